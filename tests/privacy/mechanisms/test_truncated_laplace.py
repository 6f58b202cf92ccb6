"""Truncated Laplace noise on vectors: the δ claimed is met, and nearly tight, by enumeration."""

from __future__ import annotations

import itertools
import math
from typing import Any

import mpmath
import numpy as np
import pytest
from attacks import proven_epsilon
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.mechanisms.discretised_laplace import noise_scale
from dpagent.privacy.mechanisms.truncated_laplace import (
    TruncatedLaplace,
    least_bound,
    least_epsilon,
    truncated_delta,
)
from dpagent.privacy.noise.discrete_laplace import usable_bound


def mass(scale: float, bound: int) -> NDArray[np.float64]:
    """P(X = x) for x = −A..A."""
    weights = np.exp(-np.abs(np.arange(-bound, bound + 1)) / scale)
    return np.asarray(weights / weights.sum())


def with_and_without(scale: float, bound: int, shift: tuple[int, ...]) -> tuple[NDArray[np.float64], ...]:
    """Joint distributions of all coordinates, unshifted and shifted, on one box: each (n, …, n)."""
    room = max(abs(s) for s in shift)
    alone = np.pad(mass(scale, bound), room)
    joint = [alone] * len(shift), [np.roll(alone, s) for s in shift]
    return tuple(
        np.prod(np.stack(np.meshgrid(*parts, indexing="ij", sparse=False)), axis=0) for parts in joint
    )


def least_delta(first: NDArray[np.float64], second: NDArray[np.float64], epsilon: float) -> float:
    return float(np.maximum(first - math.exp(epsilon) * second, 0).sum())


@pytest.mark.parametrize(
    ("epsilon", "delta", "sensitivity"), [(0.5, 1e-3, 1), (0.5, 1e-3, 50), (3.0, 1e-5, 7), (0.1, 0.2, 9)]
)
def test_one_coordinate_meets_delta_and_is_tight(epsilon: float, delta: float, sensitivity: int) -> None:
    scale, bound = noise_scale(epsilon, sensitivity), least_bound(epsilon, delta, sensitivity)
    claimed = truncated_delta(scale, bound, sensitivity)
    assert claimed <= delta
    for shift in range(1, sensitivity + 1):
        for pair in itertools.permutations(with_and_without(scale, bound, (shift,))):
            attained = least_delta(*pair, epsilon)
            assert attained <= claimed
            assert (shift < sensitivity) or attained == pytest.approx(claimed, rel=1e-9)


def test_two_coordinates_over_all_splits() -> None:
    """The figure of methods.md: ε = 0.5, δ = 1e-3; 1.00e-3 on one coordinate, less otherwise."""
    epsilon, delta, sensitivity = 0.5, 1e-3, 24
    scale, bound = noise_scale(epsilon, sensitivity), least_bound(epsilon, delta, sensitivity)
    attained = {
        (s, sign): least_delta(
            *with_and_without(scale, bound, (s, sign * (sensitivity - s))),
            epsilon,
        )
        for s in range(sensitivity + 1)
        for sign in (1, -1)
    }
    assert max(attained.values()) <= truncated_delta(scale, bound, sensitivity) <= delta
    for whole in (0, sensitivity):
        assert attained[whole, 1] == pytest.approx(delta, rel=0.02)
    assert all(value < 0.97 * delta for (s, _), value in attained.items() if 0 < s < sensitivity)
    # not by luck of a loose bound: a support that is 2 % smaller breaks the promise
    assert least_delta(*with_and_without(scale, round(0.98 * bound), (sensitivity, 0)), epsilon) > delta


