"""The accountant, against dp-accounting, against Abadi et al., and against direct summation.

The oracles share no code with it: dp-accounting evaluates the continuous mechanism, mpmath sums
the discrete one over its support at 40 digits.
"""

from __future__ import annotations

import json
import logging
import random as random_module
from dataclasses import replace

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy.accounting import (
    INTEGER_ORDERS,
    ORDERS,
    RdpAccountant,
    RenyiEvent,
    cumulants,
    epsilon_from_rdp,
    renyi_divergences,
    running_epsilon,
    subsampled_gaussian_rdp,
)
from dpagent.privacy.events import ApproximateEvent, PrivacyLossEvent

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


events_of_all_sorts = st.lists(
    st.one_of(
        st.builds(
            PrivacyLossEvent,
            st.sampled_from([0.8, 1.0, 1.7, 30.0]),
            st.sampled_from([0.01, 0.3, 1.0]),
            st.integers(1, 9),
        ),
        st.builds(ApproximateEvent, st.sampled_from([0.0, 0.01, 1.0]), st.just(0.0), st.integers(1, 9)),
    ),
    min_size=1,
    max_size=12,
)


@given(events=events_of_all_sorts, random=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_order_and_grouping_make_no_difference_at_all(
    events: list[RenyiEvent], random: random_module.Random
) -> None:
    together, singly = RdpAccountant(), RdpAccountant()
    together.compose(*events)
    shuffled = [replace(event, steps=1) for event in events for _ in range(event.steps)]
    random.shuffle(shuffled)
    for event in shuffled:
        singly.compose(event)
    expected = together.epsilon(DELTA)
    assert singly.epsilon(DELTA) == expected  # exactly
    assert singly.to_state() == together.to_state()
    assert RdpAccountant().epsilon_after(events, DELTA) == expected
    assert running_epsilon(events, DELTA)[-1] == pytest.approx(expected, rel=1e-12, abs=1e-300)


@given(before=events_of_all_sorts, after=events_of_all_sorts)
@settings(deadline=None, max_examples=60)
def test_save_and_restore_are_identical(before: list[RenyiEvent], after: list[RenyiEvent]) -> None:
    accountant = RdpAccountant()
    accountant.compose(*before)
    restored = RdpAccountant.from_state(json.loads(json.dumps(accountant.to_state())))
    for side in (accountant, restored):
        side.compose(*after)
    assert restored.to_state() == accountant.to_state()
    assert restored.epsilon(DELTA) == accountant.epsilon(DELTA)
    assert RdpAccountant.from_state(RdpAccountant().to_state()).epsilon(DELTA) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"orders": [(2.0).hex()]}, "orders"),
        ({"more": 1}, "entries"),
        ({"gaussian": {}}, "gaussian"),
        ({"gaussian": [["0x1p0", "0x1p-3"]]}, "gaussian charge"),
        ({"gaussian": [[1.0, "0x1p-3", 1]]}, "gaussian charge"),
        ({"gaussian": [["nan", "0x1p-3", 1]]}, "noise multiplier"),
        ({"gaussian": [["0x1p0", "0x1p1", 1]]}, "sampling rate"),
        ({"gaussian": [["0x1p0", "0x1p-3", 0]]}, "steps"),
        ({"gaussian": [["0x1p0", "0x1p-3", 1], ["0x1.0p0", "0x1p-3", 2]]}, "twice"),
        ({"pure": [["0x1p5000", 1]]}, "pure charge"),
        ({"pure": [["0x1p0", 1.5]]}, "steps"),
    ],
)
def test_a_malformed_state_is_refused(change: dict[str, object], message: str) -> None:
    accountant = RdpAccountant()
    accountant.compose(PrivacyLossEvent(1.0, 0.1), ApproximateEvent(0.5))
    state = accountant.to_state()
    assert RdpAccountant.from_state(state).to_state() == state
    with pytest.raises(ParameterError, match=message):
        RdpAccountant.from_state(state | change)


