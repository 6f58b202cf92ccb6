"""Post-processing: rounding for the wire, and the clamp cap."""

from __future__ import annotations

import math

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
from dpagent.privacy.mechanisms.wire import WireForm, round_to_wire, wire_shift, wire_width


@given(sigma=st.floats(1e-3, 2.0**24))
def test_the_coarse_grid_resolves_the_noise(sigma: float) -> None:
    shift = wire_shift(sigma)
    assert shift >= 0
    assert sigma / 2**shift < 8
    assert shift == 0 or sigma / 2**shift >= 4


def test_width_at_the_reference_setting() -> None:
    m = DiscretisedGaussian(1.0, 2.25, 0.1, 26_010)
    assert m.wire_form(600.0) == WireForm(shift=15, width=12)
    assert m.wire_form(1e12).width == 32
    assert wire_width(1.0, 32) == 4
    # One value more on either side takes one bit more: [−128, 127] holds ±127.
    assert [wire_width(reach, 0) for reach in (125.0, 126.0, 127.0)] == [8, 8, 9]
    assert [wire_width(reach * 2**9, 9) for reach in (125.0, 126.0, 127.0)] == [8, 8, 9]


@given(
    lot=st.floats(1, 1e5),
    noise=st.floats(0.3, 200),
    steps=st.integers(1, 50),
)
def test_width_leaves_room_for_lot_and_noise(lot: float, noise: float, steps: int) -> None:
    m = DiscretisedGaussian(1.0, noise, 0.1, 1000, steps=steps)
    form = m.wire_form(lot)
    assert form.shift == wire_shift(m.sigma_units)
    reach = (lot + 6 * math.sqrt(lot)) * m.resolution * steps + 8 * m.sigma_units * math.sqrt(steps)
    assert form.width == 32 or (2 ** (form.width - 1) - 1) * 2**form.shift >= reach


def test_laplace_noise_gets_the_room_it_needs() -> None:
    pure = DiscretisedLaplace(1.0, 1.0, 0.1, 650, steps=2)
    cut = TruncatedLaplace.for_delta(1.0, 1.0, 1e-5, 0.1, 650, steps=2)
    for m in (pure, cut):
        form = m.wire_form(60.0)
        assert 4 <= m.deviation_units / 2**form.shift < 8
        reach = (60 + 6 * math.sqrt(60)) * m.sensitivity_units * 2 + m.reach_units
        assert (
            (2 ** (form.width - 1) - 1) * 2**form.shift >= reach > (2 ** (form.width - 2) - 3) * 2**form.shift
        )
    assert cut.reach_units == 2 * cut.support_units < pure.reach_units


@given(
    values=st.lists(st.integers(-(2**61), 2**61), max_size=20),
    shift=st.integers(0, 32),
    width=st.integers(4, 32),
)
def test_coarse_values_are_neighbours_and_in_range(values: list[int], shift: int, width: int) -> None:
    low, high = -(2 ** (width - 1)), 2 ** (width - 1) - 1
    coarse = round_to_wire(np.array(values, dtype=np.int64), shift, width).tolist()
    for value, got in zip(values, coarse, strict=True):
        assert low <= got <= high
        floor = value >> shift
        ceiling = -(-value >> shift)
        assert got in (min(max(floor, low), high), min(max(ceiling, low), high))


@pytest.mark.parametrize("value", [-70_001, -32_768, -1, 0, 1, 11_111, 98_304])
def test_rounding_is_unbiased(value: int) -> None:
    draws, shift = 200_000, 15
    coarse = round_to_wire(np.full(draws, value, dtype=np.int64), shift, 16)
    ups = int((coarse - (value >> shift)).sum())
    fraction = (value % 2**shift) / 2**shift
    assert stats.binomtest(ups, draws, fraction).pvalue > 1e-6


def test_input_is_left_alone_and_no_entropy_is_read_without_a_shift() -> None:
    values = np.array([5, -9, 100], dtype=np.int64)
    assert round_to_wire(values, 0, 4, entropy=lambda _: b"").tolist() == [5, -8, 7]
    round_to_wire(values, 3, 8)
    assert values.tolist() == [5, -9, 100]


def test_bad_wire_parameters_are_named() -> None:
    values = np.zeros(3, dtype=np.int64)
    with pytest.raises(ParameterError, match="shift"):
        round_to_wire(values, 33, 8)
    with pytest.raises(ParameterError, match="width"):
        round_to_wire(values, 3, 3)
    with pytest.raises(ParameterError, match="values"):
        round_to_wire(np.zeros(3), 3, 8)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="2\\^62"):
        round_to_wire(np.array([2**62]), 3, 8)
    for deviation in (0.0, -1.0, math.nan, 2.0**33):
        with pytest.raises(ParameterError, match="deviation units"):
            wire_shift(deviation)
    for reach in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ParameterError, match="reach units"):
            wire_width(reach, 3)
    with pytest.raises(ParameterError, match="shift"):
        wire_width(1.0, 33)
    with pytest.raises(ParameterError, match="expected lot"):
        DiscretisedGaussian(1.0, 2.0, 0.1, 3).wire_form(0.0)


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
