"""The model on its way down: weights at 8 bits each, or as they are.

``int8``: blocks of 64 weights, each with a scale. The scales come first, as float16, then a signed byte a
weight, little-endian; the last block may be shorter. A weight is its byte times its block's scale. That
product has at most 19 significant bits, so it is exact in float32: every receiver has the same weights, to
the bit. The error is at most half a scale: 1/254 of the largest weight of a block, and 2⁻²⁵ for the steps of
small scales. A scale of float16 loses nothing else against float32, since weights are rounded to multiples of
the scale as it travels: it is rounded up, so that the largest fits.

Weights of more than 127 · 65,504, some 8.3 million, saturate. If one is not a finite number, its whole block
is not: a device declines such a model.

``float32``: little-endian, as they are.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.protocol.sizes import WEIGHTS_OF_A_SCALE, Precision, block_count, weights_bytes

_LARGEST: Final = 127
_LARGEST_SCALE: Final = float(np.finfo(np.float16).max)


def weights_to_bytes(weights: NDArray[np.float32], precision: Precision) -> bytes:
    """Weights, shape (parameters,), as they are sent."""
    if precision == "float32":
        return bytes(weights.astype("<f4", copy=False).tobytes())
    blocks = np.zeros((block_count(weights.size, WEIGHTS_OF_A_SCALE), WEIGHTS_OF_A_SCALE), np.float32)
    blocks.reshape(-1)[: weights.size] = weights
    scales = _scales(np.abs(blocks).max(axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = blocks / scales.astype(np.float32)[:, np.newaxis]
    steps = np.rint(np.nan_to_num(steps, nan=0.0, posinf=0.0, neginf=0.0))
    signed = np.clip(steps, -_LARGEST, _LARGEST).astype(np.int8)
    return bytes(scales.astype("<f2").tobytes() + signed.tobytes()[: weights.size])


def weights_from_bytes(data: bytes, parameters: int, precision: Precision) -> NDArray[np.float32]:
    """Inverse of :func:`weights_to_bytes`, but for rounding: shape (parameters,).

    Raises:
        ValueError: there are other numbers of bytes.
    """
    if len(data) != weights_bytes(parameters, precision):
        raise ValueError(f"{len(data)} bytes are not {parameters} weights as {precision}")
    if precision == "float32":
        return np.frombuffer(data, "<f4").astype(np.float32)
    blocks = block_count(parameters, WEIGHTS_OF_A_SCALE)
    scales = np.frombuffer(data, "<f2", blocks).astype(np.float32)
    steps = np.frombuffer(data, np.int8, offset=2 * blocks).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return np.asarray(steps * np.repeat(scales, WEIGHTS_OF_A_SCALE)[:parameters])


def weights_as_sent(weights: NDArray[np.float32], precision: Precision) -> NDArray[np.float32]:
    """Weights, shape (parameters,), as devices get them."""
    return weights_from_bytes(weights_to_bytes(weights, precision), weights.size, precision)


def _scales(largest: NDArray[np.float32]) -> NDArray[np.float16]:
    """The least float16 of which 127 reach the largest weight of each block; NaN where that is not finite."""
    wanted = largest.astype(np.float64) / _LARGEST
    with np.errstate(over="ignore", invalid="ignore"):
        scales = np.minimum(wanted, _LARGEST_SCALE).astype(np.float16)
    below = (scales.astype(np.float64) < wanted) & (wanted <= _LARGEST_SCALE)
    scales[below] = np.nextafter(scales[below], np.float16(np.inf))
    scales[~np.isfinite(largest)] = np.nan
    return scales
