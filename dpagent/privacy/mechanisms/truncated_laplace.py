"""The discretised truncated Laplace mechanism: noise that never exceeds A, at a price in δ.

The cap ``bounded`` (:mod:`dpagent.privacy.mechanisms.bounded`) uses it.

Like :mod:`dpagent.privacy.mechanisms.discretised_laplace`, but the integer noise of every coordinate has the
support [−A, A]: p(x) = r^|x|/Z with r = e^(−1/λ) and Z = (1 + r − 2r^(A+1))/(1 − r). After Geng, Ding, Guo
and Kumar, *Tight analysis of privacy and utility tradeoff in approximate DP* (AISTATS 2020), who treat
one continuous coordinate; the proof here is for integers and for vectors.

*Cost.* Let s be the integer vector of the record by which two data sets differ, ‖s‖₁ ≤ Δ ≤ A,
and λ ≥ Δ/ε. Where both outputs have mass, their ratio is at most e^(‖s‖₁/λ) ≤ e^ε, as in the pure case.
So the mechanism is (ε, δ)-DP for δ = P(some coordinate falls where the other output's support
does not reach). Coordinate j does so if its noise is one of the |s_j| outermost points on one side,
whose mass is T(|s_j|),

    T(s) = Σ_{x=A−s+1..A} p(x) = r^(A+1−s)·(1 − r^s)/(1 + r − 2r^(A+1)),   s ≤ A.

T(0) = 0, and T(s+1) − T(s) = p(A−s) rises with s up to s = A, for the mass rises towards the centre:
T is convex, hence superadditive. By the union bound δ ≤ Σ_j T(|s_j|) ≤ T(Σ_j |s_j|) ≤ T(Δ), with
no factor of the dimension, and symmetric in the two data sets. It is the exact δ at this ε
when λ = Δ/ε and the whole shift is in one coordinate. Dividing by r^(A+1),

    1/δ = (e^(aε) − 1)/(e^ε − 1) + (e^(bε) − 1)/(e^ε − 1),   a = (A+1)/Δ,  b = A/Δ,  ε = Δ/λ,

which for fine grids is the published A = λ·ln(1 + (e^ε − 1)/(2δ)). With u = e^ε the terms are slopes
of secants of u^a and u^b from 1, which rise with u for a > 1 and b ≥ 1. So δ falls as ε rises,
from Δ/(2A+1) (uniform noise, ε → 0) towards 0: for a given A there is one least ε for each δ.

*A below Δ* is refused. Two sums may then be further apart than noise reaches, and as ε rises δ goes
to 1 rather than to 0: the mass gathers at the centre, which the other support does not reach.

The sampler may take a slightly smaller A than asked for (public; by less than 0.013 %). All
figures are for the A it takes. Values of δ are rounded up by more than the errors behind them.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Self

from dpagent.errors import ParameterError, PlanError, require_between, require_count, require_positive
from dpagent.norm import Norm
from dpagent.privacy.events import ApproximateEvent, Event, poisson_sampled
from dpagent.privacy.mechanisms.discretised_laplace import (
    MAX_EPSILON,
    RESOLUTION,
    LaplaceNoise,
    multiplier_for,
    noise_scale,
    sensitivity_of,
)
from dpagent.privacy.mechanisms.grid import Grid, l1_resolution
from dpagent.privacy.mechanisms.mechanism import Parameter, PlannedMechanism
from dpagent.privacy.noise.discrete_laplace import (
    MAX_BOUND,
    MAX_SCALE,
    MIN_SCALE,
    DiscreteLaplaceSampler,
    statistical_distance,
    usable_bound,
)
from dpagent.privacy.noise.entropy import Entropy

if TYPE_CHECKING:
    from dpagent.privacy.mechanisms.laplace_law import LaplaceLaw

_ROUNDING: Final = 2.0**-36
_HALVINGS: Final = 200


@dataclass(frozen=True, slots=True)
class TruncatedLaplace(LaplaceNoise, PlannedMechanism):
    """The mechanism of one round; the record states all that an accountant or auditor needs. Public.

    The other attributes are those of :class:`~dpagent.privacy.mechanisms.discretised_laplace.LaplaceNoise`.

    Attributes:
        bound_units: A, in grid units: at least the sensitivity, at most 2⁵⁰.

    Raises:
        ParameterError: an attribute is out of range, the noise cannot be drawn, or A is below the
            sensitivity.
    """

    name: ClassVar[str] = "truncated-laplace"
    deviation_per_multiplier: ClassVar[float] = math.sqrt(2)
    parameters: ClassVar[tuple[Parameter, ...]] = (
        RESOLUTION,
        Parameter("bound_units", 1, MAX_BOUND, "largest noise of a step, in grid units", whole=True),
    )

    bound_units: int = field(kw_only=True)

    def __post_init__(self) -> None:
        LaplaceNoise.__post_init__(self)
        require_count("bound units", self.bound_units, maximum=MAX_BOUND)
        if self.support_units < self.sensitivity_units:
            raise ParameterError(
                f"bound units are {self.support_units} ({self.cap:g}), below the L1 sensitivity of "
                f"{self.sensitivity_units} ({self.sensitivity_units * self.granularity:g}): no epsilon can "
                "hide that. Raise the cap, or lower the clip norm."
            )

    @classmethod
    def for_delta(
        cls,
        clip_norm: float,
        epsilon: float,
        delta: float,
        sampling_rate: float,
        dimension: int,
        *,
        steps: int = 1,
        resolution: int | None = None,
        accumulation_slack: float | None = None,
    ) -> Self:
        """The least A with which a step on a known lot is (``epsilon``, ``delta``)-DP."""
        grid = _grid(clip_norm, dimension, resolution)
        bound = least_bound(epsilon, delta, sensitivity_of(grid, accumulation_slack))
        noise, own = multiplier_for(epsilon), (steps, resolution, accumulation_slack)
        return cls(clip_norm, noise, sampling_rate, dimension, *own, bound_units=bound)

    @classmethod
    def for_cap(
        cls,
        clip_norm: float,
        cap: float,
        delta: float,
        sampling_rate: float,
        dimension: int,
        *,
        steps: int = 1,
        resolution: int | None = None,
        accumulation_slack: float | None = None,
        max_epsilon: float = MAX_EPSILON,
    ) -> Self:
        """The least ε with which a step's noise of at most ``cap`` is (ε, ``delta``)-DP.

        Args:
            clip_norm: C.
            cap: bound on one step's noise in each coordinate of the sum over a lot, in gradient
                units, above 0; from public values only.
            delta: of one step on a known lot, in (0, 1).
            sampling_rate: q.
            dimension: d.
            steps: noisy local steps in one round.
            resolution: grid units to one clip norm.
            accumulation_slack: of sums, or None where records are rounded.
            max_epsilon: the largest ε acceptable, in (0, 1000].

        Raises:
            ParameterError: a value is out of its range.
            PlanError: no ε up to ``max_epsilon`` meets the cap; says which cap or ε would do.
        """
        require_positive("cap", cap)
        grid = _grid(clip_norm, dimension, resolution)
        bound = math.floor(min(cap / grid.granularity, MAX_BOUND))
        sensitivity = sensitivity_of(grid, accumulation_slack)
        try:
            epsilon = least_epsilon(bound, delta, sensitivity, max_epsilon=max_epsilon)
        except PlanError as error:
            highest = _highest_epsilon(max_epsilon, sensitivity)
            needed = least_bound(highest, delta, sensitivity) * grid.granularity
            enough = _enough_epsilon(bound, delta, sensitivity)
            raise PlanError(
                f"A noise cap of {cap:g} cannot be met: the L1 sensitivity is "
                f"{sensitivity * grid.granularity:g}, and with epsilon up to {highest:g} at "
                f"delta {delta:g} noise has to reach {_rounded_up(needed):g}. Raise the cap to that, "
                f"{f'let it be {enough:.3g}, before sampling, ' if enough else ''}or lower the clip norm."
            ) from error
        noise, own = multiplier_for(epsilon), (steps, resolution, accumulation_slack)
        return cls(clip_norm, noise, sampling_rate, dimension, *own, bound_units=bound)

    @property
    def support_units(self) -> int:
        """The largest magnitude of a noise value, in grid units: A as the sampler takes it."""
        return _support(self.scale_units, self.bound_units)

    @property
    def cap(self) -> float:
        """The same in gradient units."""
        return self.support_units * self.granularity

    @property
    def delta(self) -> float:
        """δ of one step on a known lot, before sampling."""
        return truncated_delta(self.scale_units, self.support_units, self.sensitivity_units)

    @property
    def deviation_units(self) -> float:
        """Bound on the standard deviation of one step's noise: that of Laplace or uniform noise."""
        uniform = math.sqrt(self.support_units * (self.support_units + 1) / 3)
        return min(self.scale_units * math.sqrt(2), uniform)

    @property
    def noise_law(self) -> LaplaceLaw:
        """That of whole Laplace noise, given that it stays within A."""
        from dpagent.privacy.mechanisms.laplace_law import LaplaceLaw  # for a coordinator alone

        return LaplaceLaw(self.scale_units, self.support_units)

    @property
    def event(self) -> Event:
        """The charge for one round, sampling included."""
        return poisson_sampled(ApproximateEvent(self.epsilon, self.delta), self.sampling_rate, self.steps)

    @property
    def statistical_distance(self) -> float:
        """Total variation distance of one round's noise from ideal noise; see ``docs/privacy.md``."""
        return self.dimension * self.steps * statistical_distance(self.scale_units, self.bound_units)

    def sampler(self, *, entropy: Entropy = os.urandom) -> DiscreteLaplaceSampler:
        """A sampler of this mechanism's noise, for instance to draw ahead of need."""
        return DiscreteLaplaceSampler(self.scale_units, bound=self.bound_units, entropy=entropy)