def test_three_coordinates_and_a_sampled_lot() -> None:
    epsilon, sensitivity, bound, q = 1.2, 6, 11, 0.3
    m = TruncatedLaplace(
        1.0, epsilon, q, 3, resolution=4, bound_units=bound
    )  # 4 steps to C, slack 1, and 1: a sensitivity of 6
    assert m.sensitivity_units == sensitivity
    for shift in itertools.product(range(-sensitivity, sensitivity + 1), repeat=3):
        if sum(map(abs, shift)) != sensitivity or list(shift) != sorted(shift):
            continue
        without, present = with_and_without(m.scale_units, bound, shift)
        assert least_delta(without, present, epsilon) <= m.delta
        mixed = (1 - q) * without + q * present
        for pair in ((without, mixed), (mixed, without)):
            assert least_delta(*pair, composed(m.event).epsilon) <= composed(m.event).delta
    without, present = with_and_without(m.scale_units, bound, (sensitivity, 0, 0))
    mixed = (1 - q) * without + q * present
    assert least_delta(mixed, without, composed(m.event).epsilon) == pytest.approx(q * m.delta, rel=1e-6)


@given(
    epsilon=st.floats(1e-4, 50),
    sensitivity=st.integers(1, 2**26),
    excess=st.floats(1, 1e4),
)
def test_delta_is_rounded_up_by_very_little(epsilon: float, sensitivity: int, excess: float) -> None:
    scale, bound = noise_scale(epsilon, sensitivity), math.ceil(sensitivity * excess)
    with mpmath.workdps(60):
        r = mpmath.exp(-1 / mpmath.mpf(scale))
        exact = r ** (bound + 1 - sensitivity) * (1 - r**sensitivity) / (1 + r - 2 * r ** (bound + 1))
        got = truncated_delta(scale, bound, sensitivity)
        assert exact <= got <= exact * (1 + mpmath.mpf(1e-10)) + 1e-300


def test_delta_is_the_mass_of_the_outermost_points() -> None:
    p = mass(7.3, 40)
    for s in range(1, 41):
        assert truncated_delta(7.3, 40, s) == pytest.approx(p[:s].sum(), rel=1e-10)


@given(sensitivity=st.integers(1, 10**6), excess=st.floats(1, 100), data=st.data())
def test_delta_falls_with_epsilon_from_that_of_uniform_noise(
    sensitivity: int, excess: float, data: st.DataObject
) -> None:
    bound = math.ceil(sensitivity * excess)
    low, high = sorted(data.draw(st.tuples(*[st.floats(1e-4, 60)] * 2)))
    deltas = [truncated_delta(noise_scale(e, sensitivity), bound, sensitivity) for e in (low, high)]
    assert deltas[1] <= deltas[0] * (1 + 1e-10)
    assert deltas[0] <= sensitivity / (2 * bound + 1) * (1 + 1e-10)


@given(epsilon=st.floats(1e-3, 20), delta=st.floats(1e-12, 0.4), sensitivity=st.integers(1, 2**24))
def test_the_bound_is_enough_and_not_too_much(epsilon: float, delta: float, sensitivity: int) -> None:
    scale, bound = noise_scale(epsilon, sensitivity), least_bound(epsilon, delta, sensitivity)
    assert bound == usable_bound(scale, bound)
    assert truncated_delta(scale, bound, sensitivity) <= delta
    # no smaller one will do, up to what the sampler rounds and to the rounding of δ
    smaller = bound - 1 - bound // 2**12
    assert smaller < sensitivity or truncated_delta(scale, smaller, sensitivity) > delta * (1 - 1e-9)


def test_a_fine_grid_gives_the_published_formula() -> None:
    for epsilon, delta in ((0.5, 1e-3), (2.0, 1e-6)):
        sensitivity = 10**6
        published = sensitivity / epsilon * math.log(1 + math.expm1(epsilon) / (2 * delta))
        assert least_bound(epsilon, delta, sensitivity) == pytest.approx(published, rel=3e-4)


@given(bound=st.integers(2, 10**6), delta=st.floats(1e-10, 0.5), sensitivity=st.integers(1, 10**6))
def test_epsilon_is_enough_and_the_least(bound: int, delta: float, sensitivity: int) -> None:
    def is_met(at: float) -> bool:
        scale = noise_scale(at, sensitivity)
        support = usable_bound(scale, bound) or 0
        return support >= sensitivity and truncated_delta(scale, support, sensitivity) <= delta

    try:
        epsilon = least_epsilon(bound, delta, sensitivity)
    except PlanError:
        assert not is_met(min(1000.0, sensitivity * 64 * (1 - 1e-9)))
        return
    assert is_met(epsilon)
    less = epsilon * (1 - 1e-6)
    assert less < sensitivity / 2.0**40 or not is_met(less)


