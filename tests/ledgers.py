"""Charges and ledgers for tests of the agent."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.admission import admit
from agent.charges import Budget, Charge
from agent.ledger import Ledger
from agent.state import AgentState
from dpagent.learning.data.dataset import Dataset
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask

DATASET = "digits"
BUDGET = Budget(epsilon=50.0, delta=1e-3)


def open_state(path: Path, budget: Budget = BUDGET, dataset: str = DATASET) -> AgentState:
    return AgentState(path, dataset, budget)


def charge_for(plan: Plan, data: Dataset, ledger: Ledger, dataset: str = DATASET, **changes: Any) -> Charge:
    """What the daemon charges for a round that the device accepts."""
    task = RoundTask.of(plan)
    price = admit(task, data, ledger, dataset, now=0.0)
    return replace(Charge.of(task, price, dataset, charged_at="2026-11-20T00:00:00+00:00"), **changes)


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
