"""The discretised Laplace mechanism: pure ε for a whole vector, by clipping in L1.

The clipped sum of a lot, each record's gradient with an L1 norm of at most C, is rounded to an integer grid
(:mod:`dpagent.privacy.mechanisms.grid`; or each record is, and then added up); every coordinate then gets an
independent integer X with P(X = x) ∝ r^|x|, r = e^(−1/λ) (Ghosh, Roughgarden, Sundararajan, STOC 2009, for
one coordinate).

*Cost.* Let s be the integer vector by which the sums of two neighbouring data sets differ, ‖s‖₁ ≤ Δ. For
every output x, P(total + X = x) and P(total + s + X = x) differ by at most a factor of
Π_j e^(|s_j|/λ) = e^(‖s‖₁/λ) ≤ e^(Δ/λ), by the triangle inequality in each coordinate. So λ = Δ/ε,
rounded up, gives ε-DP for the vector, in any dimension, on any grid; a Poisson lot amplifies it
(:mod:`dpagent.privacy.accounting.amplification`). Both are sharp: at x beyond the shift they hold with
equality. The *noise multiplier* of a plan is λ/Δ = 1/ε.

Clipping in L2 to C would bound ‖s‖₁ by C·√d only. Conversely the price of L1 is paid in the clip:
a dense gradient of d coordinates has an L1 norm of up to √d times its L2 norm.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count
from dpagent.norm import Norm
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.events import ApproximateEvent, Event, poisson_sampled
from dpagent.privacy.mechanisms.grid import MAX_RESOLUTION, Grid, l1_resolution
from dpagent.privacy.mechanisms.mechanism import CalibratedMechanism, Parameter, SumMechanism
from dpagent.privacy.noise.discrete_laplace import (
    MAX_SCALE,
    MIN_SCALE,
    DiscreteLaplaceSampler,
    statistical_distance,
)
from dpagent.privacy.noise.entropy import Entropy
from dpagent.privacy.statement import Adjacency, Trust, Unit

if TYPE_CHECKING:
    from dpagent.privacy.calibration import EventFamily
    from dpagent.privacy.mechanisms.laplace_law import LaplaceLaw

#: Mechanisms of the Laplace family are built for an ε of one noisy sum, before sampling, up to this.
MAX_EPSILON: Final = 1000.0
#: The grid, as plans announce it.
RESOLUTION: Final = Parameter(
    "resolution", 256, MAX_RESOLUTION[Norm.L1], "grid units to one clip norm", whole=True
)
_NOISE_MULTIPLIERS: Final = (1 / MAX_EPSILON, 1e12)
_FINEST: Final = 1 << 28
_WIDEST: Final = 1 << 31  # noise multiplier times resolution: the wire takes deviations of up to 2³² units


@dataclass(frozen=True, slots=True)
class LaplaceNoise(SumMechanism):
    """What Laplace noise on an L1-clipped sum has in common, whole or truncated. Public.

    Attributes:
        clip_norm: C, the L1 norm a record's gradient is scaled down to, in [1e-9, 1e9].
        noise_multiplier: the noise's scale over the L1 sensitivity, in [0.001, 1e12]: 1/ε.
        sampling_rate: q, the probability with which each record enters a lot, in (0, 1].
        dimension: d, number of coordinates of the sum.
        steps: noisy local steps in one round, each with a fresh lot and fresh noise.
        resolution: grid units to one clip norm, in [1, 2³⁰]; by default
            :func:`~dpagent.privacy.mechanisms.grid.l1_resolution` of d.
        accumulation_slack: None where each record is rounded to the grid (:meth:`constrain`). Where their sum
            is (:meth:`quantize`), the most that summing in floating point adds to a record's influence,
            relative to the clip norm, in [0, 0.01].

    Raises:
        ParameterError: an attribute is out of range, or the noise is too small or too large to
            be drawn (its scale has to lie within the sampler's range, in grid units).
    """

    unit: ClassVar[Unit] = Unit.RECORD
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE
    trust: ClassVar[Trust] = Trust.NONE
    norm: ClassVar[Norm] = Norm.L1

    clip_norm: float
    noise_multiplier: float
    sampling_rate: float
    dimension: int
    steps: int = 1
    resolution: int | None = None
    accumulation_slack: float | None = None

    def __post_init__(self) -> None:
        _ = self.grid
        require_between("noise multiplier", self.noise_multiplier, *_NOISE_MULTIPLIERS)
        require_between("sampling rate", self.sampling_rate, 0.0, 1.0, low_open=True)
        require_count("steps", self.steps)
        if not MIN_SCALE <= self.scale_units <= MAX_SCALE:
            low, high = MIN_SCALE / self.sensitivity_units, MAX_SCALE / self.sensitivity_units
            raise ParameterError(
                f"noise multiplier is {self.noise_multiplier!r}; with a sensitivity of "
                f"{self.sensitivity_units} grid units, noise can be drawn for {low:.3g} to {high:.3g}. "
                "Change the epsilon target, or take another resolution."
            )

    @property
    def epsilon(self) -> float:
        """ε of one step on a lot that is known, before sampling, in (0, 1000]."""
        return 1 / self.noise_multiplier

    @property
    def grid(self) -> Grid:
        """How gradients become whole numbers."""
        resolution = l1_resolution(self.dimension) if self.resolution is None else self.resolution
        return Grid(Norm.L1, self.clip_norm, self.dimension, resolution)

    @property
    def sensitivity_units(self) -> int:
        """Δ: bound on one record's change of the integer sum, in L1, in grid units."""
        return sensitivity_of(self.grid, self.accumulation_slack)

    @property
    def scale_units(self) -> float:
        """λ, the noise's scale in grid units: Δ/ε, rounded up."""
        return noise_scale(self.epsilon, self.sensitivity_units)

    def round_cost(self, delta: float) -> tuple[float, float]:
        """(ε, δ) of one round with ideal noise: its steps added up; ``delta`` has no effect."""
        total = composed(self.event)
        return total.epsilon, total.delta

    def quantize(self, total: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round a clipped sum to the grid; see :meth:`Grid.quantize_sum`.

        Raises:
            ParameterError: ``total`` does not fit, or the noise was not made for a sum.
        """
        return self.grid.quantize_sum(total, self.accumulation_slack)


@dataclass(frozen=True, slots=True)
class DiscretisedLaplace(LaplaceNoise, CalibratedMechanism):
    """The mechanism of one round; the record states all that an accountant or auditor needs. Public.

    Its attributes are those of :class:`LaplaceNoise`.

    >>> m = DiscretisedLaplace(clip_norm=10.0, noise_multiplier=2.0, sampling_rate=0.1, dimension=650)
    >>> m.epsilon, m.round_cost(0.0)
    (0.5, (0.06285..., 0.0))
    """

    name: ClassVar[str] = "discrete-laplace"
    deviation_per_multiplier: ClassVar[float] = math.sqrt(2)
    parameters: ClassVar[tuple[Parameter, ...]] = (RESOLUTION,)

    @property
    def deviation_units(self) -> float:
        """Bound on the standard deviation of one step's noise, in grid units: λ√2."""
        return self.scale_units * math.sqrt(2)

    @property
    def noise_law(self) -> LaplaceLaw:
        """Its own, whatever its scale."""
        from dpagent.privacy.mechanisms.laplace_law import LaplaceLaw  # for a coordinator alone

        return LaplaceLaw(self.scale_units)

    @property
    def event(self) -> Event:
        """The charge for one round, sampling included."""
        return poisson_sampled(ApproximateEvent(self.epsilon), self.sampling_rate, self.steps)

    @property
    def statistical_distance(self) -> float:
        """Total variation distance of one round's noise from ideal noise; see ``docs/privacy.md``."""
        return self.dimension * self.steps * statistical_distance(self.scale_units)

    def sampler(self, *, entropy: Entropy = os.urandom) -> DiscreteLaplaceSampler:
        """A sampler of this mechanism's noise, for instance to draw ahead of need."""
        return DiscreteLaplaceSampler(self.scale_units, entropy=entropy)

    @classmethod
    def family(cls, sampling_rate: float, steps: int = 1) -> EventFamily:
        """See :func:`dpagent.privacy.calibration.laplace_family`."""
        from dpagent.privacy.calibration import laplace_family  # which training never loads

        return laplace_family(sampling_rate, steps)

    @classmethod
    def chosen_parameters(cls, noise_multipliers: Sequence[float]) -> dict[str, float]:
        """The finest grid on which the wire takes the greatest noise of the job, up to 2²⁸ units to C.

        Rounding adds a unit a coordinate to the sensitivity: on that grid 0.01 % of it at d = 26,010 and
        0.2 % at 550,000. Noise multipliers above 8, an ε below 1/8 a step, take a coarser one.
        """
        return {"resolution": finest_resolution(max(noise_multipliers))}


def finest_resolution(noise_multiplier: float) -> int:
    """The finest grid on which the wire takes such noise: a power of two of grid units to C, at most 2²⁸."""
    return min(1 << max(0, math.floor(math.log2(_WIDEST / noise_multiplier))), _FINEST)


def sensitivity_of(grid: Grid, accumulation_slack: float | None) -> int:
    """Δ: of records that are rounded, where the slack is None, and of their sum otherwise."""
    if accumulation_slack is None:
        return grid.sensitivity_units
    return grid.sum_sensitivity_units(accumulation_slack)


def noise_scale(epsilon: float, sensitivity: int) -> float:
    """λ = Δ/ε, rounded up, so that Δ/λ is at most ε."""
    return math.nextafter(sensitivity / epsilon, math.inf)


def multiplier_for(epsilon: float) -> float:
    """The noise multiplier 1/ε, rounded down, so that an ε of its own is at least ``epsilon``."""
    multiplier = 1 / epsilon
    return multiplier if 1 / multiplier >= epsilon else math.nextafter(multiplier, 0.0)
