"""What a power cut between any two writes of a ledger and its heads leaves."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fleets import make_plan
from ledgers import (
    BUDGET,
    DATA,
    DATASET,
    charge_and_spool,
    charge_for,
    charge_rounds,
    copied,
    files_of,
    open_state,
    put_copy_back,
    reserved,
    restore,
)
from storms import in_a_child

import agent.custody
import agent.database
import agent.heads
import agent.state
import dpagent.database_file
import dpagent.storage
from agent.audit import audit, open_ledger, verify
from agent.charges import Budget
from agent.custody import begin_ledger, raise_budget
from agent.heads import LedgerFiles, read_second_head
from agent.replay import replay
from agent.rounds import declined_rounds
from agent.state import AgentState, BudgetRaisedError
from dpagent.errors import LedgerError


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

    write, replace, whole = (
        agent.heads.write_over_spare, dpagent.storage.replace_durably, agent.database.transaction
    )  # fmt: skip

    def write_over_spare(*arguments: Any, **options: Any) -> None:
        point()
        write(*arguments, **options)
        point()

    def replace_durably(*arguments: Any) -> None:
        point()
        replace(*arguments)
        point()

    @contextmanager
    def transaction(connection: sqlite3.Connection, **options: Any) -> Iterator[None]:
        with whole(connection, **options):
            yield
            point()
        point()

    agent.heads.write_over_spare = write_over_spare
    dpagent.storage.replace_durably = dpagent.database_file.replace_durably = replace_durably
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
        AgentState(files, {DATASET: BUDGET}, check=replay).close()
    except LedgerError:
        begin_ledger(files, {DATASET: BUDGET})
        AgentState(files, {DATASET: BUDGET}, check=replay).close()


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
    modules = (agent.custody, agent.heads, agent.database, dpagent.database_file, dpagent.storage)
    ours = {module.__file__ for module in modules}

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
        state = AgentState(files_of(path), {DATASET: BUDGET}, check=replay)
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
        assert bool(state.ledger.trusts_of(DATASET, price.job, 1)) == (entries == 4)
        state.close()
        heads_agree(path)
        # Or its owner puts an earlier copy back: what left is written off.
        put_copy_back(earlier, path)
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
        AgentState(files, {DATASET: new}, check=replay)

    def raised() -> None:
        raise_budget(files, {DATASET: new})

    for _ in cuts(path, lower if change == "lower" else raised):
        try:
            AgentState(files, {DATASET: new}, check=replay).close()
        except BudgetRaisedError:
            raise_budget(files, {DATASET: new})
            AgentState(files, {DATASET: new}, check=replay).close()
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
    put_copy_back(earlier, path)
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
