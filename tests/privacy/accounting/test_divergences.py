"""Rényi divergences of one release: against the mechanism itself, continuous and discrete.

The oracles share no code with the module: dp-accounting, quadrature of the continuous mechanism and
sums over the support of the discrete one, in mpmath at 30 digits or more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import rdp
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.divergences import INTEGER_ORDERS, ORDERS, cumulants, pure_cumulants

# The oracle announces fractional orders whose series does not converge, and leaves them out.
logging.getLogger("absl").setLevel(logging.ERROR)


def divergences(sigmas: ArrayLike, rates: ArrayLike) -> NDArray[np.float64]:
    """Bounds on D_α at all orders: a row for each pair."""
    sigmas, rates = np.broadcast_arrays(np.atleast_1d(sigmas), np.atleast_1d(rates))
    return cumulants(sigmas.astype(np.float64), rates.astype(np.float64), ORDERS) / (np.array(ORDERS) - 1)


@pytest.mark.parametrize("rate", [1e-3, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [0.7, 1.0, 2.25, 8.0, 40.0])
def test_divergences_equal_the_continuous_ones_at_integer_orders(rate: float, sigma: float) -> None:
    ours = divergences(sigma, rate)[0]
    at_integers = [i for i, order in enumerate(ORDERS) if order in INTEGER_ORDERS]
    oracle = rdp.RdpAccountant(INTEGER_ORDERS)
    oracle.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)))
    theirs = oracle._rdp
    # dp-accounting subtracts nearly equal numbers when the divergence is tiny, hence atol
    np.testing.assert_allclose(ours[at_integers], theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("shift", [1, 2])
def test_bounds_the_discrete_mechanism_in_both_directions(rate: float, sigma: float, shift: int) -> None:
    """One dimension, sensitivity ``shift``, noise of σ·shift; orders also between the integers."""
    with mpmath.workdps(40):
        variance = mpmath.mpf(sigma * shift) ** 2
        # The largest terms of a moment lie about order · shift ≤ 40, with the noise's deviation of at most 6.
        support = range(-160, 161)

        def weight(x: int) -> mpmath.mpf:
            return mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * variance))

        total = mpmath.fsum(weight(x) for x in support)
        absent = [weight(x) / total for x in support]
        shifted = [weight(x - shift) / total for x in support]
        present = [(1 - rate) * a + rate * b for a, b in zip(absent, shifted, strict=True)]
        logs = [(mpmath.log(a), mpmath.log(b)) for a, b in zip(absent, present, strict=True)]
        bounds = divergences(sigma, rate)[0]
        for order in (1.1, 1.5, 2.0, 2.7, 3.0, 6.4, 8.0, 11.9, 20.0):
            bound = bounds[ORDERS.index(order)]
            for power in (1 - mpmath.mpf(order), mpmath.mpf(order)):
                moment = mpmath.fsum(mpmath.exp(power * a + (1 - power) * b) for a, b in logs)
                assert mpmath.log(moment) / (order - 1) <= bound * (1 + 1e-9)


@pytest.mark.parametrize(
    ("sigma", "rate", "order", "excess"),
    [
        (4.0, 0.01, 1.1, 0.82),
        (4.0, 0.01, 9.5, 0.004),
        (2.0, 0.1, 1.5, 0.35),
        (2.0, 0.1, 6.3, 0.01),
        (1.0, 0.01, 1.5, 0.35),
        (1.0, 0.01, 11.5, 0.02),
        (0.7, 0.3, 1.3, 0.88),
        (0.7, 0.3, 2.6, 0.13),
        (1.3, 0.9, 3.5, 0.04),
    ],
)
def test_between_the_integers_it_is_above_the_continuous_divergence_by_little_at_high_orders(
    sigma: float, rate: float, order: float, excess: float
) -> None:
    """Quadrature of both directions. Nearly twice as much close to order 1, where few ε are read off."""
    with mpmath.workdps(30):
        a, q, s = mpmath.mpf(order), mpmath.mpf(rate), mpmath.mpf(sigma)

        def ratio(x: mpmath.mpf) -> mpmath.mpf:
            return 1 - q + q * mpmath.exp((2 * x - 1) / (2 * s**2))

        ends = [-14 * s, -4 * s, 0, 4 * s, 9 * s, 14 * s + order]
        added, removed = (
            mpmath.log(mpmath.quad(lambda x, p=p: mpmath.npdf(x, 0, s) * ratio(x) ** p, ends)) / (a - 1)
            for p in (a, 1 - a)
        )
    ours = cumulants(np.array([sigma]), rate, [order])[0, 0] / (order - 1)
    assert removed < added
    assert added * (1 - 1e-10) <= ours <= added * (1 + excess)


@given(
    order=st.floats(1.001, 60), greater=st.floats(0, 8), position=st.floats(-1, 1), weight=st.floats(0.01, 1)
)
def test_two_swapped_points_diverge_no_more_when_the_record_is_removed(
    order: float, greater: float, position: float, weight: float
) -> None:
    """The inequality that the module's text proves, and the form that it takes there."""
    with mpmath.workdps(60):
        i, alpha = mpmath.mpf(greater), mpmath.mpf(order)
        j = i * position
        a, b, u, v = 1 + mpmath.tanh(i), 1 - mpmath.tanh(i), 1 + mpmath.tanh(j), 1 - mpmath.tanh(j)
        added = u**alpha * a ** (1 - alpha) + v**alpha * b ** (1 - alpha)
        removed = a**alpha * u ** (1 - alpha) + b**alpha * v ** (1 - alpha)
        assert removed <= added * (1 + mpmath.mpf(10) ** -45)
        beta, m, w = 2 * alpha - 1, (i + j) / 2, (i - j) / 2
        left = mpmath.cosh(m - beta * w) * mpmath.cosh(m + w) ** beta
        right = mpmath.cosh(m + beta * w) * mpmath.cosh(m - w) ** beta
        assert right <= left * (1 + mpmath.mpf(10) ** -45)
        assert mpmath.almosteq(added / removed, left / right, rel_eps=mpmath.mpf(10) ** -40)