def truncated_delta(scale: float, bound: int, sensitivity: int) -> float:
    """T(Δ) of the module's text, rounded up; at most 1.

    Args:
        scale: λ, in [2⁻⁶, 2⁴⁰].
        bound: A.
        sensitivity: Δ, in [1, A].

    Raises:
        ParameterError: a value is out of its range.
    """
    require_between("scale", scale, MIN_SCALE, MAX_SCALE)
    require_count("sensitivity", sensitivity)
    require_count("bound", bound, minimum=sensitivity, maximum=MAX_BOUND)
    outermost = math.exp((sensitivity - bound - 1) / scale) * -math.expm1(-sensitivity / scale)
    whole = -math.expm1(-(bound + 1) / scale) - math.exp(-1 / scale) * math.expm1(-bound / scale)
    return min(1.0, math.nextafter(outermost / whole * (1 + _ROUNDING), 1.0))


def least_bound(epsilon: float, delta: float, sensitivity: int) -> int:
    """The least A, to within the sampler's resolution, at which (``epsilon``, ``delta``) is met.

    From (1 + r)·r^−(A+1) ≥ 2 + (e^ε − 1)/δ; at least Δ. Verified after.

    Raises:
        ParameterError: a value is out of its range, or Δ/ε is out of the sampler's.
    """
    require_positive("epsilon", epsilon, maximum=MAX_EPSILON)
    require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    require_count("sensitivity", sensitivity)
    scale = require_between("scale", noise_scale(epsilon, sensitivity), MIN_SCALE, MAX_SCALE)
    # log of 2 + (e^ε − 1)/δ, which for large ε would overflow
    log_needed = epsilon - math.log(delta) + math.log(2 * delta * math.exp(-epsilon) - math.expm1(-epsilon))
    exact = scale * (log_needed - math.log1p(math.exp(-1 / scale)))
    bound = max(sensitivity, math.ceil(exact) - 1)
    while (support := _support(scale, bound)) < sensitivity or (
        truncated_delta(scale, support, sensitivity) > delta
    ):
        bound += 1 + (bound >> 14)
    return _support(scale, bound)