def test_a_cap_that_nothing_meets_is_refused_with_one_that_will_do() -> None:
    with pytest.raises(PlanError, match=r"cap of 0\.9 cannot be met") as below:
        TruncatedLaplace.for_cap(1.0, 0.9, 1e-5, 0.1, 650)
    with pytest.raises(PlanError, match="with epsilon up to 2 at delta 1e-05") as narrow:
        TruncatedLaplace.for_cap(1.0, 3.0, 1e-5, 0.1, 650, max_epsilon=2.0)
    for error, most in ((below, 1000.0), (narrow, 2.0)):
        cap = float(str(error.value).partition("has to reach ")[2].split(". Raise")[0])
        m = TruncatedLaplace.for_cap(1.0, cap, 1e-5, 0.1, 650, max_epsilon=most)
        assert most * 0.99 < m.epsilon <= most
        assert m.cap <= cap
    with pytest.raises(ParameterError, match="below the L1 sensitivity"):
        TruncatedLaplace(1.0, 1.0, 0.1, 1, resolution=100, bound_units=100)
    # Δ is 101 here; below it, more ε only makes things worse
    p = [least_delta(*with_and_without(noise_scale(e, 101), 99, (101,)), e) for e in (1.0, 10.0, 300.0)]
    assert p[0] < p[1] < p[2]
    assert p[2] > 0.9


def test_a_wide_cap_costs_next_to_nothing() -> None:
    m = TruncatedLaplace.for_cap(1.0, 1e6, 1e-5, 1.0, 10, resolution=16)
    assert m.delta <= 1e-5
    assert m.epsilon < 1e-9
    assert TruncatedLaplace.for_cap(1.0, 1e300, 1e-5, 1.0, 10).bound_units == 2**50


def test_the_record_states_the_maths() -> None:
    m = TruncatedLaplace.for_delta(0.5, 0.5, 1e-3, 0.1, 26_010, steps=2)
    assert (m.name, m.unit, m.norm, m.trust) == ("truncated-laplace", "record", "L1", "none")
    assert m.cap == m.support_units * m.granularity
    assert m.cap == pytest.approx(0.5 / 0.5 * math.log(1 + math.expm1(0.5) / 2e-3), rel=2e-3)
    total = composed(m.event)
    assert total.epsilon == pytest.approx(2 * math.log1p(0.1 * math.expm1(0.5)))
    assert total.delta == pytest.approx(2 * 0.1 * m.delta)
    statement = m.statement()
    assert statement.epsilon == total.epsilon
    assert total.delta <= statement.delta < total.delta * (1 + 1e-9)
    assert 0 < m.statistical_distance < 1e-20
    assert m.deviation_units <= m.scale_units * math.sqrt(2)
    wide = TruncatedLaplace(1.0, 1000.0, 1.0, 1, resolution=100, bound_units=200)
    assert wide.deviation_units == pytest.approx(200 / math.sqrt(3), rel=0.01)


