"""Post-processing: rounding for the wire, and the clamp cap."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpagent.errors import ParameterError
from dpagent.privacy.caps import ClampCap
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.discretised_laplace import DiscretisedLaplace
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.privacy.mechanisms.wire import MAX_WIRE_VALUE, round_at_random, round_to_wire, wire_step


@given(sigma=st.floats(1e-3, 2.0**40))
def test_noise_spans_about_three_steps(sigma: float) -> None:
    step = wire_step(sigma)
    assert step % 2 == 1
    assert step == 1 if sigma < 6 else 2 <= sigma / step <= 4
    assert sigma < 2_122 or sigma / step == pytest.approx(3, rel=2e-3)


def test_steps_at_the_reference_setting() -> None:
    m = DiscretisedGaussian(1.0, 2.25, 0.1, 26_010)
    assert m.sigma_units / m.wire_step == pytest.approx(3, rel=1e-4)
    assert m.wire_bits(1e-6) == pytest.approx(3.6387, abs=1e-4)
    assert 3.7 < m.wire_bits(600.0) < 3.8
    assert m.wire_bits(1e6) > 10


@pytest.mark.parametrize("steps", [1, 2, 9, 64])
def test_the_step_is_of_the_noise_of_all_local_steps(steps: int) -> None:
    pure = DiscretisedLaplace(1.0, 1.0, 0.1, 650, steps=steps)
    cut = TruncatedLaplace.for_delta(1.0, 1.0, 1e-5, 0.1, 650, steps=steps)
    normal = DiscretisedGaussian(1.0, 2.25, 0.1, 650, steps=steps)
    for m in (pure, cut, normal):
        assert m.deviation_units * math.sqrt(steps) / m.wire_step == pytest.approx(3, rel=2e-2)


steps_of_grid = st.integers(0, 2**39 - 1).map(lambda half: 2 * half + 1)


@given(values=st.lists(st.integers(-(2**61), 2**61), max_size=20), step=steps_of_grid)
def test_rounded_values_are_the_nearest(values: list[int], step: int) -> None:
    for value, got in zip(values, round_to_wire(np.array(values, np.int64), step).tolist(), strict=True):
        nearest = math.floor(Fraction(value, step) + Fraction(1, 2))
        assert got == min(max(nearest, -MAX_WIRE_VALUE), MAX_WIRE_VALUE)
        assert abs(got) == MAX_WIRE_VALUE or abs(2 * (got * step - value)) < step


@given(values=st.lists(st.integers(-(2**61), 2**61), max_size=20), step=steps_of_grid)
def test_values_rounded_at_random_are_neighbours(values: list[int], step: int) -> None:
    for value, got in zip(values, round_at_random(np.array(values, np.int64), step).tolist(), strict=True):
        assert abs(got) == MAX_WIRE_VALUE or value - step < got * step < value + step


@pytest.mark.parametrize("value", [-70_001, -32_767, -1, 0, 1, 11_111, 98_301])
def test_rounding_at_random_is_unbiased(value: int) -> None:
    draws, step = 200_000, 32_767
    coarse = round_at_random(np.full(draws, value, dtype=np.int64), step)
    ups = int((coarse - value // step).sum())
    assert stats.binomtest(ups, draws, (value % step) / step).pvalue > 1e-6


@pytest.mark.parametrize("sigma", [6.0, 7.3, 33.0, 2_122.0])
def test_rounding_noise_to_the_nearest_is_unbiased_wherever_it_stands(sigma: float) -> None:
    """Exactly, from the noise's probabilities: mean, variance, and the moment generating function's bound."""
    step, points = wire_step(sigma), np.arange(-math.ceil(14 * sigma), math.ceil(14 * sigma) + 1)
    masses = np.exp(-(points**2) / (2 * sigma**2))
    masses /= masses.sum()
    for shift in np.unique(np.linspace(-step // 2, step // 2, 23).astype(int)).tolist():
        rounded = round_to_wire(points + shift, step) - shift / step
        assert abs(masses @ rounded) < 1e-12
        assert masses @ rounded**2 == pytest.approx((sigma / step) ** 2 + (1 - step**-2) / 12, abs=1e-9)
        for t in (0.01, 0.5, 2.0):
            bound = math.exp(t**2 / 2 * ((sigma / step) ** 2 + 1 / 12))
            assert masses @ np.exp(t * rounded) <= bound * (1 + 1e-9)


def test_input_is_left_alone_and_no_entropy_is_read_to_round_to_the_nearest() -> None:
    values = np.array([5, -9, 100], dtype=np.int64)
    assert round_to_wire(values, 1).tolist() == [5, -9, 100]
    round_to_wire(values, 3)
    round_at_random(values, 3)
    assert values.tolist() == [5, -9, 100]


def test_all_that_random_bytes_can_add_is_added() -> None:
    """Less would round towards minus infinity."""

    def most(count: int) -> bytes:
        words = np.full(count // 8, step - 1, "<u8")
        return words.tobytes()

    for step in (3, 15, 2**40 - 1):
        values = np.array([0, 1, -step + 1])
        assert round_at_random(values, step, entropy=most).tolist() == [0, 1, 0]
        assert round_at_random(values, step, entropy=bytes).tolist() == [0, 0, -1]


def test_values_at_their_limits() -> None:
    limit = 2**62
    within = np.array([limit - 1, 1 - limit])
    for rounded in (round_to_wire, round_at_random):
        assert rounded(within, 1).tolist() == [MAX_WIRE_VALUE, -MAX_WIRE_VALUE]
        for beyond in (limit, -limit):
            with pytest.raises(ParameterError, match="values"):
                rounded(np.array([beyond]), 1)


def test_bad_wire_parameters_are_named() -> None:
    values = np.zeros(3, dtype=np.int64)
    for step in (0, -1, 2, 2**40 + 1):
        with pytest.raises(ParameterError, match="step"):
            round_to_wire(values, step)
    with pytest.raises(ParameterError, match="values"):
        round_to_wire(np.zeros(3), 3)  # type: ignore[arg-type]
    for deviation in (0.0, -1.0, math.nan, 2.0**41):
        with pytest.raises(ParameterError, match="deviation units"):
            wire_step(deviation)
    with pytest.raises(ParameterError, match="expected lot"):
        DiscretisedGaussian(1.0, 2.0, 0.1, 3).wire_bits(0.0)


def test_clamp_bounds_by_the_regulariser_then_by_the_ball() -> None:
    weights = np.array([10.0, -10.0, 0.0, 0.01], dtype=np.float32)
    noisy = np.array([3.0, -9.0, 0.5, 0.05])
    capped, report = ClampCap(0.5, 0.1).apply(noisy, weights, radius=100.0)
    np.testing.assert_allclose(capped, [3.0, -5.0, 0.1, 0.05])
    assert report.coordinates_clamped == 2
    assert report.norm_before == pytest.approx(np.linalg.norm(noisy))
    assert report.norm_after == pytest.approx(np.linalg.norm(capped))
    projected, report = ClampCap(0.5, 0.1).apply(noisy, weights, radius=1.0)
    np.testing.assert_allclose(projected, capped / np.linalg.norm(capped))
    assert report.norm_after == pytest.approx(1.0)
    assert noisy.tolist() == [3.0, -9.0, 0.5, 0.05]


def test_clamp_leaves_a_small_gradient_alone() -> None:
    noisy = np.array([0.01, -0.02])
    capped, report = ClampCap(0.5, 0.1).apply(noisy, np.zeros(2, dtype=np.float32), radius=1.0)
    np.testing.assert_array_equal(capped, noisy)
    assert report.coordinates_clamped == 0


def test_bad_caps_are_named() -> None:
    cap, weights = ClampCap(0.5, 0.1), np.zeros(2, dtype=np.float32)
    with pytest.raises(ParameterError, match="regularisation"):
        ClampCap(0.0, 0.1)
    with pytest.raises(ParameterError, match="floor"):
        ClampCap(0.5, 0.0)
    with pytest.raises(ParameterError, match="radius"):
        cap.apply(np.zeros(2), weights, 0.0)
    with pytest.raises(ParameterError, match="noisy mean"):
        cap.apply(np.array([np.nan, 0.0]), weights, 1.0)
    with pytest.raises(ParameterError, match="entries"):
        cap.apply(np.zeros(3), weights, 1.0)
