"""The replay of a ledger: every charge is priced again, and what contradicts the others is refused."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from fleets import make_plan, make_task, terms
from ledgers import (
    DATA,
    DATASET,
    body_of,
    charge_and_spool,
    charge_for,
    charge_rounds,
    entries,
    open_state,
    rechain,
    refused,
)
from planted import plant

from agent.accounts import GRID_TOLERANCE
from agent.audit import open_ledger, verify
from agent.charges import Budget, BudgetChange, Charge, SumCharge, WriteOff
from agent.priced_charges import empty_account, event_of, grid_of, price_after, rebuilt
from agent.replay import replay
from dpagent.errors import LedgerError
from dpagent.privacy.accounting.choice import priced
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.events import GaussianEvent, poisson_sampled
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE
from dpagent.privacy.statement import Trust

# --- prices ------------------------------------------------------------------------------------


def test_what_is_stated_is_what_an_independent_accountant_says(path: Path, database: Path) -> None:
    connection, _ = open_ledger(path)
    bodies = [json.loads(row[2]) for row in entries(connection) if row[1] == "charge"]
    connection.close()
    accountant = PldAccountant()
    plan = make_plan()
    for body, noise in zip(bodies, plan.release.mechanism.noise_multipliers, strict=True):
        assert body["noise_multiplier"] == noise
        accountant.compose(poisson_sampled(GaussianEvent(noise), 0.25, 1))
        assert body["cumulative_epsilon"] == pytest.approx(accountant.epsilon(1e-5), rel=1e-3)
        assert body["cumulative_delta"] == 1e-5
    assert bodies[0]["job_epsilon"] == pytest.approx(bodies[-1]["cumulative_epsilon"], rel=1e-3)


def test_a_ledger_priced_by_renyi_divergence_verifies_and_goes_on(path: Path) -> None:
    """As a job of thousands of rounds that all differ is priced: without a grid."""
    with closing(open_state(path)) as state:
        charge_rounds(state, 1, 2)
    database, accountant = path / "ledger.db", RdpAccountant()
    reserved = accountant.epsilon_after(
        [
            poisson_sampled(GaussianEvent(noise), 0.25, 1)
            for noise in make_plan().release.mechanism.noise_multipliers
        ],
        1e-5,
    )
    for number in (2, 3):
        body = body_of(database, number)
        accountant.compose(poisson_sampled(GaussianEvent(body["noise_multiplier"]), 0.25, 1))
        assert (body["accountant"], body["loss_grid"] > 0) == ("pld", True)
        body |= {
            "job_epsilon": reserved, "cumulative_epsilon": accountant.epsilon(1e-5),
            "accountant": "rdp", "loss_grid": None,
        }  # fmt: skip
        rechain(database, number, json.dumps(body))
    assert verify(path).charges == 2
    with closing(open_state(path)) as state:
        charge_rounds(state, 3)
    body = body_of(database, 4)
    assert body["loss_grid"] is None
    assert body["job_epsilon"] == reserved
    assert body["cumulative_epsilon"] == pytest.approx(reserved, rel=1e-6)
    assert verify(path).charges == 3


@pytest.mark.parametrize(
    ("multipliers", "rate", "delta"),
    [([2.0] + [200.0] * 5, 4e-4, 1e-19), ([1.5, 45.0], 2.5e-4, 5e-18)],
)
def test_a_round_that_its_jobs_grid_overprices_does_not_unsettle_the_ledger(
    tmp_path: Path, multipliers: list[float], rate: float, delta: float
) -> None:
    """A rare round at a tiny δ, and others that add next to nothing: on the grid of the whole, the first
    alone is priced above it. Of the second job its own agent refused the ledger at the next start."""
    changes = terms(noise_multipliers=multipliers, rate=rate, delta=delta, resolution=65_536)
    path = tmp_path / "state"
    for number in (1, 2):
        state = open_state(path)
        charge = charge_for(make_plan(round=number, **changes), DATA, state.ledger)
        if number == 1:
            alone = price_after(empty_account(charge), [event_of(charge)], charge.delta)
            events = make_task(round=1, **changes).release.events
            assert priced(events, charge.delta * (1 - NOISE_SHARE))[1] < alone <= charge.job_epsilon
        assert charge.cumulative_epsilon <= charge.job_epsilon
        charge_and_spool(state, charge, [])
        state.close()
    assert verify(path).charges == 2


def charges_of(delta: float, rounds: int, sigma: float = 20.0) -> list[Charge | BudgetChange]:
    """A job of so many rounds, charged as a device charges it.

    After the first fifty that is so in every tenth round; what stands between is close enough.
    """
    events = [poisson_sampled(GaussianEvent(sigma), 0.1, 1)] * rounds
    account, reserved = priced(events, delta * (1 - NOISE_SHARE))
    numbers = sorted({*range(1, min(rounds, 50) + 1), *range(60, rounds, 10), rounds})
    spent = [price_after(account, events[:number], delta) for number in numbers]
    epsilons = np.interp(range(1, rounds + 1), numbers, spent).tolist()
    first = changed_to(
        SumCharge(
            dataset=DATASET, job="j", round=1, mechanism="discrete-gaussian",
            noise_multiplier=sigma, parameters={"resolution": 65_536}, clip_norm=1.0,
            accumulation_slack=0.001, dimension=10, sampling_rate=0.1, steps=1, granularity=0.0,
            statistical_distance=0.0, plan="ab" * 32, schedule="s", job_epsilon=reserved, delta=delta,
            cumulative_epsilon=0.0, cumulative_delta=delta, charged_at="",
            accountant=account.name, loss_grid=grid_of(account),
        )
    )  # fmt: skip
    charges = [
        replace(first, round=number, cumulative_epsilon=epsilon)
        for number, epsilon in enumerate(epsilons, start=1)
    ]
    return [BudgetChange(DATASET, 1000.0, 0.9), *charges]


def changed_to(charge: Charge, **changes: Any) -> Charge:
    """The charge with ``changes``, and with what follows from them as the mechanism has it."""
    changed = replace(charge, **changes)
    mechanism = rebuilt(changed.charged)
    return replace(
        changed, granularity=mechanism.granularity, statistical_distance=mechanism.statistical_distance
    )


def test_what_is_not_looked_at_is_not_priced_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a job of more than 2,048 rounds, which is replayed in one pass."""
    records = charges_of(1e-5, 40, sigma=3.0)
    monkeypatch.setattr("dpagent.privacy.accounting.pld._MAX_STAGES", 16)
    with monkeypatch.context() as patch:
        patch.setattr("agent.replay.price_after", None)
        replay(records)
    charge = records[20]
    assert isinstance(charge, Charge)
    with pytest.raises(LedgerError, match=r"^Entry 21 states a cumulative ε"):
        replay([*records[:20], replace(charge, cumulative_epsilon=0.9 * charge.cumulative_epsilon)])


