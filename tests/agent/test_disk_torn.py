"""A torn page, of the database or of its write-ahead log: the device goes on, or refuses with exit code 5.

Whatever is torn, no charge is lost under which something has left: the chain reaches the second head, or the
device does not start.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fleets import make_plan
from ledgers import BUDGET, DATA, DATASET, charge_and_spool, charge_for, charge_rounds, files_of, fragments

from agent.audit import verify
from agent.custody import begin_ledger
from agent.heads import read_second_head
from agent.replay import replay
from agent.state import AgentState
from dpagent.errors import ExitCode, LedgerError

PAGE, FRAME = 4_096, 4_096 + 24
Damage = Callable[[bytearray, int], None]


def truncated(content: bytearray, at: int) -> None:
    del content[at:]


def zeros(content: bytearray, at: int) -> None:
    content[at:] = bytes(len(content) - at)


def garbage(content: bytearray, at: int) -> None:
    content[at:] = random.Random(at).randbytes(len(content) - at)


def flipped(content: bytearray, at: int) -> None:
    content[at] ^= 1 << at % 8


def sector(content: bytearray, at: int) -> None:
    """One sector of the disk was not written."""
    start = at // 512 * 512
    content[start : start + 512] = bytes(len(content[start : start + 512]))


in_every_way = pytest.mark.parametrize("damage", [truncated, zeros, garbage, flipped, sector])
in_every_file = pytest.mark.parametrize(
    "name", ["closed/ledger.db", "killed/ledger.db", "killed/ledger.db-wal"]
)


@pytest.fixture
def live(path: Path, tmp_path: Path) -> Iterator[Path]:
    """Copies of a device's directory: with the log of a device that was killed, and without one."""
    begin_ledger(files_of(path), {DATASET: BUDGET})
    state = AgentState(files_of(path), {DATASET: BUDGET}, check=replay)
    charge_rounds(state, 1, 2)
    state.mark_sent(dict.fromkeys(state.spool.pending(), 9.0), 1.0)
    shutil.copytree(path, tmp_path / "killed")
    state.close()
    shutil.copytree(path, tmp_path / "closed")
    shutil.copy(files_of(path).second_head, tmp_path / "second")
    return tmp_path


@in_every_way
@in_every_file
@pytest.mark.parametrize(
    "stride", [pytest.param(1_709), pytest.param(7, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_a_torn_last_page_costs_no_charge(
    path: Path, live: Path, name: str, damage: Damage, stride: int
) -> None:
    file = live / name
    whole = file.read_bytes()
    size = FRAME if name.endswith("-wal") else PAGE
    for at in range(len(whole) - size, len(whole), stride):
        content = bytearray(whole)
        damage(content, at)
        goes_on_or_refuses(path, live, file, bytes(content))


@in_every_way
@in_every_file
@pytest.mark.parametrize(
    "count", [pytest.param(5), pytest.param(400, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_damage_anywhere_costs_no_charge(
    path: Path, live: Path, name: str, damage: Damage, count: int
) -> None:
    file, generator = live / name, random.Random(name + damage.__name__)
    whole = file.read_bytes()
    for _ in range(count):
        content = bytearray(whole)
        damage(content, generator.randrange(len(whole)))
        goes_on_or_refuses(path, live, file, bytes(content))


def goes_on_or_refuses(path: Path, live: Path, file: Path, content: bytes) -> None:
    shutil.rmtree(path)
    shutil.copytree(file.parent, path)
    (path / file.name).write_bytes(content)
    shutil.copy(live / "second", files_of(path).second_head)
    second = read_second_head(files_of(path).second_head)
    assert second is not None
    try:
        state = AgentState(files_of(path), {DATASET: BUDGET}, check=replay)
        try:
            assert second.is_reached_by(state.ledger.digests)
            for job in (b"j" * 16, b"k" * 16):
                for known in range(1, 4):
                    state.round(job.hex(), known)
            charge = charge_for(make_plan(job=b"k" * 16), DATA, state.ledger)
            state.expire_other_rounds(charge.job, 1, 2.0)
            charge_and_spool(state, charge, fragments(9))
            state.mark_sent(dict.fromkeys(state.spool.pending(), 9.0), 3.0)
            state.mark_counted([each.digest for each in fragments(9)], 4.0)
            state.forget_other_jobs(charge.job)
        finally:
            state.close()
    except LedgerError:
        return
    assert verify(path, files_of(path).second_head).charges == 3


def test_a_value_that_its_table_does_not_allow_is_found_at_the_start(path: Path, live: Path) -> None:
    """One bit in the name of a state: nobody knows whether the round has left."""
    with closing(sqlite3.connect(path / "ledger.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        connection.execute("UPDATE rounds SET state = 'publisheD' WHERE round = 2")
    with pytest.raises(LedgerError, match="CHECK constraint failed in rounds") as caught:
        AgentState(files_of(path), {DATASET: BUDGET}, check=replay)
    assert caught.value.exit_code == ExitCode.LEDGER


@pytest.mark.parametrize("table", ["fragments", "messages"])
def test_a_message_without_its_fragment_or_the_reverse_is_found_at_the_start(
    path: Path, live: Path, table: str
) -> None:
    """What is to leave, and when, is with the fragment."""
    with closing(sqlite3.connect(path / "ledger.db", isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER forgotten")
        assert connection.execute(f"DELETE FROM {table}").rowcount > 0
    with pytest.raises(LedgerError, match="fragment 1 and its message one is missing") as caught:
        AgentState(files_of(path), {DATASET: BUDGET}, check=replay)
    assert caught.value.exit_code == ExitCode.LEDGER
