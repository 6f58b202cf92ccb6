"""The discretised Laplace mechanism: pure ε for a whole vector, by clipping in L1.

Not wired: no plan can name it yet; ``dpagent plan`` uses its formulas to price the ``bounded`` cap.

Each record's gradient is clipped to an L1 norm of C, brought onto an integer grid and added up
(:mod:`dpagent.privacy.mechanisms.grid`); every coordinate then gets an independent integer X with
P(X = x) ∝ r^|x|, r = e^(−1/λ) (Ghosh, Roughgarden, Sundararajan, STOC 2009, for one coordinate).

*Cost.* Let s be the integer vector of the record by which two data sets differ, ‖s‖₁ ≤ Δ. For
every output x, P(total + X = x) and P(total + s + X = x) differ by at most a factor of
Π_j e^(|s_j|/λ) = e^(‖s‖₁/λ) ≤ e^(Δ/λ), by the triangle inequality in each coordinate. So λ = Δ/ε,
rounded up, gives ε-DP for the vector, in any dimension; a Poisson lot amplifies it
(:mod:`dpagent.privacy.accounting.amplification`). Both are sharp: at x beyond the shift they hold with
equality.

Clipping in L2 to C would bound ‖s‖₁ by C·√d only. Conversely the price of L1 is paid in the clip:
a dense gradient of d coordinates has an L1 norm of up to √d times its L2 norm.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import ClassVar, Final

from dpagent.errors import ParameterError, require_between, require_count, require_positive
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.events import ApproximateEvent, Event, poisson_sampled
from dpagent.privacy.mechanisms.grid import Grid, Norm, l1_resolution
from dpagent.privacy.mechanisms.mechanism import Mechanism
from dpagent.privacy.noise.discrete_laplace import (
    MAX_SCALE,
    MIN_SCALE,
    DiscreteLaplaceSampler,
    statistical_distance,
)
from dpagent.privacy.noise.entropy import Entropy
from dpagent.privacy.statement import Adjacency, Trust, Unit

#: Mechanisms of the Laplace family are built for an ε of one noisy sum, before sampling, up to this.
MAX_EPSILON: Final = 1000.0
_LOG_REACH: Final = 34.0  # −log of the probability beyond the reach of noise


@dataclass(frozen=True, slots=True)
class DiscretisedLaplace(Mechanism):
    """The mechanism of one round; the record states all that an accountant or auditor needs. Public.

    Attributes:
        clip_norm: C, the L1 norm a record's gradient is scaled down to, in [1e-9, 1e9].
        epsilon: ε of one step on a lot that is known, before sampling, in (0, 1000].
        sampling_rate: q, the probability with which each record enters a lot, in (0, 1].
        dimension: d, number of coordinates of the sum.
        steps: noisy local steps in one round, each with a fresh lot and fresh noise.
        resolution: grid units to one clip norm, in [1, 2³⁰]; by default
            :func:`~dpagent.privacy.mechanisms.grid.l1_resolution` of d.

    Raises:
        ParameterError: an attribute is out of range, or the noise is too small or too large to
            be drawn (its scale has to lie within the sampler's range, in grid units).
    """

    name: ClassVar[str] = "discrete-laplace"
    unit: ClassVar[Unit] = Unit.RECORD
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE
    trust: ClassVar[Trust] = Trust.NONE
    norm: ClassVar[Norm] = Norm.L1

    clip_norm: float
    epsilon: float
    sampling_rate: float
    dimension: int
    steps: int = 1
    resolution: int | None = None

    def __post_init__(self) -> None:
        _ = self.grid
        require_positive("epsilon", self.epsilon, maximum=MAX_EPSILON)
        require_between("sampling rate", self.sampling_rate, 0.0, 1.0, low_open=True)
        require_count("steps", self.steps)
        require_drawable(self.epsilon, self.sensitivity_units)

    @property
    def grid(self) -> Grid:
        """How gradients become whole numbers."""
        resolution = l1_resolution(self.dimension) if self.resolution is None else self.resolution
        return Grid(Norm.L1, self.clip_norm, self.dimension, resolution)

    @property
    def sensitivity_units(self) -> int:
        """Δ: bound on the L1 norm of one record's integer vector, in grid units."""
        return self.grid.sensitivity_units

    @property
    def scale_units(self) -> float:
        """λ, the noise's scale in grid units: Δ/ε, rounded up."""
        return noise_scale(self.epsilon, self.sensitivity_units)

    @property
    def deviation_units(self) -> float:
        """Bound on the standard deviation of one step's noise, in grid units: λ√2."""
        return self.scale_units * math.sqrt(2)

    @property
    def reach_units(self) -> float:
        """The noise of all steps exceeds this with probability below 1e-14 a coordinate."""
        return laplace_reach(self.scale_units, self.steps)

    @property
    def event(self) -> Event:
        """The charge for one round, sampling included."""
        return poisson_sampled(ApproximateEvent(self.epsilon), self.sampling_rate, self.steps)

    @property
    def statistical_distance(self) -> float:
        """Total variation distance of one round's noise from ideal noise; see ``docs/privacy.md``."""
        return self.dimension * self.steps * statistical_distance(self.scale_units)

    def round_cost(self, delta: float) -> tuple[float, float]:
        """(ε, δ) of one round with ideal noise: its steps added up; ``delta`` has no effect."""
        total = composed(self.event)
        return total.epsilon, total.delta

    def sampler(self, *, entropy: Entropy = os.urandom) -> DiscreteLaplaceSampler:
        """A sampler of this mechanism's noise, for instance to draw ahead of need."""
        return DiscreteLaplaceSampler(self.scale_units, entropy=entropy)


def noise_scale(epsilon: float, sensitivity: int) -> float:
    """λ = Δ/ε, rounded up, so that Δ/λ is at most ε."""
    return math.nextafter(sensitivity / epsilon, math.inf)


def require_drawable(epsilon: float, sensitivity: int) -> None:
    """Raise :class:`ParameterError` unless noise of scale Δ/ε is within the sampler's range."""
    if not MIN_SCALE <= noise_scale(epsilon, sensitivity) <= MAX_SCALE:
        low, high = sensitivity / MAX_SCALE, min(sensitivity / MIN_SCALE, MAX_EPSILON)
        raise ParameterError(
            f"epsilon is {epsilon!r}; with a sensitivity of {sensitivity} grid units, noise can be "
            f"drawn for {low:.3g} to {high:.3g}. Change epsilon, or take another resolution."
        )


def laplace_reach(scale: float, steps: int) -> float:
    """A bound that the sum of ``steps`` draws of scale λ exceeds, to either side, with probability < 1e-14.

    The moment generating function of one draw is at most 1/(1 − u²λ²), that of continuous Laplace
    noise, so the sum of n draws is sub-gamma, and beyond λ(2√(nL) + L) to either side with
    probability at most e^−L (Boucheron, Lugosi, Massart, *Concentration inequalities*, 2013,
    Thm 2.3). Truncation only lowers it.
    """
    return scale * (2 * math.sqrt(steps * _LOG_REACH) + _LOG_REACH)
