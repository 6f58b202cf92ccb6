"""Schedules: shares of the budget and what is left of it, against the formulas of the papers."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.ranges import ScheduleKind
from dpagent.privacy.schedules import Schedule


@given(
    kind=st.sampled_from(["uniform", "incrementing", "linear"]),
    step=st.floats(0, 0.99),
    ratio=st.floats(1, 100),
    rounds=st.integers(1, 3000),
)
def test_shares_are_positive_rising_and_sum_to_one(
    kind: ScheduleKind, step: float, ratio: float, rounds: int
) -> None:
    shares = Schedule(kind, step=step, ratio=ratio).shares(rounds)
    assert shares.shape == (rounds,)
    assert (shares > 0).all()
    assert (np.diff(shares) >= 0).all()
    assert shares.sum() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("rounds", [2, 3, 100, 1001])
@pytest.mark.parametrize("step", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("total", [0.7, 1.0, 12.0])
def test_incrementing_follows_the_corrected_closed_form(rounds: int, step: float, total: float) -> None:
    schedule = Schedule("incrementing", step=step)
    d = step * 2 * total / (rounds * (rounds - 1))
    t = np.arange(1, rounds + 1)
    expected = total / rounds + (t - (rounds + 1) / 2) * d
    assert schedule.increment(total, rounds) == pytest.approx(d, rel=1e-14)
    np.testing.assert_allclose(schedule.budgets(total, rounds), expected, rtol=1e-12)
    np.testing.assert_allclose(total * schedule.shares(rounds), expected, rtol=1e-12)
    # the first round's budget as the paper has it, ε_1 = ε/T − (T−1)d/2
    assert schedule.budgets(total, rounds)[0] == pytest.approx(total / rounds - (rounds - 1) * d / 2)


def test_one_round_gets_all_and_has_no_step() -> None:
    kinds: tuple[ScheduleKind, ...] = ("uniform", "incrementing", "linear")
    for kind in kinds:
        assert Schedule(kind).budgets(2.5, 1).tolist() == [2.5]
    assert Schedule("incrementing").increment(2.5, 1) == 0


def test_linear_runs_from_least_to_greatest() -> None:
    shares = Schedule("linear", ratio=5.0).shares(9)
    assert shares[-1] / shares[0] == pytest.approx(5)
    np.testing.assert_allclose(np.diff(shares), np.diff(shares)[0])


@given(weights=st.lists(st.floats(1, 1e6), min_size=1, max_size=50), scale=st.floats(1e-290, 1e300))
def test_custom_keeps_the_proportions_of_its_weights_whatever_their_scale(
    weights: list[float], scale: float
) -> None:
    shares = Schedule("custom", weights=tuple(scale * w for w in weights)).shares(len(weights))
    assert (shares > 0).all()
    assert shares.sum() == pytest.approx(1, rel=1e-12)
    np.testing.assert_allclose(shares, np.array(weights) / sum(weights), rtol=1e-12)


def test_custom_may_fall_and_be_what_another_kind_is() -> None:
    assert (np.diff(Schedule("custom", weights=(3.0, 2.0, 1.0)).shares(3)) < 0).all()
    linear = Schedule("linear", ratio=7.0)
    same = Schedule("custom", weights=tuple(linear.budgets(40.0, 20)))
    np.testing.assert_allclose(same.shares(20), linear.shares(20), rtol=1e-12)


def test_a_schedule_is_a_value() -> None:
    schedule = Schedule("custom", weights=(1.0, 2.0))
    assert hash(schedule) == hash(Schedule("custom", weights=(1.0, 2.0)))
    with pytest.raises(FrozenInstanceError):
        schedule.step = 0.5  # type: ignore[misc]


jobs = st.integers(2, 60).flatmap(
    lambda rounds: st.tuples(
        st.one_of(
            st.just(Schedule("uniform")),
            st.builds(Schedule, st.just("incrementing"), step=st.floats(0, 0.99)),
            st.builds(Schedule, st.just("linear"), ratio=st.floats(1, 100)),
            st.builds(
                Schedule,
                st.just("custom"),
                weights=st.lists(st.floats(1, 100), min_size=rounds, max_size=rounds).map(tuple),
            ),
        ),
        st.just(rounds),
        st.integers(0, rounds - 1),
    )
)


@given(job=jobs, total=st.floats(1e-6, 1e6), used=st.floats(0, 0.999))
def test_what_is_reallocated_is_positive_and_sums_to_what_is_left(
    job: tuple[Schedule, int, int], total: float, used: float
) -> None:
    schedule, rounds, over = job
    spent = used * total if over else 0.0
    left = Fraction(total) - Fraction(spent)
    budgets = schedule.reallocated(total, spent, over=over, rounds=rounds)
    assert budgets.shape == (rounds - over,)
    assert (budgets > 0).all()
    assert math.fsum(budgets) == pytest.approx(float(left), rel=1e-12)
    if schedule.kind != "custom":
        assert (np.diff(budgets) >= 0).all()
    # of its arguments only
    again = Schedule(schedule.kind, schedule.step, schedule.ratio, schedule.weights)
    assert again.reallocated(total, spent, over=over, rounds=rounds).tobytes() == budgets.tobytes()


@given(job=jobs, total=st.floats(1e-6, 1e6))
def test_a_job_that_went_as_planned_goes_on_as_planned(job: tuple[Schedule, int, int], total: float) -> None:
    schedule, rounds, over = job
    planned = schedule.budgets(total, rounds)
    again = schedule.reallocated(total, math.fsum(planned[:over]), over=over, rounds=rounds)
    np.testing.assert_allclose(again, planned[over:], rtol=1e-9)


@given(
    step=st.floats(0, 0.99),
    rounds=st.integers(3, 60),
    over=st.integers(1, 58),
    used=st.floats(0, 0.999),
    total=st.floats(1e-3, 1e3),
)
def test_incrementing_restarts_as_algorithm_1_does_and_lowers_a_step_too_steep(
    step: float, rounds: int, over: int, used: float, total: float
) -> None:
    over = min(over, rounds - 2)
    schedule = Schedule("incrementing", step=step)
    left, rounds_left = total - used * total, rounds - over
    budgets = schedule.reallocated(total, used * total, over=over, rounds=rounds)
    d, greatest = schedule.increment(total, rounds), 2 * left / (rounds_left * (rounds_left - 1))
    lowered = min(d, 0.99 * greatest)
    assert budgets[0] == pytest.approx(left / rounds_left - (rounds_left - 1) * lowered / 2, rel=1e-9)
    np.testing.assert_allclose(np.diff(budgets), lowered, rtol=1e-6, atol=1e-12 * total)


def test_a_saved_round_is_shared_out_in_the_proportions_of_the_rest() -> None:
    custom = Schedule("custom", weights=(1.0, 5.0, 1.0, 3.0))
    np.testing.assert_allclose(custom.reallocated(10.0, 2.0, over=2, rounds=4), [2.0, 6.0])
    linear = Schedule("linear", ratio=3.0)
    np.testing.assert_allclose(
        linear.reallocated(9.0, 4.0, over=1, rounds=3), [2.0, 3.0]
    )  # planned 1.5, 3, 4.5
    np.testing.assert_allclose(Schedule("uniform").reallocated(10.0, 7.0, over=1, rounds=4), np.ones(3))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"kind": "falling"}, "schedule kind"),
        ({"kind": None}, "schedule kind"),
        ({"step": 1.0}, "schedule step"),
        ({"step": -0.1}, "schedule step"),
        ({"step": float("nan")}, "schedule step"),
        ({"ratio": 0.5}, "schedule ratio"),
        ({"ratio": float("inf")}, "schedule ratio"),
        ({"kind": "custom"}, "number of schedule weights"),
        ({"kind": "custom", "weights": [1.0, 2.0]}, "tuple"),
        ({"kind": "custom", "weights": (1.0, 0.0)}, "schedule weight"),
        ({"kind": "custom", "weights": (1.0, float("nan"))}, "schedule weight"),
        ({"kind": "custom", "weights": (1.0, "2")}, "schedule weight"),
        ({"kind": "custom", "weights": (1.0, 1.1e6)}, "ratio of at most"),
        ({"kind": "uniform", "weights": (1.0,)}, "schedule weights are given"),
    ],
)
def test_bad_parameters_are_named(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        Schedule(**arguments)


@pytest.mark.parametrize("rounds", [0, -1, 2_000_000, 1.5, True])
def test_bad_rounds_are_named(rounds: int) -> None:
    for call in (
        lambda: Schedule().shares(rounds),
        lambda: Schedule().budgets(1.0, rounds),
        lambda: Schedule().increment(1.0, rounds),
        lambda: Schedule().reallocated(1.0, 0.0, over=0, rounds=rounds),
    ):
        with pytest.raises(ParameterError, match="rounds"):
            call()


def test_rounds_are_those_of_the_custom_weights() -> None:
    custom = Schedule("custom", weights=(1.0, 2.0))
    for call in (lambda: custom.shares(3), lambda: custom.reallocated(1.0, 0.1, over=1, rounds=1)):
        with pytest.raises(ParameterError, match=r"rounds is \d; expected 2"):
            call()


@pytest.mark.parametrize("total", [0.0, -1.0, float("nan"), float("inf"), 1e-13, 1e13])
def test_bad_totals_are_named(total: float) -> None:
    for call in (
        lambda: Schedule().budgets(total, 3),
        lambda: Schedule().increment(total, 3),
        lambda: Schedule().reallocated(total, 0.0, over=0, rounds=3),
    ):
        with pytest.raises(ParameterError, match="total"):
            call()


def test_only_incrementing_has_a_step() -> None:
    for schedule in (Schedule("uniform"), Schedule("linear"), Schedule("custom", weights=(1.0, 1.0))):
        with pytest.raises(ParameterError, match="expected incrementing"):
            schedule.increment(1.0, 2)


@pytest.mark.parametrize("cost", [-1e-9, float("nan"), float("inf"), 1e13])
def test_bad_costs_are_named(cost: float) -> None:
    with pytest.raises(ParameterError, match="spent"):
        Schedule().reallocated(1.0, cost, over=2, rounds=5)


@pytest.mark.parametrize(
    ("spent", "over", "message"),
    [
        (1.0, 2, "have spent 1 of 1"),
        (1.0 - 1e-14, 2, "nothing is left"),
        (2.0, 1, "have spent 2 of 1"),
        (0.5, 5, "none is left"),
        (0.6, 6, "none is left"),
    ],
)
def test_a_job_with_nothing_left_says_so(spent: float, over: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Schedule().reallocated(1.0, spent, over=over, rounds=5)
