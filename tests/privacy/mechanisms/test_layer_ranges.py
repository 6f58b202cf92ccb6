"""Public ranges of layers, and how they follow the reports."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpagent.errors import ParameterError
from dpagent.privacy.mechanisms.layer_ranges import (
    UNKNOWN_EXTENT,
    Extent,
    LayerRange,
    adapted_radius,
    extent_of,
)
from dpagent.privacy.mechanisms.two_point import TwoPoint
from dpagent.privacy.ranges import MAX_RADIUS, MIN_RADIUS

AMPLITUDE = TwoPoint((LayerRange("dense", 1, 0.0, 1.0),), 1.0, 1).amplitude


def reported(offset: float, devices: int, size: int, seed: int = 0) -> Extent:
    """The extent where each device's change of each weight is ``offset`` radii, at ε = 1."""
    ones = np.random.default_rng(seed).binomial(devices, 0.5 + offset / (2 * AMPLITUDE), size)
    return extent_of(ones, np.full(size, devices), AMPLITUDE)


@pytest.mark.parametrize("offset", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("devices", [2, 3, 50])
def test_an_extent_holds_the_changes_as_often_as_two_standard_errors_should(
    offset: float, devices: int
) -> None:
    """95.4 % of normal errors; of 400, fewer than 360 or more than 399 hold once in a million."""
    extents = [reported(offset, devices, 2_000, seed) for seed in range(400)]
    assert 360 <= sum(low <= offset <= high for low, high in extents) <= 399


def test_an_extent_counts_no_noise() -> None:
    low, high = reported(0.0, 20, 20_000)
    assert low < high < 0.2
    low, high = reported(0.3, 500, 20_000)
    assert 0.29 < low < high < 0.31


@pytest.mark.parametrize("counts", [[0, 0], [1, 1]])
def test_weights_without_two_reports_say_nothing(counts: list[int]) -> None:
    assert extent_of(np.zeros(2, np.int64), np.array(counts), 2.0) == UNKNOWN_EXTENT
    assert adapted_radius(0.3, UNKNOWN_EXTENT) == 0.3


@pytest.mark.parametrize(
    ("extent", "factor"),
    [
        (Extent(0.2, 0.4), 1.0), (Extent(0.0, 5.0), 1.0), (Extent(0.09, 0.6), 1.0), (Extent(0.75, 0.8), 1.5),
        (Extent(1.5, 2.0), 2.0), (Extent(0.0, 0.08), 0.8), (Extent(0.0, 0.0), 0.5),
    ],
)  # fmt: skip
def test_a_radius_moves_only_where_reports_are_sure(extent: Extent, factor: float) -> None:
    assert adapted_radius(0.3, extent) == pytest.approx(0.3 * factor)


def test_a_radius_stays_within_bounds() -> None:
    assert adapted_radius(MIN_RADIUS, Extent(0.0, 0.0)) == MIN_RADIUS
    assert adapted_radius(MAX_RADIUS, Extent(1.0, 1.0)) == MAX_RADIUS


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0, 0.0, 1.0), "size of layer conv is 0"),
        ((2**28 + 1, 0.0, 1.0), "size of layer conv is 268435457"),
        ((1, math.nan, 1.0), "centre of layer conv is nan"),
        ((1, 1e31, 1.0), r"centre of layer conv is 1e\+31"),
        ((1, 0.0, 0.0), "radius of layer conv is 0.0"),
        ((1, 0.0, -1.0), "radius of layer conv is -1.0"),
        ((1, 0.0, math.inf), "radius of layer conv is inf"),
    ],
)
def test_bad_input_is_named(values: tuple[int, float, float], text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        LayerRange("conv", *values)
