"""The room of the ledger's log across stops, whoever reads, copies or ends what meanwhile."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from fleets import make_plan
from ledgers import AT, BUDGET, DATA, DATASET, charge_for, charge_rounds

from agent.audit import verify
from agent.charges import Budget
from agent.custody import back_up, begin_ledger, go_on_after_restore, put_back, raise_budget
from agent.heads import LedgerFiles
from agent.ledger_room import LedgerRoom
from agent.limit_settings import LimitSettings
from agent.replay import replay
from agent.state import AgentState
from dpagent import storage
from dpagent.database_file import open_readonly
from dpagent.errors import LedgerError

ROOM = LedgerRoom(3 << 20, 2 << 20)
LARGER = Budget(2 * BUDGET.epsilon, BUDGET.delta)


@pytest.fixture
def files(disk: Path) -> LedgerFiles:
    """Of a board that has stopped once."""
    files = LedgerFiles(disk / "state", disk / "head")
    begin_ledger(files, {DATASET: BUDGET})
    opened(files).close()
    return files


def opened(files: LedgerFiles, budget: Budget = BUDGET) -> AgentState:
    return AgentState(files, {DATASET: budget}, ROOM, check=replay)


def log_of(files: LedgerFiles) -> Path:
    return Path(f"{files.database}-wal")


def kept_of(files: LedgerFiles) -> Path:
    return files.state_dir / ".ledger.db-wal.room"


def blocks(file: Path) -> int:
    """Bytes that a file has on the disk, of those that it says that it has."""
    found = file.stat()
    return min(found.st_blocks * 512, found.st_size)


def room_of(files: LedgerFiles) -> dict[str, tuple[int, int]]:
    """Each of the kept files by its name, and its bytes."""
    return {
        each.name: (each.stat().st_ino, blocks(each)) for each in files.state_dir.glob(".ledger.db-*.room")
    }


def restored(files: LedgerFiles) -> None:
    go_on_after_restore(files, {DATASET: BUDGET}, write_off_all=False, allows_unproven=False, at=AT)


def leave_as_killed(state: AgentState) -> None:
    log = log_of(state.files)
    os.link(log, log.with_name("kept"))
    content = log.read_bytes()
    state.close()
    log.with_name("kept").rename(log)
    log.write_bytes(content)
    kept_of(state.files).unlink()
    os.link(log, kept_of(state.files))


def test_nothing_of_a_log_is_erased_before_it_is_gone_for_good(
    files: LedgerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite does not wait until the disk knows that it has removed a log. A power cut that brings the log
    back, without what was erased of it, brings older pages of the database back: see the next test."""
    state, log, done = opened(files), log_of(files), []
    charge_rounds(state, 1, 2)
    sync, overwrite = os.fsync, storage.overwrite

    def synced(descriptor: int) -> None:
        sync(descriptor)
        if not log.exists():
            is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            done.append("gone for good" if is_directory else "zeros on the disk")

    def overwritten(descriptor: int, data: bytes, offset: int) -> None:
        overwrite(descriptor, data, offset)
        done.append("zeros")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr("agent.ledger_room.overwrite", overwritten)
    state.close()
    assert list(dict.fromkeys(done)) == ["gone for good", "zeros", "zeros on the disk"]
    assert not any(kept_of(files).read_bytes())


def test_each_charge_fits_into_the_room_that_is_taken_for_it(disk: Path) -> None:
    """A coordinator chooses how many there are, at no ε, up to the owner's limit."""
    files, number = LedgerFiles(disk / "state", disk / "head"), 40
    begin_ledger(files, {DATASET: BUDGET})
    few, many = (
        LedgerRoom.of(LimitSettings(maximum_charges=count), has_tokens=False) for count in (10, 10 + number)
    )
    with closing(AgentState(files, {DATASET: BUDGET}, check=replay)) as state:

        def pages() -> int:
            count, free = (
                state.connection.execute(f"PRAGMA {each}").fetchone()[0]
                for each in ("page_count", "freelist_count")
            )
            return int(count - free)

        before = pages()
        for job in range(number):
            plan = make_plan(job=job.to_bytes(16, "big"))
            charge = charge_for(plan, DATA, state.ledger)
            state.offer(charge.job, charge.round, bytes(32), 0.0)
            state.charge([charge], 0.0)
        page_bytes = state.connection.execute("PRAGMA page_size").fetchone()[0]
        assert (pages() - before) * page_bytes < many.database_bytes - few.database_bytes


def test_the_log_of_an_agent_that_was_killed_is_none_of_a_ledger_that_is_put_back(
    files: LedgerFiles, disk: Path
) -> None:
    """Neither by its name, nor by the second one, under which it has its blocks."""
    state = opened(files)
    back_up(files.state_dir, disk / "backup")
    charge_rounds(state, 1, 2)
    leave_as_killed(state)
    assert any(kept_of(files).read_bytes())
    files.database.unlink()
    put_back(disk / "backup", files)
    assert not log_of(files).exists()
    restored(files)
    opened(files).close()
    assert verify(files.state_dir, files.second_head).charges == 0


@pytest.mark.parametrize("left", [12_288, 32_768])
def test_a_log_that_came_back_without_its_end_would_cost_the_ledger(files: LedgerFiles, left: int) -> None:
    """Of 20 such lengths, with 12 the board did not start."""
    state, log = opened(files), log_of(files)
    charge_rounds(state, 1, 2)
    state.mark_sent(dict.fromkeys(state.spool.pending(), 9.0), 1.0)
    charge_rounds(state, 3)
    charge_rounds(state, 1, 2, job=b"m" * 16)
    whole = log.read_bytes()
    state.close()
    log.write_bytes(whole[:left].ljust(len(whole), b"\0"))
    with pytest.raises(LedgerError):
        opened(files)