@pytest.mark.parametrize(("excess", "is_taken"), [(0.9, True), (1.1, False)])
def test_a_reservation_holds_what_the_device_prices_on_the_grid_of_the_job(
    excess: float, is_taken: bool
) -> None:
    """Whatever the rounds would cost on a finer grid of their own: admission reserves no less either."""
    budget, first = charges_of(1e-5, 1, sigma=2.0)
    assert isinstance(first, Charge)
    coarse = replace(first, loss_grid=0.05)
    alone = price_after(empty_account(coarse), [event_of(coarse)], coarse.delta)
    assert alone > 1.01 * first.job_epsilon, "on a finer grid"
    reserved = alone / (1 + excess * GRID_TOLERANCE)
    records = [budget, replace(coarse, job_epsilon=reserved, cumulative_epsilon=reserved)]
    if is_taken:
        replay(records)
        return
    with pytest.raises(LedgerError, match=r"^Entry 2 brings its job to ε"):
        replay(records)


def test_off_a_grid_a_charge_before_one_that_costs_nothing_states_its_own_price() -> None:
    """It has the ε that the next one has; on a grid, that would say that it was not looked at."""
    budget, first, *_ = charges_of(1e-5, 1)
    assert isinstance(first, Charge)
    epsilon = RdpAccountant().epsilon_after([event_of(first)], first.delta * (1 - NOISE_SHARE))
    paid = replace(first, accountant="rdp", loss_grid=None, job_epsilon=epsilon, cumulative_epsilon=epsilon)
    free = changed_to(paid, round=2, sampling_rate=1e-300)
    replay([budget, paid, free])
    with pytest.raises(LedgerError, match=r"^Entry 2 states a cumulative ε"):
        replay([budget, replace(paid, cumulative_epsilon=epsilon / 2), free])


