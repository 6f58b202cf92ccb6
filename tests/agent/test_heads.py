"""The heads of a ledger: what they say, and what they notice."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from fleets import make_plan
from ledgers import (
    BUDGET,
    DATA,
    DATASET,
    charge_for,
    charge_rounds,
    copied,
    files_of,
    fragments,
    open_state,
    put_copy_back,
    reserved,
    restore,
)

from agent import custody, heads
from agent.audit import verify
from agent.charges import Budget, Charge, Record
from agent.custody import begin_ledger, raise_budget
from agent.heads import LedgerFiles, read_second_head
from agent.replay import replay
from agent.state import AgentState, BudgetRaisedError
from dpagent import faults
from dpagent.errors import ExitCode, LedgerError, StorageError
from dpagent.faults import FaultPoint

JOB = (b"j" * 16).hex()


# --- what they say and notice -------------------------------------------------------------------


def test_the_second_head_knows_what_the_ledger_adds_up_to(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    charge_rounds(state, 1, job=b"k" * 16)
    state.offer(JOB, 9, bytes(32), 0.0)
    state.close()
    files = files_of(path)
    second, proof, total = read_second_head(files.second_head), verify(path), reserved(path)
    assert second is not None
    assert (second.entries, second.hash, second.unsent) == (3, proof.head, ())
    assert {name: asdict(each) for name, each in second.datasets.items()} == {
        DATASET: {
            "epsilon_budget": BUDGET.epsilon, "delta_budget": BUDGET.delta,
            "epsilon_reserved": total.epsilon, "delta_reserved": total.delta,
        }
    }  # fmt: skip
    assert json.loads(files.head.read_text()) == {"entries": 3, "hash": proof.head}
    assert files.second_head.stat().st_mode & 0o777 == 0o600


NO_HASH = 64 * "0"


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"entries": 1, "hash": "zz"}', "[" * 100_000, "\xff",
     '{"entries":-1,"hash":"' + NO_HASH + '","unsent":[],"datasets":{}}',
     '{"entries":1,"hash":"' + NO_HASH + '","unsent":[],"datasets":{"x":{}}}'],
)  # fmt: skip
def test_an_unreadable_second_head_is_named_and_nothing_is_taken_for_it(path: Path, text: str) -> None:
    open_state(path).close()
    files = files_of(path)
    files.second_head.write_bytes(text.encode("latin-1"))
    for attempt in (
        lambda: AgentState(files, {DATASET: BUDGET}, check=replay),
        lambda: begin_ledger(files, {DATASET: BUDGET}),
        lambda: raise_budget(files, {DATASET: Budget(60.0, BUDGET.delta)}),
        lambda: restore(path, write_off_all=True),
    ):
        with pytest.raises(LedgerError, match=r"state\.head is not readable") as caught:
            attempt()
        assert caught.value.exit_code == ExitCode.LEDGER
    assert verify(path).entries == 1


def test_a_second_head_that_is_a_pipe_is_named_and_not_waited_for(path: Path) -> None:
    second = path.with_name("head")
    os.mkfifo(second)
    with pytest.raises(StorageError, match="is no regular file"):
        read_second_head(second)


def test_an_older_directory_is_refused_though_its_own_head_fits(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    state.close()
    older = copied(path, "older")
    state = open_state(path)
    charge_rounds(state, 2)
    state.close()
    put_copy_back(older, path)
    assert verify(path).charges == 1, "alone, the directory looks whole"
    with pytest.raises(LedgerError, match=r"had 3 and has 2, by .*state\.head.*budget restored"):
        AgentState(files_of(path), {DATASET: BUDGET}, check=replay)


def test_a_second_head_that_is_older_costs_nothing(path: Path) -> None:
    """It only ever shows less than there is: what the chain has beyond it is counted."""
    state = open_state(path)
    old = files_of(path).second_head.read_bytes()
    charge_rounds(state, 1, 2)
    state.close()
    files_of(path).second_head.write_bytes(old)
    state = open_state(path)
    assert state.ledger.trusts_of(DATASET, JOB, 2)
    state.close()
    second = read_second_head(files_of(path).second_head)
    assert second is not None
    assert second.entries == 3


@pytest.mark.parametrize("ends", ["spooled", "given up"])
def test_a_copy_made_after_the_charge_does_not_run_a_round_again(path: Path, ends: str) -> None:
    """At one length of the chain: a second noisy sum would be free, or one where dummies have left."""
    state = open_state(path)
    charge = charge_for(make_plan(), DATA, state.ledger)
    state.offer(JOB, 1, bytes(32), 0.0)
    state.charge([charge], 0.0)
    between = copied(path, "between")
    state.close()
    put_copy_back(between, path)
    state = open_state(path)  # Nothing has left: this is what a power cut leaves, too.
    known = state.round(JOB, 1)
    assert known is not None
    assert known.state == "charged"
    if ends == "spooled":
        state.spool_round(JOB, 1, [], 0.0, None)
    else:
        state.give_up(JOB, 1, 0.0, [])
    state.close()
    put_copy_back(between, path)
    with pytest.raises(LedgerError, match="is an older copy"):
        open_state(path)
    restore(path)
    state = open_state(path)
    known = state.round(JOB, 1)
    assert known is not None
    assert known.state == "expired"
    state.close()


@pytest.mark.parametrize("before", [(), (1,)], ids=["as it began", "after a round"])
def test_two_agents_with_copies_of_one_directory_spend_no_budget_twice(
    path: Path, before: tuple[int, ...]
) -> None:
    """Each holds a lock of its own; the second head, which they share, was read at the start alone."""
    with closing(open_state(path)) as first:
        charge_rounds(first, *before)
        copied(path, "copy")
        files = LedgerFiles(path.parent / "copy", files_of(path).second_head)
        with closing(AgentState(files, {DATASET: BUDGET}, check=replay)) as second:
            charge_rounds(first, 2)
            known = read_second_head(files.second_head)
            with pytest.raises(LedgerError, match=r"was replaced|Entries are missing"):
                charge_rounds(second, 3, job=b"k" * 16)
            assert second.rounds.charged() == {((b"k" * 16).hex(), 3)}, "and nothing is spooled"
            assert read_second_head(files.second_head) == known
            charge_rounds(first, 3)
    with pytest.raises(LedgerError):
        AgentState(files, {DATASET: BUDGET}, check=replay)


def charged_and_copied(path: Path, state: AgentState) -> tuple[Charge, LedgerFiles]:
    """Have a state charge a round, and copy its directory then."""
    charge = charge_for(make_plan(), DATA, state.ledger)
    state.offer(charge.job, charge.round, bytes(32), 0.0)
    state.charge([charge], 0.0)
    copied(path, "copy")
    return charge, LedgerFiles(path.parent / "copy", files_of(path).second_head)


@contextmanager
def copied_after_a_charge(path: Path) -> Iterator[tuple[AgentState, Charge]]:
    """A second agent, with a copy of the directory of one that has charged a round and then spooled it, and
    the charge: the copy was made in between."""
    with closing(open_state(path)) as first:
        charge, files = charged_and_copied(path, first)
        with closing(AgentState(files, {DATASET: BUDGET}, check=replay)) as second:
            first.spool_round(charge.job, charge.round, [], 0.0, None)
            yield second, charge


def test_two_agents_with_copies_of_one_directory_send_no_two_sums_under_one_charge(path: Path) -> None:
    with copied_after_a_charge(path) as (second, charge):
        with pytest.raises(LedgerError, match="has left already"):
            second.spool_round(charge.job, charge.round, [], 0.0, None)
        assert second.rounds.charged() == {(charge.job, charge.round)}, "and nothing is spooled"


def test_a_second_agent_cannot_have_a_round_count_as_unsent_again(path: Path) -> None:
    """By its next charge; after a power cut before it gave the round up, it would run it again."""
    with copied_after_a_charge(path) as (second, _):
        with pytest.raises(LedgerError, match="has left already"):
            charge_rounds(second, 2)
        second.close()
        with pytest.raises(LedgerError):
            AgentState(second.files, {DATASET: BUDGET}, check=replay)
        known = read_second_head(second.files.second_head)
        assert known is not None
        assert known.unsent == ()


@pytest.mark.parametrize("command", ["raise", "restored"])
def test_what_a_copy_charges_while_a_command_checks_the_ledger_is_not_written_over(
    path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Which takes seconds: the second head that was read before that would forget it."""
    with closing(open_state(path)) as first:
        charge_rounds(first, 1)
        older = copied(path, "older")
        charge_rounds(first, 2)
        copied(path, "copy")
    files = files_of(path)
    with closing(
        AgentState(LedgerFiles(path.parent / "copy", files.second_head), {DATASET: BUDGET}, check=replay)
    ) as second:

        def charged_meanwhile(records: Sequence[Record]) -> object:
            charge_rounds(second, 1, job=b"k" * 16)
            return replay(records)

        monkeypatch.setattr(custody, "replay", charged_meanwhile)
        if command == "raise":
            with pytest.raises(LedgerError, match="Entries are missing"):
                raise_budget(files, {DATASET: Budget(60.0, BUDGET.delta)})
        else:
            put_copy_back(older, path)
            restore(path)
        known = read_second_head(files.second_head)
        assert known is not None
        spent = second.ledger.accounts.reserved(DATASET)
        assert known.datasets[DATASET].epsilon_reserved >= spent.epsilon


