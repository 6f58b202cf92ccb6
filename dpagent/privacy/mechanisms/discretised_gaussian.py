"""The discretised Gaussian mechanism: constrain in integers, then add integer noise.

After Kairouz, Liu and Steinke (ICML 2021) and Canonne, Kamath and Steinke (NeurIPS 2020):
clip each record's gradient, bring it onto an integer grid, add up (:mod:`dpagent.privacy.mechanisms.grid`),
add discrete Gaussian noise (:mod:`dpagent.privacy.noise.discrete_gaussian`). The sensitivity is that of
the integer vectors, rounding included. What a release costs is derived in
:mod:`dpagent.privacy.accounting.rdp`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count, require_positive
from dpagent.privacy.accounting.gaussian_loss import MIN_SIGMA_STEPS
from dpagent.privacy.accounting.imperfect_noise import imperfect_delta
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.events import SIGMA_RANGE, Event, GaussianEvent, poisson_sampled
from dpagent.privacy.mechanisms.grid import FINE_STEPS, Constrained, Grid, Norm
from dpagent.privacy.noise.discrete_gaussian import (
    MAX_SIGMA,
    MIN_SIGMA,
    DiscreteGaussianSampler,
    statistical_distance,
)
from dpagent.privacy.noise.entropy import Entropy, Sampler
from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit

#: What the guarantee of a job rests on besides the code.
JOB_ASSUMPTIONS: Final = (
    "The noise multipliers and the sampling rate of a job are fixed before its first round.",
    "The operating system's random numbers are uniform and stay secret.",
)

#: Share of a job's δ that its ε does without, to cover noise that is not drawn exactly (its statistical
#: distance) and not continuous (the lemma in :mod:`dpagent.privacy.accounting.gaussian_loss`).
NOISE_SHARE: Final = 1e-6


def release_epsilon(event: Event, sigma_steps: float, delta: float) -> float:
    """ε of one release with discrete Gaussian noise of parameter ``sigma_steps``, at ``delta`` in (0, 1).

    Tight where the noise is fine enough for that (see :mod:`dpagent.privacy.accounting.gaussian_loss`), and
    by Rényi divergence where it is not.
    """
    if sigma_steps >= MIN_SIGMA_STEPS:
        return PldAccountant().epsilon_after([event], delta)
    return RdpAccountant().epsilon_after([event], delta)


def fine_steps_for(noise_multiplier: float) -> int:
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
class DiscretisedGaussian:
    """One release's mechanism; the record states all an accountant or auditor needs. Public.

    Attributes:
        clip_norm: C, the L2 norm a record's gradient is scaled down to, in [1e-9, 1e9].
        noise_multiplier: σ, the noise's parameter over the L2 sensitivity, in [1e-6, 1e12].
        sampling_rate: q, the probability with which each record enters a lot, in (0, 1].
        dimension: d, number of coordinates released.
        steps: noisy local steps in one release, each with a fresh lot and fresh noise.
        fine_steps: grid steps to one clip norm, in [1, 2²⁰].
        accumulation_slack: None where each record is rounded to the grid (:meth:`constrain`). Where their sum
            is (:meth:`snap`), what summing in floating point can add to a record's influence, relative to
            the clip norm, in [0, 0.01].

    Raises:
        ParameterError: an attribute is out of range, or the noise is too small or too large to
            be drawn (its parameter has to lie within the sampler's range, in fine-grid steps).
    """

    name: ClassVar[str] = "discrete-gaussian"
    unit: ClassVar[Unit] = Unit.RECORD
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE
    trust: ClassVar[Trust] = Trust.NONE
    norm: ClassVar[Norm] = Norm.L2

    clip_norm: float
    noise_multiplier: float
    sampling_rate: float
    dimension: int
    steps: int = 1
    fine_steps: int = FINE_STEPS
    accumulation_slack: float | None = None

    def __post_init__(self) -> None:
        _ = self.sensitivity_steps
        require_between("noise multiplier", self.noise_multiplier, *SIGMA_RANGE)
        require_between("sampling rate", self.sampling_rate, 0.0, 1.0, low_open=True)
        require_count("steps", self.steps)
        if not MIN_SIGMA <= self.sigma_steps <= MAX_SIGMA:
            low, high = MIN_SIGMA / self.sensitivity_steps, MAX_SIGMA / self.sensitivity_steps
            raise ParameterError(
                f"noise multiplier is {self.noise_multiplier!r}; with a sensitivity of "
                f"{self.sensitivity_steps} grid steps, noise can be drawn for {low:.3g} to {high:.3g}. "
                "Change the epsilon target, or take other fine steps."
            )

    @property
    def grid(self) -> Grid:
        """How gradients become whole numbers."""
        return Grid(Norm.L2, self.clip_norm, self.dimension, self.fine_steps)

    @property
    def granularity(self) -> float:
        """One fine-grid step in gradient units."""
        return self.grid.granularity

    @property
    def sensitivity_steps(self) -> int:
        """Bound on what one record changes in the integer sum, in L2, in fine-grid steps."""
        if self.accumulation_slack is None:
            return self.grid.sensitivity_steps
        return self.grid.snapped_sensitivity_steps(self.accumulation_slack)

    @property
    def sigma_steps(self) -> float:
        """The noise's parameter in fine-grid steps: σ times the sensitivity, rounded up."""
        return math.nextafter(self.noise_multiplier * self.sensitivity_steps, math.inf)

    @property
    def deviation_steps(self) -> float:
        """Bound on the standard deviation of one step's noise, in fine-grid steps."""
        return self.sigma_steps

    @property
    def reach_steps(self) -> float:
        """The noise of all steps exceeds this with probability below 1e-14 a coordinate."""
        return 8 * self.sigma_steps * math.sqrt(self.steps)

    @property
    def event(self) -> Event:
        """The charge for one release."""
        return poisson_sampled(GaussianEvent(self.noise_multiplier), self.sampling_rate, self.steps)

    @property
    def statistical_distance(self) -> float:
        """Total variation distance of one release from ideal noise; η of ``docs/privacy.md``.

        A mechanism within η of an (ε, δ)-DP one is (ε, δ + (1 + e^ε)·η)-DP.
        """
        return self.dimension * self.steps * statistical_distance(self.sigma_steps)

    def statement(self, delta: float) -> BudgetStatement:
        """What one release guarantees, at ``delta`` in (0, 1) and what imperfect noise adds to it."""
        epsilon = release_epsilon(self.event, self.sigma_steps, delta)
        return BudgetStatement(
            self.unit,
            self.adjacency,
            self.trust,
            self.name,
            epsilon,
            imperfect_delta(epsilon, delta, self.statistical_distance),
        )

    @classmethod
    def job_statement(cls, epsilon: float, delta: float, *assumptions: str) -> BudgetStatement:
        """What a job of such releases guarantees, or several, whose charges come to (ε, δ).

        Args:
            epsilon: as accounted for, at least 0.
            delta: likewise, with what is set aside for imperfect noise, in [0, 1].
            assumptions: besides those that all jobs rest on.
        """
        return BudgetStatement(
            cls.unit, cls.adjacency, cls.trust, cls.name, epsilon, delta, (*JOB_ASSUMPTIONS, *assumptions)
        )

    def constrain(self, gradients: NDArray[np.float32]) -> Constrained:
        """Clip, round and add up the records of a microbatch; see :meth:`Grid.constrain`."""
        return self.grid.constrain(gradients)

    def snap(self, total: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round a sum of clipped gradients to the grid; see :meth:`Grid.snap`.

        Raises:
            ParameterError: ``total`` does not fit, or the noise was not made for a sum.
        """
        if self.accumulation_slack is None:
            raise ParameterError(
                "accumulation slack is None; expected a number, so that sums may be rounded."
            )
        return self.grid.snap(total)

    def sampler(self, *, entropy: Entropy = os.urandom) -> DiscreteGaussianSampler:
        """What draws this mechanism's noise, for instance ahead of need."""
        return DiscreteGaussianSampler(self.sigma_steps, entropy=entropy)

    def perturb(
        self, total: NDArray[np.int64], *, entropy: Entropy = os.urandom, noise: Sampler | None = None
    ) -> NDArray[np.int64]:
        """Add one discrete Gaussian vector with parameter ``sigma_steps``.

        Args:
            total: exact sum over one lot, shape (d,), in fine-grid steps.
            entropy: gives n uniform bytes for an argument n; to be replaced in tests only.
            noise: a pool over :meth:`sampler`, filled ahead of need; ``entropy`` is then unused.

        Raises:
            ParameterError: ``total`` is not an integer vector of d entries.
        """
        self.grid.require_total(total)
        return total + (noise or self.sampler(entropy=entropy)).sample(self.dimension)


def require_noise_as_priced(
    mechanism: DiscretisedGaussian, rounds: int, job_epsilon: float, delta: float
) -> None:
    """See that noise, discrete and drawn as it is, is what a job's price takes it for.

    Args:
        mechanism: Of one of the job's rounds.
        rounds: Of the job.
        job_epsilon: Reserved for it.
        delta: Of the job.

    Raises:
        ParameterError: The grid is too coarse for the noise, or the sampler too far from exact.
    """
    if mechanism.sigma_steps < MIN_SIGMA_STEPS:
        raise ParameterError(
            f"noise is {mechanism.sigma_steps:.4g} grid steps; its price holds from {MIN_SIGMA_STEPS:,} on. "
            "Plan finer steps or more noise."
        )
    excess = imperfect_delta(job_epsilon, 0.0, rounds * mechanism.statistical_distance)
    if not excess <= NOISE_SHARE * delta:
        raise ParameterError(
            f"noise as it is drawn would add {excess:.3g} to δ; set aside for that is "
            f"{NOISE_SHARE * delta:.3g}. Plan a smaller ε or a greater δ."
        )
