"""The state of an agent: charge and fragments in one transaction, whatever fails or dies."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from brokers import wait_until
from fleets import make_plan, records, terms
from ledgers import (
    BUDGET,
    DATA,
    DATASET,
    charge_and_spool,
    charge_for,
    charge_rounds,
    entries,
    files_of,
    fragments,
    open_state,
)
from storms import beside

from agent.audit import open_ledger, verify
from agent.charges import Budget
from agent.spool import SpooledFragment
from agent.state import AgentState
from dpagent.errors import LedgerError, StateInUseError, StorageError


def test_two_agents_cannot_share_a_ledger(path: Path, state: AgentState) -> None:
    with pytest.raises(StateInUseError, match=str(os.getpid())):
        open_state(path)


def test_a_state_that_could_not_be_opened_is_not_held(path: Path, database: Path) -> None:
    head = (path / "ledger.head").read_text()
    (path / "ledger.head").write_text("nonsense")
    with pytest.raises(LedgerError):
        open_state(path)
    (path / "ledger.head").write_text(head)
    open_state(path).close()


# --- charge, then spool ------------------------------------------------------------------------


def state_of(state: AgentState, number: int) -> str:
    known = state.round((b"j" * 16).hex(), number)
    assert known is not None
    return known.state


def test_a_round_goes_through_its_states(state: AgentState) -> None:
    job = (b"j" * 16).hex()
    assert state.round(job, 1) is None
    state.offer(job, 1, bytes(32), 1.0)
    assert state_of(state, 1) == "offered"
    state.decline(job, 1, "too dear", 2.0)
    assert state_of(state, 1) == "declined"
    state.offer(job, 1, b"p" * 32, 3.0)
    charge = charge_for(make_plan(), DATA, state.ledger)
    state.charge([charge], 4.0)
    assert state_of(state, 1) == "charged"
    assert state.ledger.trusts_of(DATASET, job, 1)
    state.offer(job, 1, b"q" * 32, 5.0)
    known = state.round(job, 1)
    assert known is not None
    assert (known.state, known.plan.hex()) == ("charged", charge.plan), "another plan takes over no charge"
    first, second = fragments(1, 2)
    state.spool_round(job, 1, [first, second], 6.0, None)
    assert state_of(state, 1) == "spooled"
    state.mark_sent({first.digest: 9.0}, 7.0)
    assert state_of(state, 1) == "spooled"
    state.mark_sent({second.digest: 9.0}, 7.0)
    assert state_of(state, 1) == "published"
    state.mark_counted([first.digest], 8.0)
    assert state_of(state, 1) == "published"
    state.mark_counted([second.digest], 8.0)
    assert state_of(state, 1) == "receipted"
    state.expire_job((b"j" * 16).hex(), 9.0)
    assert state_of(state, 1) == "receipted", "what is done does not expire"


@pytest.mark.parametrize("last", ["charged", "spooled", "published"])
def test_another_round_expires_what_is_not_receipted(state: AgentState, last: str) -> None:
    job = (b"j" * 16).hex()
    state.offer(job, 1, bytes(32), 1.0)
    state.charge([charge_for(make_plan(), DATA, state.ledger)], 1.0)
    if last != "charged":
        state.spool_round(job, 1, fragments(1), 1.0, None)
    if last == "published":
        state.mark_sent({fragment.digest: 9.0 for fragment in fragments(1)}, 1.0)
    assert state_of(state, 1) == last
    state.expire_other_rounds(job, 2, 2.0)
    assert state_of(state, 1) == "expired"


def test_a_round_writes_little_besides_its_fragments(disk: Path) -> None:
    """On a memory card every write counts. What the kernel has been given, in pages of the file system."""
    job, rounds, count = (b"j" * 16).hex(), 2, 16

    def written() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))

    state = open_state(disk / "state")
    charge_rounds(state, 1)
    if not (before := written()):
        pytest.skip("the state lies in memory, or the system does not count")
    sent = 0
    for number in range(2, rounds + 2):
        mine = [replace(each, message=b"m" * 1_600) for each in fragments(number, count)]
        state.expire_earlier_rounds(job, number, 1.0)
        charge_and_spool(state, charge_for(make_plan(round=number), DATA, state.ledger), mine)
        sent += sum(len(fragment.message) for fragment in mine)
        state.reschedule([(1.0, fragment.digest) for fragment in mine])
        for fragment in mine:
            state.mark_sent({fragment.digest: 9.0}, 1.0)
        state.mark_counted([fragment.digest for fragment in mine], 1.0)
        state.write_notes()
    assert written() - before - sent < rounds * (160 << 10)
    state.close()


def test_what_is_noted_is_written_after_a_while_and_with_what_is_durable(state: AgentState) -> None:
    charge_rounds(state, 1)
    (first, *_), reader = fragments(97), open_ledger(state.files.state_dir)[0]

    def sent() -> int:
        return int(reader.execute("SELECT count(*) FROM fragments WHERE state = 'sent'").fetchone()[0])

    state.mark_sent({first.digest: 9.0}, 1.0)
    state.write_old_notes()
    assert sent() == 0
    assert state.connection.execute("SELECT count(*) FROM fragments WHERE state = 'sent'").fetchone()[0] == 1
    wait_until(lambda: state.write_old_notes() or sent() == 1, "the note")
    second = fragments(97)[1]
    state.mark_sent({second.digest: 9.0}, 1.0)
    state.offer((b"j" * 16).hex(), 2, bytes(32), 1.0)
    assert sent() == 2
    third = fragments(97)[2]
    state.mark_sent({third.digest: 9.0}, 1.0)
    state.close()
    assert sent() == 3
    reader.close()


def test_a_flood_of_offers_stays_bounded_and_frees_no_charge(state: AgentState) -> None:
    charge_rounds(state, 1)
    with state.noted():
        for number in range(3_000):
            state.rounds.offer("other", number + 1, bytes(32), 0.0)
    assert state.connection.execute("SELECT count(*) FROM rounds").fetchone()[0] <= 2_002
    assert state.ledger.trusts_of(DATASET, (b"j" * 16).hex(), 1)
    assert state_of(state, 1) == "spooled"


def failing_fragments(error: BaseException) -> Iterator[SpooledFragment]:
    yield from fragments(50)
    raise error


@pytest.mark.parametrize("error", [RuntimeError("seal"), KeyboardInterrupt(), OSError(28, "No space left")])
def test_an_error_while_spooling_leaves_the_charge_and_no_fragment(
    path: Path, state: AgentState, error: BaseException
) -> None:
    """Nothing has left, so the same charge serves for the next attempt."""
    charge = charge_for(make_plan(), DATA, state.ledger)
    with pytest.raises((type(error), StorageError)):
        charge_and_spool(state, charge, failing_fragments(error))
    assert state_of(state, 1) == "charged"
    assert state.spool.pending() == {}
    assert verify(path).charges == 1
    state.spool_round(charge.job, 1, fragments(50), 0.0, None)
    assert state_of(state, 1) == "spooled"
    assert verify(path).charges == 1


def test_a_full_disk_while_charging_leaves_no_charge(path: Path, state: AgentState) -> None:
    charge_rounds(state, 1)
    before, spent = entries(state.connection), state.ledger.epsilon_spent(DATASET)
    job = (b"j" * 16).hex()
    state.offer(job, 2, bytes(32), 0.0)
    charge = replace(charge_for(make_plan(round=2), DATA, state.ledger), charged_at="x" * 100_000)
    pages = state.connection.execute("PRAGMA page_count").fetchone()[0]
    state.connection.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StorageError, match="disk is full"):
        state.charge([charge], 0.0)
    assert entries(state.connection) == before
    assert state.ledger.epsilon_spent(DATASET) == spent
    assert state_of(state, 2) == "offered"
    state.connection.execute("PRAGMA max_page_count=1000000")
    state.charge([charge], 0.0)
    assert verify(path).charges == 2


@pytest.mark.usefixtures("executed")
def test_a_full_disk_is_what_is_said_also_where_no_process_can_be_started(
    path: Path, state: AgentState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, prices were checked again in a process, whose error took the place of the disk's."""
    state.close()
    with closing(AgentState(files_of(path), {DATASET: BUDGET})) as opened:
        charge = replace(charge_for(make_plan(), DATA, opened.ledger), charged_at="x" * 100_000)
        pages = opened.connection.execute("PRAGMA page_count").fetchone()[0]
        opened.connection.execute(f"PRAGMA max_page_count={pages}")
        monkeypatch.setattr(sys, "executable", "/none")
        with pytest.raises(StorageError, match="disk is full"):
            opened.charge([charge], 0.0)
        assert len(opened.ledger.digests) == 1, "the budget"