def test_noise_stays_within_the_cap_and_an_attack_proves_what_is_claimed() -> None:
    draws, epsilon, delta = 200_000, 1.0, 2e-3
    one = TruncatedLaplace.for_delta(1.0, epsilon, delta, 1.0, 1)
    # d coordinates of a one-dimensional release are as many independent releases
    sampler = one.sampler()
    record = one.constrain(np.array([[-3.0]], dtype=np.float32)).total[0]
    assert abs(record) <= one.sensitivity_units
    without, present = sampler.sample(draws), record + sampler.sample(draws)
    assert np.abs(without).max() <= one.support_units
    assert np.abs(without).max() > 0.99 * one.support_units
    thresholds = np.linspace(-1.5, 1.5, 25) * one.sensitivity_units
    assert 0.9 < proven_epsilon(present, without, thresholds, delta) <= epsilon
    # without the δ, the promise is broken: some outputs are possible with the record only
    assert proven_epsilon(present, without, [-float(one.support_units)]) > 2 * epsilon
    beyond = np.count_nonzero(np.abs(present) > one.support_units) / draws
    assert beyond == pytest.approx(delta, rel=0.3)
    # half the noise is caught
    assert proven_epsilon(record + without // 2, without // 2, thresholds, delta) > epsilon


def test_a_whole_vector_is_released() -> None:
    m = TruncatedLaplace.for_delta(1.0, 1.0, 1e-3, 1.0, 1000)
    total = np.arange(1000, dtype=np.int64) * 10**9
    noise = m.add_noise(total) - total
    assert np.abs(noise).max() <= m.support_units
    assert len(set(noise.tolist())) > 990
    pooled = m.add_noise(total, noise=m.sampler(), entropy=lambda _: b"")
    assert not np.array_equal(pooled - total, noise)


@pytest.mark.parametrize("make", ["delta", "cap"])
def test_rounded_sums_of_neighbouring_lots_meet_epsilon_and_delta(make: str) -> None:
    """Of a mechanism for sums, with all of its slack used up: δ at its ε over all outputs, both ways."""
    options: dict[str, Any] = {"resolution": 12, "accumulation_slack": 0.01}
    if make == "delta":
        m = TruncatedLaplace.for_delta(1.0, 1.2, 0.02, 1.0, 2, **options)
    else:
        m = TruncatedLaplace.for_cap(1.0, 5.0, 0.02, 1.0, 2, **options)
    assert m.sensitivity_units == 12 + 1 + 2 + 1
    records = [(1.01, 0.0), (0.505, 0.505), (1.0, -0.01), (0.3, -0.71)]
    steps = []
    for record in records:
        total = np.array([0.5, 0.5]) / 12 - 1e-6 * np.sign(record)
        steps.append(m.quantize(total + record) - m.quantize(total))
    assert max(np.abs(step).sum() for step in steps) >= 14
    reach = m.support_units
    points = np.arange(-reach - 16, reach + 17)
    masses = np.where(np.abs(points) <= reach, np.exp(-np.abs(points) / m.scale_units), 0.0)
    masses /= masses.sum()
    deltas = []
    for step in steps:
        shifted = [np.roll(masses, int(part)) for part in step]
        without, present = np.outer(masses, masses), np.outer(*shifted)
        for p, q in ((without, present), (present, without)):
            deltas.append(float(np.maximum(p - math.exp(m.epsilon) * q, 0).sum()))
    assert max(deltas) <= m.delta <= 0.02
    assert max(deltas) > 0.3 * m.delta


def test_bad_values_are_named() -> None:
    with pytest.raises(ParameterError, match="bound units"):
        TruncatedLaplace(1.0, 1.0, 1.0, 1, bound_units=0)
    with pytest.raises(ParameterError, match="bound units"):
        TruncatedLaplace(1.0, 1.0, 1.0, 1, bound_units=2**51)
    with pytest.raises(ParameterError, match="noise multiplier"):
        TruncatedLaplace(1.0, math.nan, 1.0, 1, bound_units=2**30)
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ParameterError, match="delta"):
            least_bound(1.0, delta, 10)
        with pytest.raises(ParameterError, match="delta"):
            TruncatedLaplace.for_cap(1.0, 2.0, delta, 1.0, 1)
    for cap in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ParameterError, match="cap"):
            TruncatedLaplace.for_cap(1.0, cap, 1e-5, 1.0, 1)
    with pytest.raises(ParameterError, match="max epsilon"):
        least_epsilon(10, 0.1, 2, max_epsilon=0.0)
    with pytest.raises(ParameterError, match="max epsilon"):
        least_epsilon(10, 0.1, 2, max_epsilon=1e-13)
    with pytest.raises(ParameterError, match="bound"):
        truncated_delta(1.0, 3, 4)
    with pytest.raises(ParameterError, match="scale"):
        TruncatedLaplace.for_delta(1.0, 1e-9, 1e-5, 1.0, 10**6)
