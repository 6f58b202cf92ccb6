"""Integers from the discrete Laplace distribution, whole or cut off, from the system's entropy.

The distribution gives k ∈ ℤ a probability proportional to exp(−|k|/λ), or that on −A..A and 0
beyond (the discretised truncated Laplace, after Geng, Ding, Guo, Kumar, AISTATS 2020). As with the
discrete Gaussian there is no floating-point number in a draw, no accept-reject loop, and a
fixed number of random bytes: see :mod:`dpagent.privacy.noise.alias_table` for both, and for what the
processor's cache could still show.

**Digits.** With q = exp(−1/λ), a magnitude m = 1 + g has g ≥ 0 and P(g) ∝ q^g, for g < A if cut
off. Write g = d + B·h with 0 ≤ d < B. Then q^g = q^d·(q^B)^h: the digit d and the rest h are
independent, d geometric with ratio q on 0..B−1, h geometric with ratio q^B, for h < A/B if B
divides A. No term is neglected, unlike the smoothing of a sum of two Gaussians. So the low digits
of g come from tables of their own, and the last table, with a step of B (now the product of
the low digits' sizes), draws h and whether k is zero together: relative to 2·q^g for the two k
with this magnitude and 1 for k = 0, all divided by (1−q^B)/(1−q), the sum over the low digits,

    k = 0:  (1−q)/(1−q^B),        h:  2q·(q^B)^h,  h = 0, 1, …

An independent uniform sign s turns j = 0 (zero) or 1 + h into v = ±j, and

    k = B·v + sign(v)·(1 − B + low digits),

which is 0 for v = 0 without any branch. Up to λ = 97 (or A < 2¹⁴) there is one table, two up to
1.5 million, three up to 2·10¹⁰ and four up to 2⁴⁰.

**Distance**, in total variation, per value:

- *tail*: without A, magnitudes end at the first multiple N of B that is at least 84λ;
  P(|k| > N) = 2q^(N+1)/(1+q) ≤ 2·exp(−(N+1)/λ), below 2⁻¹²⁰. The same is done, and charged, if
  A ≥ N: to cut at N in place of A takes away no more than that. If A < N, nothing is cut but what
  the distribution lacks anyway;
- *arithmetic*, in 208-bit fixed point: 2q is off by at most 2 units of 2⁻²⁰⁸, and each
  multiplication by q^B adds at most 3, so n weights are off together by less than n²·2⁻²⁰⁵; the
  weight of zero, a quotient by 1 − q^B > 2⁻⁴¹, is off by less than 2⁻¹⁶⁶ (by 0 if B = 1). For
  n ≤ 2¹⁴ + 1 that is less than n·2⁻¹⁵⁸; and the weights add up to at least 1 (with B = 1 zero has
  1; otherwise λ > 97 and 2q > 1);
- *rounding* to the table's 159 bits, with the arithmetic, at most n·2⁻¹⁵⁷ a table of n values.

**A is rounded down** to a multiple of B, a power of two of at most A/2¹³, so by less than 0.013 %,
and not at all below 2¹⁴. The distribution, and what it costs, is that of the A used,
:func:`usable_bound`: it follows from λ and A, and is public like them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_between, require_count
from dpagent.privacy.noise.alias_table import (
    BLOCK,
    WEIGHT_BITS,
    AliasTable,
    Workspace,
    exponential,
    table_distance,
)
from dpagent.privacy.noise.entropy import Entropy

MIN_SCALE: Final = 2.0**-6
MAX_SCALE: Final = 2.0**40
MAX_BOUND: Final = 2**50

_TAIL_SCALES: Final = 84
_LAST_BITS: Final = 13  # the last table has up to 2¹³ magnitudes; up to 2¹⁴ if A is to be kept
_DIGIT_BITS: Final = 14  # a low digit has up to 2¹⁴ values


class Layout(NamedTuple):
    """How magnitudes 1..N are put together.

    Attributes:
        digit_bits: log₂ of the sizes of the low digits, lowest first; none for one table.
        last: number of values of the highest digit, so that N = last·2^(sum of ``digit_bits``).
        cut: whether a tail beyond N was given up.
    """

    digit_bits: tuple[int, ...]
    last: int
    cut: bool

    @property
    def step(self) -> int:
        """B of the module's text."""
        return 1 << sum(self.digit_bits)

    @property
    def reach(self) -> int:
        """N, the largest magnitude drawn."""
        return self.last * self.step


