"""A round that is charged in two accounts at once: with a figure that trusts nobody, and one that trusts the
coordinator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from commands import dpagent
from dp_accounting.pld import PLDAccountant
from fleets import make_plan, records, update_plan
from ledgers import LIMITS, files_of

from agent.admission import admit
from agent.audit import audit, verify
from agent.charges import Budget, BudgetChange, Charge
from agent.custody import back_up, begin_ledger, go_on_after_restore, put_back
from agent.declined import Declined
from agent.heads import read_second_head
from agent.limit_settings import LimitSettings
from agent.limits import BeyondLimitError
from agent.priced_charges import charge_of
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
READY = LIMITS.with_values({"methods": ("central", "dp-sgd"), "trust": (Trust.NONE, Trust.COORDINATOR)})
JOB = (b"j" * 16).hex()
AT = datetime(2026, 11, 23, 12, tzinfo=UTC)


def opened(path: Path) -> AgentState:
    files = files_of(path)
    if not files.database.exists():
        begin_ledger(files, BUDGETS)
    return AgentState(files, BUDGETS, check=replay)


def charges_for(state: AgentState, plan: Plan, limits: LimitSettings = READY) -> list[Charge]:
    """What the daemon charges for a round that the device accepts."""
    task = RoundTask.of(plan)
    prices = admit(task, DATA, state.ledger.books, "digits", limits, now=0.0)
    return [charge_of(task, price, charged_at="2026-11-23T00:00:00+00:00") for price in prices]


def noisy_plan(number: int = 1, **changes: Any) -> Plan:
    """A round of a job with noise of devices besides the coordinator's."""
    return update_plan(round=number, device_noise=[6.0, 5.0, 4.0], **changes)


def offer_and_charge(state: AgentState, charges: Sequence[Charge]) -> None:
    state.offer(charges[0].job, charges[0].round, bytes(32), 0.0)
    state.charge(charges, 0.0)


def charged(path: Path, rounds: int, limits: LimitSettings = READY) -> list[Charge]:
    """The charges of a ledger with so many rounds of such a job, of which nothing of the last has left."""
    state, charges = opened(path), []
    for number in range(1, rounds + 1):
        if number > 1:
            state.spool_round(JOB, number - 1, [], 0.0, None)
        found = charges_for(state, noisy_plan(number), limits)
        offer_and_charge(state, found)
        charges += found
    state.close()
    return charges


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
    (other,) = charges_for(state, plan)
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
            charges_for(state, plan)
    state.close()
    for charge in charges:
        with pytest.raises(LedgerError, match=r"^Entry 5 changes the schedule"):
            replay([*CHANGES, *charges, replace(charge, round=2, schedule="o" * 64)])


def test_of_two_charges_none_is_durable_or_both(tmp_path: Path) -> None:
    state = opened(tmp_path / "state")
    first, second = charges_for(state, noisy_plan())
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
    # Nobody knows whose jobs they were.
    told = dpagent("budget", "show", "--state-dir", path).stdout
    assert "Of 'digits', what a restore wrote off trusted the coordinator: without that trust nothing" in told
    assert "Of 'digits', what a restore wrote off trusted nobody" in told


def test_the_owner_reads_that_the_job_has_a_bound_without_trust(tmp_path: Path) -> None:
    path = tmp_path / "state"
    charged(path, 2)
    found = json.loads(dpagent("budget", "show", "--state-dir", path, "--json").stdout)["datasets"]
    for account in ACCOUNTS:
        assert found[account]["jobs"] == [JOB]
        assert not any("without that trust" in each for each in found[account]["statement"]["assumptions"])
        assert not any("is not in it" in each for each in found[account]["statement"]["assumptions"])
    state = opened(path)
    offer_and_charge(state, charges_for(state, update_plan(job=b"u" * 16)))
    state.close()
    page = dpagent("budget", "show", "--state-dir", path).stdout
    assert "Of 'digits', 1 job trusted the coordinator: without that trust nothing bounds" in page


def test_the_owner_reads_that_a_figure_with_trust_leaves_other_jobs_of_the_device_out(tmp_path: Path) -> None:
    """It is for everything that the device contributes, and of the jobs of its own account alone."""
    path = tmp_path / "state"
    charged(path, 1)
    state = opened(path)
    offer_and_charge(state, charges_for(state, make_plan(job=b"o" * 16)))
    assert (state.ledger.accounts.jobs_besides(TRUSTING), state.ledger.accounts.jobs_besides("digits")) == (
        1,
        0,
    )
    state.close()
    found = json.loads(dpagent("budget", "show", "--state-dir", path, "--json").stdout)["datasets"]
    sentence = (
        "Of 'digits', 1 job trusted nobody, and what was told by that of the device as a whole is not in it"
    )
    assert any(sentence in each for each in found[TRUSTING]["statement"]["assumptions"])
    assert not any("is not in it" in each for each in found["digits"]["statement"]["assumptions"])
    assert sentence in dpagent("budget", "show", "--state-dir", path).stdout