@pytest.mark.parametrize("is_deleted", [False, True], ids=["", "its lock was deleted"])
def test_two_agents_do_not_both_find_that_nothing_has_left(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    """The one waits until the other has spooled the round, and said so in the second head."""
    monkeypatch.setattr(heads, "_HELD_S", 0.0)
    with closing(open_state(path)) as first:
        charge, files = charged_and_copied(path, first)
        if is_deleted:  # Before, the first one had the old file, and the second one a new one.
            _lock_of(files.second_head).unlink()
        with closing(AgentState(files, {DATASET: BUDGET}, check=replay)) as second:

            def spool_too() -> None:
                second.spool_round(charge.job, charge.round, [], 0.0, None)

            waited_for = {FaultPoint.AGENT_SPOOL_WRITTEN}

            def reached(point: FaultPoint) -> None:
                if point in waited_for:
                    waited_for.remove(point)
                    with pytest.raises(StorageError, match="held by another program"):
                        spool_too()

            monkeypatch.setattr(faults, "reached", reached)
            first.spool_round(charge.job, charge.round, [], 0.0, None)
            with pytest.raises(LedgerError, match="has left already"):
                spool_too()
            assert second.rounds.charged() == {(charge.job, charge.round)}, "and nothing is spooled"


def test_two_agents_in_one_directory_send_no_two_sums_under_one_charge(path: Path) -> None:
    """Whoever deletes the lock can start a second one, which runs the round again, since nothing has left."""
    with closing(open_state(path)) as first:
        charge = charge_for(make_plan(), DATA, first.ledger)
        first.offer(charge.job, charge.round, bytes(32), 0.0)
        first.charge([charge], 0.0)
        (path / "lock").unlink()
        with closing(AgentState(files_of(path), {DATASET: BUDGET}, check=replay)) as second:
            first.spool_round(charge.job, charge.round, fragments(1), 0.0, None)
            with pytest.raises(LedgerError, match="another agent works with"):
                second.spool_round(charge.job, charge.round, fragments(2), 0.0, None)
            assert {*second.spool.pending()} == {each.digest for each in fragments(1)}
            charge_rounds(second, 2)
        with pytest.raises(StorageError, match="append-only"):
            charge_rounds(first, 3)


@contextmanager
def _no_spare(second: Path, _patch: pytest.MonkeyPatch) -> Iterator[None]:
    blocked = second.with_name(f".{second.name}.spare")
    blocked.unlink()
    blocked.mkdir()
    yield
    blocked.rmdir()


@contextmanager
def _held(second: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """By a command of the owner's that stands still, say."""
    patch.setattr(heads, "_HELD_S", 0.0)
    with _lock_of(second).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _lock_fails(_second: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a disk of a network. Before, the exit code was that of a fault of the program."""

    def flock(_descriptor: object, _operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with patch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        yield


@pytest.mark.parametrize("blocked", [_no_spare, _held, _lock_fails])
def test_a_second_head_that_cannot_be_written_stops_the_device_before_a_record_is_read(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blocked: Callable[[Path, pytest.MonkeyPatch], AbstractContextManager[None]],
) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    with blocked(files_of(path).second_head, monkeypatch):
        with pytest.raises(StorageError):
            charge_rounds(state, 2)
        with pytest.raises(StorageError):  # It would lag by two.
            state.charge([charge_for(make_plan(round=3), DATA, state.ledger)], 0.0)
        assert [row[0] for row in state.connection.execute("SELECT number FROM entries")] == [1, 2, 3]
        state.close()
        with pytest.raises(StorageError):
            open_state(path)
    state = open_state(path)
    assert state.rounds.charged() == {(JOB, 2)}, "it is run again, under the charge it has"
    charge_rounds(state, 3)
    state.close()
    assert verify(path).charges == 3


def test_nothing_is_spooled_while_the_disk_of_the_second_head_is_taken_away(tmp_path: Path) -> None:
    """Before, it could not be unmounted while the agent ran, nor mounted read-only."""
    files = LedgerFiles(tmp_path / "state", tmp_path / "disk" / "second.head")
    files.second_head.parent.mkdir()
    begin_ledger(files, {DATASET: BUDGET})
    with closing(AgentState(files, {DATASET: BUDGET}, check=replay)) as state:
        charge_rounds(state, 1)
        opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
        assert str(files.database) in opened
        assert not [each for each in opened if Path(each).parent == files.second_head.parent]
        state.offer(JOB, 2, bytes(32), 0.0)
        state.charge([charge_for(make_plan(round=2), DATA, state.ledger)], 0.0)
        files.second_head.parent.rename(tmp_path / "away")
        # A copy that runs the round, once the disk is back, finds that nothing has left.
        with pytest.raises(StorageError, match="No such file or directory"):
            state.spool_round(JOB, 2, fragments(2), 0.0, None)
        assert state.rounds.charged() == {(JOB, 2)}
    # Nor is a directory that is not there an error of the disk, which a service begins again after.
    with pytest.raises(LedgerError, match="is its disk mounted"):
        AgentState(files, {DATASET: BUDGET}, check=replay)
    (tmp_path / "away").rename(files.second_head.parent)
    with closing(AgentState(files, {DATASET: BUDGET}, check=replay)) as state:
        assert state.rounds.charged() == {(JOB, 2)}


def test_a_lock_of_another_user_is_named(tmp_path: Path) -> None:
    """Before, the error named the second head, which was the agent's own."""
    files = files_of(tmp_path / "state")
    begin_ledger(files, {DATASET: BUDGET})
    lock = _lock_of(files.second_head)
    lock.unlink()
    lock.mkdir()  # As little a file that it may write, also for root.
    with pytest.raises(StorageError, match=re.escape(str(lock))):
        AgentState(files, {DATASET: BUDGET}, check=replay)


def _lock_of(second_head: Path) -> Path:
    return second_head.with_name(f".{second_head.name}.lock")


# --- budgets at the start -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget", [Budget(50.1, 1e-3), Budget(50.0, 2e-3), Budget(60.0, 1e-4), Budget(1.0, 2e-3)]
)
def test_a_larger_budget_is_refused_and_a_lower_one_taken(path: Path, budget: Budget) -> None:
    open_state(path).close()
    files = files_of(path)
    with pytest.raises(BudgetRaisedError, match="budget raise") as caught:
        AgentState(files, {DATASET: budget}, check=replay)
    assert caught.value.exit_code == ExitCode.LEDGER
    with pytest.raises(BudgetRaisedError, match="'others'"):
        AgentState(files, {"others": Budget(1e-3, 1e-9)}, check=replay)
    assert verify(path).entries == 1
    AgentState(files, {DATASET: Budget(40.0, 1e-3)}, check=replay).close()
    AgentState(files, {DATASET: Budget(40.0, 1e-4)}, check=replay).close()
    assert verify(path).entries == 3
    with pytest.raises(BudgetRaisedError):
        AgentState(files, {DATASET: BUDGET}, check=replay)
