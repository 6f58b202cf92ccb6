"""The heads of a ledger: what they notice, and what a power cut between any two writes leaves."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fleets import make_plan
from ledgers import BUDGET, DATA, DATASET, charge_and_spool, charge_for, charge_rounds, files_of, open_state
from storms import in_a_child

import agent.custody
import agent.database
import agent.heads
import agent.state
import dpagent.storage
from agent.audit import audit, open_ledger, verify
from agent.charges import Budget, Charge
from agent.custody import begin_ledger, go_on_after_restore, raise_budget
from agent.heads import LedgerFiles, read_second_head
from agent.rounds import declined_rounds
from agent.state import AgentState, BudgetRaisedError
from dpagent.errors import ExitCode, LedgerError, StorageError

JOB = (b"j" * 16).hex()
AT = datetime(2026, 11, 22, tzinfo=UTC)


def restore(path: Path, *, write_off_all: bool = False, budget: Budget = BUDGET) -> None:
    go_on_after_restore(
        files_of(path), {DATASET: budget}, write_off_all=write_off_all, allows_unproven=False, at=AT
    )


def reserved(path: Path) -> Budget:
    return audit(path).accounts.reserved(DATASET)


def copied(path: Path, to: str) -> Path:
    """A copy of a state directory, whether an agent has it open or not."""
    target = path.with_name(to)
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(path, target))


def put_back(copy: Path, path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(copy, path)


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
        lambda: AgentState(files, {DATASET: BUDGET}),
        lambda: begin_ledger(files, {DATASET: BUDGET}),
        lambda: raise_budget(files, {DATASET: Budget(60.0, BUDGET.delta)}),
        lambda: restore(path, write_off_all=True),
    ):
        with pytest.raises(LedgerError, match=r"state\.head is not readable") as caught:
            attempt()
        assert caught.value.exit_code == ExitCode.LEDGER
    assert verify(path).entries == 1


def test_an_older_directory_is_refused_though_its_own_head_fits(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    state.close()
    older = copied(path, "older")
    state = open_state(path)
    charge_rounds(state, 2)
    state.close()
    put_back(older, path)
    assert verify(path).charges == 1, "alone, the directory looks whole"
    with pytest.raises(LedgerError, match=r"had 3 and has 2, by .*state\.head.*budget restored"):
        AgentState(files_of(path), {DATASET: BUDGET})


def test_a_second_head_that_is_older_costs_nothing(path: Path) -> None:
    """It only ever shows less than there is: what the chain has beyond it is counted."""
    state = open_state(path)
    old = files_of(path).second_head.read_bytes()
    charge_rounds(state, 1, 2)
    state.close()
    files_of(path).second_head.write_bytes(old)
    state = open_state(path)
    assert state.ledger.is_charged(DATASET, JOB, 2)
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
    put_back(between, path)
    state = open_state(path)  # Nothing has left: this is what a power cut leaves, too.
    known = state.round(JOB, 1)
    assert known is not None
    assert known.state == "charged"
    if ends == "spooled":
        state.spool_round(JOB, 1, [], 0.0, None)
    else:
        state.give_up(JOB, 1, 0.0, [])
    state.close()
    put_back(between, path)
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
        with closing(AgentState(files, {DATASET: BUDGET})) as second:
            charge_rounds(first, 2)
            known = read_second_head(files.second_head)
            with pytest.raises(LedgerError, match=r"was replaced|Entries are missing"):
                charge_rounds(second, 3, job=b"k" * 16)
            assert second.rounds.charged() == {((b"k" * 16).hex(), 3)}, "and nothing is spooled"
            assert read_second_head(files.second_head) == known
            charge_rounds(first, 3)
    with pytest.raises(LedgerError):
        AgentState(files, {DATASET: BUDGET})


@contextmanager
def copied_after_a_charge(path: Path) -> Iterator[tuple[AgentState, Charge]]:
    """A second agent, with a copy of the directory of one that has charged a round and then spooled it, and
    the charge: the copy was made in between."""
    with closing(open_state(path)) as first:
        charge = charge_for(make_plan(), DATA, first.ledger)
        first.offer(charge.job, charge.round, bytes(32), 0.0)
        first.charge([charge], 0.0)
        copied(path, "copy")
        files = LedgerFiles(path.parent / "copy", files_of(path).second_head)
        with closing(AgentState(files, {DATASET: BUDGET})) as second:
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
            AgentState(second.files, {DATASET: BUDGET})
        known = read_second_head(second.files.second_head)
        assert known is not None
        assert known.unsent == ()


def test_a_second_head_that_cannot_be_written_stops_the_device_before_a_record_is_read(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    second = files_of(path).second_head
    blocked = second.with_name(f".{second.name}.new")
    blocked.mkdir()
    with pytest.raises(StorageError):
        charge_rounds(state, 2)
    with pytest.raises(StorageError):  # It would lag by two.
        state.charge([charge_for(make_plan(round=3), DATA, state.ledger)], 0.0)
    assert [row[0] for row in state.connection.execute("SELECT number FROM entries")] == [1, 2, 3]
    state.close()
    with pytest.raises(StorageError):
        open_state(path)
    blocked.rmdir()
    state = open_state(path)
    charge_rounds(state, 3)
    state.close()
    assert verify(path).charges == 3


# --- budgets at the start -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget", [Budget(50.1, 1e-3), Budget(50.0, 2e-3), Budget(60.0, 1e-4), Budget(1.0, 2e-3)]
)
def test_a_larger_budget_is_refused_and_a_lower_one_taken(path: Path, budget: Budget) -> None:
    open_state(path).close()
    files = files_of(path)
    with pytest.raises(BudgetRaisedError, match="budget raise") as caught:
        AgentState(files, {DATASET: budget})
    assert caught.value.exit_code == ExitCode.LEDGER
    with pytest.raises(BudgetRaisedError, match="'others'"):
        AgentState(files, {"others": Budget(1e-3, 1e-9)})
    assert verify(path).entries == 1
    AgentState(files, {DATASET: Budget(40.0, 1e-3)}).close()
    AgentState(files, {DATASET: Budget(40.0, 1e-4)}).close()
    assert verify(path).entries == 3
    with pytest.raises(BudgetRaisedError):
        AgentState(files, {DATASET: BUDGET})


# --- power cuts ---------------------------------------------------------------------------------


def cut(step: int, action: Callable[[], None]) -> bool:
    """Whether a process that does ``action`` was killed: before or after a commit or the write of a head.

    Args:
        step: the number of the point at which it is killed, from 0. Beyond the last, it is not.
        action: is done in a process of its own.
    """

    def doomed() -> None:
        _kill_at(step)
        action()

    return in_a_child(doomed)


def _kill_at(step: int) -> None:
    points = iter(range(1_000_000))

    def point() -> None:
        if next(points) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    write, whole = agent.heads.write_atomically, agent.database.transaction

    def write_atomically(*arguments: Any, **options: Any) -> None:
        point()
        write(*arguments, **options)
        point()

    @contextmanager
    def transaction(connection: sqlite3.Connection, **options: Any) -> Iterator[None]:
        with whole(connection, **options):
            yield
            point()
        point()

    agent.heads.write_atomically = write_atomically
    agent.database.transaction = agent.state.transaction = agent.custody.transaction = transaction


def cuts(path: Path, action: Callable[[], None]) -> Iterator[int]:
    """Kill ``action`` at each point in turn; the directory and the second head stand as they were before."""
    before, second = path.with_name("before"), files_of(path).second_head
    kept = second.read_bytes() if second.exists() else None
    if path.exists():
        copied(path, "before")
    for step in range(200):
        shutil.rmtree(path, ignore_errors=True)
        second.unlink(missing_ok=True)
        if before.exists():
            shutil.copytree(before, path)
        if kept is not None:
            second.write_bytes(kept)
        was_cut = cut(step, action)
        yield step
        if not was_cut:
            assert step >= 6, "a commit, a head and a second head, before and after"
            return
    raise AssertionError("it was never done")


def heads_agree(path: Path) -> None:
    second, proof = read_second_head(files_of(path).second_head), verify(path)
    assert second is not None
    assert (second.entries, second.hash) == (proof.entries, proof.head)


def begin_if_refused(files: LedgerFiles) -> None:
    try:
        AgentState(files, {DATASET: BUDGET}).close()
    except LedgerError:
        begin_ledger(files, {DATASET: BUDGET})
        AgentState(files, {DATASET: BUDGET}).close()


def test_a_power_cut_while_a_ledger_begins_leaves_one_that_can_be_begun(path: Path) -> None:
    files = files_of(path)
    for _ in cuts(path, lambda: begin_ledger(files, {DATASET: BUDGET})):
        begin_if_refused(files)
        heads_agree(path)
        assert verify(path).entries == 1


@pytest.mark.parametrize(
    "leftover",
    [
        pytest.param(False, id="nothing there"),
        pytest.param(True, id="the end of another", marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_line_of_a_beginning_leaves_no_ledger_or_one_that_is_whole(
    path: Path, leftover: bool
) -> None:
    """Whoever reads it then, as `dpagent budget show` does, finds its whole schema."""
    files = files_of(path)
    found = set()
    for line in range(0, 10_000, 9):
        shutil.rmtree(path, ignore_errors=True)
        files.second_head.unlink(missing_ok=True)
        if leftover:
            open_state(path).close()
            (path / "ledger.db").rename(path / "ledger.db-wal")
            (path / ".ledger.db.new").write_bytes(b"torn")
            files.head.unlink()
            files.second_head.unlink()
        was_killed = in_a_child(lambda at=line: _begin_until(files, at))
        if files.database.exists():
            found.add(audit(path).entries != ())
            connection, _ = open_ledger(path)
            with closing(connection):
                assert declined_rounds(connection) == []
        begin_if_refused(files)
        heads_agree(path)
        assert verify(path, files.second_head).entries == 1
        if not was_killed:
            assert line > 100
            assert found == {False, True}
            return
    raise AssertionError("it was never done")


def _begin_until(files: LedgerFiles, line: int) -> None:
    """Begin a ledger, and be killed before that line of those that are run for it."""
    lines = itertools.count()
    ours = {agent.custody.__file__, agent.heads.__file__, agent.database.__file__, dpagent.storage.__file__}

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in ours:
            return None
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    begin_ledger(files, {DATASET: BUDGET})
    sys.settrace(None)


def test_a_power_cut_in_a_round_hides_no_charge_and_refunds_nothing(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1, 2)
    state.close()
    earlier = copied(path, "earlier")
    plan = make_plan(job=b"k" * 16)
    price = charge_for(plan, DATA, open_and_close(path).ledger)

    def take_part() -> None:
        state = AgentState(files_of(path), {DATASET: BUDGET})
        charge_and_spool(state, price, [])

    seen = set()
    for _ in cuts(path, take_part):
        with closing(sqlite3.connect(path / "ledger.db")) as connection:
            entries = connection.execute("SELECT max(number) FROM entries").fetchone()[0]
            standing = connection.execute(
                "SELECT state FROM rounds WHERE job = ?", (price.job,)
            ).fetchone() or ("none",)
        second = read_second_head(files_of(path).second_head)
        assert second is not None
        assert second.entries in (entries, entries - 1), "it never leads, and lags by one at most"
        if standing[0] in ("none", "offered"):
            assert entries == 3
        else:
            assert entries == 4
        if standing[0] == "spooled":
            assert second.entries == 4, "nothing leaves under an entry that it does not know"
        seen.add((standing[0], second.entries, second.unsent))
        # The board goes on.
        spent = reserved(path)
        ends = copied(path, "ends")
        kept = files_of(path).second_head.read_bytes()
        state = open_state(path)
        assert state.ledger.is_charged(DATASET, price.job, 1) == (entries == 4)
        state.close()
        heads_agree(path)
        # Or its owner puts an earlier copy back: what left is written off.
        put_back(earlier, path)
        files_of(path).second_head.write_bytes(kept)
        try:
            open_state(path).close()
        except LedgerError:
            restore(path)
            open_state(path).close()
        left = reserved(path)
        if standing[0] == "spooled":
            assert left.epsilon >= spent.epsilon
            assert left.delta >= spent.delta
        shutil.rmtree(ends)
    assert {("offered", 3, ()), ("charged", 3, ()), ("charged", 4, (4,)), ("spooled", 4, (4,)),
            ("spooled", 4, ())} <= seen  # fmt: skip


def open_and_close(path: Path) -> AgentState:
    state = open_state(path)
    state.close()
    return state


@pytest.mark.parametrize("change", ["lower", "raise"])
def test_a_power_cut_while_a_budget_changes_leaves_the_old_one_or_the_new(path: Path, change: str) -> None:
    open_state(path).close()
    files = files_of(path)
    new = Budget(40.0, BUDGET.delta) if change == "lower" else Budget(60.0, BUDGET.delta)

    def lower() -> None:
        AgentState(files, {DATASET: new})

    def raised() -> None:
        raise_budget(files, {DATASET: new})

    for _ in cuts(path, lower if change == "lower" else raised):
        try:
            AgentState(files, {DATASET: new}).close()
        except BudgetRaisedError:
            raise_budget(files, {DATASET: new})
            AgentState(files, {DATASET: new}).close()
        heads_agree(path)
        assert verify(path).entries == 2


@pytest.mark.parametrize("write_off_all", [False, True])
def test_a_power_cut_while_a_restore_is_written_off_leaves_it_refused_or_done(
    path: Path, write_off_all: bool
) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    state.close()
    earlier = copied(path, "earlier")
    state = open_state(path)
    charge_rounds(state, 1, job=b"k" * 16)
    state.close()
    true = BUDGET if write_off_all else reserved(path)
    put_back(earlier, path)
    for _ in cuts(path, lambda: restore(path, write_off_all=write_off_all)):
        try:
            open_state(path).close()
        except LedgerError:
            restore(path, write_off_all=write_off_all)
            open_state(path).close()
        heads_agree(path)
        left = reserved(path)
        assert true.epsilon <= left.epsilon <= true.epsilon * (1 + 1e-9)
        assert true.delta <= left.delta <= true.delta * (1 + 1e-9)
        running = audit(path).accounts.running_job(DATASET)
        assert running is None, "no job goes on"
