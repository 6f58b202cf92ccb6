"""A round that is charged in two accounts at once: with a figure that trusts nobody, and one that trusts the
coordinator."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from commands import dpagent
from fleets import make_plan, records, update_plan
from ledgers import LIMITS, files_of

from agent.admission import Declined, admit
from agent.audit import audit, verify
from agent.charges import Budget, BudgetChange, Charge, charge_of
from agent.columns import account_name
from agent.custody import back_up, begin_ledger, go_on_after_restore, put_back
from agent.heads import read_second_head
from agent.replay import replay
from agent.state import AgentState
from dpagent.errors import LedgerError, StorageError
from dpagent.privacy.statement import Trust
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask

DATA = records(20)
TRUSTING = "digits@coordinator"
ACCOUNTS = ("digits", TRUSTING)
BUDGETS = {name: Budget(50.0, 1e-3) for name in ACCOUNTS}
CHANGES = [BudgetChange(name, 50.0, 1e-3) for name in ACCOUNTS]
READY = LIMITS.model_copy(update={"methods": ("central", "dp-sgd"), "trust": (Trust.NONE, Trust.COORDINATOR)})
JOB = (b"j" * 16).hex()
AT = datetime(2026, 11, 23, 12, tzinfo=UTC)


def opened(path: Path) -> AgentState:
    files = files_of(path)
    if not files.database.exists():
        begin_ledger(files, BUDGETS)
    return AgentState(files, BUDGETS)


def charge_for(state: AgentState, plan: Plan) -> Charge:
    task = RoundTask.of(plan)
    price = admit(task, DATA, state.ledger, "digits", READY, now=0.0)
    account = account_name("digits", task.release.mechanism.trust)
    return charge_of(task, price, account, charged_at="2026-11-23T00:00:00+00:00")


def both(state: AgentState, number: int) -> list[Charge]:
    """Of one round of a job whose schedule has a mechanism of each trust."""
    plans = (make_plan(round=number), update_plan(round=number))
    return [replace(charge_for(state, plan), schedule="s" * 64) for plan in plans]


def offer_and_charge(state: AgentState, charges: list[Charge]) -> None:
    state.offer(charges[0].job, charges[0].round, bytes(32), 0.0)
    state.charge(charges, 0.0)


def charged(path: Path, rounds: int) -> list[Charge]:
    """The charges of a ledger with so many rounds of such a job."""
    state = opened(path)
    first = both(state, 1)
    charges = [replace(each, round=1 + number) for number in range(rounds) for each in first]
    for number in range(rounds):
        pair = [replace(each, cumulative_epsilon=_spent(state, each)) for each in charges[2 * number :][:2]]
        charges[2 * number : 2 * number + 2] = pair
        if number:
            state.spool_round(JOB, number, [], 0.0, None)
        offer_and_charge(state, pair)
    state.close()
    return charges


def _spent(state: AgentState, charge: Charge) -> float:
    """ε of an account after one more such charge, as admission finds it."""
    account = state.ledger.accounts.job(charge.dataset, charge.job)
    if account is None:
        return charge.cumulative_epsilon
    return min(account.spent.epsilon_after([charge.event], charge.delta * (1 - 1e-6)), charge.job_epsilon)


def test_neither_charge_of_a_round_ends_the_other(tmp_path: Path) -> None:
    path = tmp_path / "state"
    charges = charged(path, 3)
    state = opened(path)
    accounts = state.ledger.accounts
    for account, first in zip(ACCOUNTS, charges, strict=False):
        assert accounts.is_running(account, JOB)
        assert accounts.reserved(account) == Budget(first.job_epsilon, 1e-5)
        assert 0 < state.ledger.epsilon_spent(account) <= first.job_epsilon
    assert state.ledger.trusts_of("digits", JOB, 3) == (Trust.NONE, Trust.COORDINATOR)
    state.close()
    assert verify(path).charges == 6
    second = read_second_head(files_of(path).second_head)
    assert second is not None
    assert {name: totals.epsilon_reserved for name, totals in second.datasets.items()} == {
        each.dataset: each.job_epsilon for each in charges[:2]
    }
    assert second.unsent == (7, 8), "both charges of round 3, of which nothing has left, and no other's"


@pytest.mark.parametrize("plan", [make_plan(job=b"o" * 16), update_plan(job=b"o" * 16)])
def test_another_job_in_either_account_ends_it_in_both(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "state"
    charges = charged(path, 1)
    state = opened(path)
    other = charge_for(state, plan)
    offer_and_charge(state, [other])
    for account in ACCOUNTS:
        assert not state.ledger.accounts.is_running(account, JOB)
    state.close()
    for late in charges:
        with pytest.raises(LedgerError, match=r"^Entry 6 continues a job after a newer one"):
            replay([*CHANGES, *charges, other, replace(late, round=2)])


def test_neither_account_takes_another_schedule_under_the_id_of_the_job(tmp_path: Path) -> None:
    path = tmp_path / "state"
    charges = charged(path, 1)
    state = opened(path)
    for plan in (make_plan(round=2), update_plan(round=2)):
        with pytest.raises(Declined, match="schedule changed"):
            charge_for(state, plan)
    state.close()
    for charge in charges:
        with pytest.raises(LedgerError, match=r"^Entry 5 changes the schedule"):
            replay([*CHANGES, *charges, replace(charge, round=2, schedule="o" * 64)])


def test_of_two_charges_none_is_durable_or_both(tmp_path: Path) -> None:
    state = opened(tmp_path / "state")
    first, second = both(state, 1)
    state.offer(first.job, 1, bytes(32), 0.0)
    with pytest.raises(StorageError):
        state.charge([first, second, second], 0.0)
    assert state.ledger.number_of_charges == 0
    assert state.ledger.accounts.reserved("digits") == Budget(0.0, 0.0)
    state.charge([first, second], 0.0)
    state.close()
    assert verify(tmp_path / "state").charges == 2


def test_a_restored_backup_refunds_neither(tmp_path: Path) -> None:
    path, copy = tmp_path / "state", tmp_path / "copy.db"
    opened(path).close()
    back_up(path, copy)
    charges = charged(path, 2)
    files = files_of(path)
    for file in path.iterdir():
        file.unlink()
    put_back(copy, files)
    lost = go_on_after_restore(files, BUDGETS, write_off_all=False, allows_unproven=False, at=AT)
    assert {each.dataset: each.epsilon for each in lost} == pytest.approx(
        {each.dataset: each.job_epsilon for each in charges[:2]}
    )
    ledger = audit(path)
    assert ledger.accounts.running_job("digits") is None


def test_the_owner_reads_that_the_job_has_a_bound_without_trust(tmp_path: Path) -> None:
    path = tmp_path / "state"
    charged(path, 2)
    found = json.loads(dpagent("budget", "show", "--state-dir", path, "--json").stdout)["datasets"]
    for account in ACCOUNTS:
        assert found[account]["jobs"] == [JOB]
        assert not any("without that trust" in each for each in found[account]["statement"]["assumptions"])
    state = opened(path)
    offer_and_charge(state, [charge_for(state, update_plan(job=b"u" * 16))])
    state.close()
    page = dpagent("budget", "show", "--state-dir", path).stdout
    assert "Of 'digits', 1 job trusted the coordinator: without that trust nothing bounds" in page