@pytest.mark.slow
@pytest.mark.heavy
def test_a_long_job_is_replayed_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of prices, each of a second or more, would keep a board from starting for hours."""
    records = charges_of(1e-5, 2_100, sigma=3.0)
    monkeypatch.setattr("agent.replay.price_after", None)
    replay(records)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("delta", "rounds"),
    [pytest.param(1e-5, 2_100, marks=pytest.mark.slow), (1e-5, 300), (1e-18, 10), (1e-25, 10)],
)
def test_long_jobs_and_tiny_deltas_verify(delta: float, rounds: int) -> None:
    records = charges_of(delta, rounds)
    replay(records)
    for number, factor in ((1, 0.98), (1, 1.02), (rounds // 2, 0.98), (rounds // 2, 1.02), (rounds, 0.98)):
        charge = records[number]
        assert isinstance(charge, Charge)
        wrong = replace(charge, cumulative_epsilon=charge.cumulative_epsilon * factor + (factor - 1) / 5)
        with pytest.raises(LedgerError, match=rf"^Entry {number + 1} .* cumulative ε"):
            replay([*records[:number], wrong])


# --- charges that have no price ----------------------------------------------------------------


def refused_charge(charge: Charge, records: list[Charge | BudgetChange]) -> str:
    """What is said of a job whose second charge is another one."""
    with pytest.raises(LedgerError, match=r"^Entry 3 ") as caught:
        replay([*records[:2], charge, records[3]])
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "offender"),
    [
        ({"mechanism": "laplace"}, "mechanism is 'laplace'"),
        ({"parameters": {}}, "are none"),
        ({"parameters": {"bound": 3}}, "are bound"),
        ({"parameters": {"bound": 3, "resolution": 65_536}}, "are bound, resolution"),
        ({"parameters": {"resolution": 255}}, "resolution is 255"),
        ({"parameters": {"resolution": 65_536.0}}, "resolution is 65536.0"),
        ({"noise_multiplier": 0.049}, "noise multiplier is 0.049"),
        ({"noise_multiplier": 10_001.0}, "noise multiplier is 10001.0"),
        ({"noise_multiplier": math.nan}, "noise multiplier is nan"),
        ({"granularity": 2.0**-15}, "granularity is 3.0517578125e-05"),
        ({"granularity": 0.0}, "granularity is 0.0"),
        ({"granularity": math.nan}, "granularity is nan"),
        ({"statistical_distance": -1.0}, "statistical distance is -1.0"),
        ({"statistical_distance": 0.0}, "statistical distance is 0.0"),
        ({"accumulation_slack": 0.02}, "accumulation slack is 0.02"),
        ({"clip_norm": 0.0}, "clip norm is 0.0"),
        ({"dimension": 0}, "dimension is 0"),
        ({"steps": 10**400}, "is an integer of 1,329 bits"),
        ({"loss_grid": math.nan}, "grid is nan"),
        ({"loss_grid": None}, "loss grid is None with accountant pld"),
        ({"accountant": "rdp"}, "with accountant rdp"),
        ({"plan": ""}, "plan is ''"),
        ({"plan": "ab" * 31}, "plan is 'abab"),
    ],
)
def test_what_a_price_rests_on_is_checked(changes: dict[str, Any], offender: str) -> None:
    records = charges_of(1e-5, 3)
    charge = records[2]
    assert isinstance(charge, Charge)
    assert offender in refused_charge(replace(charge, **changes), records)


@pytest.mark.parametrize(
    ("changes", "offender"),
    [
        ({"noise_multiplier": 8.0, "parameters": {"resolution": 256}}, "its price holds from 2,122"),
        ({"dimension": 2**28, "delta": 1e-40}, "would add"),
    ],
)
def test_noise_that_is_not_as_priced_is_found_though_all_figures_fit(
    changes: dict[str, Any], offender: str
) -> None:
    records = charges_of(1e-5, 3)
    charge = records[2]
    assert isinstance(charge, Charge)
    assert offender in refused_charge(changed_to(charge, **changes), records)


def test_charges_of_more_runs_than_can_be_counted_are_refused() -> None:
    """At a rate so low that they cost nothing, though no figure of theirs is off."""
    budget, first, *_ = charges_of(1e-5, 1)
    assert isinstance(first, Charge)
    free = changed_to(
        first,
        noise_multiplier=4.0,
        sampling_rate=1e-300,
        steps=2**53,
        job_epsilon=0.0,
        cumulative_epsilon=0.0,
    )
    replay([budget, free])
    with pytest.raises(LedgerError, match="count is 18014398509481984"):
        replay([budget, free, replace(free, round=2)])


@pytest.mark.parametrize("grid", [-1.0, 0.0, 1e-12, 7.0])
def test_a_charge_on_an_impossible_grid_is_named(path: Path, database: Path, grid: float) -> None:
    rechain(database, 2, json.dumps(body_of(database, 2) | {"loss_grid": grid}))
    assert f"grid is {grid}" in refused(path)


def test_a_charge_of_another_scope_than_the_ledgers_is_refused(
    path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figure bounds something else: the sum with the others would bound nothing."""

    class Shuffled(DiscretisedGaussian):
        name: ClassVar[str] = "shuffled"
        trust: ClassVar[Trust] = Trust.SHUFFLER

    plant(monkeypatch, Shuffled)
    rechain(database, 3, json.dumps(body_of(database, 3) | {"mechanism": Shuffled.name}))
    said = refused(path)
    assert "Entry 3" in said
    assert "shuffled" in said
    assert Trust.SHUFFLER in said


