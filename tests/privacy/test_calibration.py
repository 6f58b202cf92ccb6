"""Calibration: the target is met from below, whatever the schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.accounting.accountant import Accountant
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.calibration import (
    NOISE_RANGE,
    BudgetPlan,
    EventFamily,
    calibrate,
    gaussian_family,
    laplace_family,
    price,
)
from dpagent.privacy.events import ApproximateEvent
from dpagent.privacy.ranges import AccountantName
from dpagent.privacy.schedules import Schedule

Kind = Literal["uniform", "incrementing", "linear"]
pytestmark = pytest.mark.heavy

KINDS: tuple[Kind, ...] = ("uniform", "incrementing", "linear")


TARGETS = pytest.mark.parametrize(
    ("epsilon", "delta", "rounds", "rate", "steps"),
    [
        (2.0, 1e-5, 100, 0.1, 1),
        (0.5, 1e-5, 60, 0.1, 1),
        (0.05, 1e-6, 20, 0.01, 3),
        (8.0, 1e-5, 40, 0.02, 10),
        (200.0, 1e-5, 10, 0.5, 1),
        (1.0, 1e-5, 30, 1.0, 1),
        (1.0, 1e-5, 1, 0.1, 1),
        (300.0, 1e-5, 10, 1.0, 1),
        pytest.param(1.0, 1e-9, 1, 0.001, 1, marks=pytest.mark.slow),
    ],
)


def total(plan: BudgetPlan, family: EventFamily, accountant: Accountant) -> float:
    accountant.compose(*map(family.event, plan.noise_multipliers))
    return accountant.epsilon(plan.delta)


@pytest.mark.parametrize("kind", KINDS)
@TARGETS
def test_meets_its_target_on_the_safe_side(
    kind: Kind, epsilon: float, delta: float, rounds: int, rate: float, steps: int
) -> None:
    """Also by Rényi divergences, which want more noise."""
    family = gaussian_family(rate, steps)
    plan = calibrate(Schedule(kind), family, epsilon=epsilon, delta=delta, rounds=rounds)
    assert plan.accountant == "pld"
    assert epsilon * (1 - 1e-4) <= plan.epsilon_by_round[-1] <= epsilon * (1 - 1e-8)
    assert total(plan, family, PldAccountant()) == pytest.approx(epsilon, rel=5e-4)
    assert plan.rounds == len(plan.epsilon_by_round) == rounds
    assert (np.diff(plan.epsilon_by_round) >= 0).all()
    loose = calibrate(Schedule(kind), family, epsilon=epsilon, delta=delta, rounds=rounds, accountant="rdp")
    assert loose.accountant == "rdp"
    spent = total(loose, family, RdpAccountant())
    assert epsilon * (1 - 1e-4) <= spent <= epsilon * (1 - 1e-8)
    assert loose.epsilon_by_round[-1] == pytest.approx(spent, rel=1e-12)
    assert plan.noise_multipliers[0] < loose.noise_multipliers[0]


@given(
    kind=st.sampled_from(KINDS),
    epsilon=st.floats(0.02, 50),
    log_delta=st.floats(-9, -2),
    rounds=st.integers(1, 20),
    rate=st.floats(1e-3, 1),
)
@settings(max_examples=12)
def test_meets_any_reachable_target(
    kind: Kind, epsilon: float, log_delta: float, rounds: int, rate: float
) -> None:
    assume(1 - (1 - rate) ** rounds > 3 * 10**log_delta)
    plan = calibrate(
        Schedule(kind), gaussian_family(rate), epsilon=epsilon, delta=10**log_delta, rounds=rounds
    )
    assert epsilon * (1 - 1e-4) <= plan.epsilon_by_round[-1] <= epsilon * (1 - 1e-7)


def test_a_delta_that_allows_everything_takes_the_least_noise() -> None:
    plan = calibrate(Schedule("uniform"), gaussian_family(0.005), epsilon=1.0, delta=0.01, rounds=1)
    assert plan.noise_multipliers == pytest.approx((NOISE_RANGE[0],))
    assert plan.epsilon_by_round == (0.0,)


def test_incrementing_noise_strictly_falls_and_uniform_noise_is_constant() -> None:
    def multipliers(schedule: Schedule) -> tuple[float, ...]:
        plan = calibrate(schedule, gaussian_family(0.1), epsilon=1.0, delta=1e-5, rounds=50)
        return plan.noise_multipliers

    assert (np.diff(multipliers(Schedule("incrementing", step=0.1))) < 0).all()
    assert (np.diff(multipliers(Schedule("linear"))) < 0).all()
    assert len(set(multipliers(Schedule("uniform")))) == 1
    assert multipliers(Schedule("incrementing", step=0.0)) == multipliers(Schedule("uniform"))


def test_many_different_rounds_are_priced_by_renyi_divergences() -> None:
    def accountant(schedule: Schedule) -> str:
        plan = calibrate(schedule, gaussian_family(0.01), epsilon=2.0, delta=1e-5, rounds=2_100)
        return plan.accountant

    assert accountant(Schedule()) == "rdp"
    assert accountant(Schedule("uniform")) == "pld"


@pytest.mark.parametrize(
    ("epsilon", "delta", "rounds", "accountant"),
    [
        (1e-4, 1e-5, 10, None),
        (1e-3, 1e-5, 10, "rdp"),
        (1e-2, 1e-30, 10, "rdp"),
        (1e-6, 1e-9, 10**6, "pld"),
    ],
)
def test_a_target_beyond_the_noise_that_devices_accept_says_so(
    epsilon: float, delta: float, rounds: int, accountant: Literal["rdp", "pld"] | None
) -> None:
    with pytest.raises(
        PlanError, match=f"epsilon {epsilon:g} at delta {delta:g} .* {rounds:,} round"
    ) as error:
        calibrate(
            Schedule("uniform"), gaussian_family(1.0), epsilon=epsilon, delta=delta, rounds=rounds,
            accountant=accountant,
        )  # fmt: skip
    assert f"{NOISE_RANGE[1]:g}" in str(error.value)


def test_noise_stays_within_what_devices_accept() -> None:
    for epsilon in (0.005, 900.0):
        plan = calibrate(
            Schedule("linear", ratio=100.0), gaussian_family(1.0), epsilon=epsilon, delta=1e-5, rounds=5
        )
        assert NOISE_RANGE[0] <= min(plan.noise_multipliers)
        assert max(plan.noise_multipliers) <= NOISE_RANGE[1]
        assert plan.epsilon_by_round[-1] <= epsilon
    narrow = replace(gaussian_family(1.0), noise_range=(1.0, 2.0))
    with pytest.raises(PlanError, match="differs by a factor of 10; expected at most 2"):
        calibrate(Schedule("linear", ratio=100.0), narrow, epsilon=1.0, delta=1e-5, rounds=5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accountant", ["pld", "rdp", "basic"])
def test_pure_mechanisms_meet_their_target_too(kind: Kind, accountant: AccountantName) -> None:
    family = laplace_family(sampling_rate=0.2, steps=2)
    plan = calibrate(Schedule(kind), family, epsilon=2.0, delta=1e-5, rounds=12, accountant=accountant)
    assert 2.0 * (1 - 1e-4) <= plan.epsilon_by_round[-1] <= 2.0
    assert total(plan, family, PldAccountant()) <= 2.0 * (1 + 1e-4)
    if accountant == "basic":
        spent = [2 * math.log1p(0.2 * math.expm1(1 / noise)) for noise in plan.noise_multipliers]
        assert plan.epsilon_by_round == pytest.approx(np.cumsum(spent), rel=1e-9)


def test_without_a_delta_pure_mechanisms_are_added_up_as_the_schedule_has_it() -> None:
    plan = calibrate(Schedule("incrementing"), laplace_family(1.0), epsilon=3.0, delta=0.0, rounds=10)
    assert plan.accountant == "basic"
    budgets = Schedule("incrementing").budgets(3.0, 10)
    assert [1 / noise for noise in plan.noise_multipliers] == pytest.approx(budgets, rel=1e-4)
    with pytest.raises(ParameterError, match="GaussianEvent"):
        calibrate(Schedule(), gaussian_family(1.0), epsilon=3.0, delta=0.0, rounds=10)


def test_mechanisms_with_a_delta_of_their_own_meet_the_target() -> None:
    family = EventFamily(lambda noise: ApproximateEvent(1 / noise, 1e-7), "epsilon")
    plan = calibrate(Schedule("uniform"), family, epsilon=1.0, delta=1e-5, rounds=20)
    assert 1.0 * (1 - 1e-4) <= plan.epsilon_by_round[-1] <= 1.0
    with pytest.raises(PlanError, match="cost inf"):
        calibrate(Schedule("uniform"), family, epsilon=1.0, delta=1e-6, rounds=20)


def test_a_price_is_that_of_the_accountants() -> None:
    sigmas = [2.0, 1.5, 1.2]
    family = gaussian_family(0.2, steps=4)
    for accountant in (PldAccountant(), RdpAccountant()):
        spent = price(sigmas, family, delta=1e-5, accountant=accountant.name)
        accountant.compose(*map(family.event, sigmas))
        assert spent[-1] == pytest.approx(accountant.epsilon(1e-5), rel=5e-4)
    with pytest.raises(ParameterError, match="events are none"):
        price([], family, delta=1e-5)
    with pytest.raises(ParameterError, match="noise multiplier"):
        price([1.0, 0.0], family, delta=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epsilon", 0.0, "epsilon"),
        ("epsilon", 5000.0, "epsilon"),
        ("delta", 1.0, "delta"),
        ("rounds", 0, "rounds"),
        ("accountant", "moments", "accountant is 'moments'; expected one of pld, rdp, basic"),
    ],
)
def test_bad_parameters_are_named(name: str, value: object, message: str) -> None:
    arguments: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "rounds": 10, name: value}
    with pytest.raises(ParameterError, match=message):
        calibrate(Schedule(), gaussian_family(0.1), **arguments)


@pytest.mark.parametrize(("rate", "steps", "message"), [(1.5, 1, "sampling rate"), (0.1, 0, "count")])
def test_bad_families_are_named(rate: float, steps: int, message: str) -> None:
    for family in (gaussian_family(rate, steps), laplace_family(rate, steps)):
        with pytest.raises(ParameterError, match=message):
            calibrate(Schedule(), family, epsilon=1.0, delta=1e-5, rounds=3)


@pytest.mark.parametrize("edge", [0.5, 0.9092])
def test_a_cost_in_stairs_is_met_with_the_margin_too(edge: float) -> None:
    """The target less 1e-8 is too near to it, however long the search stays on that stair."""

    def stairs(noise: float) -> ApproximateEvent:
        if not 0.9 * edge <= noise < 1:
            return ApproximateEvent(0.9 * edge / noise)
        return ApproximateEvent((1 - 1e-8 if noise < edge else 1 - 5e-5) * 0.9)

    plan = calibrate(Schedule("uniform"), EventFamily(stairs, "epsilon"), epsilon=0.9, delta=0.0, rounds=1)
    assert 0.9 * (1 - 1e-4) <= plan.epsilon_by_round[-1] <= 0.9 * (1 - 1e-6)
    assert plan.epsilon_by_round[-1] == stairs(plan.noise_multipliers[0]).epsilon


def test_a_schedule_is_one() -> None:
    with pytest.raises(ParameterError, match="schedule is a str"):
        calibrate("uniform", gaussian_family(0.1), epsilon=1.0, delta=1e-5, rounds=2)  # type: ignore[arg-type]