def test_a_head_that_cannot_be_written_does_not_unsettle_the_ledger(path: Path, state: AgentState) -> None:
    """The commit counts: what it charged stays charged in memory as on disk."""
    charge_rounds(state, 1)
    blocked = path / ".ledger.head.spare"
    blocked.unlink()
    blocked.mkdir()
    with pytest.raises(StorageError):
        charge_rounds(state, 2)
    assert [row[0] for row in entries(state.connection)] == [1, 2, 3]
    assert state.ledger.trusts_of(DATASET, (b"j" * 16).hex(), 2)
    blocked.rmdir()
    charge_rounds(state, 3)
    assert verify(path).charges == 3


def test_the_spool_follows_a_fragment_to_its_receipt(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    first, second, third = sorted(state.spool.pending())
    state.reschedule([(100.0, first), (50.0, second), (75.0, third)])
    assert state.spool.next_due_at() == 50.0
    assert list(state.spool.due(80.0, 10)) == [second, third]
    assert list(state.spool.due(80.0, 1)) == [second]
    state.mark_sent({second: 500.0}, 60.0)
    assert state.mark_counted([second, b"x" * 16], 61.0) == 1
    assert state.mark_counted([second], 61.0) == 0
    assert sorted(state.spool.pending()) == [first, third]
    state.close()
    state = open_state(path)
    assert sorted(state.spool.pending()) == [first, third]
    job = (b"j" * 16).hex()
    assert state.expire_other_rounds(job, 1, 62.0) == 0
    assert state.expire_other_rounds(job, 2, 62.0) == 2
    assert state.spool.next_due_at() is None
    # A receipt that comes after the round was given up still says the truth about it.
    assert state.mark_counted([first], 62.0) == 1
    rows = dict(state.connection.execute("SELECT digest, state FROM fragments").fetchall())
    assert rows == {first: "counted", second: "counted", third: "expired"}
    state.close()


# --- SIGKILL -----------------------------------------------------------------------------------


def charge_on(path: Path, pause_s: float, ready: Callable[[], object]) -> NoReturn:
    data = records(20)
    state = open_state(path, Budget(1e9, 1.0))
    ready()
    while True:
        job = os.urandom(16)
        for number in (1, 2, 3):
            charge = charge_for(make_plan(round=number, job=job, **terms(delta=1e-9)), data, state.ledger)
            sent = [SpooledFragment(os.urandom(16), os.urandom(500), 0.0) for _ in range(20)]
            charge_and_spool(state, charge, sent)
            time.sleep(pause_s)


@pytest.mark.heavy
def test_no_kill_leaves_a_fragment_without_its_charge(path: Path) -> None:
    generator = random.Random(5)
    charges = 0
    for _ in range(4):
        with beside(partial(charge_on, path, 0.0)):
            time.sleep(generator.uniform(0.05, 0.4))
        proof = verify(path)
        connection, _ = open_ledger(path)
        rows = connection.execute("SELECT job, round, count(*) FROM fragments GROUP BY job, round").fetchall()
        charged = {
            (body["job"], body["round"])
            for _, kind, text, _ in entries(connection) if kind == "charge" for body in [json.loads(text)]
        }  # fmt: skip
        connection.close()
        assert {tuple(row)[:2] for row in rows} <= charged
        assert {tuple(row)[2] for row in rows} <= {20}
        assert len(charged) == proof.charges >= charges
        charges = proof.charges
    assert charges > 0


@pytest.mark.heavy
def test_verifying_beside_a_busy_agent_raises_no_false_alarm(path: Path) -> None:
    with beside(partial(charge_on, path, 0.1)):  # slower than verifying, or the two would race for ever
        wait_until(lambda: verify(path).charges > 9, "some charges")
        seen = [verify(path).charges for _ in range(20)]
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]
