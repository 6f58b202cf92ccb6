"""The records of a step: Poisson sampling from the operating system's entropy.

The amplification by sampling in :mod:`dpagent.privacy.accounting.rdp` requires that each record is drawn
independently, with a probability of at most the accounted q. A pseudo-random
generator would break it if an adversary learnt the seed, so this module uses none.
"""

from __future__ import annotations

import math
import os
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_between, require_count
from dpagent.privacy.noise.entropy import Entropy, uniform_words

LOT_TAIL: Final = 2.0**-128
"""A lot is larger than :func:`largest_lot` with at most this probability."""

_BLOCK: Final = 65_536
_DRAWS: Final = 64


def poisson_lot(records: int, sampling_rate: float, *, entropy: Entropy = os.urandom) -> NDArray[np.intp]:
    """Draw a lot: each record independently with probability ⌊q·2⁶⁴⌋/2⁶⁴ ≤ q.

    The divergences of the sampled mechanism never fall with q, so the shortfall (less than 2⁻⁶⁴)
    is on the safe side. At q = 1 all records are taken and no entropy is read.

    Args:
        records: number of records of the device, at least 0.
        sampling_rate: q, in (0, 1].
        entropy: gives n uniform bytes for an argument n; to be replaced in tests only.

    Returns:
        Rising indices in [0, records); their number is random, and 0 is possible.

    Raises:
        ParameterError: a value is out of its range.
    """
    require_count("records", records, minimum=0)
    require_between("sampling rate", sampling_rate, 0.0, 1.0, low_open=True)
    if sampling_rate == 1:
        return np.arange(records, dtype=np.intp)
    threshold = np.uint64(int(Fraction(sampling_rate) * 2**64))
    drawn = [
        start + np.flatnonzero(uniform_words(min(_BLOCK, records - start), entropy) < threshold)
        for start in range(0, records, _BLOCK)
    ]
    return np.concatenate([np.zeros(0, dtype=np.intp), *drawn])


def largest_lot(records: int, sampling_rate: float) -> int:
    """A size that a Poisson lot exceeds with a probability of at most :data:`LOT_TAIL`.

    The size of a lot of n records is binomial. With the relative entropy
    D(a ‖ q) = a·ln(a/q) + (1−a)·ln((1−a)/(1−q)), P(size ≥ L) ≤ exp(−n·D(L/n ‖ q)) for every L > nq
    (Chernoff). The result is the least L < n, as far as floating point can tell, for which that is below the
    tail at L + 1; n if there is none. The exponent must exceed the tail's by a thousandth, which is more than
    its rounding. The bound rises with n, so it holds for every data set of at most ``records``.

    Args:
        records: the most records that a device may have, at least 0. Public.
        sampling_rate: q, in (0, 1].

    Raises:
        ParameterError: a value is out of its range.

    >>> largest_lot(60_000, 0.01), largest_lot(50, 0.5), largest_lot(1_000_000, 1e-6)
    (952, 50, 34)
    """
    require_count("records", records, minimum=0)
    require_between("sampling rate", sampling_rate, 0.0, 1.0, low_open=True)
    needed = -math.log(LOT_TAIL) * 1.001
    low, high = min(math.ceil(records * sampling_rate), records), records
    while low < high:  # The exponent rises with the size above the mean.
        middle = (low + high) // 2
        if _exponent(middle + 1, records, sampling_rate) >= needed:
            high = middle
        else:
            low = middle + 1
    return low


def _exponent(size: int, records: int, rate: float) -> float:
    """n·D(size/n ‖ rate), of a size above the mean."""
    if rate == 1:
        return 0.0
    rest = records - size
    outside = rest * (math.log(rest / records) - math.log1p(-rate)) if rest else 0.0
    return size * (math.log(size / records) - math.log(rate)) + outside


def shuffled(lot: NDArray[np.intp], *, entropy: Entropy = os.urandom) -> NDArray[np.intp]:
    """The records of a lot in uniformly random order.

    The bound on the contribution of floating-point summing to a record's influence couples the orders of two
    neighbouring lots (:mod:`dpagent.learning.training.engine`), and needs each order to be equally likely. So
    the records are sorted by random 64-bit keys, drawn anew should two be equal: given that they
    differ, each order of them has the same probability.

    Args:
        lot: indices, shape (n,).
        entropy: gives n uniform bytes for an argument n; to be replaced in tests only.
    """
    for _ in range(_DRAWS):
        keys = uniform_words(len(lot), entropy)
        order = np.argsort(keys)
        if not (np.diff(keys[order]) == 0).any():
            return lot[order]
    raise RuntimeError(f"{_DRAWS} draws of random keys had equal ones; the source of entropy is broken.")