@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "shifts",
    [[(1, 1)], [(1, 0)], [(3, -1)], [(1, 1), (1, 0), (0, -1)], [(0, 0), (2, 2)]],
    ids=["diagonal", "short", "long", "rounded", "maybe"],
)
def test_bounds_vectors_whose_rounding_is_random(
    shifts: Sequence[tuple[int, int]], sigma: float, rate: float
) -> None:
    """Two dimensions, sensitivity √10 or the longest; the record's vector is one of several at random."""
    sensitivity = max(math.hypot(*shift) for shift in shifts)
    sensitivity = max(sensitivity, math.sqrt(2))
    x = np.arange(-90, 91)
    absent, *present = (
        np.exp(-((x[:, np.newaxis] - s) ** 2 + (x - t) ** 2) / (2 * (sigma * sensitivity) ** 2))
        for s, t in [(0, 0), *shifts]
    )
    total = absent.sum()
    mixture = ((1 - rate) * absent + rate * sum(present) / len(present)) / total
    absent = absent / total
    inside = (absent > 1e-150) & (mixture > 1e-150)
    p, q = mixture[inside], absent[inside]
    for order in (1.01, 1.5, 2.0, 2.7, 4.0):
        bound = cumulants(np.array([sigma]), rate, [order])[0, 0]
        for up, down in ((p, q), (q, p)):
            assert math.log((down * (up / down) ** order).sum()) <= bound * (1 + 1e-9) + 1e-13


