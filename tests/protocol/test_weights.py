"""Weights on their way down: exact at float32, within half a scale and alike everywhere at int8."""

from __future__ import annotations

import numpy as np
import pytest
import second_client
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dpagent.protocol.sizes import weights_bytes
from dpagent.protocol.weights import weights_from_bytes, weights_to_bytes

finite = arrays.arrays(
    np.float32, st.integers(1, 200), elements=st.floats(-8e6, 8e6, width=32) | st.floats(-1, 1, width=32)
)


def received(weights: np.ndarray) -> np.ndarray:
    data = weights_to_bytes(weights, "int8")
    assert len(data) == weights_bytes(weights.size, "int8")
    return weights_from_bytes(data, weights.size, "int8")


def test_float32_travels_bit_by_bit() -> None:
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38], np.float32)
    back = weights_from_bytes(weights_to_bytes(odd, "float32"), 7, "float32")
    assert back.dtype == np.float32
    assert back.tobytes() == odd.tobytes()
    assert back.flags.writeable


_LEAST_NORMAL = float(np.finfo(np.float16).smallest_normal)


@given(finite)
def test_int8_is_within_half_a_scale_of_each_weight(weights: np.ndarray) -> None:
    back = received(weights)
    assert back.dtype == np.float32
    assert back.shape == weights.shape
    for start in range(0, weights.size, 64):
        block = weights[start : start + 64].astype(np.float64)
        scale = float(np.frombuffer(weights_to_bytes(weights, "int8"), "<f2", start // 64 + 1)[-1])
        error = np.abs(block - back[start : start + 64])
        assert error.max() <= scale * (0.5 + 1e-6)
        assert scale <= np.abs(block).max() / 127 * (1 + 2**-10) + 2.0**-24
        if scale >= _LEAST_NORMAL:
            # What was received is sent as it was received: the largest weight still is 127 scales.
            assert np.array_equal(received(back[start : start + 64]), back[start : start + 64])


@given(finite)
def test_both_clients_have_the_same_weights_to_the_bit(weights: np.ndarray) -> None:
    data = weights_to_bytes(weights, "int8")
    other = np.array(second_client.weights_of(data, weights.size, "int8"), np.float64)
    assert np.array_equal(other, received(weights).astype(np.float64))


def test_zeros_are_zeros_and_huge_weights_saturate() -> None:
    assert not received(np.zeros(130, np.float32)).any()
    huge = np.array([3e38, -3e38, 1.0], np.float32)
    assert received(huge).tolist() == [127 * 65_504.0, -127 * 65_504.0, 0.0]


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_spoils_its_block_alone(odd: float) -> None:
    weights = np.linspace(-1, 1, 130, dtype=np.float32)
    weights[70] = odd
    back = received(weights)
    assert np.isnan(back[64:128]).all()
    assert np.isfinite(back[:64]).all()
    assert np.isfinite(back[128:]).all()


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_another_number_of_bytes_is_refused(precision: str) -> None:
    data = weights_to_bytes(np.ones(100, np.float32), precision)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(ValueError, match="100 weights"):
            weights_from_bytes(wrong, 100, precision)
