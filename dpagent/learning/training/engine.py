"""The promises of a training engine: clipped sums of per-example gradients, and their error bounds.

An engine takes a lot in microbatches of at most m records. For record i it computes the gradient
g_i of the softmax cross-entropy in float32, its norm n_i and its clip factor c_i = min(1, C/n_i),
and returns Σ c_i·g_i. The norm is the one in which the mechanism states its sensitivity, L1 or L2.
The mechanism rounds that sum to its integer grid and adds noise for
one record's largest change of it (``docs/privacy.md``). Floating-point sums are not exact, so an
engine promises:

1. **Batch invariance.** Everything of record i (activations, the factors of its gradient, n_i, c_i)
   is a function of that record and the weights alone, bit for bit, independently of the other records in the
   microbatch and wherever the record stands in it. :meth:`Engine.is_batch_invariant` tries it on
   the spot (:mod:`dpagent.learning.training.batch_invariance`, which says how surely).
2. **Short sums.** No float32 sum runs over more than the records of one microbatch; microbatches
   are added in float64. No float32 sum of squares (L2) or magnitudes (L1) runs over more than
   :data:`NORM_RUN` numbers; to each, once it is in float64, :data:`UNDERFLOW` is added for each of its terms.
3. **Exclusion.** A record that holds a number which is not finite, or whose gradient is not, or whose norm
   has a square beyond float32, adds exact zeros, and is counted.

What follows. Let u = 2⁻²⁴ and γ_k = ku/(1−ku); a sum of k products, in any order and with or without fused
multiply-adds, is off by at most γ_k times the sum of their magnitudes (Higham, "Accuracy and Stability of
Numerical Algorithms", 2nd ed., section 3.1).

* *The norm in L2.* n_i² is a sum of non-negative terms, each a sum of at most NORM_RUN squares or, for a
  dense layer, a product of two such sums; so its relative error is at most γ_{2·NORM_RUN+16}, and that of the
  root half of it. Squares and their sums that underflow, gradually or all at once, are too small by less
  than 2⁻¹²⁶ each, and UNDERFLOW makes up for both. That is not a trifle: in a dense layer, what
  underflows in one factor is multiplied by the other, which hostile weights make as large
  as 10³⁸. The true norm of the record's contribution, c_i·g_i, is then at most (1+η)·C with
  η = γ_{NORM_RUN+16}: the root, the quotient and the product with c_i take up the eight more.
* *The norm in L1.* n_i is a sum of magnitudes, each piece of it a sum of at most NORM_RUN of them or, for a
  dense layer, a product of two such sums of half as many; so its relative error is at most γ_{NORM_RUN+8}.
  A magnitude is exact, but a processor that takes subnormal numbers for zero loses up to 2⁻¹²⁶ of it, and as
  much of each partial sum: UNDERFLOW makes up for both, also where the other factor of a dense layer is
  enormous. The quotient and the product with c_i add less than the eight that are left: the true norm of
  c_i·g_i is at most (1+η)·C, with the same η.
* *The clip factor* is a normal number of float32 in both norms, and so rounded by a relative 2⁻²⁴ only:
  n_i < 2⁶⁴, since its square is finite in float32, and a plan's C is at least 10⁻⁹, so c_i > 2⁻⁹⁴. Its
  product with one factor of a dense layer may be subnormal, and then is rounded up by as much as 2⁻¹⁵⁰, which
  the other factor multiplies. That one adds up to less than 2⁶⁴ too: its squares would not be finite, and in
  L1 a sum of magnitudes from :data:`LARGEST_SUM` on counts as infinite. For 2²⁸ coordinates that is 2⁻⁵⁸,
  which is below 2⁻²⁸·C, and is covered by what is spare below.
* *The sum.* In each coordinate, a microbatch's sum is off its true value by at most γ_m times the sum of its
  terms' magnitudes. That is a vector with the norm of Σ|c_i·g_i|: at most mγ_m(1+η)·C, in L1 and in L2 alike,
  by the triangle inequality. Products that underflow add up to 2⁻¹²⁶ each: for 2²⁸ coordinates of 64 records
  2⁻⁹² in L1, which is below 2⁻⁶²·C, and is covered by what is spare below.
* *One record more.* The lot is taken in uniformly random order. Couple the orders of a lot and of the lot
  with one more record: put the new record at a uniformly random place and move the one that stood
  there to the end. Both orders are uniform, and only two microbatches differ: so the sums differ by one
  contribution and the errors of two microbatches on either side, however large the lot is. The row of a
  record that cannot be read, or that is nobody's, stays blank: no other moves.
* *Float64.* Adding up B microbatches of L records is off by at most B·2⁻⁵²·L·(1+η)·C, in either norm by the
  same argument; lots are limited to B·L ≤ 2³³ (:data:`MAX_LOT_MICROBATCHES`), which makes both sides together
  less than 2⁻¹⁷·C, half of it spare.

Together, with C = 1 the sums of neighbouring lots differ by at most 1 + :func:`accumulation_slack`, in the
norm in which records are clipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.spec import ModelSpec
from dpagent.norm import Norm

NORM_RUN: Final = 1024
"""No float32 sum of squares or magnitudes is longer: longer vectors are measured piece by piece, and the
pieces added in float64."""

NOBODY: Final = -1
"""In place of a label: the row holds no record."""

UNDERFLOW: Final = 2.0**-125
"""The most that a float32 square or magnitude and its addition lose to underflow: twice the least normal
number."""

LARGEST_SUM: Final = 2.0**64
"""A sum of magnitudes from here on counts as infinite, as one of squares is."""

MICROBATCH_S: Final = 30.0
"""In which an engine computes a microbatch, or is too slow to be used."""
MAX_MICROBATCH: Final = 64
"""Records whose gradients may be summed in float32; the slack grows with the square of it."""

MAX_LOT_MICROBATCHES: Final = 1 << 33
"""Records of a lot times the number of its microbatches is at most this."""

_UNIT: Final = 2.0**-24
_FLOAT64_PART: Final = 2.0**-17


class ClippedSum(NamedTuple):
    """The clipped sum of a lot, or of a part of it, without noise. Private: never publish any of it.

    Attributes:
        total: Σ c_i·g_i, ``(d,)`` float64, in gradient units.
        within: for each clip norm, how many records had a norm of at most it, ``(groups,)`` int64.
        excluded: how many records were left out because they, or their gradients, are not finite.
    """

    total: NDArray[np.float64]
    within: NDArray[np.int64]
    excluded: int


class Engine(Protocol):
    """Computes one architecture on this machine.

    Attributes:
        spec: the architecture.
        microbatch: records computed together, in ``1..MAX_MICROBATCH``.
        views: augmented copies of each record, whose gradients are averaged before clipping.
        norm: in which records are clipped.
        processes: that compute microbatches side by side.
        elsewhere_s: processor time that other processes have spent for it, in seconds.
    """

    spec: ModelSpec
    microbatch: int
    views: int

    @property
    def norm(self) -> Norm: ...

    @property
    def processes(self) -> int: ...

    @property
    def elsewhere_s(self) -> float: ...

    def clipped_sum(
        self,
        weights: NDArray[np.float32],
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
        clip_norms: Sequence[float],
    ) -> ClippedSum:
        """Clip each record's gradient and add up.

        Args:
            weights: ``(d,)`` float32.
            inputs: ``(n, *input_shape)``, or ``(n, views, *input_shape)`` with several views;
                float32, or uint8 in 0..255, which is divided by 255. n may be 0.
            labels: ``(n,)`` integers in ``0..classes-1``, or :data:`NOBODY`: such a row is computed like any
                other, adds exact zeros, and counts nowhere.
            clip_norms: one for the whole gradient, or one for each layer with parameters, in the order of
                ``spec.parameter_shapes``; each a bound on the engine's norm.

        Raises:
            ParameterError: the weights or the clip norms do not fit the model.
            DataError: inputs or labels do not fit the model.
        """
        ...

    def is_batch_invariant(self, seed: int | None = None) -> bool:
        """Whether this machine computes a record alike at every place and beside any other.

        An experiment with drawn weights and records, of the system's entropy if ``seed`` is None; see
        :mod:`dpagent.learning.training.batch_invariance`.
        """
        ...


class SingleEngine(Engine, Protocol):
    """An engine in one process, which may compute a part of a batch."""

    def clipped_sum(
        self,
        weights: NDArray[np.float32],
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
        clip_norms: Sequence[float],
        microbatches: Iterable[int] | None = None,
    ) -> ClippedSum:
        """As :meth:`Engine.clipped_sum`, of some microbatches.

        Args:
            weights: as there.
            inputs: of all microbatches.
            labels: as well.
            clip_norms: as there.
            microbatches: numbers of those to compute, each taken when the one before is computed; None: all.
        """
        ...


def parts_of(records: int, microbatch: int, numbers: Iterable[int] | None = None) -> Iterator[slice]:
    """The records of each microbatch.

    Args:
        records: of the batch.
        microbatch: records of each but the last.
        numbers: of the microbatches; None: of all.

    >>> [*parts_of(10, 4)], [*parts_of(10, 4, [2])]
    ([slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)], [slice(8, 10, None)])
    """
    for number in range(-(-records // microbatch)) if numbers is None else numbers:
        yield slice(number * microbatch, min((number + 1) * microbatch, records))


def accumulation_slack(microbatch: int) -> float:
    """How much more than its clip norm one record can change a sum, relative to the norm, in L1 as in L2.

    Derived in the module's text; 1.05e-3 for the greatest, 64.

    >>> f"{accumulation_slack(32):.1e}"
    '3.1e-04'
    """
    norm = _gamma(NORM_RUN + 16)
    return norm + 4 * microbatch * _gamma(microbatch) * (1 + norm) + _FLOAT64_PART


def _gamma(terms: int) -> float:
    return terms * _UNIT / (1 - terms * _UNIT)


ACCUMULATION_SLACK: Final = accumulation_slack(MAX_MICROBATCH)
"""The slack that a fleet's noise covers, so that every board may choose its microbatch."""
