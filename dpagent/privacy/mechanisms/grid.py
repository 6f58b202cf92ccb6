"""From float gradients to integers of bounded norm: the first step of every mechanism.

A record's vector (a gradient; at the coordinator a device's whole update) is clipped to a norm of
at most C, L2 for Gaussian noise and L1 for Laplace noise, brought onto an integer grid of
``resolution`` grid units per C, and summed. This follows Kairouz, Liu and Steinke (ICML 2021),
with two departures:

- The grid is fine and rounding is to nearest. The sensitivity Δ *includes* the most that rounding can add
  to the norm. The paper repeats randomised rounding until the norm is small, and its running time
  depends on the data. :mod:`dpagent.privacy.mechanisms.wire` reduces the bits for the wire afterwards.
- The norm of every *integer* vector is checked in exact arithmetic, and the sum is an integer
  sum. So the sensitivity is a theorem about integers: adding or removing a record changes the
  sum by that record's vector, whose norm is at most Δ, and no floating-point slack (Casacuberta,
  Shoemate, Vadhan, Wagaman, CCS 2022) remains.

*Slack in L2.* Rounding moves a vector of d coordinates by at most √d/2, so Δ = F + ⌈√d/2⌉ + 1 for
F grid units per C: 0.13 % above F at d = 26,010 and F = 65,536. The last unit covers errors of the
float64 scaling, so that these never bring a record above the bound.

*Slack in L1.* Rounding adds at most 1/2 a coordinate, and never more than doubles it, so
Δ = F + min(⌊d/2⌋, F) + 1: a slack of d/2F, which at F = 65,536 and d = 26,010 would be 20 %.
Truncation towards zero would add nothing, but removes half a unit from a coordinate on average, and
a vector of L1 norm C has F/d units per coordinate on average: the same d/2F, but as a bias that
no averaging removes. Either way the grid needs some hundred units per coordinate;
then rounding to nearest is as cheap, and has almost no bias. So
:func:`l1_resolution` takes the smallest power of two of at least 512·d, up to 2²⁸: up to
d = 524,288 the slack is below 0.1 % (0.078 % at d = 26,010, where F = 2²⁴), and half a unit is at
most 1/1024 of the mean coordinate of a clipped vector. (A normal vector of 26,010 coordinates
loses 19 % of its L1 norm to truncation at F = 2¹⁶, and 0.4 % to rounding to nearest.)

*Sums.* Rounding each record needs all its coordinates in memory, which for a dense layer costs more than
its gradient. So a sum of clipped float vectors may be rounded instead (:meth:`Grid.quantize`). If the
float sums of two neighbouring lots differ by at most (1 + s)·C, s being the *accumulation slack*
that the learning engine proves (:mod:`dpagent.learning.training.engine`), then in L2 their integer vectors
differ by at most Δ = F + ⌈sF⌉ + ⌈√d⌉ + 1: each rounding moves a coordinate by up to 1/2, and the last unit
covers the float64 scaling, whose error in L2 is below L·F·2⁻⁵¹ units for L records. In L1 the same holds with
d for ⌈√d⌉: a unit for each coordinate. A coordinate of which the record has nothing costs as much, so nothing
bounds that by F here; F has to be large beside d. Engines add up no more than 2²⁰ records, so the error of
the scaling stays below one unit in L1 too, up to F = 2³⁰.

Both rest on one condition outside this package: **a record's float32 vector must not depend, in
any bit, on the other records of its microbatch.** The learning engines guarantee it and test it.
Within this module each row is treated by a function of that row alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count
from dpagent.norm import Norm

#: Fine-grid units to one L2 clip norm.
DEFAULT_RESOLUTION: Final = 65_536

#: Up to so many grid units to C, norms and sums are exact in float64.
MAX_RESOLUTION: Final[dict[Norm, int]] = {Norm.L1: 2**30, Norm.L2: 2**20}

_MAX_DIMENSION: Final = 2**28
_EXACT: Final = 2**53  # float64 holds all whole numbers up to this
_L1_STEPS_A_COORDINATE: Final = 512
_MAX_SLACK: Final = 0.01
_L1_DEFAULT_RANGE: Final = (65_536, 2**28)


class Constrained(NamedTuple):
    """The contribution of a microbatch.

    Attributes:
        total: sum of the records' integer vectors, shape (d,), int64, in grid units.
        excluded: records left out because their vector is not finite. Private: never publish.
    """

    total: NDArray[np.int64]
    excluded: int


@dataclass(frozen=True, slots=True)
class Grid:
    """How vectors of d float32 numbers become whole numbers of bounded norm. Public.

    Attributes:
        norm: of clipping and sensitivity.
        clip_norm: C, the norm a record's vector is scaled down to, in [1e-9, 1e9].
        dimension: d, in [1, 2²⁸].
        resolution: F, grid units to one clip norm, in [1, 2²⁰] for L2, [1, 2³⁰] for L1.

    Raises:
        ParameterError: an attribute is out of range.
    """

    norm: Norm
    clip_norm: float
    dimension: int
    resolution: int

    def __post_init__(self) -> None:
        if not isinstance(self.norm, Norm):
            raise ParameterError(f"norm is {self.norm!r}; expected one of {', '.join(Norm)}.")
        require_between("clip norm", self.clip_norm, 1e-9, 1e9)
        require_count("dimension", self.dimension, maximum=_MAX_DIMENSION)
        require_count("resolution", self.resolution, maximum=MAX_RESOLUTION[self.norm])

    @property
    def granularity(self) -> float:
        """One grid unit in the vectors' own units."""
        return self.clip_norm / self.resolution

    @property
    def sensitivity_units(self) -> int:
        """Δ: bound on the norm of one record's integer vector, in grid units."""
        if self.norm is Norm.L2:
            return self.resolution + _ceil_half_sqrt(self.dimension) + 1
        return self.resolution + min(self.dimension // 2, self.resolution) + 1

    def constrain(self, vectors: NDArray[np.float32], *, what: str = "gradients") -> Constrained:
        """Clip, round and add up the records of a microbatch.

        Each row is scaled by min(1, C/‖row‖)·F/C and rounded to nearest; a row with an infinite
        or undefined entry counts as zeros. Every row's contribution has a norm of at most
        ``sensitivity_units``, for every row.

        Args:
            vectors: a record's vector in each row, shape (m, d), float32; m may be 0.
            what: a name for the rows, for the text of an error.

        Raises:
            ParameterError: ``vectors`` has another shape or type, or so many rows (4 million at the
                least) that their sum might not be exact.
        """
        shape = vectors.shape
        if len(shape) != 2 or shape[1] != self.dimension or vectors.dtype != np.float32:
            raise ParameterError(
                f"{what} have shape {shape} and type {vectors.dtype}; "
                f"expected (records, {self.dimension}) float32 numbers."
            )
        if shape[0] * self.sensitivity_units >= _EXACT:
            most = _EXACT // self.sensitivity_units
            raise ParameterError(f"{what} are {shape[0]} records; expected at most {most} at a time.")
        total = np.zeros(self.dimension)
        vector, scratch = np.empty(self.dimension), np.empty(self.dimension)
        excluded = 0
        for row in vectors:
            np.copyto(vector, row)
            if self._quantize_row(vector, scratch):
                total += vector  # exact: whole numbers, and sums below 2⁵³
            else:
                excluded += 1
        return Constrained(total.astype(np.int64), excluded)

    def sum_sensitivity_units(self, accumulation_slack: float) -> int:
        """Δ where sums are rounded and not records: bound on one record's change of the sum, in grid units.

        Args:
            accumulation_slack: s, the most that floating-point summation adds to a record's influence,
                relative to the clip norm, in [0, 0.01].
        """
        require_between("accumulation slack", accumulation_slack, 0.0, _MAX_SLACK)
        extra = math.ceil(Fraction(accumulation_slack) * self.resolution)
        rounding = self.dimension if self.norm is Norm.L1 else _ceil_sqrt(self.dimension)
        return self.resolution + extra + rounding + 1

    def quantize_sum(self, total: NDArray[np.float64], accumulation_slack: float | None) -> NDArray[np.int64]:
        """As :meth:`quantize`, for noise that was made for sums: that allows for an accumulation slack.

        Raises:
            ParameterError: ``total`` does not fit, or the slack is None: the noise was not made for a sum.
        """
        if accumulation_slack is None:
            raise ParameterError(
                "accumulation slack is None; expected a number, so that sums may be rounded."
            )
        return self.quantize(total)

    def quantize(self, total: NDArray[np.float64]) -> NDArray[np.int64]:
        """A sum of clipped vectors, shape (d,) in the vectors' own units, rounded to whole grid units.

        Raises:
            ParameterError: ``total`` does not fit, or an entry is not finite or beyond 2⁵³ grid units.
        """
        if total.shape != (self.dimension,) or total.dtype != np.float64:
            raise ParameterError(
                f"total has shape {total.shape} and type {total.dtype}; "
                f"expected ({self.dimension},) float64 numbers."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            units = np.rint(total * (self.resolution / self.clip_norm))
        if not (np.abs(units) <= _EXACT).all():
            raise ParameterError("total has entries that are not finite, or beyond 2⁵³ grid units.")
        return units.astype(np.int64)

    def require_total(self, total: NDArray[np.int64]) -> None:
        """Raise :class:`ParameterError` unless ``total`` is a vector of d integers."""
        if total.shape != (self.dimension,) or total.dtype.kind != "i":
            raise ParameterError(
                f"total has shape {total.shape} and type {total.dtype}; "
                f"expected ({self.dimension},) integers."
            )
        # Array by array: whole numbers of Python's take the longer the larger they are.
        if not ((total >= -_EXACT) & (total <= _EXACT)).all():
            raise ParameterError("total has entries beyond ±2⁵³; expected sums of constrained records.")

    def _quantize_row(self, vector: NDArray[np.float64], scratch: NDArray[np.float64]) -> bool:
        """Replace one vector by its grid vector; False, and undefined, if it is not finite."""
        # Squares and sums of float32 values neither overflow nor vanish in float64.
        norm = _measure(self.norm, vector, scratch)
        if self.norm is Norm.L2:
            norm = math.sqrt(norm)
        if not math.isfinite(norm):
            return False
        vector *= self.resolution / max(self.clip_norm, norm)
        np.rint(vector, out=vector)
        shrink_to_norm(vector, scratch, self.sensitivity_units, self.norm)
        return True


def l1_resolution(dimension: int) -> int:
    """Grid units per L1 clip norm with a rounding slack below 0.1 %, or 2²⁸."""
    require_count("dimension", dimension, maximum=_MAX_DIMENSION)
    low, high = _L1_DEFAULT_RANGE
    return min(max(low, 1 << (_L1_STEPS_A_COORDINATE * dimension - 1).bit_length()), high)


def shrink_to_norm(vector: NDArray[np.float64], scratch: NDArray[np.float64], bound: int, norm: Norm) -> None:
    """Shorten a vector of whole numbers, in place, until its norm is at most ``bound``.

    Whole numbers whose squares (L2) or absolute values (L1) add up to less than 2⁵³ are exact in
    float64, in any order of additions; so is the comparison. Scaling by less than 1 and
    truncating towards zero lowers every non-zero entry, so the loop ends. It is a safeguard: a
    vector that was scaled to ``bound`` less the rounding slack does not enter it.
    """
    power = 2 if norm is Norm.L2 else 1
    while (measure := _measure(norm, vector, scratch)) > bound**power:
        vector *= min(bound / measure ** (1 / power), 1 - 2.0**-30)
        np.trunc(vector, out=vector)


def _measure(norm: Norm, vector: NDArray[np.float64], scratch: NDArray[np.float64]) -> float:
    """Σ x² for L2, Σ |x| for L1.

    Numpy's own sum, not BLAS: its order of additions depends on nothing but d, and no threads.
    """
    power = np.square if norm is Norm.L2 else np.abs
    return float(power(vector, out=scratch).sum())


def _ceil_half_sqrt(dimension: int) -> int:
    """⌈√d/2⌉, exactly: the least n with (2n)² ≥ d."""
    return (math.isqrt(dimension - 1) + 2) // 2


def _ceil_sqrt(dimension: int) -> int:
    """⌈√d⌉, exactly."""
    return math.isqrt(dimension - 1) + 1