def test_rounds_from_before_the_owner_trusted_the_coordinator_are_not_in_that_figure(tmp_path: Path) -> None:
    """They are charged to the account that trusts nobody alone: of a job in both, the first round is not."""
    state = opened(tmp_path / "state")
    nobody = READY.with_values({"trust": (Trust.NONE,)})
    for number, limits, accounts in ((1, nobody, 1), (2, READY, 2)):
        charges = charges_for(state, noisy_plan(number), limits)
        assert len(charges) == accounts
        state.offer(JOB, number, bytes(32), 0.0)
        state.charge(charges, 0.0)
        state.spool_round(JOB, number, [], 0.0, None)
    accounts_ = state.ledger.accounts
    assert (accounts_.jobs_besides(TRUSTING), accounts_.jobs_without_bound(TRUSTING)) == (1, 0)
    state.close()


def test_a_job_of_another_schedule_under_the_same_id_gives_a_job_no_bound(tmp_path: Path) -> None:
    state = opened(tmp_path / "state")
    for number, plan in enumerate((update_plan(), make_plan(round=2)), 1):
        (charge,) = charges_for(state, plan)
        offer_and_charge(state, [charge])
        state.spool_round(JOB, number, [], 0.0, None)
    accounts = state.ledger.accounts
    assert all(accounts.job(account, JOB) is not None for account in ACCOUNTS)
    assert accounts.jobs_without_bound(TRUSTING) == 1
    state.close()


# --- admission ----------------------------------------------------------------------------------


def test_each_charge_is_priced_as_dp_accounting_does(tmp_path: Path) -> None:
    """Three rounds at noise multipliers of 6, 5 and 4 over twice the norm of an update; of the coordinator's
    noise, at 2, 1.5 and 1 over the norm."""
    charges = charged(tmp_path / "state", 3)
    for account, multipliers in zip(ACCOUNTS, ([6.0, 5.0, 4.0], [2.0, 1.5, 1.0]), strict=True):
        theirs = PLDAccountant()
        for each in multipliers:
            theirs.compose(dp_accounting.GaussianDpEvent(each))
        first, *_, last = [each for each in charges if each.dataset == account]
        assert first.job_epsilon == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)
        assert last.cumulative_epsilon == pytest.approx(first.job_epsilon, rel=2e-3)
    assert verify(tmp_path / "state").charges == 6


def test_a_device_that_trusts_nobody_takes_part_by_the_account_that_trusts_nobody(tmp_path: Path) -> None:
    path = tmp_path / "state"
    begin_ledger(files_of(path), {"digits": BUDGETS["digits"]})
    alone = READY.with_values({"trust": (Trust.NONE,)})
    state = AgentState(files_of(path), {"digits": BUDGETS["digits"]}, check=replay)
    for number in (1, 2):
        (charge,) = charges_for(state, noisy_plan(number), alone)
        assert (charge.dataset, charge.mechanism) == ("digits", "device-gaussian")
        offer_and_charge(state, [charge])
    with pytest.raises(BeyondLimitError, match="the trusted party is coordinator"):
        charges_for(state, update_plan(job=b"o" * 16), alone)
    with pytest.raises(Declined, match=r"no lifetime budget for 'digits@coordinator'"):
        charges_for(state, noisy_plan(3))
    state.close()
    assert verify(path).charges == 2


@pytest.mark.parametrize("poor", ACCOUNTS)
def test_a_device_declines_if_either_account_cannot_pay(poor: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    budgets = BUDGETS | {poor: Budget(0.5, 1e-3)}
    begin_ledger(files_of(path), budgets)
    state = AgentState(files_of(path), budgets, check=replay)
    with pytest.raises(Declined, match=f"the lifetime budget for '{poor}' is 0.5"):
        charges_for(state, noisy_plan())
    state.close()


def test_an_owner_who_withdraws_the_trust_leaves_the_rest_of_the_job_to_the_other_account(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state"
    charged(path, 1)
    state = opened(path)
    state.spool_round(JOB, 1, [], 0.0, None)
    (second,) = charges_for(state, noisy_plan(2), READY.with_values({"trust": (Trust.NONE,)}))
    offer_and_charge(state, [second])
    state.spool_round(JOB, 2, [], 0.0, None)
    offer_and_charge(state, charges_for(state, noisy_plan(3)))
    state.close()
    assert [each.dataset for each in audit(path).charges] == [*ACCOUNTS, "digits", *ACCOUNTS]


def test_both_charges_count_among_those_that_the_ledger_has_room_for(tmp_path: Path) -> None:
    state = opened(tmp_path / "state")
    with pytest.raises(BeyondLimitError, match=r"is 6; this device accepts at most 5"):
        charges_for(state, noisy_plan(), READY.with_values({"maximum_charges": 5}))
    assert len(charges_for(state, noisy_plan(), READY.with_values({"maximum_charges": 6}))) == 2
    state.close()


def test_a_job_that_begins_in_one_account_needs_room_for_both(tmp_path: Path) -> None:
    """The owner trusts the coordinator from the second round on: four charges more, beside the first."""
    alone = {"trust": (Trust.NONE,)}
    charged(tmp_path / "state", 1, READY.with_values(alone))
    state = opened(tmp_path / "state")
    state.spool_round(JOB, 1, [], 0.0, None)
    with pytest.raises(BeyondLimitError, match=r"is 5; this device accepts at most 4 .*maximum_charges"):
        charges_for(state, noisy_plan(2), READY.with_values({"maximum_charges": 4}))
    assert len(charges_for(state, noisy_plan(2), READY.with_values({"maximum_charges": 5}))) == 2
    state.close()
