"""Integers from the discrete Gaussian N_ℤ(0, σ²), drawn from the operating system's entropy.

The distribution gives x ∈ ℤ a probability proportional to exp(−x²/(2σ²)) (Canonne, Kamath,
Steinke, NeurIPS 2020). No floating-point number takes part in a draw, so the attacks of
Jin et al. (IEEE S&P 2022) on rounded continuous noise have nothing to hold on to; and there is
no accept-reject loop, so the work of a draw does not depend on the value it returns (for what a
cache could still show, see :mod:`dpagent.privacy.noise.alias_table`).

**Table (σ ≤ 1024).** |x| from an exact alias table with weights w_0, 2w_1, 2w_2, …, 2w_R, where
w_j = exp(−j²/(2σ²)), and an independent uniform sign. Distance from N_ℤ(0, σ²), in total
variation, per value:

- *tail*: the support is cut at R = ⌈13σ⌉ + 1; P(|X| ≥ R) ≤ 2·exp(−R²/(2σ²)) (same paper: X is
  σ-sub-Gaussian), below 2⁻¹²⁰;
- *arithmetic*: the weights follow from w_{j+1} = w_j·a_j, a_{j+1} = a_j·b, a_0 = exp(−1/(2σ²)),
  b = exp(−1/σ²), in 208-bit fixed point. All factors are at most 1, so errors add: a_j is off
  by at most (2j+1)·2⁻²⁰⁷, 2w_j by at most (j+1)²·2⁻²⁰⁶ and their sum, for R < 2¹⁸, by less than
  (R+1)·2⁻¹⁷⁰;
- *rounding* to the table's 159 bits, with the arithmetic, at most (R+1)·2⁻¹⁵⁷ (the alias table's
  module).

The variance enters as an exact rational.

**Wide (1024 < σ ≤ 2²⁴).** X = X1 + k·Y with X1 ~ table(σ1), Y ~ N_ℤ(0, σ2²), σ1² = 5k² and
σ1² + k²σ2² = σ², exactly, as rationals (after Micciancio and Walter, CRYPTO 2017, and its
forerunners; the proof below is short enough to give in full). Completing the square,

    j²/σ2² + (x − kj)²/σ1² = (j − c_x)²/τ² + x²/σ²,   1/τ² = 1/σ2² + k²/σ1²,  c_x = τ²kx/σ1²,

so P(X = x) ∝ exp(−x²/(2σ²)) · Σ_j exp(−(j − c_x)²/(2τ²)). By Poisson summation the sum over j
is τ√(2π)·(1 + 2·Σ_{m≥1} exp(−2π²τ²m²)·cos(2πm·c_x)), within a factor 1 ± η of τ√(2π) for all x,
with η = 2·Σ_{m≥1} exp(−2π²τ²m²). Hence each probability, normalised, is within a factor
(1+η)/(1−η) of the right one, and the distance is at most η/(1−η) ≤ 2η. With σ1² = 5k² and
σ2 ≥ 20, τ² = 5σ2²/(σ2² + 5) > 4.93 and 2η < 10⁻⁴¹.

Y comes from a table, or for σ > 354,690 is itself such a sum, X2 + k'·X3. To have X1 + k·Y' in place of
X1 + k·Y adds no more than the distance of Y' from Y, so the distances of the sums add up, and with them those
of the tables.

The strides are the first of five choices for which the last table's σ is at most 630. So rounds whose σ
differ a little share the other tables (a power of two of columns each, filled to 99 %), and the last, which
is built anew for each σ, has at most 2¹³ columns up to σ = 12 million, 2¹⁴ above. No table has more, 320 KiB:
two parts for all σ would need one of 2¹⁸ columns, 5 MiB, which takes half a second to build on a PC and does
not fit into a board's cache.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Final

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

MIN_SIGMA: Final = 2.0**-6
MAX_TABLE_SIGMA: Final = 1024.0
MAX_SIGMA: Final = 2.0**24

_TAIL_SIGMAS: Final = 13
#: k, k'. Each is the largest for which ⌈13·√5·k⌉ + 2 values fit 2¹⁰, 2¹² or 2¹⁴ columns.
_STRIDES: Final = ((35,), (140,), (563,), (140, 35), (140, 140))
_FIRST_VARIANCE: Final = 5  # σ1²/k²
_MAX_LAST_SIGMA: Final = 630


class DiscreteGaussianSampler:
    """Draws from N_ℤ(0, σ²), up to a certified distance.

    >>> sampler = DiscreteGaussianSampler(3.0)
    >>> values = sampler.sample(1000)
    >>> values.shape, str(values.dtype), int(abs(values).max()) <= 40
    ((1000,), 'int64', True)
    >>> sampler.statistical_distance < 1e-37
    True

    Attributes:
        sigma: σ, the parameter of the distribution (its standard deviation is at most σ, and
            equal to it to 2e-7 for σ ≥ 1).
        statistical_distance: certified bound on the total variation distance between one value
            drawn and N_ℤ(0, σ²); distances of independent draws add up.
    """

    def __init__(self, sigma: float, *, entropy: Entropy = os.urandom) -> None:
        """Prepare for σ in [2⁻⁶, 2²⁴], taken as the exact rational the float is.

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
        tables = [(factor, gaussian_table(variance)) for factor, variance in self._parts]
        values = np.empty(count, dtype=np.int64)
        space, total = Workspace(min(count, BLOCK)), np.empty(min(count, BLOCK), dtype=np.int32)
        for start in range(0, count, BLOCK):
            block = values[start : start + BLOCK]
            # 32 bits hold the sum: 13·(σ1 + k·σ2 + k·k'·σ3) is below 2²⁹
            part = total[: block.size]
            part.fill(0)
            for factor, table in tables:
                drawn = table.draw(block.size, self._entropy, space, signed=True)
                part += np.multiply(drawn, np.int32(factor), out=drawn)
            np.copyto(block, part)
        return values


