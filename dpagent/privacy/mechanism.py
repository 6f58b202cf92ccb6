"""The discretised Gaussian mechanism: constrain in integers, then add integer noise.

After Kairouz, Liu and Steinke (ICML 2021) and Canonne, Kamath and Steinke (NeurIPS 2020):
clip each record's gradient, bring it onto an integer grid, add up, add discrete Gaussian noise.
Departures:

- The grid is fine, ``fine_steps`` to one clip norm, and rounding is to nearest. The norm it can
  add is at most √d/2 steps and is *paid for* in the sensitivity (0.13 % at d = 26,010 and 65,536
  steps), in place of randomised rounding until the norm is small, whose running time depends
  on the data. Fewer bits for the wire come afterwards, see :mod:`dpagent.privacy.wire`.
- The norm of every record's *integer* vector is checked in exact arithmetic. The sum is an
  integer sum. So the sensitivity is a theorem about integers: adding or removing a record
  changes the sum by that record's vector, whose norm is at most ``sensitivity_steps``, and no
  floating-point slack (Casacuberta, Shoemate, Vadhan, Wagaman, CCS 2022) remains.

That rests on one condition outside this module: **a record's float32 gradient must not depend,
in any bit, on the other records of its microbatch.** The learning engines guarantee it and test
it. Within this module each row is treated by a function of that row alone.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count, require_positive
from dpagent.privacy.discrete_gaussian import (
    MAX_SIGMA,
    MIN_SIGMA,
    DiscreteGaussianSampler,
    Entropy,
    statistical_distance,
)
from dpagent.privacy.events import PrivacyLossEvent

#: Fine-grid steps to one clip norm.
FINE_STEPS: Final = 65_536

_MAX_FINE_STEPS: Final = 2**20
_MAX_DIMENSION: Final = 2**28


class Constrained(NamedTuple):
    """What a microbatch contributes.

    Attributes:
        total: sum of the records' integer vectors, shape (d,), int64, in fine-grid steps.
        excluded: records left out because their gradient is not finite. Private: never publish.
    """

    total: NDArray[np.int64]
    excluded: int


@dataclass(frozen=True, slots=True)
class DiscretisedGaussian:
    """One release's mechanism; the record states all an accountant or auditor needs. Public.

    Attributes:
        clip_norm: C, the L2 norm a record's gradient is scaled down to, in [1e-9, 1e9].
        noise_multiplier: σ, the noise's parameter over the L2 sensitivity.
        sampling_rate: q, the probability with which each record enters a lot, in (0, 1].
        dimension: d, number of coordinates released.
        steps: noisy local steps in one release, each with a fresh lot and fresh noise.
        fine_steps: grid steps to one clip norm, in [1, 2²⁰].

    Raises:
        ParameterError: an attribute is out of range, or the noise is too small or too large to
            be drawn (its parameter is to lie in [2⁻⁶, 2²⁴] fine-grid steps).
    """

    clip_norm: float
    noise_multiplier: float
    sampling_rate: float
    dimension: int
    steps: int = 1
    fine_steps: int = FINE_STEPS

    def __post_init__(self) -> None:
        require_between("clip norm", self.clip_norm, 1e-9, 1e9)
        require_positive("noise multiplier", self.noise_multiplier)
        require_between("sampling rate", self.sampling_rate, 0.0, 1.0, low_open=True)
        require_count("dimension", self.dimension, maximum=_MAX_DIMENSION)
        require_count("steps", self.steps)
        require_count("fine steps", self.fine_steps, maximum=_MAX_FINE_STEPS)
        if not MIN_SIGMA <= self.sigma_steps <= MAX_SIGMA:
            low, high = MIN_SIGMA / self.sensitivity_steps, MAX_SIGMA / self.sensitivity_steps
            raise ParameterError(
                f"noise multiplier is {self.noise_multiplier!r}; with a sensitivity of "
                f"{self.sensitivity_steps} grid steps, noise can be drawn for {low:.3g} to {high:.3g}. "
                "Change the epsilon target, or take other fine steps."
            )

    @property
    def unit(self) -> str:
        """Whose presence is hidden."""
        return "record"

    @property
    def adjacency(self) -> str:
        """Which data sets are neighbours."""
        return "add-or-remove-one"

    @property
    def trust(self) -> str:
        """Who has to be trusted for the guarantee to hold."""
        return "none: the device adds all the noise before anything leaves it"

    @property
    def granularity(self) -> float:
        """One fine-grid step in gradient units."""
        return self.clip_norm / self.fine_steps

    @property
    def sensitivity_steps(self) -> int:
        """Bound on the L2 norm of one record's integer vector, in fine-grid steps.

        The clip norm, what rounding to nearest can add (√d/2), and one step so that errors of
        the float64 scaling never make a record an offender.
        """
        return self.fine_steps + _ceil_half_sqrt(self.dimension) + 1

    @property
    def sigma_steps(self) -> float:
        """The noise's parameter in fine-grid steps: σ times the sensitivity, rounded up."""
        return math.nextafter(self.noise_multiplier * self.sensitivity_steps, math.inf)

    @property
    def event(self) -> PrivacyLossEvent:
        """The charge for one release."""
        return PrivacyLossEvent(self.noise_multiplier, self.sampling_rate, self.steps)

    @property
    def statistical_distance(self) -> float:
        """Total variation distance of one release from ideal noise; η of ``docs/privacy.md``.

        A mechanism within η of an (ε, δ)-DP one is (ε, δ + (1 + e^ε)·η)-DP.
        """
        return self.dimension * self.steps * statistical_distance(self.sigma_steps)

    def constrain(self, gradients: NDArray[np.float32]) -> Constrained:
        """Clip, round and add up the records of a microbatch.

        Each row is scaled by min(1, C/‖g‖)·fine_steps/C and rounded to nearest; a row with an
        infinite or undefined entry counts as zeros. Every row's contribution has an L2 norm of
        at most ``sensitivity_steps``, whatever the row holds.

        Args:
            gradients: per-example gradients, shape (m, d), float32; m may be 0.

        Raises:
            ParameterError: ``gradients`` has another shape or type.
        """
        shape = gradients.shape
        if len(shape) != 2 or shape[1] != self.dimension or gradients.dtype != np.float32:
            raise ParameterError(
                f"gradients have shape {shape} and type {gradients.dtype}; "
                f"expected (records, {self.dimension}) float32 numbers."
            )
        total = np.zeros(self.dimension)
        vector, scratch = np.empty(self.dimension), np.empty(self.dimension)
        excluded = 0
        for gradient in gradients:
            np.copyto(vector, gradient)
            if self._to_grid(vector, scratch):
                total += vector  # exact: whole numbers, and sums far below 2⁵³
            else:
                excluded += 1
        return Constrained(total.astype(np.int64), excluded)

    def perturb(self, total: NDArray[np.int64], *, entropy: Entropy = os.urandom) -> NDArray[np.int64]:
        """Add one discrete Gaussian vector with parameter ``sigma_steps``.

        Args:
            total: exact sum over one lot, shape (d,), in fine-grid steps.
            entropy: gives n uniform bytes for an argument n; to be replaced in tests only.

        Raises:
            ParameterError: ``total`` is not an integer vector of d entries.
        """
        if total.shape != (self.dimension,) or total.dtype.kind != "i":
            raise ParameterError(
                f"total has shape {total.shape} and type {total.dtype}; "
                f"expected ({self.dimension},) integers."
            )
        return total + DiscreteGaussianSampler(self.sigma_steps, entropy=entropy).sample(self.dimension)

    def _to_grid(self, vector: NDArray[np.float64], scratch: NDArray[np.float64]) -> bool:
        """Replace one gradient by its grid vector; False, and undefined, if it is not finite."""
        np.square(vector, out=scratch)
        # Squares of float32 values neither overflow nor vanish in float64. Numpy's own sum, not
        # BLAS, here and below: its order of additions depends on nothing but d, and no threads.
        norm = math.sqrt(scratch.sum())
        if not math.isfinite(norm):
            return False
        vector *= self.fine_steps / max(self.clip_norm, norm)
        np.rint(vector, out=vector)
        shrink_to_norm(vector, scratch, self.sensitivity_steps)
        return True


def shrink_to_norm(vector: NDArray[np.float64], scratch: NDArray[np.float64], bound: int) -> None:
    """Shorten a vector of whole numbers, in place, until its L2 norm is at most ``bound``.

    Whole numbers below 2²⁶ whose squares add up to less than 2⁵³ are exact in float64, in any
    order of additions; so is the comparison. Scaling by less than 1 and truncating towards zero
    lowers every non-zero entry, so the loop ends. It is a safeguard: a vector that was scaled to
    ``bound`` less the rounding slack does not enter it.
    """
    while (square := float(np.square(vector, out=scratch).sum())) > bound**2:
        vector *= min(bound / math.sqrt(square), 1 - 2.0**-30)
        np.trunc(vector, out=vector)


def _ceil_half_sqrt(dimension: int) -> int:
    """⌈√d/2⌉, exactly: the least n with (2n)² ≥ d."""
    return (math.isqrt(dimension - 1) + 2) // 2
