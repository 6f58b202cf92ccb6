"""Public ranges of layers, from the public global model."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy.mechanisms.layer_ranges import LayerRange, adapted_ranges
from dpagent.privacy.mechanisms.two_point import TwoPoint

LAYERS = (("conv", 3), ("dense", 2))


def test_each_layer_gets_its_own_middle_and_width() -> None:
    weights = np.array([-1.0, 0.5, 3.0, 0.25, 0.25])
    conv, dense = adapted_ranges(LAYERS, weights, floor=0.01, margin=1.5)
    assert conv == LayerRange("conv", 3, 1.0, 3.0)
    assert dense == LayerRange("dense", 2, 0.25, 0.01)  # the floor lets equal weights move
    assert TwoPoint((conv, dense), 1.0, 2).dimension == 5


def test_ranges_follow_the_model_from_round_to_round() -> None:
    first = adapted_ranges(LAYERS, np.array([-1.0, 0.0, 1.0, 4.0, 5.0]), floor=1e-3)
    second = adapted_ranges(LAYERS, np.array([-0.1, 0.0, 0.1, 8.0, 10.0]), floor=1e-3)
    assert [layer.radius for layer in first] == [1.0, 0.5]
    assert [layer.centre for layer in second] == [0.0, 9.0]
    assert second[0].radius == pytest.approx(0.1)


@settings(max_examples=200)
@given(
    st.lists(st.floats(-1e30, 1e30, width=64), min_size=5, max_size=5),
    st.floats(1e-30, 10.0),
    st.floats(1.0, 1.9),
    st.sampled_from([np.float32, np.float64]),
)
def test_ranges_hold_all_public_weights(
    values: list[float], floor: float, margin: float, dtype: type[np.floating]
) -> None:
    weights = np.array(values).clip(-3e29, 3e29).astype(dtype)
    start = 0
    for layer in adapted_ranges(LAYERS, weights, floor=floor, margin=margin):
        part = weights[start : start + layer.size].astype(np.float64)
        start += layer.size
        slack = 4 * np.finfo(float).eps * max(abs(layer.centre), layer.radius)
        assert layer.radius >= floor
        assert layer.centre - layer.radius - slack <= part.min()
        assert part.max() <= layer.centre + layer.radius + slack


ZEROS = np.zeros(5)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LayerRange("conv", 0, 0.0, 1.0), "size of layer conv is 0"),
        (lambda: LayerRange("conv", 2**28 + 1, 0.0, 1.0), "size of layer conv is 268435457"),
        (lambda: LayerRange("conv", 1, math.nan, 1.0), "centre of layer conv is nan"),
        (lambda: LayerRange("conv", 1, 1e31, 1.0), r"centre of layer conv is 1e\+31"),
        (lambda: LayerRange("conv", 1, 0.0, 0.0), "radius of layer conv is 0.0"),
        (lambda: LayerRange("conv", 1, 0.0, -1.0), "radius of layer conv is -1.0"),
        (lambda: LayerRange("conv", 1, 0.0, math.inf), "radius of layer conv is inf"),
        (lambda: adapted_ranges((), ZEROS[:0], floor=1.0), "layers is empty"),
        (lambda: adapted_ranges(LAYERS, ZEROS[:4], floor=1.0), r"weights have shape \(4,\); expected \(5,\)"),
        (lambda: adapted_ranges(LAYERS, ZEROS.reshape(5, 1), floor=1.0), r"shape \(5, 1\)"),
        (lambda: adapted_ranges((("a", 0), ("b", 5)), ZEROS, floor=1.0), "size of layer a is 0"),
        (lambda: adapted_ranges((("a", -1), ("b", 6)), ZEROS, floor=1.0), "size of layer a is -1"),
        (lambda: adapted_ranges(LAYERS, ZEROS, floor=0.0), "floor is 0.0"),
        (lambda: adapted_ranges(LAYERS, ZEROS, floor=math.nan), "floor is nan"),
        (lambda: adapted_ranges(LAYERS, ZEROS, floor=1.0, margin=0.5), "margin is 0.5"),
        (lambda: adapted_ranges(LAYERS, ZEROS, floor=1.0, margin=101.0), "margin is 101.0"),
        (
            lambda: adapted_ranges(LAYERS, np.array([0, 0, 0, math.nan, 1.0]), floor=1.0),
            "least weight of layer dense is nan",
        ),
        (
            lambda: adapted_ranges(LAYERS, np.array([0, 0, math.inf, 0, 1.0]), floor=1.0),
            "greatest weight of layer conv is inf",
        ),
        (lambda: adapted_ranges(LAYERS, np.array([-1e308, 0, 1e308, 0, 1]), floor=1.0), "layer conv is"),
    ],
)
def test_bad_input_is_named(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        make()