class DiscreteLaplaceSampler:
    """Draws from the discrete Laplace distribution on ℤ or −A..A, up to a certified distance.

    >>> sampler = DiscreteLaplaceSampler(2.0, bound=10)
    >>> int(abs(sampler.sample(1000)).max()) <= 10
    True
    >>> sampler.statistical_distance < 1e-45
    True

    Attributes:
        scale: λ, in grid units.
        bound: A as used, at most the requested one; None for the whole of ℤ. Public.
        statistical_distance: certified bound on the total variation distance between one value
            drawn and the distribution; distances of independent draws add up.
    """

    def __init__(self, scale: float, *, bound: int | None = None, entropy: Entropy = os.urandom) -> None:
        """Prepare for λ in [2⁻⁶, 2⁴⁰], taken as the exact rational the float is.

        Args:
            scale: λ.
            bound: A in [1, 2⁵⁰], the largest magnitude; None for no bound.
            entropy: gives n uniform bytes for an argument n; to be replaced in tests only.

        Raises:
            ParameterError: λ or A is out of range.
        """
        self._layout = lay_out(scale, bound)
        self.scale = float(scale)
        self.bound = usable_bound(scale, bound)
        self.statistical_distance = statistical_distance(scale, bound)
        self._entropy = entropy

    def sample(self, count: int) -> NDArray[np.int64]:
        """``count`` independent values, shape (count,); ``count`` may be 0."""
        require_count("count", count, minimum=0)
        *digits, last = laplace_tables(self.scale, self._layout)
        step = self._layout.step
        values = np.empty(count, dtype=np.int64)
        size = min(count, BLOCK)
        space, low, scaled = Workspace(size), np.empty(size, np.int64), np.empty(size, np.int64)
        for start in range(0, count, BLOCK):
            block = values[start : start + BLOCK]
            block_low, block_scaled = low[: block.size], scaled[: block.size]
            block_low.fill(1 - step)  # 0 if there are no low digits
            stride = 1
            for table in digits:
                digit = table.draw(block.size, self._entropy, space, signed=False)
                block_low += np.multiply(digit, stride, out=block_scaled, dtype=np.int64)
                stride *= table.size
            signed = last.draw(block.size, self._entropy, space, signed=True)
            np.multiply(signed, step, out=block, dtype=np.int64)
            if digits:
                block_low *= np.sign(signed, out=signed)
                block += block_low
        return values


def usable_bound(scale: float, bound: int | None) -> int | None:
    """A as :class:`DiscreteLaplaceSampler` uses it; None stays None.

    Raises:
        ParameterError: λ or A is out of range.
    """
    layout = lay_out(scale, bound)
    return bound if bound is None or layout.cut else layout.reach


def statistical_distance(scale: float, bound: int | None = None) -> float:
    """The bound of the module's text on the distance of one value, without building tables.

    For a ``bound`` it is the distance from the distribution on ±``usable_bound(scale, bound)``.

    Raises:
        ParameterError: λ or A is out of range.
    """
    layout = lay_out(scale, bound)
    exponent = min(Fraction(layout.reach + 1) / Fraction(scale), Fraction(700))
    tail = 2 * math.exp(-float(exponent)) if layout.cut else 0.0
    return tail + table_distance(layout.last + 1) + sum(table_distance(1 << b) for b in layout.digit_bits)


def lay_out(scale: float, bound: int | None = None) -> Layout:
    """Choose the digits, for the whole of ℤ or for −A..A."""
    exact = Fraction(require_between("discrete Laplace scale", scale, MIN_SCALE, MAX_SCALE))
    tail = math.ceil(_TAIL_SCALES * exact)
    low_bits = max(0, tail.bit_length() - _LAST_BITS)
    last = -(-tail >> low_bits)
    if bound is None:
        return Layout(_digits(low_bits), last, cut=True)
    if require_count("discrete Laplace bound", bound, maximum=MAX_BOUND) < last << low_bits:
        low_bits = max(0, bound.bit_length() - _LAST_BITS - 1)
        return Layout(_digits(low_bits), bound >> low_bits, cut=False)
    return Layout(_digits(low_bits), last, cut=True)


@lru_cache(maxsize=4)
def laplace_tables(scale: float, layout: Layout) -> tuple[AliasTable, ...]:
    """The low digits' tables, lowest first, then the last one: 0 for zero, 1 + h otherwise."""
    rate, stride, tables = 1 / Fraction(scale), 1, []
    for bits in layout.digit_bits:
        powers = partial(_powers, 1 << WEIGHT_BITS, exponential(rate * stride), 1 << bits)
        tables.append(AliasTable.from_weights(powers))
        stride <<= bits
    one, ratio, ratio_of_step = 1 << WEIGHT_BITS, exponential(rate), exponential(rate * stride)
    zero = ((one - ratio) << WEIGHT_BITS) // (one - ratio_of_step)
    last = AliasTable.from_weights(lambda: chain([zero], _powers(2 * ratio, ratio_of_step, layout.last)))
    return (*tables, last)


def _powers(first: int, ratio: int, count: int) -> Iterator[int]:
    """``count`` terms of a geometric sequence in fixed point."""
    power = first
    for _ in range(count):
        yield power
        power = power * ratio >> WEIGHT_BITS


def _digits(low_bits: int) -> tuple[int, ...]:
    """Split so many bits into as few digits as can be, of nearly equal size."""
    number = -(-low_bits // _DIGIT_BITS)
    return tuple((low_bits + i) // number for i in range(number))
