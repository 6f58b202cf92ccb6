"""Integers from the discrete Gaussian N_ℤ(0, σ²), drawn from the operating system's entropy.

The distribution gives x ∈ ℤ a probability proportional to exp(−x²/(2σ²)) (Canonne, Kamath,
Steinke, NeurIPS 2020). No floating-point number takes part in a draw, so the attacks of
Jin et al. (IEEE S&P 2022) on rounded continuous noise have nothing to hold on to; and there is
no accept-reject loop, so the work of a draw does not depend on the value it returns.

**Table (σ ≤ 1024).** Cumulative probabilities in 128-bit fixed point; a draw is a uniform
128-bit number looked up among them. Distance from N_ℤ(0, σ²), in total variation, per value:

- *tail*: the support is cut at R = ⌈13σ⌉ + 1; P(|X| ≥ R) ≤ 2·exp(−R²/(2σ²)) (same paper: X is
  σ-sub-Gaussian), below 2⁻¹²⁰;
- *thresholds*: n = 2R + 1 entries, each threshold rounded down by at most 2⁻¹²⁸, so each
  probability is off by at most 2⁻¹²⁸, half the sum of which is at most n·2⁻¹²⁹;
- *arithmetic*: weights w_j = exp(−j²/(2σ²)) follow from w_{j+1} = w_j·a_j, a_{j+1} = a_j·b,
  a_0 = exp(−1/(2σ²)), b = exp(−1/σ²), in 256-bit fixed point. All factors are at most 1, so
  errors add: a_j is off by at most (2j+1)·2⁻²⁵⁵, w_j by at most (j+1)²·2⁻²⁵⁵, their sum by
  (R+1)³·2⁻²⁵⁵, which for the largest table (R < 2¹⁷) is below 2⁻²⁰³. Normalising divides by a
  sum of at least 1. Charged as n·2⁻¹²⁹, many orders too much.

Together: tail + n·2⁻¹²⁸. The variance enters as an exact rational.

The uniform number is read lazily: its high 64 bits decide, unless they equal the high word of
a threshold (probability below n·2⁻⁶⁴), and only then are the low 64 bits drawn. That changes
nothing in the distribution; it is the one event in which more than 8 bytes are read per value.

**Wide (1024 < σ ≤ 2²⁴).** X = X1 + k·X2 with X1 ~ table(σ1), X2 ~ table(σ2), σ1 = 3k and
σ1² + k²σ2² = σ², exactly, as rationals (after Micciancio and Walter, CRYPTO 2017, and its
forerunners; the proof below is short enough to give in full). Completing the square,

    j²/σ2² + (x − kj)²/σ1² = (j − c_x)²/τ² + x²/σ²,   1/τ² = 1/σ2² + k²/σ1²,  c_x = τ²kx/σ1²,

so P(X = x) ∝ exp(−x²/(2σ²)) · Σ_j exp(−(j − c_x)²/(2τ²)). By Poisson summation the sum over j
is τ√(2π)·(1 + 2·Σ_{m≥1} exp(−2π²τ²m²)·cos(2πm·c_x)), within a factor 1 ± η of τ√(2π) for all x,
with η = 2·Σ_{m≥1} exp(−2π²τ²m²). Hence each probability, normalised, is within a factor
(1+η)/(1−η) of the right one, and the distance is at most η/(1−η) ≤ 2η. With σ1 = 3k and
σ2 ≥ 20, τ² = 9σ2²/(σ2² + 9) > 8.8 and η < 10⁻⁷⁴. The tables' own distances add to it.
k is the power of two nearest √(σ/3) on the logarithmic scale, so both tables stay below 2¹⁸
entries, and rounds whose σ differ a little share the first table.

**Time.** Words are drawn in blocks, whatever their values. The binary search takes the same
number of steps for every value up to ±1, but its memory accesses, and numpy's reuse of the
previous search's end, depend on the values drawn: against an observer of the processor's cache
this is not constant time. What leaves the device does so at times drawn independently of it.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count

Entropy = Callable[[int], bytes]

MIN_SIGMA: Final = 2.0**-6
MAX_TABLE_SIGMA: Final = 1024.0
MAX_SIGMA: Final = 2.0**24

_BLOCK: Final = 65_536  # values drawn at a time: bounds the memory
_TAIL_SIGMAS: Final = 13
_THRESHOLD_BITS: Final = 128
_WORD: Final = 64
_FIXED_BITS: Final = 256
_DECIMAL: Final = Context(prec=110)


class DiscreteGaussianSampler:
    """Draws from N_ℤ(0, σ²), up to a certified distance.

    Attributes:
        sigma: σ, the parameter of the distribution (its standard deviation is at most σ, and
            equal to it to 2e-7 for σ ≥ 1).
        statistical_distance: certified bound on the total variation distance between one value
            drawn and N_ℤ(0, σ²); distances of independent draws add up.
    """

    def __init__(self, sigma: float, *, entropy: Entropy = os.urandom) -> None:
        """Prepare the tables for σ in [2⁻⁶, 2²⁴], taken as the exact rational the float is.

        Args:
            sigma: σ.
            entropy: gives n uniform bytes for an argument n; to be replaced in tests only.

        Raises:
            ParameterError: σ is out of range.
        """
        self.sigma = require_between("discrete Gaussian sigma", sigma, MIN_SIGMA, MAX_SIGMA)
        self._entropy = entropy
        self._parts = decompose(self.sigma)
        self.statistical_distance = statistical_distance(self.sigma)

    def sample(self, count: int) -> NDArray[np.int64]:
        """``count`` independent values, shape (count,); ``count`` may be 0."""
        require_count("count", count, minimum=0)
        tables = [(stride, gaussian_table(variance)) for stride, variance in self._parts]
        values = np.zeros(count, dtype=np.int64)
        for start in range(0, count, _BLOCK):
            block = values[start : start + _BLOCK]
            for stride, table in tables:
                block += stride * table.draw(block.size, self._entropy)
        return values


def decompose(sigma: float) -> tuple[tuple[int, Fraction], ...]:
    """Strides and exact variances of the table draws that add up to N_ℤ(0, σ²)."""
    variance = Fraction(sigma) ** 2
    if sigma <= MAX_TABLE_SIGMA:
        return ((1, variance),)
    stride = 2 ** round(math.log2(sigma / 3) / 2)
    return ((1, Fraction(9 * stride**2)), (stride, variance / stride**2 - 9))


def statistical_distance(sigma: float) -> float:
    """The bound of the module's text on the distance of one value, without building tables."""
    parts = decompose(sigma)
    distance = sum(_table_distance(variance) for _, variance in parts)
    if len(parts) == 2:
        (_, first), (stride, second) = parts
        tau_squared = 1 / (1 / second + stride**2 / first)
        distance += smoothing_distance(float(tau_squared))
    return distance


