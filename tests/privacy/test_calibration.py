"""Calibration: the target is met from below, whatever the schedule."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.calibration import BudgetPlan, affordable_rounds, calibrate, price
from dpagent.privacy.events import PrivacyLossEvent
from dpagent.privacy.schedules import Schedule

Kind = Literal["uniform", "incrementing", "linear"]
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
        (1.0, 1e-9, 1, 0.001, 1),
    ],
)


def total(plan: BudgetPlan, accountant: PldAccountant | RdpAccountant) -> float:
    for sigma in plan.noise_multipliers:
        accountant.compose(PrivacyLossEvent(sigma, plan.sampling_rate, plan.steps))
    return accountant.epsilon(plan.delta)


@pytest.mark.parametrize("kind", KINDS)
@TARGETS
def test_meets_its_target_on_the_safe_side(
    kind: Kind, epsilon: float, delta: float, rounds: int, rate: float, steps: int
) -> None:
    plan = calibrate(
        Schedule(kind), epsilon=epsilon, delta=delta, rounds=rounds, sampling_rate=rate, steps=steps
    )
    assert plan.accountant == "pld"
    assert epsilon * (1 - 1e-4) <= plan.epsilon_by_round[-1] <= epsilon * (1 - 1e-8)
    assert total(plan, PldAccountant()) == pytest.approx(epsilon, rel=5e-4)
    assert plan.rounds == len(plan.epsilon_by_round) == rounds
    assert (np.diff(plan.epsilon_by_round) >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
@TARGETS
def test_meets_its_target_by_renyi_divergences_too(
    kind: Kind, epsilon: float, delta: float, rounds: int, rate: float, steps: int
) -> None:
    terms = {"epsilon": epsilon, "delta": delta, "rounds": rounds, "sampling_rate": rate, "steps": steps}
    plan = calibrate(Schedule(kind), **terms, accountant="rdp")  # type: ignore[arg-type]
    assert plan.accountant == "rdp"
    spent = total(plan, RdpAccountant())
    assert epsilon * (1 - 1e-5) <= spent <= epsilon * (1 - 1e-8)
    assert plan.epsilon_by_round[-1] == pytest.approx(spent, rel=1e-12)
    tight = calibrate(Schedule(kind), **terms)  # type: ignore[arg-type]
    assert tight.noise_multipliers[0] < plan.noise_multipliers[0]


@given(
    kind=st.sampled_from(KINDS),
    epsilon=st.floats(0.02, 50),
    log_delta=st.floats(-9, -2),
    rounds=st.integers(1, 20),
    rate=st.floats(1e-3, 1),
)
@settings(max_examples=25, deadline=None)
def test_meets_any_reachable_target(
    kind: Kind, epsilon: float, log_delta: float, rounds: int, rate: float
) -> None:
    assume(1 - (1 - rate) ** rounds > 3 * 10**log_delta)
    plan = calibrate(Schedule(kind), epsilon=epsilon, delta=10**log_delta, rounds=rounds, sampling_rate=rate)
    assert epsilon * (1 - 1e-4) <= plan.epsilon_by_round[-1] <= epsilon * (1 - 1e-7)


def test_a_delta_that_allows_everything_takes_the_least_noise() -> None:
    plan = calibrate(Schedule("uniform"), epsilon=1.0, delta=0.01, rounds=1, sampling_rate=0.005)
    assert plan.noise_multipliers == pytest.approx((0.01,))
    assert plan.epsilon_by_round == (0.0,)


def test_incrementing_noise_strictly_falls_and_uniform_noise_is_constant() -> None:
    def multipliers(schedule: Schedule) -> tuple[float, ...]:
        return calibrate(schedule, epsilon=1.0, delta=1e-5, rounds=50, sampling_rate=0.1).noise_multipliers

    assert (np.diff(multipliers(Schedule("incrementing", step=0.1))) < 0).all()
    assert (np.diff(multipliers(Schedule("linear"))) < 0).all()
    assert len(set(multipliers(Schedule("uniform")))) == 1
    assert multipliers(Schedule("incrementing", step=0.0)) == multipliers(Schedule("uniform"))


def test_many_different_rounds_are_priced_by_renyi_divergences() -> None:
    terms = {"epsilon": 2.0, "delta": 1e-5, "rounds": 2_100, "sampling_rate": 0.01}
    assert calibrate(Schedule(), **terms).accountant == "rdp"  # type: ignore[arg-type]
    assert calibrate(Schedule("uniform"), **terms).accountant == "pld"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("epsilon", "delta", "rounds", "accountant"),
    [(1e-3, 1e-5, 10, "rdp"), (1e-2, 1e-30, 10, "rdp"), (1e-6, 1e-9, 10**6, "pld")],
)
def test_an_infeasible_target_says_so(
    epsilon: float, delta: float, rounds: int, accountant: Literal["rdp", "pld"]
) -> None:
    with pytest.raises(PlanError, match=f"epsilon {epsilon:g} at delta {delta:g} cannot be met.*Raise"):
        calibrate(
            Schedule("uniform"), epsilon=epsilon, delta=delta, rounds=rounds, sampling_rate=1.0,
            accountant=accountant,
        )  # fmt: skip


def test_a_price_is_that_of_the_accountants() -> None:
    sigmas = [2.0, 1.5, 1.2]
    for name, accountant in (("pld", PldAccountant()), ("rdp", RdpAccountant())):
        plan = price(sigmas, delta=1e-5, sampling_rate=0.2, steps=4, accountant=name)  # type: ignore[arg-type]
        assert plan.noise_multipliers == tuple(sigmas)
        assert plan.epsilon_by_round[-1] == pytest.approx(total(plan, accountant), rel=5e-4)
        assert plan.epsilon_target == plan.epsilon_by_round[-1]
    with pytest.raises(ParameterError, match="noise multipliers are empty"):
        price([], delta=1e-5, sampling_rate=0.1)
    with pytest.raises(ParameterError, match="noise multiplier"):
        price([1.0, 0.0], delta=1e-5, sampling_rate=0.1)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_affordable_rounds_are_the_last_that_fit(accountant: Literal["rdp", "pld"]) -> None:
    terms = {"delta": 1e-5, "sampling_rate": 0.1, "steps": 2, "accountant": accountant}
    rounds = affordable_rounds(2.5, epsilon=2.0, **terms)  # type: ignore[arg-type]
    costs = [price([2.5] * count, **terms).epsilon_by_round[-1] for count in (rounds, rounds + 1)]  # type: ignore[arg-type]
    assert costs[0] <= 2.0 < costs[1]
    with pytest.raises(PlanError, match=r"cannot keep epsilon 0\.1.*costs"):
        affordable_rounds(0.5, epsilon=0.1, **terms)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epsilon", 0.0, "epsilon"),
        ("epsilon", 5000.0, "epsilon"),
        ("delta", 1.0, "delta"),
        ("rounds", 0, "rounds"),
        ("sampling_rate", 1.5, "sampling rate"),
        ("steps", 0, "steps"),
        ("accountant", "moments", "accountant is 'moments'; expected one of pld, rdp"),
    ],
)
def test_bad_parameters_are_named(name: str, value: object, message: str) -> None:
    arguments: dict[str, object] = {
        "epsilon": 1.0,
        "delta": 1e-5,
        "rounds": 10,
        "sampling_rate": 0.1,
        name: value,
    }
    with pytest.raises(ParameterError, match=message):
        calibrate(Schedule(), **arguments)  # type: ignore[arg-type]
