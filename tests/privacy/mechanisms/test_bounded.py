"""The bounded cap: what a public cap costs is charged, and the rest reallocated."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.mechanisms.bounded import BoundedCap, BoundedJob, BoundedRound
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE, Query
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.privacy.schedules import Schedule

UNIFORM = Schedule("uniform")
QUERY = Query(clip_norm=1.0, accumulation_slack=0.0, dimension=650, sampling_rate=0.1)
RESOLUTION = 1 << 22
WIDE = 1e9


def job(**changes: Any) -> BoundedJob:
    values: dict[str, Any] = {
        "epsilon": 3.0,
        "delta": 1e-5,
        "rounds": 10,
        "schedule": UNIFORM,
        "cap": BoundedCap(1.0, 1e-9),
        "expected_lot": 1.0,
    }
    return BoundedJob(**values | changes)


def round_of(
    job: BoundedJob, number: int, cap: float, spent: float = 0.0, query: Query = QUERY
) -> BoundedRound:
    """The round whose weights give such a cap."""
    weights: NDArray[np.float64] = np.full(query.dimension, cap)
    return job.round(number, query, weights, spent=spent, resolution=RESOLUTION)


def test_the_cap_follows_the_largest_public_weight() -> None:
    cap = BoundedCap(0.5, 0.01)
    weights = np.array([0.1, -0.6, 0.0], dtype=np.float32)
    assert cap.bound(weights, 60.0) == pytest.approx(60 * 0.3, rel=1e-6)
    assert cap.bound(np.zeros(3, dtype=np.float32), 60.0) == pytest.approx(0.6)


@pytest.mark.parametrize("schedule", [UNIFORM, Schedule("incrementing", 0.6), Schedule("linear")])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_job_in_which_no_cap_acts_keeps_its_schedule(schedule: Schedule, steps: int) -> None:
    terms, query, spent, delta = job(schedule=schedule), replace(QUERY, steps=steps), 0.0, 0.0
    for number, expected in enumerate(3.0 * schedule.shares(10), 1):
        done = round_of(terms, number, WIDE, spent, query)
        assert not done.is_capped
        assert done.planned_epsilon == pytest.approx(expected, rel=1e-9)
        assert done.epsilon == composed(done.mechanism.event).epsilon == pytest.approx(expected, rel=1e-9)
        spent, delta = spent + done.epsilon, delta + composed(done.mechanism.event).delta
    assert 3.0 * (1 - 1e-9) < spent <= 3.0
    assert 0.99e-5 < delta <= 1e-5 * (1 - NOISE_SHARE)
    with pytest.raises(PlanError, match="10 of 10 rounds are over"):
        round_of(terms, 11, WIDE, spent)


def test_a_tight_cap_costs_more_and_the_rest_is_reallocated() -> None:
    terms = job(schedule=Schedule("incrementing", 0.5))
    first = round_of(terms, 1, 5.0)
    assert first.is_capped
    assert first.mechanism.cap <= 5.0
    assert first.epsilon > first.planned_epsilon
    # by the published formula, for fine grids: A = λ·ln(1 + (e^ε − 1)/(2δ)), δ = 1e-6/q before sampling
    epsilon = first.mechanism.epsilon
    scale = first.mechanism.scale_units * first.mechanism.granularity
    assert scale * math.log(1 + math.expm1(epsilon) / 2e-5) == pytest.approx(5.0, rel=1e-3)
    second = round_of(terms, 2, WIDE, first.epsilon)
    third = round_of(terms, 3, WIDE, first.epsilon + second.epsilon)
    # Still rising by d, from the remainder over nine rounds less four times d.
    step = 0.5 * 2 * 3.0 / (10 * 9)
    assert second.planned_epsilon == pytest.approx((3.0 - first.epsilon) / 9 - 4 * step)
    assert third.planned_epsilon == pytest.approx(second.planned_epsilon + step)


@given(
    scales=st.lists(st.sampled_from([0.0, 1e-3, 1.0, 50.0, 3e38]), min_size=1, max_size=12),
    schedule=st.sampled_from([UNIFORM, Schedule("incrementing", 0.9), Schedule("linear", ratio=50.0)]),
    q=st.sampled_from([0.01, 0.5, 1.0]),
    steps=st.integers(1, 3),
)
@settings(max_examples=60)
def test_no_choice_of_weights_spends_more_than_the_reservation(
    scales: list[float], schedule: Schedule, q: float, steps: int
) -> None:
    """A coordinator that chooses each round's weights, and with them its cap, after all it has seen."""
    query = Query(1.0, 0.001, 101, q, steps)
    terms = job(schedule=schedule, rounds=12, epsilon=40.0, cap=BoundedCap(0.5, 0.02), expected_lot=200.0)
    shape, resolution = (
        np.linspace(-1, 1, 101, dtype=np.float32),
        terms.resolution(query.sampling_rate, query.steps),
    )
    spent, events = 0.0, []
    for number, scale in enumerate(scales, 1):
        weights = shape * np.float32(scale)
        try:
            done = terms.round(number, query, weights, spent=spent, resolution=resolution)
        except PlanError:
            continue
        # Both sides derive it from public values.
        assert terms.round(number, query, weights, spent=spent, resolution=resolution) == done
        assert done.mechanism.cap <= terms.cap.bound(weights, 200.0)
        spent += done.epsilon
        events.append(composed(done.mechanism.event))
        assert math.fsum(each.epsilon for each in events) <= 40.0
        assert math.fsum(each.delta for each in events) <= 1e-5


def test_a_round_that_does_not_fit_is_refused_with_the_cap_that_would() -> None:
    with pytest.raises(PlanError, match=r"Round 1 of 10, with epsilon 3 of 3 left.*cap of 2 cannot") as error:
        round_of(job(), 1, 2.0)
    enough = float(str(error.value).partition("has to reach ")[2].split(". Raise")[0])
    assert round_of(job(), 1, enough).epsilon > 2.99
    with pytest.raises(PlanError, match=r"cap of 0\.5 cannot"):
        round_of(job(), 1, 0.5)


def test_a_spent_budget_says_so() -> None:
    with pytest.raises(PlanError, match="1 of 2 rounds have spent 3 of 3"):
        round_of(job(rounds=2), 2, 10.0, 3.0)


def test_an_announced_mechanism_is_held_to_the_rule_but_for_last_digits() -> None:
    found = round_of(job(), 1, 5.0)
    same: TruncatedLaplace = found.mechanism
    found.require_announced(same)
    found.require_announced(replace(same, noise_multiplier=same.noise_multiplier * (1 + 1e-12)))
    for changes in (
        {"noise_multiplier": same.noise_multiplier * 1.01},
        {"bound_units": same.bound_units * 2},
    ):
        with pytest.raises(PlanError, match=next(iter(changes)).replace("_", " ")):
            found.require_announced(replace(same, **changes))


def test_bad_values_are_named() -> None:
    for changes, name in (
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"rounds": 0}, "rounds"),
        ({"expected_lot": 0.0}, "expected lot"),
    ):
        with pytest.raises(ParameterError, match=name):
            job(**changes)
    with pytest.raises(ParameterError, match="clip norm"):
        round_of(job(), 1, 5.0, query=replace(QUERY, clip_norm=-1.0))
    with pytest.raises(ParameterError, match="spent"):
        round_of(job(), 1, 5.0, -1.0)
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