def smoothing_distance(tau_squared: float) -> float:
    """2η of the module's text; the series is bounded by its first term over 1 − e^(−6π²τ²)."""
    first = math.exp(-2 * math.pi**2 * tau_squared)
    return 4 * first / -math.expm1(-6 * math.pi**2 * tau_squared)


def table_radius(variance: Fraction) -> int:
    """The largest |x| a table holds: ⌈13σ⌉ + 1."""
    return _ceil_sqrt(_TAIL_SIGMAS**2 * variance) + 1


@dataclass(frozen=True, slots=True, eq=False)
class GaussianTable:
    """Cumulative probabilities of −R..R in fixed point; the last, 1, is left out.

    Attributes:
        radius: R.
        high: high 64 bits of the 2R thresholds, rising, uint64.
        low: their low 64 bits.
    """

    radius: int
    high: NDArray[np.uint64]
    low: NDArray[np.uint64]

    def threshold(self, index: int) -> int:
        """The threshold as the 128-bit integer it is: ⌊2¹²⁸·P(X ≤ index − R)⌋."""
        return int(self.high[index]) << _WORD | int(self.low[index])

    def draw(self, count: int, entropy: Entropy) -> NDArray[np.int64]:
        """``count`` independent values, shape (count,)."""
        words = uniform_words(count, entropy)
        index = np.searchsorted(self.high, words, side="right")
        # The number of thresholds at most (word, low word) is `index`, unless some have this
        # very high word: then a low word has to be drawn to tell.
        undecided = np.flatnonzero(self.high[np.maximum(index, 1) - 1] == words)
        for i in undecided:
            number = int(words[i]) << _WORD | int(uniform_words(1, entropy)[0])
            index[i] = bisect_right(range(self.high.size), number, key=self.threshold)
        return np.asarray(index - self.radius, dtype=np.int64)


@lru_cache(maxsize=4)
def gaussian_table(variance: Fraction) -> GaussianTable:
    """The table of N_ℤ(0, ``variance``), built with integers and decimals only."""
    radius = table_radius(variance)
    weights = fixed_point_weights(variance, radius)
    total = 2 * sum(weights) - weights[0]
    thresholds, below = [], 0
    for x in range(-radius, radius):
        below += weights[abs(x)]
        # for a tiny σ the weights left out may be 0 in fixed point: stay below 2¹²⁸ all the same
        thresholds.append(min((below << _THRESHOLD_BITS) // total, (1 << _THRESHOLD_BITS) - 1))
    mask = (1 << _WORD) - 1
    return GaussianTable(
        radius,
        np.array([threshold >> _WORD for threshold in thresholds], dtype=np.uint64),
        np.array([threshold & mask for threshold in thresholds], dtype=np.uint64),
    )


def fixed_point_weights(variance: Fraction, radius: int) -> list[int]:
    """⌊2²⁵⁶·exp(−j²/(2·variance))⌋ for j = 0..radius, up to the errors of the module's text."""
    rate = _DECIMAL.divide(Decimal(variance.denominator), Decimal(variance.numerator))
    unit = Decimal(1 << _FIXED_BITS)

    def fixed(exponent: Decimal) -> int:
        # copy_negate: the minus sign would round to the thread's own decimal context
        return int(_DECIMAL.multiply(_DECIMAL.exp(exponent.copy_negate()), unit))

    factor, ratio = fixed(_DECIMAL.divide(rate, Decimal(2))), fixed(rate)
    weights = [1 << _FIXED_BITS]
    for _ in range(radius):
        weights.append(weights[-1] * factor >> _FIXED_BITS)
        factor = factor * ratio >> _FIXED_BITS
    return weights


def uniform_words(count: int, entropy: Entropy) -> NDArray[np.uint64]:
    """``count`` uniform 64-bit words from ``entropy``."""
    data = entropy(8 * count)
    if len(data) != 8 * count:
        raise ParameterError(f"entropy gave {len(data)} bytes; expected the {8 * count} asked for.")
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)


def _table_distance(variance: Fraction) -> float:
    radius = table_radius(variance)
    tail = 2 * math.exp(-float(min(Fraction(radius**2) / (2 * variance), Fraction(700))))
    return tail + (2 * radius + 1) * 2.0**-_THRESHOLD_BITS


def _ceil_sqrt(value: Fraction) -> int:
    root = math.isqrt(math.floor(value))
    return root if root**2 >= value else root + 1
