"""The accounts of a ledger by whom their figures trust: never mixed, each with a budget of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from commands import dpagent
from fleets import agent_values, make_plan, make_task, records, report_plan, update_plan
from ledgers import LIMITS, charge_and_spool, files_of

from agent.admission import admit
from agent.audit import verify
from agent.charges import Budget, BudgetChange, Charge
from agent.columns import account_name, dataset_of, require_scope, scope_of
from agent.custody import begin_ledger, go_on_after_restore, raise_budget
from agent.declined import Declined
from agent.priced_charges import charge_of
from agent.replay import replay
from agent.settings import AgentSettings
from agent.state import AgentState, BudgetRaisedError
from dpagent.errors import LedgerError, ParameterError
from dpagent.privacy.statement import Trust
from dpagent.protocol.messages import Plan
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.task import RoundTask

DATA = records(20)
ACCOUNT = "digits@coordinator"
BUDGETS = {"digits": Budget(50.0, 1e-3), ACCOUNT: Budget(20.0, 1e-4)}
TRUSTING = LIMITS.with_values(
    {"methods": ("central", "dp-sgd", "ldp-fl"), "trust": (Trust.NONE, Trust.COORDINATOR)}
)
UPDATE_JOB = b"u" * 16
AT = datetime(2026, 11, 22, 12, tzinfo=UTC)
KEY = Signer(new_signing_secret(), "testers").public_key


def opened(path: Path) -> AgentState:
    files = files_of(path)
    if not files.database.exists():
        begin_ledger(files, BUDGETS)
    return AgentState(files, BUDGETS, check=replay)


def take_part(state: AgentState, plan: Plan) -> Charge:
    task = RoundTask.of(plan)
    (price,) = admit(task, DATA, state.ledger.books, "digits", TRUSTING, now=0.0)
    charge = charge_of(task, price, charged_at="2026-11-20T00:00:00+00:00")
    charge_and_spool(state, charge, [])
    return charge


def test_jobs_that_trust_the_coordinator_leave_the_budget_of_others_alone(tmp_path: Path) -> None:
    """And the reverse; but all jobs on the records run in sequence."""
    state = opened(tmp_path / "state")
    take_part(state, make_plan())
    before = state.ledger.accounts.reserved("digits")
    charge = take_part(state, update_plan(job=UPDATE_JOB))
    accounts = state.ledger.accounts
    assert accounts.reserved("digits") == before
    assert accounts.reserved(ACCOUNT) == Budget(charge.job_epsilon, 1e-5)
    assert state.ledger.epsilon_spent(ACCOUNT) == charge.cumulative_epsilon > 0
    assert state.ledger.trusts_of("digits", UPDATE_JOB.hex(), 1)
    with pytest.raises(Declined, match=f"a newer job, {UPDATE_JOB.hex()}"):
        admit(make_task(round=2), DATA, state.ledger.books, "digits", TRUSTING, now=0.0)
    assert "device level, trusting the coordinator" in state.ledger.spending_of("digits")
    state.close()
    assert verify(tmp_path / "state").charges == 2


def test_rounds_of_both_accounts_do_not_alternate_under_the_name_of_one_job(tmp_path: Path) -> None:
    """They are two jobs, and the second ends the first."""
    state = opened(tmp_path / "state")
    first = take_part(state, make_plan())
    second = take_part(state, update_plan(round=2))
    assert first.job == second.job
    with pytest.raises(Declined, match="the job has ended on 'digits'"):
        admit(make_task(round=3), DATA, state.ledger.books, "digits", TRUSTING, now=0.0)
    take_part(state, update_plan(round=3))
    state.close()
    changes = [BudgetChange(name, budget.epsilon, budget.delta) for name, budget in BUDGETS.items()]
    with pytest.raises(LedgerError, match=r"^Entry 5 continues a job after a newer one"):
        replay([*changes, first, second, replace(first, round=3)])


@pytest.mark.parametrize(
    ("plan", "account"),
    [(update_plan(), "digits"), (make_plan(), ACCOUNT), (report_plan(), ACCOUNT),
     (update_plan(), "digits@shuffler")],
    ids=["an update as a sum", "a sum as an update", "reports as an update", "an unknown account"],
)  # fmt: skip
def test_a_charge_in_the_account_of_another_trust_is_found(plan: Plan, account: str, tmp_path: Path) -> None:
    """Moved there, it would cost the budget of one whose guarantee it does not have."""
    state = opened(tmp_path / "state")
    if plan.method == "ldp-fl":
        raise_budget_of(state, 400.0)
    charge = take_part(state, plan)
    state.close()
    moved = replace(charge, dataset=account)
    changes = [BudgetChange(name, 1000.0, 1e-2) for name in BUDGETS]
    with pytest.raises(LedgerError, match=r"^Entry 3 is not a charge that can be priced"):
        replay([*changes, moved])
    replay([*changes, charge])


def raise_budget_of(state: AgentState, epsilon: float) -> None:
    with state.entry():
        state.ledger.set_budget("digits", Budget(epsilon, 1e-3))


def test_names_of_accounts() -> None:
    assert account_name("my data", Trust.COORDINATOR) == "my data@coordinator"
    assert (dataset_of("my data"), dataset_of("my data@coordinator")) == ("my data", "my data")
    assert scope_of("my data")[2] is Trust.NONE
    for odd in ("digits@", "digits@none", "digits@nobody", "a@b@coordinator"):
        with pytest.raises(ParameterError, match="account is"):
            scope_of(odd)
        with pytest.raises(LedgerError, match="of no account"):
            replay([BudgetChange(odd, 1.0, 1e-5)])
    with pytest.raises(
        ParameterError, match="central-gaussian hides the difference from zeros of everything"
    ):
        require_scope(RoundTask.of(update_plan()).release.mechanism, "digits")


def test_a_restored_backup_refunds_neither_account(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = opened(path)
    take_part(state, update_plan(job=UPDATE_JOB))
    state.close()
    files = files_of(path)
    for file in path.iterdir():
        file.unlink()
    (lost,) = (
        each
        for each in go_on_after_restore(files, BUDGETS, write_off_all=False, allows_unproven=False, at=AT)
        if each.epsilon
    )
    state = AgentState(files, BUDGETS, check=replay)
    assert (lost.dataset, lost.is_exact) == (ACCOUNT, True)
    assert state.ledger.accounts.reserved(ACCOUNT).epsilon == pytest.approx(lost.epsilon)
    assert state.ledger.accounts.reserved("digits") == Budget(0.0, 0.0)
    state.close()
    page = dpagent("budget", "show", "--state-dir", path).stdout
    assert "what a restore wrote off trusted the coordinator: without that trust nothing bounds" in page
    found = json.loads(dpagent("budget", "show", "--state-dir", path, "--json").stdout)["datasets"]
    assert any("trusted the coordinator" in each for each in found["digits"]["statement"]["assumptions"])


def test_a_budget_for_trusting_jobs_is_given_by_the_owners_command_alone(tmp_path: Path) -> None:
    files = files_of(tmp_path / "state")
    begin_ledger(files, {"digits": BUDGETS["digits"]})
    with pytest.raises(BudgetRaisedError, match="digits@coordinator"):
        AgentState(files, BUDGETS, check=replay)
    assert raise_budget(files, BUDGETS) == {ACCOUNT: None}
    AgentState(files, BUDGETS, check=replay).close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"limits": {"trust": ["none", "coordinator"]}}, "budget.coordinator is not set"),
        ({"data": {"name": "digits@coordinator"}}, "name"),
    ],
)
def test_settings_that_would_mix_accounts_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AgentSettings.checked(agent_values(None, KEY, **changes))


def test_the_owner_sees_each_account_and_what_is_not_bounded(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = opened(path)
    take_part(state, make_plan())
    take_part(state, update_plan(job=UPDATE_JOB))
    state.close()
    page = dpagent("budget", "show", "--state-dir", path).stdout
    assert "Trusted: no one" in page
    assert "Trusted: the coordinator" in page
    assert "1 job trusted the coordinator: without that trust nothing bounds" in page
    found = json.loads(dpagent("budget", "show", "--state-dir", path, "--json").stdout)["datasets"]
    assert found["digits"]["jobs"] == [(b"j" * 16).hex()]
    assert found[ACCOUNT]["jobs"] == [UPDATE_JOB.hex()]
    assert (found["digits"]["trust"], found[ACCOUNT]["trust"]) == ("none", "coordinator")
    assert found[ACCOUNT]["statement"]["unit"] == "device"
    assert any("trusted the coordinator" in each for each in found["digits"]["statement"]["assumptions"])
