"""From the noise's fine grid units to the few bits on the wire.

The noisy sum is rounded randomly and without bias to a multiple of
2^shift grid units, and saturated to a signed width. Both are
post-processing: they cost no privacy and only a little variance. Shift and width follow from
public parameters alone, so a fragment's size reveals nothing about the data.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_count, require_positive
from dpagent.privacy.noise.entropy import Entropy, uniform_words

MIN_WIDTH: Final = 4
MAX_WIDTH: Final = 32

_MAX_SHIFT: Final = 32
_BLOCK: Final = 65_536


@dataclass(frozen=True, slots=True)
class WireForm:
    """The form in which noisy sums travel. Public.

    Attributes:
        shift: a wire unit is 2^shift grid units; in [0, 32].
        width: signed bits of a value, in [4, 32].
    """

    shift: int
    width: int


def wire_shift(deviation_units: float) -> int:
    """The coarsest grid that still resolves the noise: s = max(0, ⌊log2(σ/4)⌋).

    The noise then has a standard deviation between 4 and 8 wire units of 2^s grid units (unless
    s is 0), and rounding adds at most 1/64 of its variance, 1/96 on average.

    Raises:
        ParameterError: ``deviation_units`` is not in (0, 2³²].
    """
    require_positive("deviation units", deviation_units, maximum=2.0**32)
    _, exponent = math.frexp(deviation_units / 4)  # a mantissa in [1/2, 1): exact, which log2 is not
    return max(0, exponent - 1)


def wire_width(reach_units: float, shift: int) -> int:
    """Bits of a signed wire value that holds sums of up to ``reach_units`` in magnitude.

    Args:
        reach_units: in grid units, above 0.
        shift: of :func:`wire_shift`.

    Returns:
        A width in [4, 32]; at 32 there may be less room than asked for.

    Raises:
        ParameterError: a value is out of its range.
    """
    require_count("shift", shift, minimum=0, maximum=_MAX_SHIFT)
    reach = require_positive("reach units", reach_units) / float(1 << shift) + 1
    return min(max(MIN_WIDTH, math.ceil(reach).bit_length() + 1), MAX_WIDTH)


def round_to_wire(
    values: NDArray[np.int64], shift: int, width: int, *, entropy: Entropy = os.urandom
) -> NDArray[np.int64]:
    """Round to multiples of 2^shift without bias, in wire units, and saturate.

    ⌊(value + u)/2^shift⌋ with u uniform in [0, 2^shift) from the operating system's entropy:
    its expectation is value/2^shift exactly.

    Args:
        values: private sums, noise included, shape (n,), each below 2⁶² in magnitude.
        shift: in [0, 32].
        width: signed bits, in [4, 32].
        entropy: gives n uniform bytes for an argument n; to be replaced in tests only.

    Returns:
        Shape (n,), int64, within [−2^(width−1), 2^(width−1) − 1].

    Raises:
        ParameterError: a value is out of its range.
    """
    require_count("shift", shift, minimum=0, maximum=_MAX_SHIFT)
    require_count("width", width, minimum=MIN_WIDTH, maximum=MAX_WIDTH)
    if values.ndim != 1 or values.dtype != np.int64:
        raise ParameterError(
            f"values have shape {values.shape} and type {values.dtype}; expected an int64 vector."
        )
    if values.size and not -(2**62) < int(values.min()) <= int(values.max()) < 2**62:
        raise ParameterError("values reach 2^62 in magnitude; expected sums of bounded integers and noise.")
    coarse = values.copy()
    if shift:
        mask = np.uint64((1 << shift) - 1)
        for start in range(0, coarse.size, _BLOCK):
            block = coarse[start : start + _BLOCK]
            block += (uniform_words(block.size, entropy) & mask).astype(np.int64)
            block >>= shift
    return np.clip(coarse, -(2 ** (width - 1)), 2 ** (width - 1) - 1)
