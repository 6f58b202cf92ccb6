"""The discretised Laplace mechanism: pure ε for a whole vector, by clipping in L1.

Each record's gradient is clipped to an L1 norm of C, brought onto an integer grid and added up
(:mod:`dpagent.privacy.mechanisms.grid`); every coordinate then gets an independent integer X with
P(X = x) ∝ r^|x|, r = e^(−1/λ) (Ghosh, Roughgarden, Sundararajan, STOC 2009, for one coordinate).

*Cost.* Let s be the integer vector of the record by which two data sets differ, ‖s‖₁ ≤ Δ. For
every output x, P(total + X = x) and P(total + s + X = x) differ by at most a factor of
Π_j e^(|s_j|/λ) = e^(‖s‖₁/λ) ≤ e^(Δ/λ), by the triangle inequality in each coordinate. So λ = Δ/ε,
rounded up, gives ε-DP for the vector, whatever its dimension; a Poisson lot amplifies it
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

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count, require_positive
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.accounting.imperfect_noise import imperfect_delta
from dpagent.privacy.events import ApproximateEvent, Event, poisson_sampled
from dpagent.privacy.mechanisms.grid import Constrained, Grid, Norm, l1_fine_steps
from dpagent.privacy.noise.discrete_laplace import (
    MAX_SCALE,
    MIN_SCALE,
    DiscreteLaplaceSampler,
    statistical_distance,
)
from dpagent.privacy.noise.entropy import Entropy, Sampler
from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit

#: Mechanisms of the Laplace family are built for an ε of one release, before sampling, up to this.
MAX_EPSILON: Final = 1000.0
_LOG_REACH: Final = 34.0  # −log of the probability beyond the reach of noise


@dataclass(frozen=True, slots=True)
class DiscretisedLaplace:
    """One release's mechanism; the record states all an accountant or auditor needs. Public.

    Attributes:
        clip_norm: C, the L1 norm a record's gradient is scaled down to, in [1e-9, 1e9].
        epsilon: ε of one step on a lot that is known, before sampling, in (0, 1000].
        sampling_rate: q, the probability with which each record enters a lot, in (0, 1].
        dimension: d, number of coordinates released.
        steps: noisy local steps in one release, each with a fresh lot and fresh noise.
        fine_steps: grid steps to one clip norm, in [1, 2³⁰]; by default
            :func:`~dpagent.privacy.mechanisms.grid.l1_fine_steps` of d.

    Raises:
        ParameterError: an attribute is out of range, or the noise is too small or too large to
            be drawn (its scale has to lie within the sampler's range, in fine-grid steps).
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
    fine_steps: int | None = None

    def __post_init__(self) -> None:
        _ = self.grid
        require_positive("epsilon", self.epsilon, maximum=MAX_EPSILON)
        require_between("sampling rate", self.sampling_rate, 0.0, 1.0, low_open=True)
        require_count("steps", self.steps)
        require_drawable(self.epsilon, self.sensitivity_steps)

    @property
    def grid(self) -> Grid:
        """How gradients become whole numbers."""
        fine_steps = l1_fine_steps(self.dimension) if self.fine_steps is None else self.fine_steps
        return Grid(Norm.L1, self.clip_norm, self.dimension, fine_steps)

    @property
    def granularity(self) -> float:
        """One fine-grid step in gradient units."""
        return self.grid.granularity

    @property
    def sensitivity_steps(self) -> int:
        """Δ: bound on the L1 norm of one record's integer vector, in fine-grid steps."""
        return self.grid.sensitivity_steps

    @property
    def scale_steps(self) -> float:
        """λ, the noise's scale in fine-grid steps: Δ/ε, rounded up."""
        return noise_scale(self.epsilon, self.sensitivity_steps)

    @property
    def deviation_steps(self) -> float:
        """Bound on the standard deviation of one step's noise, in fine-grid steps: λ√2."""
        return self.scale_steps * math.sqrt(2)

    @property
    def reach_steps(self) -> float:
        """The noise of all steps exceeds this with probability below 1e-14 a coordinate."""
        return laplace_reach(self.scale_steps, self.steps)

    @property
    def event(self) -> Event:
        """The charge for one release, sampling included."""
        return poisson_sampled(ApproximateEvent(self.epsilon), self.sampling_rate, self.steps)

    @property
    def statistical_distance(self) -> float:
        """Total variation distance of one release from ideal noise; see ``docs/privacy.md``."""
        return self.dimension * self.steps * statistical_distance(self.scale_steps)

    def statement(self) -> BudgetStatement:
        """What one release guarantees: its steps added up, and a δ for imperfect noise only."""
        total = composed(self.event)
        return BudgetStatement(
            self.unit,
            self.adjacency,
            self.trust,
            self.name,
            total.epsilon,
            imperfect_delta(total.epsilon, total.delta, self.statistical_distance),
        )

    def constrain(self, gradients: NDArray[np.float32]) -> Constrained:
        """Clip, round and add up the records of a microbatch; see :meth:`Grid.constrain`."""
        return self.grid.constrain(gradients)

    def sampler(self, *, entropy: Entropy = os.urandom) -> DiscreteLaplaceSampler:
        """What draws this mechanism's noise, for instance ahead of need."""
        return DiscreteLaplaceSampler(self.scale_steps, entropy=entropy)

    def perturb(
        self, total: NDArray[np.int64], *, entropy: Entropy = os.urandom, noise: Sampler | None = None
    ) -> NDArray[np.int64]:
        """Add one discrete Laplace vector with scale ``scale_steps``.

        Args:
            total: exact sum over one lot, shape (d,), in fine-grid steps.
            entropy: gives n uniform bytes for an argument n; to be replaced in tests only.
            noise: a pool over :meth:`sampler`, filled ahead of need; ``entropy`` is then unused.

        Raises:
            ParameterError: ``total`` is not an integer vector of d entries.
        """
        self.grid.require_total(total)
        return total + (noise or self.sampler(entropy=entropy)).sample(self.dimension)


def noise_scale(epsilon: float, sensitivity: int) -> float:
    """λ = Δ/ε, rounded up, so that Δ/λ is at most ε."""
    return math.nextafter(sensitivity / epsilon, math.inf)


def require_drawable(epsilon: float, sensitivity: int) -> None:
    """Raise :class:`ParameterError` unless noise of scale Δ/ε is within the sampler's range."""
    if not MIN_SCALE <= noise_scale(epsilon, sensitivity) <= MAX_SCALE:
        low, high = sensitivity / MAX_SCALE, min(sensitivity / MIN_SCALE, MAX_EPSILON)
        raise ParameterError(
            f"epsilon is {epsilon!r}; with a sensitivity of {sensitivity} grid steps, noise can be "
            f"drawn for {low:.3g} to {high:.3g}. Change epsilon, or take other fine steps."
        )


def laplace_reach(scale: float, steps: int) -> float:
    """What the sum of ``steps`` draws of scale λ exceeds, to either side, with probability < 1e-14.

    The moment generating function of one draw is at most 1/(1 − u²λ²), that of continuous Laplace
    noise, so the sum of n draws is sub-gamma, and beyond λ(2√(nL) + L) to either side with
    probability at most e^−L (Boucheron, Lugosi, Massart, *Concentration inequalities*, 2013,
    Thm 2.3). Truncation only lowers it.
    """
    return scale * (2 * math.sqrt(steps * _LOG_REACH) + _LOG_REACH)
