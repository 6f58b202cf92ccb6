"""The discretised Gaussian mechanism: constrain in integers, then add integer noise.

After Kairouz, Liu and Steinke (ICML 2021) and Canonne, Kamath and Steinke (NeurIPS 2020):
clip each record's gradient, bring it onto an integer grid, add up (:mod:`dpagent.privacy.mechanisms.grid`),
add discrete Gaussian noise (:mod:`dpagent.privacy.noise.discrete_gaussian`). The sensitivity is that of
the integer vectors, rounding included. The cost of a round is derived in
:mod:`dpagent.privacy.accounting.rdp`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count, require_positive
from dpagent.norm import Norm
from dpagent.privacy.events import SIGMA_RANGE, Event, GaussianEvent, poisson_sampled
from dpagent.privacy.mechanisms.grid import DEFAULT_RESOLUTION, Grid
from dpagent.privacy.mechanisms.mechanism import CalibratedMechanism, Mechanism, Parameter
from dpagent.privacy.noise.discrete_gaussian import (
    MAX_SIGMA,
    MIN_SIGMA,
    DiscreteGaussianSampler,
    statistical_distance,
)
from dpagent.privacy.noise.entropy import Entropy
from dpagent.privacy.statement import Adjacency, Trust, Unit

if TYPE_CHECKING:
    from dpagent.privacy.calibration import EventFamily
    from dpagent.privacy.mechanisms.honest_norms import SubGaussianLaw


def finest_resolution(noise_multiplier: float) -> int:
    """The finest grid on which the noise can still be drawn: steps to a clip norm, a power of two up to 2²⁰.

    A finer grid makes the slack of rounding smaller: at d = 26,010, where sums are rounded, 0.25 % of
    the sensitivity at 2¹⁶ steps and 0.015 % at 2²⁰.

    Args:
        noise_multiplier: the greatest of a job, above 0.

    Raises:
        ParameterError: the noise is too large for any grid.
    """
    steps = MAX_SIGMA / (2 * require_positive("noise multiplier", noise_multiplier))
    if steps < 1:
        raise ParameterError(f"noise multiplier is {noise_multiplier!r}; expected at most {MAX_SIGMA / 2:g}.")
    return int(1 << min(math.floor(math.log2(steps)), 20))


@dataclass(frozen=True, slots=True)
class DiscretisedGaussian(CalibratedMechanism):
    """The mechanism of one round; the record states all that an accountant or auditor needs. Public.

    Attributes:
        clip_norm: C, the L2 norm a record's gradient is scaled down to, in [1e-9, 1e9].
        noise_multiplier: σ, the noise's parameter over the L2 sensitivity, in [1e-6, 1e12].
        sampling_rate: q, the probability with which each record enters a lot, in (0, 1].
        dimension: d, number of coordinates of the sum.
        steps: noisy local steps in one round, each with a fresh lot and fresh noise.
        resolution: grid units to one clip norm, in [1, 2²⁰].
        accumulation_slack: None where each record is rounded to the grid (:meth:`constrain`). Where their sum
            is (:meth:`quantize`), the most that summing in floating point adds to a record's influence,
            relative to the clip norm, in [0, 0.01].

    Raises:
        ParameterError: an attribute is out of range, or the noise is too small or too large to
            be drawn (its parameter has to lie within the sampler's range, in grid units).
    """

    name: ClassVar[str] = "discrete-gaussian"
    unit: ClassVar[Unit] = Unit.RECORD
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE
    trust: ClassVar[Trust] = Trust.NONE
    norm: ClassVar[Norm] = Norm.L2
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("resolution", 256, 1_048_576, "grid units to one clip norm", whole=True),
    )

    clip_norm: float
    noise_multiplier: float
    sampling_rate: float
    dimension: int
    steps: int = 1
    resolution: int = DEFAULT_RESOLUTION
    accumulation_slack: float | None = None

    def __post_init__(self) -> None:
        require_between("noise multiplier", self.noise_multiplier, *SIGMA_RANGE)
        require_between("sampling rate", self.sampling_rate, 0.0, 1.0, low_open=True)
        require_count("steps", self.steps)
        if not MIN_SIGMA <= self.sigma_units <= MAX_SIGMA:
            low, high = MIN_SIGMA / self.sensitivity_units, MAX_SIGMA / self.sensitivity_units
            raise ParameterError(
                f"noise multiplier is {self.noise_multiplier!r}; with a sensitivity of "
                f"{self.sensitivity_units} grid units, noise can be drawn for {low:.3g} to {high:.3g}. "
                "Change the epsilon target, or take another resolution."
            )

    @property
    def grid(self) -> Grid:
        """How gradients become whole numbers."""
        return Grid(Norm.L2, self.clip_norm, self.dimension, self.resolution)

    @property
    def sensitivity_units(self) -> int:
        """Bound on one record's change of the integer sum, in L2, in grid units."""
        if self.accumulation_slack is None:
            return self.grid.sensitivity_units
        return self.grid.sum_sensitivity_units(self.accumulation_slack)

    @property
    def sigma_units(self) -> float:
        """The noise's parameter in grid units: σ times the sensitivity, rounded up."""
        return math.nextafter(self.noise_multiplier * self.sensitivity_units, math.inf)

    @property
    def deviation_units(self) -> float:
        """Bound on the standard deviation of one step's noise, in grid units."""
        return self.sigma_units

    @property
    def noise_law(self) -> SubGaussianLaw | None:
        """That of N_ℤ(0, σ²), for σ of at least one grid unit.

        E e^(tN) = e^(t²σ²/2)·Σe^(−(k−tσ²)²/2σ²)/Σe^(−k²/2σ²), and a sum over shifted points is never the
        larger (Canonne, Kamath, Steinke, NeurIPS 2020). By Poisson summation the moments are those of
        N(0, σ²) but for terms in y = 2πσj, j ≥ 1: E N² ≥ σ²·(1 − 2Σy²e^(−y²/2)) and
        E N⁴ ≤ σ⁴·(3 + 2Σy⁴e^(−y²/2)). At σ = 1 these are below 10⁻⁶ and 10⁻⁵, and they fall with σ.

        Rounding to the nearest multiple of an odd step sums e^(t·round) over residues: by Poisson summation,
        that is the moment generating function at t/step of N plus uniform noise on a step, and terms at
        t/step + 2πij/step, j ≥ 1, each of which has the factor e^(−2π²j²σ²/step²). For a step of σ/2 or less
        that is below 10⁻³⁴.
        """
        from dpagent.privacy.mechanisms.honest_norms import SubGaussianLaw  # for a coordinator alone

        if self.sigma_units < 1:
            return None
        square = self.sigma_units**2
        return SubGaussianLaw(square, square * (1 - 1e-6), square**2 * (3 + 1e-5))

    @property
    def event(self) -> Event:
        """The charge for one round."""
        return poisson_sampled(GaussianEvent(self.noise_multiplier), self.sampling_rate, self.steps)

    @property
    def statistical_distance(self) -> float:
        """Total variation distance of one round's noise from ideal noise; η of ``docs/privacy.md``.

        A mechanism within η of an (ε, δ)-DP one is (ε, δ + (1 + e^ε)·η)-DP.
        """
        return self.dimension * self.steps * statistical_distance(self.sigma_units)

    def round_cost(self, delta: float) -> tuple[float, float]:
        """(ε, δ) of one round with ideal noise: tight where it is fine enough, else by Rényi divergence."""
        from dpagent.privacy.accounting.gaussian_loss import MIN_SIGMA_UNITS  # which training never loads
        from dpagent.privacy.accounting.pld import PldAccountant
        from dpagent.privacy.accounting.rdp import RdpAccountant

        accountant = PldAccountant() if self.sigma_units >= MIN_SIGMA_UNITS else RdpAccountant()
        return accountant.epsilon_after([self.event], delta), delta

    def require_noise_as_priced(self, rounds: int, job_epsilon: float, delta: float) -> None:
        """See :meth:`Mechanism.require_noise_as_priced`; the price also takes the grid to be fine.

        Raises:
            ParameterError: the grid is too coarse for the noise, or the sampler too far from exact.
        """
        from dpagent.privacy.accounting.gaussian_loss import MIN_SIGMA_UNITS

        if self.sigma_units < MIN_SIGMA_UNITS:
            raise ParameterError(
                f"noise is {self.sigma_units:.4g} grid units; its price holds from {MIN_SIGMA_UNITS:,} on. "
                "Plan a finer resolution or more noise."
            )
        Mechanism.require_noise_as_priced(self, rounds, job_epsilon, delta)

    def quantize(self, total: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round a clipped sum to the grid; see :meth:`Grid.quantize_sum`.

        Raises:
            ParameterError: ``total`` does not fit, or the noise was not made for a sum.
        """
        return self.grid.quantize_sum(total, self.accumulation_slack)

    def sampler(self, *, entropy: Entropy = os.urandom) -> DiscreteGaussianSampler:
        """A sampler of this mechanism's noise, for instance to draw ahead of need."""
        return DiscreteGaussianSampler(self.sigma_units, entropy=entropy)

    @classmethod
    def family(cls, sampling_rate: float, steps: int = 1) -> EventFamily:
        """See :func:`dpagent.privacy.calibration.gaussian_family`."""
        from dpagent.privacy.calibration import gaussian_family

        return gaussian_family(sampling_rate, steps)

    @classmethod
    def chosen_parameters(cls, noise_multipliers: Sequence[float]) -> dict[str, float]:
        """The finest grid on which the greatest noise of the job can still be drawn."""
        return {"resolution": finest_resolution(max(noise_multipliers))}
