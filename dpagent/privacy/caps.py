"""The ``clamp`` noise cap: bound a noisy gradient by the gradient of an L2 penalty.

Like the noise cap of Luo, Xu and Guan (2022), it prevents excessive noise on a
coordinate. Their Algorithm 1 replaces large noise by γ·w, which every observer of the model
knows, and so publishes the gradient itself: it is not differentially private. This cap bounds the *noisy*
mean gradient: each coordinate by max(γ·|w_j|, floor), and the vector by
the ball that contains every mean of clipped gradients. It uses only public values and the noisy
gradient, so it is post-processing and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_positive


@dataclass(frozen=True, slots=True)
class CapReport:
    """The effect of a cap; public, since it is a function of public values.

    Attributes:
        coordinates_clamped: number of coordinates beyond their bound.
        norm_before: L2 norm of the noisy mean, in gradient units.
        norm_after: L2 norm of the capped gradient.
    """

    coordinates_clamped: int
    norm_before: float
    norm_after: float


@dataclass(frozen=True, slots=True)
class ClampCap:
    """Bounds each coordinate by max(γ·|w_j|, floor), then the vector by a ball.

    Attributes:
        regularisation: γ, above 0: the derivative of the L2 penalty is γ·w.
        floor: least bound, in gradient units, above 0: lets weights at zero move.

    Raises:
        ParameterError: an attribute is not above 0.
    """

    regularisation: float
    floor: float

    def __post_init__(self) -> None:
        require_positive("regularisation", self.regularisation)
        require_positive("floor", self.floor)

    def apply(
        self, noisy_mean: NDArray[np.float64], weights: NDArray[np.float32], radius: float
    ) -> tuple[NDArray[np.float64], CapReport]:
        """The capped gradient, shape (d,), float64, and a report of the changes.

        Args:
            noisy_mean: the fleet's mean gradient, with noise, shape (d,).
            weights: public global weights, shape (d,).
            radius: bound on the L2 norm of a mean of clipped gradients, above 0.

        Raises:
            ParameterError: shapes differ, an entry is not finite, or the radius is not above 0.
        """
        require_positive("radius", radius)
        _require_finite_vector("noisy mean", noisy_mean)
        _require_finite_vector("weights", weights)
        if noisy_mean.shape != weights.shape:
            raise ParameterError(
                f"noisy mean has {noisy_mean.size} entries and weights have {weights.size}; "
                "expected one for one."
            )
        bound = np.maximum(self.regularisation * np.abs(weights.astype(np.float64)), self.floor)
        capped = np.clip(noisy_mean, -bound, bound).astype(np.float64)
        norm = float(np.linalg.norm(capped))
        if norm > radius:
            capped *= radius / norm
        return capped, CapReport(
            coordinates_clamped=int(np.count_nonzero(np.abs(noisy_mean) > bound)),
            norm_before=float(np.linalg.norm(noisy_mean)),
            norm_after=float(np.linalg.norm(capped)),
        )


def _require_finite_vector(name: str, values: NDArray[np.floating[Any]]) -> None:
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ParameterError(f"{name} has shape {values.shape}; expected a vector of finite numbers.")
