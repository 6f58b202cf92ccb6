"""Calibration: the target is met from below, whatever the schedule."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy import PrivacyLossEvent, RdpAccountant, Schedule, calibrate

Kind = Literal["uniform", "incrementing", "linear"]
KINDS: tuple[Kind, ...] = ("uniform", "incrementing", "linear")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("epsilon", "delta", "rounds", "rate", "steps"),
    [
        (2.0, 1e-5, 100, 0.1, 1),
        (0.5, 1e-5, 60, 0.1, 1),
        (0.05, 1e-6, 20, 0.01, 3),
        (8.0, 1e-5, 40, 0.02, 10),
        (200.0, 1e-5, 10, 0.5, 1),
        (1.0, 1e-5, 30, 1.0, 1),
        (1.0, 1e-5, 1, 0.1, 1),
    ],
)
def test_meets_its_target_on_the_safe_side(
    kind: Kind, epsilon: float, delta: float, rounds: int, rate: float, steps: int
) -> None:
    plan = calibrate(
        Schedule(kind), epsilon=epsilon, delta=delta, rounds=rounds, sampling_rate=rate, steps=steps
    )
    accountant = RdpAccountant()
    for sigma in plan.noise_multipliers:
        accountant.compose(PrivacyLossEvent(sigma, rate, steps))
    assert epsilon * (1 - 1e-5) <= accountant.epsilon(delta) <= epsilon * (1 - 1e-8)
    assert plan.epsilon_by_round[-1] == pytest.approx(accountant.epsilon(delta), rel=1e-12)
    assert plan.rounds == len(plan.epsilon_by_round) == rounds
    assert (np.diff(plan.epsilon_by_round) >= 0).all()


@given(
    kind=st.sampled_from(KINDS),
    epsilon=st.floats(0.02, 50),
    log_delta=st.floats(-9, -2),
    rounds=st.integers(1, 40),
    rate=st.floats(1e-3, 1),
)
@settings(max_examples=40, deadline=None)
def test_meets_any_reachable_target(
    kind: Kind, epsilon: float, log_delta: float, rounds: int, rate: float
) -> None:
    delta = 10**log_delta
    if epsilon < -np.log(delta) / 500:
        epsilon = -np.log(delta) / 500  # below this the orders considered leave no room
    plan = calibrate(Schedule(kind), epsilon=float(epsilon), delta=delta, rounds=rounds, sampling_rate=rate)
    assert epsilon * (1 - 1e-5) <= plan.epsilon_by_round[-1] <= epsilon * (1 - 1e-7)


def test_incrementing_noise_strictly_falls_and_uniform_noise_is_constant() -> None:
    def multipliers(schedule: Schedule) -> tuple[float, ...]:
        return calibrate(schedule, epsilon=1.0, delta=1e-5, rounds=50, sampling_rate=0.1).noise_multipliers

    assert (np.diff(multipliers(Schedule("incrementing", step=0.1))) < 0).all()
    assert (np.diff(multipliers(Schedule("linear"))) < 0).all()
    assert len(set(multipliers(Schedule("uniform")))) == 1
    assert multipliers(Schedule("incrementing", step=0.0)) == multipliers(Schedule("uniform"))


def test_a_thousand_rounds_take_no_time() -> None:
    start = time.perf_counter()
    calibrate(Schedule(), epsilon=2.0, delta=1e-5, rounds=1000, sampling_rate=0.1)
    assert time.perf_counter() - start < 6  # about 0.4 s on a free core


@pytest.mark.parametrize(("epsilon", "delta"), [(1e-3, 1e-5), (1e-2, 1e-30)])
def test_an_infeasible_target_says_so(epsilon: float, delta: float) -> None:
    with pytest.raises(PlanError, match=f"epsilon {epsilon:g} at delta {delta:g} cannot be met.*Raise"):
        calibrate(Schedule(), epsilon=epsilon, delta=delta, rounds=10, sampling_rate=0.1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epsilon", 0.0, "epsilon"),
        ("epsilon", 5000.0, "epsilon"),
        ("delta", 1.0, "delta"),
        ("rounds", 0, "rounds"),
        ("sampling_rate", 1.5, "sampling rate"),
        ("steps", 0, "steps"),
    ],
)
def test_bad_parameters_are_named(name: str, value: float, message: str) -> None:
    arguments: dict[str, float] = {
        "epsilon": 1.0,
        "delta": 1e-5,
        "rounds": 10,
        "sampling_rate": 0.1,
        name: value,
    }
    with pytest.raises(ParameterError, match=message):
        calibrate(Schedule(), **arguments)  # type: ignore[arg-type]
