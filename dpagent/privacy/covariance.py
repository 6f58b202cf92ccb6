"""Second moments of a fleet's records, for its principal directions (DP-PCA).

After Dwork, Talwar, Thakurta and Zhang, "Analyze Gauss: Optimal Bounds for Privacy-Preserving Principal
Component Analysis" (STOC 2014): publish AᵀA with Gaussian noise; its leading eigenvectors are
post-processing. A record x, scaled down to an L2 norm of at most B, adds xxᵀ, whose Frobenius norm is
‖x‖² ≤ B². The matrix is symmetric, so only its upper triangle is summed, with the off-diagonal entries times
√2: the vector then has the Frobenius norm of the matrix, so its L2 sensitivity is B², and the noise of an
entry is that of the paper.

The second moments are about 0, not about the mean, which would need another noisy sum. The sum is
computed in float64; for L records its error is at most L·γ·B² with γ = L·2⁻⁵³/(1 − L·2⁻⁵³) for each of
two neighbouring lots, below :data:`FLOAT64_SLACK` for lots up to :data:`MAX_LOT`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.blank_rows import blank_all_but
from dpagent.errors import ParameterError, require_between, require_count
from dpagent.privacy.ranges import moments_dimension

MAX_LOT: Final = 1 << 20
FLOAT64_SLACK: Final = 2.0**-11
"""Accumulation slack that the mechanism must allow for, relative to B²."""

_MAX_VALUES: Final = 4096
_ROOT2: Final = math.sqrt(2.0)


@dataclass(frozen=True, slots=True)
class SecondMoments:
    """The second moments of records with ``values`` numbers each. Public.

    Attributes:
        values: D, numbers in a record, in [1, 4096].
        record_norm: B, the L2 norm a record is scaled down to, in [1e-4, 1e4].

    Raises:
        ParameterError: an attribute is out of its range.
    """

    values: int
    record_norm: float

    def __post_init__(self) -> None:
        require_count("values", self.values, maximum=_MAX_VALUES)
        require_between("record norm", self.record_norm, 1e-4, 1e4)

    @property
    def dimension(self) -> int:
        """Coordinates of the sum: D(D+1)/2."""
        return moments_dimension(self.values)

    @property
    def radius(self) -> float:
        """B²: bound on the L2 norm of one record's contribution; the mechanism's clip norm."""
        return self.record_norm**2

    def total(self, records: NDArray[np.floating]) -> NDArray[np.float64]:
        """Σ xxᵀ of clipped records as a vector, without noise. Private.

        A record with an infinite or undefined value adds nothing.

        Args:
            records: ``(n, values)``; n may be 0, and at most :data:`MAX_LOT` in a lot.

        Returns:
            ``(dimension,)`` float64.
        """
        if records.ndim != 2 or records.shape[1] != self.values:
            raise ParameterError(f"records have shape {records.shape}; expected (n, {self.values}).")
        with np.errstate(all="ignore"):  # A record may hold anything, also what warns where it is converted.
            rows = records.astype(np.float64)
        finite = np.count_nonzero(np.isfinite(rows), axis=1) == self.values  # `all` would end at the first.
        blank_all_but(finite, rows)
        norms = np.sqrt(np.square(rows).sum(axis=1))
        rows *= (self.record_norm / np.maximum(norms, self.record_norm))[:, np.newaxis]
        moments = rows.T @ rows
        moments *= _ROOT2
        moments[np.diag_indices(self.values)] /= _ROOT2
        return np.asarray(moments[np.triu_indices(self.values)])

    def matrix(self, noisy_sum: NDArray[np.float64]) -> NDArray[np.float64]:
        """The symmetric matrix ``(values, values)`` of a noisy sum ``(dimension,)``."""
        if noisy_sum.shape != (self.dimension,):
            raise ParameterError(f"noisy_sum has shape {noisy_sum.shape}; expected ({self.dimension},).")
        moments = np.zeros((self.values, self.values))
        moments[np.triu_indices(self.values)] = noisy_sum / _ROOT2
        moments += moments.T
        moments[np.diag_indices(self.values)] /= _ROOT2
        return moments


def leading_directions(moments: NDArray[np.float64], components: int) -> NDArray[np.float32]:
    """The eigenvectors of the largest eigenvalues, ``(values, components)``, the largest first.

    Of the two signs of a direction, that with the larger positive entry is taken, so that the
    result does not depend on the library.
    """
    require_count("components", components, maximum=len(moments))
    _, vectors = np.linalg.eigh(moments)
    leading = vectors[:, ::-1][:, :components]
    largest = np.abs(leading).argmax(axis=0)
    signs = np.sign(leading[largest, np.arange(components)])
    return np.ascontiguousarray(leading * signs, np.float32)
