"""Charges: everything an auditor needs to build and price a round again; and what a ledger guarantees."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from fleets import make_plan, make_task, records, terms
from ledgers import BUDGET, DATASET, charge_and_spool, charge_for, open_state

from agent.charges import Budget, BudgetChange, Charge, SumCharge
from agent.columns import SCOPES
from agent.priced_charges import Price, charge_of, empty_account, event_of, ledger_statement, rebuilt
from agent.replay import replay
from dpagent.errors import LedgerError, ParameterError
from dpagent.privacy.mechanisms.mechanism import JOB_ASSUMPTIONS
from dpagent.privacy.ranges import AccountantName
from dpagent.privacy.statement import Trust
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask
from dpagent.schema.base import checked_as, read_json
from dpagent.schema.json_values import json_of
from dpagent.schema.problems import SchemaError


def made_of(task: RoundTask) -> Charge:
    price = Price("digits", task.release.mechanism, 2.0, 3.0, 2e-5, "pld", 1e-3)
    return charge_of(task, price, charged_at="2026-11-20T00:00:00+00:00")


def charge(**changes: Any) -> Charge:
    """For round 2 of a job in which no two numbers are alike."""
    task = make_task(
        **terms(rate=0.125, local_steps=3, clipping={"norms": [0.75], "accumulation_slack": 0.003}), round=2
    )
    return replace(made_of(task), **changes)


@pytest.mark.parametrize("number", [1, 3])
def test_a_charge_rebuilds_the_mechanism_of_its_round(number: int) -> None:
    task = make_task(**terms(rate=0.125, local_steps=3), round=number)
    made = made_of(task)
    assert rebuilt(made.charged) == task.release.mechanism
    assert event_of(made) == task.release.events[0]
    assert (made.round, made.job, made.schedule) == (number, task.plan.job.hex(), task.schedule_digest)


def test_a_charge_comes_through_json_and_takes_nothing_else() -> None:
    made = charge()
    assert read_json(SumCharge, json_of(made)) == made
    for odd in ({"colour": 1}, {"round": 2.5}, {"job_epsilon": "2"}):
        with pytest.raises(SchemaError):
            checked_as(SumCharge, asdict(made) | odd)


def test_the_account_is_of_the_kind_and_on_the_grid_that_the_charge_names() -> None:
    for name in get_args(AccountantName):
        grid = 1e-3 if name == "pld" else None
        account = empty_account(charge(accountant=name, loss_grid=grid))
        assert (account.name, account.events) == (name, ())
        assert getattr(account, "grid", None) == grid
    with pytest.raises(ParameterError, match="grid"):
        empty_account(charge(accountant="rdp", loss_grid=1e-3))


def test_a_ledger_states_the_sum_of_its_jobs_and_each_mechanism_once() -> None:
    reserved = Budget(epsilon=3.5, delta=2e-5)
    statement = ledger_statement("digits", reserved, ["laplace", "gaussian", "laplace"], "It rains.")
    assert statement.scope == SCOPES[Trust.NONE]
    assert (statement.epsilon, statement.delta) == (3.5, 2e-5)
    assert statement.mechanism == "laplace + gaussian"
    assert statement.assumptions == (*JOB_ASSUMPTIONS, "It rains.")


def test_a_ledger_without_charges_says_that_nothing_was_released() -> None:
    statement = ledger_statement("digits", Budget(0.0, 0.0), [])
    assert statement.mechanism == "nothing released"
    assert (statement.epsilon, statement.delta, statement.assumptions) == (0.0, 0.0, JOB_ASSUMPTIONS)


# --- charges in a row ---------------------------------------------------------------------------

OTHER_JOB = b"k" * 16
BUDGET_CHANGE = BudgetChange(DATASET, BUDGET.epsilon, BUDGET.delta)


def charged(path: Path, *plans: Plan) -> list[Charge]:
    """The charges of a device that takes part in these rounds."""
    state, charges = open_state(path), []
    for plan in plans:
        charges.append(charge_for(plan, records(20), state.ledger))
        charge_and_spool(state, charges[-1], [])
    state.close()
    return charges


def test_charges_of_the_wrong_order_are_found_at_their_place(tmp_path: Path) -> None:
    """A ledger whose hashes fit may still tell of rounds that no agent would have charged."""
    first, second = charged(tmp_path / "one", make_plan(), make_plan(round=2))
    *_, newer = charged(tmp_path / "two", make_plan(), make_plan(job=OTHER_JOB))
    for found, rows in (
        ("round 1 after round 1", [BUDGET_CHANGE, first, first]),
        ("after a newer one", [BUDGET_CHANGE, first, newer, second]),
        ("without a budget", [first]),
    ):
        with pytest.raises(LedgerError, match=f"^Entry {len(rows)} .*{found}"):
            replay(rows)
    accounts = replay([BUDGET_CHANGE, first, second])
    assert accounts.epsilon_spent(DATASET) == second.cumulative_epsilon
