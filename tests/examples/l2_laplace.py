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

from dpagent.norm import Norm
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.calibration import EventFamily, laplace_family
from dpagent.privacy.events import ApproximateEvent, Event, poisson_sampled
from dpagent.privacy.mechanisms.grid import Grid
from dpagent.privacy.mechanisms.mechanism import CalibratedMechanism, Parameter
from dpagent.privacy.noise.discrete_laplace import DiscreteLaplaceSampler, statistical_distance
from dpagent.privacy.noise.entropy import Entropy
from dpagent.privacy.statement import Adjacency, Trust, Unit


@dataclass(frozen=True, slots=True)
class L2Laplace(CalibratedMechanism):
    """Laplace noise for an L2 clip norm; the noise multiplier is λ over the L1 sensitivity, 1/ε of a step."""

    name: ClassVar[str] = "l2-laplace"
    unit: ClassVar[Unit] = Unit.RECORD
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE
    trust: ClassVar[Trust] = Trust.NONE
    norm: ClassVar[Norm] = Norm.L2
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("resolution", 256, 1_048_576, "grid units to one clip norm", whole=True),
    )

    clip_norm: float
    accumulation_slack: float
    dimension: int
    sampling_rate: float
    steps: int
    noise_multiplier: float
    resolution: int

    @classmethod
    def family(cls, sampling_rate: float, steps: int = 1) -> EventFamily:
        """Pure mechanisms whose ε is one over the noise multiplier."""
        return laplace_family(sampling_rate, steps)

    @classmethod
    def chosen_parameters(cls, noise_multipliers: Sequence[float]) -> dict[str, float]:
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
        """λ, for the L1 norm that Δ₂ allows, rounded up."""
        l1_sensitivity = (math.isqrt(self.dimension - 1) + 1) * self.sensitivity_units
        return math.nextafter(self.noise_multiplier * l1_sensitivity, math.inf)

    @property
    def deviation_units(self) -> float:
        """λ√2."""
        return self.scale_units * math.sqrt(2)

    @property
    def event(self) -> Event:
        """The charge for one round."""
        return poisson_sampled(ApproximateEvent(1 / self.noise_multiplier), self.sampling_rate, self.steps)

    def round_cost(self, delta: float) -> tuple[float, float]:
        """The steps' ε added up; no δ."""
        total = composed(self.event)
        return total.epsilon, total.delta

    @property
    def statistical_distance(self) -> float:
        """Of the sampler, over all coordinates and steps."""
        return self.dimension * self.steps * statistical_distance(self.scale_units)

    def sampler(self, *, entropy: Entropy = os.urandom) -> DiscreteLaplaceSampler:
        """Exact discrete Laplace noise."""
        return DiscreteLaplaceSampler(self.scale_units, entropy=entropy)