def test_what_a_reader_leaves_after_a_stop_costs_no_room(files: LedgerFiles) -> None:
    """A reader may make log and index but not remove them. Before, the next start gave up for them what had
    been kept, and took 16 MB anew some seconds later."""
    before = room_of(files)
    assert before[".ledger.db-wal.room"][1] >= ROOM.log_bytes
    assert verify(files.state_dir, files.second_head).charges == 0
    assert log_of(files).stat().st_size == 0, "this test needs a reader that leaves one"
    state = opened(files)
    assert {name: inode for name, (inode, _) in room_of(files).items()} == {
        name: inode for name, (inode, _) in before.items()
    }
    charge_rounds(state, 1)
    state.close()
    assert verify(files.state_dir, files.second_head).charges == 1


def test_a_reader_that_goes_on_over_a_start_and_a_stop_loses_nothing(files: LedgerFiles) -> None:
    with closing(open_readonly(files.database)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM entries").fetchone()[0] == 1
        for number in (1, 2):
            state = opened(files)
            assert blocks(log_of(files)) >= ROOM.log_bytes
            charge_rounds(state, number)
            state.close()
            assert log_of(files).samefile(kept_of(files)), "the reader goes on with it"
            assert reader.execute("SELECT count(*) FROM entries").fetchone()[0] == 1
        reader.execute("COMMIT")
        assert reader.execute("SELECT count(*) FROM entries").fetchone()[0] == 3
    state = opened(files)
    assert state.ledger.number_of_charges == 2
    state.close()
    assert not any(kept_of(files).read_bytes())


def test_a_reader_of_a_database_that_a_restore_replaces_reads_that_one(
    files: LedgerFiles, disk: Path
) -> None:
    """Before, the log of the next one was in the file of its log: `database disk image is malformed`."""
    state = opened(files)
    back_up(files.state_dir, disk / "backup")
    charge_rounds(state, 1)
    command = [sys.executable, "-c", _READER, files.database.as_uri()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "(2,) ('ok',)\n"
        state.close()
        files.database.unlink()
        put_back(disk / "backup", files)
        restored(files)
        state = opened(files)
        charge_rounds(state, 1, 2, job=b"m" * 16)
        state.close()
        reader.stdin.write("again\n")
        reader.stdin.close()
        assert reader.stdout.readline() == "(2,) ('ok',)\n"
    assert verify(files.state_dir, files.second_head).charges == 2


_READER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1] + "?mode=ro", uri=True)
for _ in range(2):
    connection.execute("BEGIN")
    found = [connection.execute(each).fetchone() for each in
        ("SELECT count(*) FROM entries", "PRAGMA integrity_check")]
    connection.execute("COMMIT")
    print(*found, flush=True)
    sys.stdin.readline()
"""


def test_who_closes_twice_erases_no_log_of_the_next_agent(files: LedgerFiles) -> None:
    state = opened(files)
    state.close()
    other = opened(files)
    charge_rounds(other, 1)
    state.close()
    leave_as_killed(other)
    other = opened(files)
    assert other.ledger.number_of_charges == 1
    other.close()


def test_a_command_of_the_owner_leaves_the_room(files: LedgerFiles) -> None:
    """Before, it left 1 of the 16 MB."""
    before = room_of(files)
    raise_budget(files, {DATASET: LARGER})
    assert room_of(files) == before


def test_a_command_after_a_power_cut_leaves_no_fragment_in_the_log(files: LedgerFiles) -> None:
    state = opened(files)
    charge_rounds(state, 1)
    leave_as_killed(state)
    assert b"m" * 100 in kept_of(files).read_bytes()
    raise_budget(files, {DATASET: LARGER})
    assert not any(kept_of(files).read_bytes())
    assert verify(files.state_dir, files.second_head).charges == 1


def test_boards_whose_kept_logs_were_made_one_file_have_a_log_each(disk: Path) -> None:
    """All are zeros, so a program that makes one file of those with the same content takes them."""
    boards = [LedgerFiles(disk / name / "state", disk / name / "head") for name in ("one", "other")]
    for each in boards:
        each.state_dir.parent.mkdir()
        begin_ledger(each, {DATASET: BUDGET})
        opened(each).close()
    one, other = map(kept_of, boards)
    assert one.read_bytes() == other.read_bytes()
    other.unlink()
    os.link(one, other)
    states = [opened(each) for each in boards]
    assert not log_of(boards[0]).samefile(log_of(boards[1]))
    for number in (1, 2):
        for state in states:
            charge_rounds(state, number)
    for state in states:
        state.close()
    assert [verify(each.state_dir, each.second_head).charges for each in boards] == [2, 2]


def test_a_full_disk_that_refuses_what_is_there_keeps_no_board_from_its_start(
    files: LedgerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As XFS does."""
    take = os.posix_fallocate

    def refused(descriptor: int, offset: int, size: int) -> None:
        if offset + size <= os.fstat(descriptor).st_size:
            raise OSError(28, "No space left on device")
        take(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", refused)
    for number in (1, 2):
        state = opened(files)
        charge_rounds(state, number)
        state.close()


def test_a_copy_on_a_file_system_without_hard_links_starts(
    files: LedgerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, no agent started there until its owner deleted a file of which no document tells."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    for number in (1, 2):
        state = opened(files)
        charge_rounds(state, number)
        state.close()
    assert verify(files.state_dir, files.second_head).charges == 2
