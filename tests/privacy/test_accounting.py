"""The accountant, against dp-accounting, against Abadi et al., and against direct summation.

The oracles share no code with it: dp-accounting evaluates the continuous mechanism, mpmath sums
the discrete one over its support at 40 digits.
"""

from __future__ import annotations

import logging
import time

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy import (
    INTEGER_ORDERS,
    ORDERS,
    PrivacyLossEvent,
    RdpAccountant,
    epsilon_from_rdp,
    running_epsilon,
    subsampled_gaussian_rdp,
)

DELTA = 1e-5
# The oracle announces fractional orders whose series does not converge, and leaves them out.
logging.getLogger("absl").setLevel(logging.ERROR)


def continuous(
    sigmas: list[float], rate: float, orders: tuple[float, ...], steps: int = 1
) -> rdp.RdpAccountant:
    accountant = rdp.RdpAccountant(orders)
    for sigma in sigmas:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(event, steps)
    return accountant


@pytest.mark.parametrize("rate", [1e-3, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [0.7, 1.0, 2.25, 8.0, 40.0])
def test_divergences_equal_the_continuous_ones_at_integer_orders(rate: float, sigma: float) -> None:
    ours = subsampled_gaussian_rdp(sigma, rate)[0]
    at_integers = [i for i, order in enumerate(ORDERS) if order in INTEGER_ORDERS]
    theirs = continuous([sigma], rate, tuple(INTEGER_ORDERS))._rdp
    # dp-accounting subtracts nearly equal numbers when the divergence is tiny, hence atol
    np.testing.assert_allclose(ours[at_integers], theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 25])
@pytest.mark.parametrize(
    ("rate", "sigma"), [(0.01, 1.0), (0.1, 1.0), (0.1, 2.25), (0.1, 5.0), (0.5, 20.0), (1.0, 12.0)]
)
@pytest.mark.parametrize("sigmas", [[1.0], [1.3, 1.15, 1.0]], ids=["constant", "rising"])
def test_epsilon_is_within_one_percent_of_dp_accounting(
    steps: int, rate: float, sigma: float, sigmas: list[float]
) -> None:
    sigmas = [sigma * factor for factor in sigmas]
    ours = running_epsilon([PrivacyLossEvent(s, rate, steps) for s in sigmas], DELTA)[-1]
    up_to_64 = tuple(order for order in ORDERS if order <= 64)  # it takes seconds for the rest
    at_integers = continuous(sigmas, rate, INTEGER_ORDERS, steps).get_epsilon(DELTA)
    theirs = min(at_integers, continuous(sigmas, rate, up_to_64, steps).get_epsilon(DELTA))
    assert ours <= at_integers * (1 + 1e-6)
    assert theirs * (1 - 1e-6) <= ours <= 1.01 * theirs


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "excess"),
    [(0.5, 3.0, 100, 0.01), (0.01, 0.7, 1000, 0.07), (0.1, 0.8, 100, 0.07), (0.001, 0.5, 1000, 0.28)],
)
def test_what_the_bound_between_integers_costs_at_low_orders(
    rate: float, sigma: float, steps: int, excess: float
) -> None:
    """With ε of 4 to 14 the best order is about 3, where the bound is loosest, for small σ most."""
    ours = running_epsilon([PrivacyLossEvent(sigma, rate, steps)], DELTA)[0]
    theirs = continuous([sigma], rate, tuple(o for o in ORDERS if o < 13), steps).get_epsilon(DELTA)
    assert 4 < theirs * (1 - 1e-6) <= ours <= (1 + excess) * theirs


@pytest.mark.parametrize(("steps", "published"), [(10_000, 1.26), (40_000, 2.55)])
def test_moments_accountant_values_of_abadi_et_al(steps: int, published: float) -> None:
    ours = running_epsilon([PrivacyLossEvent(4.0, 0.01, steps)], DELTA)[0]
    tight = pld.PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(4.0))
    tight.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    assert tight.get_epsilon(DELTA) <= ours <= published


@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("shift", [1, 2])
def test_bounds_the_discrete_mechanism_in_both_directions(rate: float, sigma: float, shift: int) -> None:
    """One dimension, sensitivity ``shift``, noise of σ·shift; orders also between the integers."""
    with mpmath.workdps(40):
        variance = mpmath.mpf(sigma * shift) ** 2
        support = range(-400, 401)

        def weight(x: int) -> mpmath.mpf:
            return mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * variance))

        total = mpmath.fsum(weight(x) for x in support)
        absent = [weight(x) / total for x in support]
        shifted = [weight(x - shift) / total for x in support]
        present = [(1 - rate) * a + rate * b for a, b in zip(absent, shifted, strict=True)]
        bounds = subsampled_gaussian_rdp(sigma, rate)[0]
        for order in (1.1, 1.5, 2.0, 2.7, 3.0, 6.4, 8.0, 11.9, 20.0):
            bound = bounds[ORDERS.index(order)]
            for p, q in ((present, absent), (absent, present)):
                moment = mpmath.fsum(
                    a ** mpmath.mpf(order) * b ** (1 - mpmath.mpf(order)) for a, b in zip(p, q, strict=True)
                )
                assert mpmath.log(moment) / (order - 1) <= bound * (1 + 1e-9)