def least_epsilon(bound: int, delta: float, sensitivity: int, *, max_epsilon: float = MAX_EPSILON) -> float:
    """The least ε at which noise of at most A costs no more than ``delta``, rounded up.

    Not below Δ/2⁴⁰, the least that can be drawn.

    Raises:
        ParameterError: a value is out of its range.
        PlanError: A is below Δ, or no ε up to ``max_epsilon`` will do.
    """
    require_count("bound", bound, minimum=0, maximum=MAX_BOUND)
    require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    require_count("sensitivity", sensitivity)
    require_positive("max epsilon", max_epsilon, maximum=MAX_EPSILON)

    def is_met(epsilon: float) -> bool:
        scale = noise_scale(epsilon, sensitivity)
        support = _support(scale, bound)
        return support >= sensitivity and truncated_delta(scale, support, sensitivity) <= delta

    low = sensitivity / MAX_SCALE * (1 + _ROUNDING)
    high = _highest_epsilon(max_epsilon, sensitivity)
    if not low <= high:
        raise ParameterError(
            f"max epsilon is {max_epsilon!r}; expected at least {low:g}, the least to be drawn."
        )
    if bound < sensitivity or not is_met(high):
        raise PlanError(
            f"Noise of at most {bound} grid units cannot hide a sensitivity of {sensitivity} steps with "
            f"epsilon up to {max_epsilon:g} at delta {delta:g}."
        )
    if is_met(low):
        return low
    for _ in range(_HALVINGS):
        middle = math.sqrt(low) * math.sqrt(high)
        if not low < middle < high:
            break
        low, high = (low, middle) if is_met(middle) else (middle, high)
    return high


def _enough_epsilon(bound: int, delta: float, sensitivity: int) -> float | None:
    """The least ε at which noise of at most A costs no more than ``delta``; None if there is none."""
    try:
        return least_epsilon(bound, delta, sensitivity)
    except PlanError:
        return None


def _grid(clip_norm: float, dimension: int, resolution: int | None) -> Grid:
    return Grid(Norm.L1, clip_norm, dimension, l1_resolution(dimension) if resolution is None else resolution)


def _highest_epsilon(max_epsilon: float, sensitivity: int) -> float:
    """The largest ε up to ``max_epsilon`` for which noise can be drawn."""
    return min(max_epsilon, sensitivity / MIN_SCALE * (1 - _ROUNDING))


def _rounded_up(value: float) -> float:
    """To six digits, rounded so that a reader can use the number as it stands."""
    return float(f"{value * (1 + 1e-5):.6g}")


def _support(scale: float, bound: int) -> int:
    """A as the sampler takes it; 0 if it is below 1."""
    return (usable_bound(scale, bound) or 0) if bound else 0