def decompose(sigma: float) -> tuple[tuple[int, Fraction], ...]:
    """Factors and exact variances of the table draws that add up to N_ℤ(0, σ²)."""
    variance = Fraction(sigma) ** 2
    if sigma <= MAX_TABLE_SIGMA:
        return ((1, variance),)
    fitting = (strides for strides in _STRIDES if sigma <= _MAX_LAST_SIGMA * math.prod(strides))
    return split(variance, next(fitting, _STRIDES[-1]))


def split(variance: Fraction, strides: Sequence[int]) -> tuple[tuple[int, Fraction], ...]:
    """Factors and variances of X1, X2, … of the module's text, for strides k, k', …"""
    parts, factor = [], 1
    for stride in strides:
        first = Fraction(_FIRST_VARIANCE * stride**2)
        parts.append((factor, first))
        variance, factor = (variance - first) / stride**2, factor * stride
    return (*parts, (factor, variance))


def statistical_distance(sigma: float) -> float:
    """The bound of the module's text on the distance of one value, without building tables."""
    return distance_of_parts(decompose(sigma))


def distance_of_parts(parts: Sequence[tuple[int, Fraction]]) -> float:
    """That of the sum of draws from tables: of the tables, and of each sum.

    Args:
        parts: as of :func:`split`.
    """
    distance = sum(_table_distance(variance) for _, variance in parts)
    factor, rest = parts[-1]
    for below, first in reversed(parts[:-1]):
        stride = factor // below
        distance += smoothing_distance(float(1 / (1 / rest + stride**2 / first)))
        factor, rest = below, first + stride**2 * rest
    return distance


def smoothing_distance(tau_squared: float) -> float:
    """2η of the module's text; the series is bounded by its first term over 1 − e^(−6π²τ²)."""
    first = math.exp(-2 * math.pi**2 * tau_squared)
    return 4 * first / -math.expm1(-6 * math.pi**2 * tau_squared)


def table_radius(variance: Fraction) -> int:
    """R, the largest |x| a table holds: ⌈13σ⌉ + 1."""
    return _ceil_sqrt(_TAIL_SIGMAS**2 * variance) + 1


@lru_cache(maxsize=8)
def gaussian_table(variance: Fraction) -> AliasTable:
    """The table of |x| for N_ℤ(0, ``variance``), built with integers and decimals only."""
    radius = table_radius(variance)
    return AliasTable.from_weights(
        lambda: (weight << (j > 0) for j, weight in enumerate(fixed_point_weights(variance, radius)))
    )


def fixed_point_weights(variance: Fraction, radius: int) -> Iterator[int]:
    """⌊2²⁰⁸·exp(−j²/(2·variance))⌋ for j = 0..radius, up to the errors of the module's text."""
    factor, ratio = exponential(1 / (2 * variance)), exponential(1 / variance)
    weight = 1 << WEIGHT_BITS
    yield weight
    for _ in range(radius):
        weight = weight * factor >> WEIGHT_BITS
        yield weight
        factor = factor * ratio >> WEIGHT_BITS


def _table_distance(variance: Fraction) -> float:
    radius = table_radius(variance)
    tail = 2 * math.exp(-float(min(Fraction(radius**2) / (2 * variance), Fraction(700))))
    return tail + table_distance(radius + 1)


def _ceil_sqrt(value: Fraction) -> int:
    root = math.isqrt(math.floor(value))
    return root if root**2 >= value else root + 1
