"""Charges and ledgers for tests of the agent."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.decision import decide, model_of, schedule_digest
from agent.ledger import Budget, Charge, Ledger
from agent.state import AgentState
from agent.update import mechanism_of
from dpagent.learning.data.dataset import Dataset
from dpagent.protocol.messages import Plan

DATASET = "digits"
BUDGET = Budget(epsilon=50.0, delta=1e-3)


def open_state(path: Path, budget: Budget = BUDGET, dataset: str = DATASET) -> AgentState:
    return AgentState(path, dataset, budget)


def charge_for(plan: Plan, data: Dataset, ledger: Ledger, dataset: str = DATASET, **changes: Any) -> Charge:
    """What the daemon charges for a round that the device accepts."""
    price = decide(plan, data, ledger, dataset, now=0.0)
    mechanism = mechanism_of(plan, model_of(plan))
    values: dict[str, Any] = {
        "dataset": dataset, "job": plan.job.hex(), "round": plan.round, "mechanism": plan.mechanism.name,
        "noise_multiplier": plan.noise_multiplier, "sampling_rate": plan.mechanism.sampling_rate,
        "steps": plan.mechanism.local_steps, "clip_norm": mechanism.clip_norm,
        "granularity": mechanism.granularity, "dimension": mechanism.dimension,
        "statistical_distance": mechanism.statistical_distance, "schedule": schedule_digest(plan),
        "job_epsilon": price.job_epsilon, "delta": plan.mechanism.delta,
        "cumulative_epsilon": price.cumulative_epsilon, "cumulative_delta": price.cumulative_delta,
        "charged_at": "2026-11-20T00:00:00+00:00", "loss_grid": price.loss_grid,
        "accumulation_slack": mechanism.accumulation_slack,
    }  # fmt: skip
    return Charge(**(values | changes))


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
