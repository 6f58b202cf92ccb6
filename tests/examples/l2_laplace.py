"""A worked example of a mechanism: Laplace noise on sums that are clipped in L2.

A record changes the integer sum by a vector s with ‖s‖₂ ≤ Δ₂, so ‖s‖₁ ≤ √d·Δ₂, and independent Laplace noise
of scale λ = √d·Δ₂/ε on each coordinate is ε-DP (Dwork, McSherry, Nissim, Smith, TCC 2006). That is sound,
and more noise than clipping in L1 needs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpagent.privacy.accounting.approximate import amplified_epsilon, unamplified_epsilon
from dpagent.privacy.calibration import BudgetPlan
from dpagent.privacy.events import ApproximateEvent
from dpagent.privacy.mechanisms.discretised_laplace import laplace_reach, noise_scale
from dpagent.privacy.mechanisms.grid import Grid, Norm
from dpagent.privacy.mechanisms.mechanism import Parameter, PlannedMechanism
from dpagent.privacy.noise.discrete_laplace import DiscreteLaplaceSampler, statistical_distance
from dpagent.privacy.noise.entropy import Entropy
from dpagent.privacy.schedules import Schedule
from dpagent.privacy.statement import Adjacency, Trust, Unit


@dataclass(frozen=True, slots=True)
class L2Laplace(PlannedMechanism):
    """Laplace noise for an L2 clip norm; fields as of ``Query``, and the two parameters."""

    name: ClassVar[str] = "l2-laplace"
    unit: ClassVar[Unit] = Unit.RECORD
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE
    trust: ClassVar[Trust] = Trust.NONE
    norm: ClassVar[Norm] = Norm.L2
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("epsilon", 1e-3, 100.0, "ε of one step on a lot that is known"),
        Parameter("resolution", 256, 1_048_576, "grid units to one clip norm", whole=True),
    )

    clip_norm: float
    accumulation_slack: float
    dimension: int
    sampling_rate: float
    steps: int
    epsilon: float
    resolution: int

    @classmethod
    def calibrate(
        cls,
        schedule: Schedule,
        *,
        epsilon: float,
        delta: float,
        rounds: int,
        sampling_rate: float,
        steps: int = 1,
    ) -> BudgetPlan:
        """Each round's share of ε, by basic composition; δ is left for imperfect noise."""
        shares = [epsilon * share * (1 - 1e-9) for share in schedule.shares(rounds)]
        levels = [unamplified_epsilon(share / steps, sampling_rate) for share in shares]
        spent = [sum(shares[: number + 1]) for number in range(rounds)]
        return BudgetPlan(schedule, tuple(levels), tuple(spent), epsilon, delta, sampling_rate, steps)

    @classmethod
    def chosen_parameters(cls, noise_levels: Sequence[float]) -> dict[str, float]:
        """A fixed grid: the noise is wide on any."""
        return {"resolution": 65_536}

    @property
    def grid(self) -> Grid:
        """How gradients become whole numbers."""
        return Grid(Norm.L2, self.clip_norm, self.dimension, self.resolution)

    @property
    def sensitivity_units(self) -> int:
        """Δ₂, of the quantized sum."""
        return self.grid.sum_sensitivity_units(self.accumulation_slack)

    @property
    def scale_units(self) -> float:
        """λ, for the L1 norm that Δ₂ allows."""
        return noise_scale(self.epsilon, (math.isqrt(self.dimension - 1) + 1) * self.sensitivity_units)

    @property
    def deviation_units(self) -> float:
        """λ√2."""
        return self.scale_units * math.sqrt(2)

    @property
    def reach_units(self) -> float:
        """Of the noise of all steps."""
        return laplace_reach(self.scale_units, self.steps)

    @property
    def event(self) -> ApproximateEvent:
        """The charge for one round, sampling included."""
        return ApproximateEvent(amplified_epsilon(self.epsilon, self.sampling_rate), 0.0, self.steps)

    def round_cost(self, delta: float) -> tuple[float, float]:
        """The steps' ε added up; no δ."""
        return self.event.epsilon * self.steps, 0.0

    @property
    def statistical_distance(self) -> float:
        """Of the sampler, over all coordinates and steps."""
        return self.dimension * self.steps * statistical_distance(self.scale_units)

    def sampler(self, *, entropy: Entropy = os.urandom) -> DiscreteLaplaceSampler:
        """Exact discrete Laplace noise."""
        return DiscreteLaplaceSampler(self.scale_units, entropy=entropy)
