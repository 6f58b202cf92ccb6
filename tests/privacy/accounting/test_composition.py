"""Sums of privacy costs: against mpmath, and against mechanisms small enough to enumerate."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.composition import (
    composed,
    composed_rho,
    exact_sum,
    gaussian_rho,
    group_event,
    group_rho,
    pure_cumulants,
    pure_rho,
    zcdp_delta,
    zcdp_epsilon,
    zcdp_rho,
)
from dpagent.privacy.events import ApproximateEvent, GaussianEvent, SelfComposedEvent

Distribution = dict[object, float]


def hockey_stick(p: Distribution, q: Distribution, epsilon: float) -> float:
    """The least δ with P(S) ≤ e^ε·Q(S) + δ for all events S."""
    return math.fsum(max(0.0, p[x] - math.exp(epsilon) * q.get(x, 0.0)) for x in p)


def noisy_answer(bit: int, epsilon: float, delta: float) -> Distribution:
    """The worst (ε, δ)-DP mechanism for one bit: with probability δ the truth is told outright."""
    truthful = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    return {("told", bit): delta, bit: truthful, 1 - bit: 1 - delta - truthful}


def product(*parts: Distribution) -> Distribution:
    return {
        outcome: math.prod(part[x] for part, x in zip(parts, outcome, strict=True))
        for outcome in itertools.product(*parts)
    }


@pytest.mark.parametrize(("epsilon", "delta", "steps"), [(0.4, 0.0, 3), (0.7, 0.01, 3), (1.5, 0.1, 2)])
def test_basic_composition_holds_for_the_worst_mechanism(epsilon: float, delta: float, steps: int) -> None:
    total = composed(SelfComposedEvent(ApproximateEvent(epsilon, delta), steps), ApproximateEvent(0.2, 0.001))
    assert total.epsilon == pytest.approx(steps * epsilon + 0.2)
    assert total.delta == pytest.approx(steps * delta + 0.001)
    p, q = (
        product(*[noisy_answer(bit, epsilon, delta)] * steps, noisy_answer(bit, 0.2, 0.001)) for bit in (0, 1)
    )
    attained = hockey_stick(p, q, total.epsilon)
    assert attained <= total.delta * (1 + 1e-9) + 1e-15
    assert attained >= 0.001  # the second event's δ is told outright in any case


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.5, 0.0), (0.5, 1e-3), (2.0, 1e-4), (1e-9, 1e-3), (0.0, 1e-3)]
)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_group_privacy_follows_the_chain(epsilon: float, delta: float, size: int) -> None:
    chain = mpmath.mpf(0)
    for _ in range(size):
        chain = chain * mpmath.exp(epsilon) + delta
    group = group_event(ApproximateEvent(epsilon, delta), size)
    assert size * epsilon <= group.epsilon <= math.nextafter(size * epsilon, math.inf)
    assert group.delta == pytest.approx(float(chain), rel=1e-7)


@pytest.mark.parametrize("epsilon", [1e-9, 1e-3, 0.5, 1.0, 4.0, 40.0, 900.0])
def test_pure_divergence_is_that_of_randomised_response(epsilon: float) -> None:
    orders = (1.01, 1.5, 2.0, 7.0, 64.0, 1024.0)
    ours = pure_cumulants([epsilon], orders)[0]
    with mpmath.workdps(900):
        p = mpmath.exp(epsilon) / (1 + mpmath.exp(epsilon))
        for order, bound in zip(orders, ours, strict=True):
            a = mpmath.mpf(order)
            moment = p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)
            assert bound == pytest.approx(float(mpmath.log(moment)), rel=1e-11)


@given(
    epsilon=st.floats(1e-3, 5),
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=5),
    tilts=st.lists(st.floats(-1, 1), min_size=5, max_size=5),
    order=st.floats(1.05, 60),
)
def test_pure_divergence_bounds_any_pure_pair(
    epsilon: float, weights: list[float], tilts: list[float], order: float
) -> None:
    q = np.array(weights) / sum(weights)
    p = q * np.exp(epsilon / 2 * np.array(tilts[: len(q)]))
    p /= p.sum()  # within e^±ε of q
    cumulant = math.log(float((q * (p / q) ** order).sum()))
    assert cumulant <= pure_cumulants([epsilon], [order])[0, 0] * (1 + 1e-9) + 1e-13


@given(epsilon=st.floats(1e-6, 500), order=st.floats(1.0001, 1e4))
def test_rho_of_a_pure_mechanism_covers_all_orders_and_is_tight(epsilon: float, order: float) -> None:
    rho = pure_rho(epsilon)
    assert rho <= epsilon**2 / 2
    assert pure_cumulants([epsilon], [order])[0, 0] <= order * (order - 1) * rho * (1 + 1e-9)
    at_one = pure_cumulants([epsilon], [1 + 1e-7])[0, 0] / 1e-7
    assert at_one == pytest.approx(rho, rel=1e-4 * (1 + epsilon))


@given(
    terms=st.lists(st.tuples(st.floats(0, 1e12), st.integers(1, 2**53)), max_size=30),
)
def test_sums_are_exact_and_rounded_up(terms: list[tuple[float, int]]) -> None:
    exact = sum((Fraction(value) * count for value, count in terms), Fraction(0))
    ours = exact_sum(terms)
    assert ours >= exact
    assert ours == 0 or math.nextafter(ours, 0) < exact


@given(rho=st.floats(1e-12, 1e6), delta=st.floats(1e-100, 0.99), epsilon=st.floats(1e-6, 1e3))
@settings(deadline=None, max_examples=60)
def test_conversions_are_on_the_safe_side_of_their_formula(rho: float, delta: float, epsilon: float) -> None:
    """Whatever order they chose, no order gives less: against the best of many in exact arithmetic."""
    with mpmath.workdps(50):
        log_delta = mpmath.log(mpmath.mpf(delta))

        def delta_at(a: mpmath.mpf, rho: float, epsilon: float) -> mpmath.mpf:
            return (a - 1) * (rho * a - epsilon) - mpmath.log(a - 1) + a * mpmath.log1p(-1 / a)

        def attained(rho: float, epsilon: float) -> mpmath.mpf:
            """The convex log δ at its least, by ternary search."""
            low, high = mpmath.mpf(-45), mpmath.mpf(45)
            for _ in range(200):
                left, right = (2 * low + high) / 3, (low + 2 * high) / 3
                at_left, at_right = (delta_at(1 + mpmath.exp(u), rho, epsilon) for u in (left, right))
                low, high = (low, right) if at_left <= at_right else (left, high)
            return delta_at(1 + mpmath.exp(low), rho, epsilon)

        assert attained(rho, zcdp_epsilon(rho, delta)) <= log_delta
        assert attained(zcdp_rho(epsilon, delta), epsilon) <= log_delta
        ours = zcdp_delta(rho, epsilon)
        assert ours == 1 or ours >= mpmath.exp(attained(rho, epsilon))


def test_zcdp_sums_and_groups() -> None:
    assert gaussian_rho(2.0) == 0.125
    assert composed_rho([0.1, 0.2, gaussian_rho(2.0)]) == pytest.approx(0.425)
    assert composed_rho([]) == 0
    assert group_rho(0.1, 3) == pytest.approx(0.9)


@pytest.mark.parametrize("rho", [1e-8, 1e-3, 0.1, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_zcdp_converts_as_an_independent_minimisation_does(rho: float, delta: float) -> None:
    with mpmath.workdps(40):

        def epsilon_at(a: mpmath.mpf) -> mpmath.mpf:
            return rho * a + mpmath.log((a - 1) / a) - (mpmath.log(delta) + mpmath.log(a)) / (a - 1)

        # the derivative vanishes at the best order
        def slope(a: mpmath.mpf) -> mpmath.mpf:
            return rho + (mpmath.log(delta) + mpmath.log(a)) / (a - 1) ** 2

        start = 1 + mpmath.sqrt(mpmath.log(1 / mpmath.mpf(delta)) / rho)
        best = mpmath.findroot(slope, (1 + (start - 1) / 10**6, start), solver="bisect", tol=1e-40)
        expected = float(mpmath.mpf(epsilon_at(best)))
    ours = zcdp_epsilon(rho, delta)
    assert ours == pytest.approx(max(expected, 0.0), rel=1e-9, abs=1e-12)
    assert ours <= rho + 2 * math.sqrt(rho * math.log(1 / delta))  # Bun and Steinke's Prop. 1.3
    if ours > 0:
        assert zcdp_delta(rho, ours) == pytest.approx(delta, rel=1e-6)
        assert zcdp_rho(ours, delta) == pytest.approx(rho, rel=1e-9)


@pytest.mark.parametrize(("rho", "epsilon"), [(0.1, 1.0), (1.0, 0.5), (0.005, 0.2), (20.0, 60.0)])
def test_zcdp_covers_the_gaussian_exactly_computed(rho: float, epsilon: float) -> None:
    """Against the exact δ of the Gaussian mechanism (Balle and Wang, 2018), and not far from it."""
    mu = math.sqrt(2 * rho)
    exact = float(
        mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
    )
    assert exact <= zcdp_delta(rho, epsilon) <= 12 * exact


def test_no_cost_is_no_cost() -> None:
    assert zcdp_epsilon(0.0, 1e-5) == zcdp_delta(0.0, 1.0) == pure_rho(0.0) == 0
    assert (pure_cumulants([0.0], [2.0, 1024.0]) == 0).all()


@given(rho=st.floats(1e-20, 1e12), delta=st.floats(1e-300, 0.999), more=st.floats(1.001, 10))
@settings(max_examples=200)
def test_zcdp_conversion_is_monotone_and_finite_everywhere(rho: float, delta: float, more: float) -> None:
    epsilon = zcdp_epsilon(rho, delta)
    assert 0 <= epsilon < math.inf
    assert zcdp_epsilon(min(rho * more, 1e12), delta) >= epsilon * (1 - 1e-9)
    assert zcdp_epsilon(rho, min(delta * more, 0.9999)) <= epsilon * (1 + 1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: composed(), "events"),
        (lambda: composed(SelfComposedEvent(ApproximateEvent(900.0), 2)), "epsilon"),
        (lambda: composed(SelfComposedEvent(ApproximateEvent(0.1, 0.6), 2)), "delta"),
        (lambda: composed(SelfComposedEvent(ApproximateEvent(0.1, 0.0), 10**400)), "count"),
        (lambda: composed(GaussianEvent(1.0)), "events"),
        (lambda: group_event(ApproximateEvent(0.1), 0), "group size"),
        (lambda: group_event(ApproximateEvent(0.1), 10**400), "group size"),
        (lambda: group_event(ApproximateEvent(1.0, 0.1), 5), "group size"),
        (lambda: pure_cumulants([-1.0], [2.0]), "epsilon"),
        (lambda: pure_cumulants([1.0], [1.0]), "order"),
        (lambda: gaussian_rho(0.0), "noise multiplier"),
        (lambda: pure_rho(math.inf), "epsilon"),
        (lambda: composed_rho([0.1, math.nan]), "rho"),
        (lambda: composed_rho([1e12, 1e12]), "sum of rho"),
        (lambda: group_rho(1e12, 2), "rho of the group"),
        (lambda: zcdp_epsilon(-1.0, 0.1), "rho"),
        (lambda: zcdp_epsilon(1.0, 1.0), "delta"),
        (lambda: zcdp_delta(1.0, -0.1), "epsilon"),
        (lambda: zcdp_rho(0.0, 0.1), "epsilon"),
        (lambda: zcdp_rho(1.0, 0.0), "delta"),
    ],
)
def test_bad_values_are_named(call: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()  # type: ignore[operator]