@given(
    sigma=st.floats(1e-3, 1e6),
    rate=st.floats(1e-9, 1),
    order=st.floats(1.01, 1000),
    more=st.floats(1.0001, 10),
)
def test_the_bound_rises_with_the_order_and_the_rate_and_falls_with_the_noise(
    sigma: float, rate: float, order: float, more: float
) -> None:
    def divergence(sigma: float, rate: float, order: float) -> float:
        return float(cumulants(np.array([sigma]), rate, [order])[0, 0] / (order - 1))

    base = divergence(sigma, rate, order) * (1 - 1e-10)
    assert divergence(sigma, rate, min(order * more, 1024.0)) >= base
    assert divergence(sigma, min(1.0, rate * more), order) >= base
    assert divergence(sigma / more, rate, order) >= base


def formula(sigma: float, rate: float, order: float) -> mpmath.mpf:
    """The bound as the module's text states it, summed at 60 digits."""
    with mpmath.workdps(60):
        x, q = 1 / mpmath.mpf(sigma) ** 2, mpmath.mpf(rate)
        n = int(order)
        f = mpmath.mpf(round(10 * (order - n))) / 10
        total = mpmath.fsum(
            mpmath.binomial(n, k)
            * (1 - q) ** (n - k)
            * q**k
            * mpmath.exp(k * (k - 1) * x / 2)
            * (1 - q + q * mpmath.exp(k * x)) ** f
            for k in range(n + 1)
        )
        return min(mpmath.log(total) / (n + f - 1), (n + f) * x / 2)


@pytest.mark.parametrize(
    ("sigma", "rate"),
    [
        (0.05, 1e-9),
        (0.3, 0.01),
        (0.8, 0.01),
        (1.0, 0.5),
        (2.0, 1e-6),
        (12.0, 0.1),
        (300.0, 0.999),
        (1e5, 0.3),
    ],
)
def test_divergences_equal_the_formula_whatever_is_priced_along(sigma: float, rate: float) -> None:
    """Alone, among similar rounds (scaled together), and among rounds of all kinds (one by one)."""
    orders = (1.1, 1.9, 2.0, 3.5, 11.9, 32.0, 33.0, 64.0, 130.0, 256.0, 320.0, 1024.0)
    columns = [ORDERS.index(order) for order in orders]
    expected = [float(formula(sigma, rate, order)) for order in orders]
    similar = sigma * np.linspace(0.98, 1.0, 200)
    generator = np.random.default_rng(5)
    mixed = np.append(10 ** generator.uniform(-1.5, 4, 60), sigma)
    rates = np.append(10 ** generator.uniform(-8, 0, 60), rate)
    for rows in (
        divergences(sigma, rate),
        divergences(similar, rate),
        divergences(mixed, rates),
        cumulants(np.array([sigma]), rate, orders) / (np.array(orders) - 1),
    ):
        row = rows[-1] if rows.shape[1] == len(orders) else rows[-1, columns]
        np.testing.assert_allclose(row, expected, rtol=1e-10)


def test_rounds_priced_together_are_priced_as_each_alone() -> None:
    sigmas = np.linspace(0.4, 5, 1000)
    rates = np.where(np.arange(1000) % 2, 0.1, 0.05)
    together = divergences(sigmas, rates)
    assert together.shape == (1000, len(ORDERS))
    for i in (0, 17, 500, 999):
        np.testing.assert_allclose(together[i], divergences(sigmas[i], rates[i])[0], rtol=1e-11, atol=1e-300)


def test_extreme_values_neither_overflow_nor_vanish() -> None:
    tiny_noise, huge_noise = divergences([0.01, 1e6], 0.01)
    assert np.isfinite(tiny_noise).all()
    # at order 2 the divergence is log(1 + q²(e^(1/σ²) − 1)), here q²/σ² to first order
    assert huge_noise[ORDERS.index(2.0)] == pytest.approx(1e-4 / 1e12, rel=1e-9)


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


def test_what_costs_nothing_has_no_divergence() -> None:
    assert (pure_cumulants([0.0], [2.0, 1024.0]) == 0).all()


@pytest.mark.parametrize(
    ("epsilons", "orders", "message"), [([-1.0], [2.0], "epsilon"), ([1.0], [1.0], "order")]
)
def test_bad_values_are_named(epsilons: list[float], orders: list[float], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        pure_cumulants(epsilons, orders)
