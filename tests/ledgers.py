"""Charges and ledgers for tests of the agent."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fleets import make_plan, records

from agent.admission import JobPrices, admit
from agent.audit import audit, verify
from agent.charges import Budget, Charge, WriteOff
from agent.custody import begin_ledger, go_on_after_restore, raise_budget
from agent.heads import GENESIS, LedgerFiles, read_second_head, save_head
from agent.ledger import Ledger, link
from agent.limit_settings import LimitSettings
from agent.priced_charges import charge_of
from agent.replay import replay
from agent.spool import SpooledFragment
from agent.state import AgentState, BudgetRaisedError
from dpagent.errors import LedgerError
from dpagent.learning.data.dataset import Dataset
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask

DATASET = "digits"
DATA = records(20)
AT = datetime(2026, 11, 22, 12, tzinfo=UTC)
BUDGET = Budget(epsilon=50.0, delta=1e-3)
LIMITS = LimitSettings(minimum_compute_slot_s=0.05, minimum_jitter_window_s=0.0, minimum_fragments=1)
_PRICES = JobPrices()
"""Of the last jobs that were priced here: most tests charge rounds of the same."""


def files_of(path: Path) -> LedgerFiles:
    """Of a state directory, with the second head at its default place."""
    return LedgerFiles(path, path.with_name(f"{path.name}.head"))


def open_state(path: Path, budget: Budget = BUDGET, dataset: str = DATASET) -> AgentState:
    """The state of an agent whose owner begins a ledger, and raises its budget, where that is needed."""
    files = files_of(path)
    if not files.database.exists() and not files.second_head.exists():
        begin_ledger(files, {dataset: budget})
    try:
        return AgentState(files, {dataset: budget}, check=replay)
    except BudgetRaisedError:
        raise_budget(files, {dataset: budget})
        return AgentState(files, {dataset: budget}, check=replay)


def restore(
    path: Path, *, write_off_all: bool = False, dataset: str = DATASET, budget: Budget = BUDGET
) -> tuple[WriteOff, ...]:
    """What ``dpagent budget restored`` does: what it writes off."""
    return go_on_after_restore(
        files_of(path), {dataset: budget}, write_off_all=write_off_all, allows_unproven=False, at=AT
    )


def reserved(path: Path, dataset: str = DATASET) -> Budget:
    """What the jobs and write-offs of a ledger reserve."""
    return audit(path).accounts.reserved(dataset)


def copied(path: Path, to: str) -> Path:
    """A copy of a state directory, whether an agent has it open or not."""
    target = path.with_name(to)
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(path, target))


def put_copy_back(copy: Path, path: Path) -> None:
    """Of a whole state directory, as a thief does; not by a command."""
    shutil.rmtree(path)
    shutil.copytree(copy, path)


def charge_for(plan: Plan, data: Dataset, ledger: Ledger, dataset: str = DATASET, **changes: Any) -> Charge:
    """What the daemon charges for a round that the device accepts."""
    task = RoundTask.of(plan)
    (price,) = admit(task, data, ledger.books, dataset, LIMITS, now=0.0, known=_PRICES)
    return replace(charge_of(task, price, charged_at="2026-11-20T00:00:00+00:00"), **changes)


def tamper(database: Path, *statements: str | tuple[str, Sequence[Any]]) -> None:
    """Change a ledger behind the agent's back, as somebody with a SQLite shell would."""
    connection = sqlite3.connect(database)
    try:
        with connection:
            for trigger in ("no_update", "no_delete"):
                connection.execute(f"DROP TRIGGER IF EXISTS {trigger}")
            connection.execute("DROP INDEX IF EXISTS one_charge_a_round")
            for statement in statements:
                if isinstance(statement, str):
                    connection.execute(statement)
                else:
                    connection.execute(*statement)
    finally:
        connection.close()


def fragments(tag: int, count: int = 3) -> list[SpooledFragment]:
    return [SpooledFragment(bytes([tag, index]) * 8, b"m" * 100, 0.0) for index in range(count)]


def charge_and_spool(
    state: AgentState, charge: Charge, spooled: Iterable[SpooledFragment], *, plan: bytes = bytes(32)
) -> None:
    """What a device does with a round, from its offer to its spool."""
    state.offer(charge.job, charge.round, plan, 0.0)
    state.charge([charge], 0.0)
    state.spool_round(charge.job, charge.round, spooled, 0.0, None)


def charge_rounds(state: AgentState, *rounds: int, job: bytes = b"j" * 16) -> None:
    for number in rounds:
        plan = make_plan(round=number, job=job)
        charge = charge_for(plan, DATA, state.ledger)
        charge_and_spool(state, charge, fragments(number + 16 * job[0] % 200))


def entries(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in connection.execute("SELECT * FROM entries ORDER BY number")]


def body_of(database: Path, number: int) -> dict[str, Any]:
    """The body of an entry."""
    with closing(sqlite3.connect(database)) as connection:
        return dict(json.loads(entries(connection)[number - 1][2]))


def rechain(database: Path, number: int, body: str) -> None:
    """Replace the body of an entry and every hash from there on, as the owner of the device can."""
    with closing(sqlite3.connect(database)) as connection:
        rows = entries(connection)
    previous, statements = GENESIS, []
    for row in rows:
        text = body if row[0] == number else row[2]
        previous = link(previous, row[0], row[1], text)
        statements.append(
            ("UPDATE entries SET body = ?, digest = ? WHERE number = ?", (text, previous, row[0]))
        )
    tamper(database, *statements)
    files = files_of(database.parent)
    files.head.unlink(missing_ok=True)
    second = read_second_head(files.second_head)
    assert second is not None
    save_head(files.second_head, replace(second, entries=len(rows), hash=previous.hex()))


def refused(path: Path) -> str:
    """What both the auditor's command and the agent say of a ledger."""
    with pytest.raises(LedgerError) as caught:
        verify(path)
    with pytest.raises(LedgerError) as at_start:
        open_state(path)
    assert str(at_start.value) == str(caught.value)
    return str(caught.value)