# --- contradictions ----------------------------------------------------------------------------


def test_a_changed_grid_is_found(path: Path, database: Path) -> None:
    body = body_of(database, 3)
    for changes in ({"loss_grid": 2 * body["loss_grid"]}, {"accountant": "rdp", "loss_grid": None}):
        rechain(database, 3, json.dumps(body | changes))
        assert "Entry 3 changes the schedule, δ, accountant, grid" in refused(path)


def test_a_changed_schedule_is_found(path: Path, database: Path) -> None:
    rechain(database, 3, json.dumps(body_of(database, 3) | {"schedule": "0" * 64}))
    assert "Entry 3 changes the schedule" in refused(path)


@pytest.mark.parametrize("factor", [0.5, 0.995, 1.005, 2.0])
def test_a_wrong_cumulative_epsilon_is_found_though_the_hashes_fit(
    path: Path, database: Path, factor: float
) -> None:
    body = body_of(database, 3)
    body["cumulative_epsilon"] *= factor
    rechain(database, 3, json.dumps(body, sort_keys=True, separators=(",", ":")))
    assert "Entry 3 states a cumulative ε" in refused(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_undefined_cumulative_epsilon_is_found(path: Path, database: Path, value: float) -> None:
    rechain(database, 3, json.dumps(body_of(database, 3) | {"cumulative_epsilon": value}))
    assert "ntry 3" in refused(path)


def test_a_wrong_cumulative_delta_is_found(path: Path, database: Path) -> None:
    rechain(database, 3, json.dumps(body_of(database, 3) | {"cumulative_delta": 1e-9}))
    assert "ntry 3" in refused(path)


def test_a_reservation_smaller_than_what_was_spent_is_found(path: Path, database: Path) -> None:
    rechain(database, 2, json.dumps(body_of(database, 2) | {"job_epsilon": 1e-3}))
    assert "ntry" in refused(path)


def test_less_noise_than_stated_before_is_found(path: Path, database: Path) -> None:
    charge = SumCharge(**body_of(database, 3))
    changed = changed_to(charge, noise_multiplier=200.0)
    rechain(database, 3, json.dumps(asdict(changed)))
    assert "Entry 3 states a cumulative ε" in refused(path)


# --- budgets -----------------------------------------------------------------------------------


def test_a_reservation_beyond_the_budget_is_found(path: Path, database: Path) -> None:
    """An agent that ignored its budget must not pass as verified."""
    rechain(database, 1, json.dumps(body_of(database, 1) | {"epsilon": 1e-3}))
    said = refused(path)
    assert "Entry 2 brings the reserved ε" in said
    assert "0.001" in said


@pytest.mark.parametrize("sigma", [100.0, 250.0])
@pytest.mark.parametrize("stated", [0.0, 0.5, 0.99])
def test_jobs_that_cost_little_cannot_state_less(sigma: float, stated: float) -> None:
    """However many there are: what each reserves counts towards the budget, and an absolute tolerance would
    be a small job's whole price."""
    budget, first = charges_of(1e-5, 1, sigma)
    assert isinstance(first, Charge)
    assert 1e-7 < first.job_epsilon < 1e-2
    jobs = [
        replace(
            first, job=f"{number:032x}", job_epsilon=stated * first.job_epsilon,
            cumulative_epsilon=number * stated * first.job_epsilon, cumulative_delta=number * first.delta,
        )
        for number in range(1, 4)
    ]  # fmt: skip
    with pytest.raises(LedgerError, match="Entry 2 brings its job to ε"):
        replay([budget, *jobs])
    replay([budget, first])


def test_a_reserved_delta_beyond_the_budget_is_found() -> None:
    _, *charges = charges_of(1e-5, 1)
    replay([BudgetChange(DATASET, 1000.0, 1e-5), *charges])
    with pytest.raises(LedgerError, match=r"^Entry 2 brings the reserved δ to 1e-05; .* is 9e-06"):
        replay([BudgetChange(DATASET, 1000.0, 0.9e-5), *charges])


@pytest.mark.parametrize(("epsilon", "delta"), [(-4.0, 1e-5), (1.0, -1e-5), (1.0, 1.5), (0.0, 1e-5)])
def test_a_budget_that_is_none_is_named(epsilon: float, delta: float) -> None:
    with pytest.raises(LedgerError, match="invalid budget"):
        replay([BudgetChange(DATASET, epsilon, delta)])


# --- write-offs --------------------------------------------------------------------------------


def written_off(epsilon: float, delta: float, of_all: Budget) -> WriteOff:
    return WriteOff(DATASET, epsilon, delta, of_all.epsilon, of_all.delta, is_exact=True, written_at="")


def test_write_offs_add_up() -> None:
    first, second = (
        written_off(1.0, 1e-5, Budget(1.0, 1e-5)),
        written_off(2.0, 3e-5, Budget(3.0, 4e-5)),
    )
    accounts = replay([BudgetChange(DATASET, 50.0, 1e-3), first, second])
    assert accounts.written_off(DATASET) == accounts.reserved(DATASET) == Budget(3.0, 1e-5 + 3e-5)


@pytest.mark.parametrize(
    ("epsilon", "delta", "of_all"),
    [(-1.0, 0.0, Budget(1.0, 2e-5)), (0.0, -1e-5, Budget(2.0, 1e-5)), (math.nan, 0.0, Budget(2.0, 2e-5))],
)
def test_a_write_off_gives_nothing_back(epsilon: float, delta: float, of_all: Budget) -> None:
    """Though the sum that it states is right."""
    budget, whole = BudgetChange(DATASET, 50.0, 1e-3), written_off(2.0, 2e-5, Budget(2.0, 2e-5))
    with pytest.raises(LedgerError, match=r"^Entry 3 writes off ε = .*, δ = "):
        replay([budget, whole, written_off(epsilon, delta, of_all)])


def test_a_write_off_is_of_a_budget_and_its_sums_are_right() -> None:
    budget = BudgetChange(DATASET, 50.0, 1e-3)
    with pytest.raises(LedgerError, match=r"^Entry 1 writes off a part of no budget"):
        replay([written_off(1.0, 1e-5, Budget(1.0, 1e-5)), budget])
    for symbol, of_all in (("ε", Budget(0.5, 1e-5)), ("δ", Budget(1.0, 0.5e-5))):
        with pytest.raises(LedgerError, match=rf"^Entry 2 states a cumulative {symbol} of"):
            replay([budget, written_off(1.0, 1e-5, of_all)])


def test_nothing_is_said_to_be_left_once_an_infinite_epsilon_is_reserved() -> None:
    budget, whole = BudgetChange(DATASET, 50.0, 1e-3), written_off(math.inf, 2e-5, Budget(math.inf, 2e-5))
    assert replay([budget, whole]).reserved(DATASET) == Budget(math.inf, 2e-5)
    for records in (
        [replace(whole, cumulative_epsilon=50.0)],
        [whole, written_off(1.0, 0.0, Budget(1.0, 2e-5))],
    ):
        with pytest.raises(LedgerError, match=rf"^Entry {len(records) + 1} states a cumulative ε of"):
            replay([budget, *records])
