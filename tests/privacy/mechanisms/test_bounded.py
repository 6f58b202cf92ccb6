"""The bounded cap: what a public cap costs is charged, and the rest reallocated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.events import ApproximateEvent
from dpagent.privacy.mechanisms.bounded import BoundedBudget, BoundedCap
from dpagent.privacy.schedules import Schedule

UNIFORM = Schedule("uniform")


def budget(**changes: Any) -> BoundedBudget:
    arguments: dict[str, Any] = {
        "epsilon": 3.0,
        "delta": 1e-5,
        "rounds": 10,
        "sampling_rate": 0.1,
        "schedule": UNIFORM,
    }
    return BoundedBudget(**arguments | changes)


def test_the_cap_follows_the_largest_public_weight() -> None:
    cap = BoundedCap(0.5, 0.01)
    weights = np.array([0.1, -0.6, 0.0], dtype=np.float32)
    assert cap.bound(weights, 60.0) == pytest.approx(60 * 0.3, rel=1e-6)
    assert cap.bound(np.zeros(3, dtype=np.float32), 60.0) == pytest.approx(0.6)


@pytest.mark.parametrize("schedule", [UNIFORM, Schedule("incrementing", 0.6), Schedule("linear")])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_job_in_which_no_cap_acts_keeps_its_schedule(schedule: Schedule, steps: int) -> None:
    state = budget(schedule=schedule, steps=steps)
    shares = 3.0 * schedule.shares(10)
    for expected in shares:
        done = state.next_round(math.inf, clip_norm=1.0, dimension=650)
        assert not done.capped
        assert done.planned_epsilon == pytest.approx(expected, rel=1e-9)
        assert composed(done.mechanism.event).epsilon == pytest.approx(expected, rel=1e-9)
        state = done.after
    assert 3.0 * (1 - 1e-9) < state.spent_epsilon <= 3.0
    assert 0.99e-5 < state.spent_delta <= 1e-5
    assert state.rounds_left == 0
    with pytest.raises(PlanError, match="10 of 10 rounds are over"):
        state.next_round(math.inf, clip_norm=1.0, dimension=650)


def test_a_tight_cap_costs_more_and_the_rest_is_reallocated() -> None:
    state = budget(schedule=Schedule("incrementing", 0.5))
    first = state.next_round(5.0, clip_norm=1.0, dimension=650)
    assert first.capped
    assert first.mechanism.cap <= 5.0
    cost = composed(first.mechanism.event).epsilon
    assert cost > first.planned_epsilon
    # by the published formula, for fine grids: A = λ·ln(1 + (e^ε − 1)/(2δ)), δ = 1e-6/q before sampling
    epsilon = first.mechanism.epsilon
    scale = first.mechanism.scale_units * first.mechanism.granularity
    assert scale * math.log(1 + math.expm1(epsilon) / 2e-5) == pytest.approx(5.0, rel=1e-3)
    rest = first.after.planned()
    assert rest.shape == (9,)
    assert rest.sum() == pytest.approx(3.0 - cost)
    np.testing.assert_allclose(np.diff(rest), 0.5 * 2 * 3.0 / (10 * 9))  # still rising by d
    assert state.spent == ()  # nothing changed where it was asked


@given(
    caps=st.lists(st.floats(1.5, 200), min_size=1, max_size=10),
    epsilon=st.floats(0.5, 50),
    q=st.floats(0.001, 1),
    steps=st.integers(1, 3),
)
@settings(max_examples=60)
def test_the_budget_is_never_exceeded_and_the_cap_always_kept(
    caps: list[float], epsilon: float, q: float, steps: int
) -> None:
    state = budget(epsilon=epsilon, sampling_rate=q, steps=steps, rounds=len(caps))
    for cap in caps:
        try:
            done = state.next_round(cap, clip_norm=1.0, dimension=100)
        except PlanError:
            continue
        assert done.mechanism.cap <= cap
        state = done.after
    assert math.fsum(composed(event).epsilon for event in state.spent) <= epsilon
    assert math.fsum(composed(event).delta for event in state.spent) <= 1e-5


@given(
    scales=st.lists(st.sampled_from([0.0, 1e-3, 1.0, 50.0, 3e38]), min_size=1, max_size=12),
    schedule=st.sampled_from([UNIFORM, Schedule("incrementing", 0.9), Schedule("linear", ratio=50.0)]),
    q=st.sampled_from([0.01, 0.5, 1.0]),
)
@settings(max_examples=60)
def test_no_choice_of_weights_spends_more_than_the_reservation(
    scales: list[float], schedule: Schedule, q: float
) -> None:
    """A coordinator that chooses each round's weights, and with them its cap, after all it has seen."""
    cap, weights = BoundedCap(0.5, 0.02), np.linspace(-1, 1, 101, dtype=np.float32)
    state = budget(schedule=schedule, sampling_rate=q, rounds=12, epsilon=40.0)
    for scale in scales:
        bound = cap.bound(weights * np.float32(scale), 200.0)
        try:
            done = state.next_round(bound, clip_norm=1.0, dimension=101, accumulation_slack=0.001)
        except PlanError:
            continue
        # Both sides derive it from public values, to the bit.
        again = state.next_round(bound, clip_norm=1.0, dimension=101, accumulation_slack=0.001)
        assert again == done
        assert done.mechanism.cap <= bound
        state = done.after
        assert math.fsum(composed(event).epsilon for event in state.spent) <= 40.0
        assert math.fsum(composed(event).delta for event in state.spent) <= 1e-5