def test_a_state_without_an_entry_or_of_another_kind_is_refused() -> None:
    state = RdpAccountant().to_state()
    del state["pure"]
    with pytest.raises(ParameterError, match="entries"):
        RdpAccountant.from_state(state)
    with pytest.raises(ParameterError, match="mapping"):
        RdpAccountant.from_state([1])  # type: ignore[arg-type]


@pytest.mark.parametrize("epsilon", [1e-3, 0.3, 1.0, 6.0])
def test_pure_charges_bound_laplace_noise_and_never_exceed_their_sum(epsilon: float) -> None:
    laplace = rdp.RdpAccountant(ORDERS)
    laplace.compose(dp_accounting.LaplaceDpEvent(1 / epsilon))
    ours = renyi_divergences([ApproximateEvent(epsilon)])[0]
    # where dp-accounting cancels, its small values are off by a few 1e-16 over (α−1)
    assert (np.array(laplace._rdp) <= ours * (1 + 1e-9) + 1e-13).all()
    accountant = RdpAccountant()
    accountant.compose(ApproximateEvent(epsilon, steps=100))
    assert accountant.epsilon(DELTA) <= 100 * epsilon
    assert running_epsilon([ApproximateEvent(epsilon)] * 3, DELTA)[0] <= epsilon
    if epsilon < 0.5:  # many small charges: less than the sum
        assert accountant.epsilon(DELTA) < 80 * epsilon


def test_a_charge_with_a_delta_is_refused_and_nothing_charged() -> None:
    accountant = RdpAccountant()
    for act in (
        lambda: accountant.compose(PrivacyLossEvent(1.0, 0.1), ApproximateEvent(1.0, 1e-6)),
        lambda: accountant.epsilon_after([ApproximateEvent(1.0, 1e-6)], DELTA),
        lambda: running_epsilon([ApproximateEvent(1.0, 1e-6)], DELTA),
    ):
        with pytest.raises(ParameterError, match=r"delta of an event is 1e-06; expected 0.*PLD accountant"):
            act()
    with pytest.raises(ParameterError, match="steps"):
        accountant.compose(PrivacyLossEvent(1.0, 0.1), PrivacyLossEvent(1.0, 0.1, 2**60))
    assert accountant.epsilon(DELTA) == 0


def test_asking_changes_nothing() -> None:
    accountant = RdpAccountant()
    assert accountant.epsilon(DELTA) == 0
    accountant.compose(PrivacyLossEvent(2.0, 0.1))
    before = accountant.epsilon(DELTA)
    assert accountant.epsilon_after([PrivacyLossEvent(1.0, 0.5, 10)], DELTA) > before
    assert accountant.epsilon_after([], DELTA) == before == accountant.epsilon(DELTA)


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
        subsampled_gaussian_rdp(sigma, rate),
        subsampled_gaussian_rdp(similar, rate),
        subsampled_gaussian_rdp(mixed, rates),
        cumulants(np.array([sigma]), rate, orders) / (np.array(orders) - 1),
    ):
        row = rows[-1] if rows.shape[1] == len(orders) else rows[-1, columns]
        np.testing.assert_allclose(row, expected, rtol=1e-10)


def test_rounds_priced_together_are_priced_as_each_alone() -> None:
    sigmas = np.linspace(0.4, 5, 1000)
    rates = np.where(np.arange(1000) % 2, 0.1, 0.05)
    together = subsampled_gaussian_rdp(sigmas, rates)
    assert together.shape == (1000, len(ORDERS))
    for i in (0, 17, 500, 999):
        np.testing.assert_allclose(
            together[i], subsampled_gaussian_rdp(sigmas[i], rates[i])[0], rtol=1e-11, atol=1e-300
        )


def test_a_plan_longer_than_is_priced_at_a_time() -> None:
    events = [PrivacyLossEvent(20.0 + i % 3, 0.1) for i in range(9000)]
    spent = running_epsilon(events, DELTA)
    accountant = RdpAccountant()
    accountant.compose(*events)
    assert spent[-1] == pytest.approx(accountant.epsilon(DELTA), rel=1e-11)
    assert spent[4999] == pytest.approx(running_epsilon(events[:5000], DELTA)[-1], rel=1e-11)
    assert (np.diff(spent) >= 0).all()


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