@given(
    sigma=st.floats(0.5, 50),
    rate=st.floats(1e-4, 1),
    steps=st.integers(1, 500),
    more=st.floats(1.01, 2),
)
@settings(deadline=None)
def test_epsilon_is_monotone(sigma: float, rate: float, steps: int, more: float) -> None:
    def epsilon(sigma: float, rate: float, steps: int) -> float:
        return float(running_epsilon([PrivacyLossEvent(sigma, rate, steps)], DELTA)[0])

    base = epsilon(sigma, rate, steps) * (1 - 1e-9)
    assert epsilon(sigma / more, rate, steps) >= base
    assert epsilon(sigma, min(1.0, rate * more), steps) >= base
    assert epsilon(sigma, rate, steps + 1) >= base


def test_composition_does_not_depend_on_grouping() -> None:
    events = [PrivacyLossEvent(1.5 + 0.01 * i, 0.05 + 0.001 * (i % 3), 1 + i % 4) for i in range(60)]
    together, singly = RdpAccountant(), RdpAccountant()
    together.compose(*events)
    for event in events:
        singly.compose(event)
    expected = together.epsilon(DELTA)
    assert singly.epsilon(DELTA) == pytest.approx(expected, rel=1e-12)
    assert running_epsilon(events, DELTA)[-1] == pytest.approx(expected, rel=1e-12)
    assert RdpAccountant().epsilon_after(events, DELTA) == pytest.approx(expected, rel=1e-12)


def test_asking_changes_nothing() -> None:
    accountant = RdpAccountant()
    assert accountant.epsilon(DELTA) == 0
    accountant.compose(PrivacyLossEvent(2.0, 0.1))
    before = accountant.epsilon(DELTA)
    assert accountant.epsilon_after([PrivacyLossEvent(1.0, 0.5, 10)], DELTA) > before
    assert accountant.epsilon_after([], DELTA) == before == accountant.epsilon(DELTA)


def test_rounds_are_vectorised() -> None:
    sigmas = np.linspace(1, 5, 1000)
    rates = np.where(np.arange(1000) % 2, 0.1, 0.05)
    start = time.perf_counter()
    rdp_rows = subsampled_gaussian_rdp(sigmas, rates)
    assert time.perf_counter() - start < 5  # about 0.3 s; a loop over rounds would take longer
    assert rdp_rows.shape == (1000, len(ORDERS))
    np.testing.assert_allclose(rdp_rows[17], subsampled_gaussian_rdp(sigmas[17], rates[17])[0], rtol=1e-13)


def test_extreme_values_neither_overflow_nor_vanish() -> None:
    tiny_noise, huge_noise = subsampled_gaussian_rdp([0.01, 1e6], 0.01)
    assert np.isfinite(tiny_noise).all()
    # at order 2 the divergence is log(1 + q²(e^(1/σ²) − 1)), here q²/σ² to first order
    assert huge_noise[ORDERS.index(2.0)] == pytest.approx(1e-4 / 1e12, rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0.0, 0.1), "noise multiplier"),
        ((float("inf"), 0.1), "noise multiplier"),
        ((1.0, 0.0), "sampling rate"),
        ((1.0, 1.1), "sampling rate"),
        ((1.0, 0.1, 0), "steps"),
    ],
)
def test_bad_events_are_named(arguments: tuple[float, float], name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        PrivacyLossEvent(*arguments)
    if name != "steps":
        with pytest.raises(ParameterError, match=name):
            subsampled_gaussian_rdp(*arguments)


def test_bad_shapes_and_deltas_are_named() -> None:
    with pytest.raises(ParameterError, match="shape"):
        subsampled_gaussian_rdp([1.0, 2.0], [0.1, 0.1, 0.1])
    with pytest.raises(ParameterError, match="shape"):
        epsilon_from_rdp(np.zeros(3), DELTA)
    with pytest.raises(ParameterError, match="negative or undefined"):
        epsilon_from_rdp(np.full(len(ORDERS), np.nan), DELTA)
    for delta in (0.0, 1.0, float("nan")):
        with pytest.raises(ParameterError, match="delta"):
            RdpAccountant().epsilon(delta)
        with pytest.raises(ParameterError, match="delta"):
            running_epsilon([], delta)