def test_a_round_that_does_not_fit_is_refused_with_the_cap_that_would() -> None:
    state = budget()
    with pytest.raises(PlanError, match=r"Round 1 of 10, with epsilon 3 of 3 left.*cap of 2 cannot") as error:
        state.next_round(2.0, clip_norm=1.0, dimension=650)
    enough = float(str(error.value).partition("has to reach ")[2].split(". Raise")[0])
    last = state.next_round(enough, clip_norm=1.0, dimension=650)
    assert last.after.spent_epsilon > 2.99
    with pytest.raises(PlanError, match=r"cap of 0\.5 cannot"):
        state.next_round(0.5, clip_norm=1.0, dimension=650)


def test_a_spent_budget_says_so() -> None:
    spent = budget(rounds=2, spent=(ApproximateEvent(3.0, 1e-6),))
    with pytest.raises(PlanError, match="1 of 2 rounds have spent 3 of 3"):
        spent.next_round(10.0, clip_norm=1.0, dimension=650)


def test_the_statement_is_the_jobs_total() -> None:
    statement = budget().statement()
    assert (statement.epsilon, statement.delta) == (3.0, 1e-5)
    assert statement.scope == ("record", "add-or-remove-one", "none")
    assert "public values alone" in statement.assumptions[0]


def test_bad_values_are_named() -> None:
    for changes, name in (
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"rounds": 0}, "rounds"),
        ({"sampling_rate": 0.0}, "sampling rate"),
        ({"steps": 0}, "steps"),
    ):
        with pytest.raises(ParameterError, match=name):
            budget(**changes)
    for cap in (math.nan, -1.0, 0.0):
        with pytest.raises(ParameterError, match="cap"):
            budget().next_round(cap, clip_norm=1.0, dimension=1)
    with pytest.raises(ParameterError, match="clip norm"):
        budget().next_round(5.0, clip_norm=-1.0, dimension=1)
    with pytest.raises(ParameterError, match="regularisation"):
        BoundedCap(0.0, 1.0)
    with pytest.raises(ParameterError, match="floor"):
        BoundedCap(1.0, math.inf)
    with pytest.raises(ParameterError, match="weights"):
        BoundedCap(1.0, 1.0).bound(np.array([np.nan]), 1.0)
    with pytest.raises(ParameterError, match="weights"):
        BoundedCap(1.0, 1.0).bound(np.zeros(0), 1.0)
    with pytest.raises(ParameterError, match="expected lot"):
        BoundedCap(1.0, 1.0).bound(np.zeros(1), 0.0)
