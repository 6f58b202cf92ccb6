"""From the noise's fine grid units to the few bits on the wire.

The noisy sum of a round is rounded to the nearest multiple of a public step, in which its noise has a
standard deviation of about three. That is post-processing: it costs no privacy, and it adds 1/12 of a squared
step, 0.9 %, to the variance.

*Without bias.* P(round(x) = k) is the density at k of x + U, with U uniform on [−1/2, 1/2] and independent:
so by Poisson's summation every moment of the rounded x is that of x + U, but for terms with the factor
φ(2πj), j ≥ 1, where φ is the characteristic function of the noise in steps. For Gaussian noise of 3 steps
these are e^−177. Random rounding would need random bits and add twice the variance or more. It is for values
that lack such noise: those that a cap has moved. The step is odd, so that no value lies in the middle.
"""

from __future__ import annotations

import math
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_count, require_positive
from dpagent.privacy.noise.entropy import Entropy, uniform_words
from dpagent.privacy.ranges import MAX_WIRE_STEP

MAX_WIRE_VALUE: Final = (1 << 31) - 1
"""Larger ones saturate."""
STEPS_OF_NOISE: Final = 3
"""Steps to a standard deviation of a round's noise."""

_REACH: Final = 1 << 62
_BLOCK: Final = 65_536


def wire_step(deviation_units: float) -> int:
    """The odd number of grid units of which a standard deviation of the noise has about three.

    2⌊σ/6⌋ + 1: noise of 6 units or more spans from 2 to 4 steps, and ever closer to 3; less is not rounded.

    Args:
        deviation_units: of the noise of all steps of a round, in grid units.

    Raises:
        ParameterError: ``deviation_units`` is not in (0, 2⁴⁰].

    >>> wire_step(300_000.0), wire_step(5.9), wire_step(6.0)
    (100001, 1, 3)
    """
    require_positive("deviation units", deviation_units, maximum=float(MAX_WIRE_STEP))
    return 2 * math.floor(deviation_units / (2 * STEPS_OF_NOISE)) + 1


def round_to_wire(values: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """Round to the nearest multiples of ``step``, in wire units, and saturate.

    Args:
        values: private sums, noise included, shape (n,), each below 2⁶² in magnitude.
        step: odd, in [1, 2⁴⁰].

    Returns:
        Shape (n,), int64, at most :data:`MAX_WIRE_VALUE` in magnitude.

    Raises:
        ParameterError: a value is out of its range.

    >>> round_to_wire(np.array([-4, -1, 1, 2, 4]), 3).tolist()
    [-1, 0, 0, 1, 1]
    """
    _require(values, step)
    return _saturated((values + step // 2) // step)


def round_at_random(
    values: NDArray[np.int64], step: int, *, entropy: Entropy = os.urandom
) -> NDArray[np.int64]:
    """Round to one of the two nearest multiples of ``step`` without bias, in wire units, and saturate.

    ⌊(value + u)/step⌋ with u uniform in [0, step): its expectation is value/step, to within 2⁻²⁴ (64-bit
    words are reduced to u).

    Args:
        values: as of :func:`round_to_wire`.
        step: likewise.
        entropy: gives n uniform bytes for an argument n; to be replaced in tests only.
    """
    _require(values, step)
    rounded = values.copy()
    for start in range(0, rounded.size, _BLOCK):
        block = rounded[start : start + _BLOCK]
        block += (uniform_words(block.size, entropy) % np.uint64(step)).astype(np.int64)
        block //= step
    return _saturated(rounded)


def _require(values: NDArray[np.int64], step: int) -> None:
    require_count("step", step, maximum=MAX_WIRE_STEP)
    if step % 2 == 0:
        raise ParameterError(f"step is {step}; expected an odd number.")
    if values.ndim != 1 or values.dtype != np.int64:
        raise ParameterError(
            f"values have shape {values.shape} and type {values.dtype}; expected an int64 vector."
        )
    if values.size and not -_REACH < int(values.min()) <= int(values.max()) < _REACH:
        raise ParameterError("values reach 2^62 in magnitude; expected sums of bounded integers and noise.")


def _saturated(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.clip(values, -MAX_WIRE_VALUE, MAX_WIRE_VALUE)
