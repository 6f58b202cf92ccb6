"""Noise that each device adds to its own update, where the coordinator adds noise to their sum besides.

With ``central`` (:mod:`dpagent.privacy.mechanisms.central`) a device trusts the coordinator. With noise of
its own it need not: its update then has a second figure, for those who trust nobody. Let x be a device's
whole numbers, its vote included, on the grid of the coordinator's noise: ‖x‖ ≤ Δ, whatever its records are
(:mod:`dpagent.privacy.mechanisms.grid`). The device sends

    w = clamp(x + N),

N fresh discrete noise, one number for each coordinate, and clamp to ±L in each coordinate. L is public, so
that every value has one width on the wire.

*Without trust.* Let x and x' be of any two data sets. ‖x − x'‖ ≤ 2Δ, so the noise multiplier here is the
noise's parameter over **2Δ**, and N hides one from the other at the price of that multiplier: everything
that the device contributes, replaced by anything else. For Gaussian noise of parameter zΔ that is a Gaussian
mechanism of multiplier z/2, for Laplace noise of scale λ an ε of 2Δ/λ (the proofs are those of
:mod:`dpagent.privacy.mechanisms.discretised_gaussian` and
:mod:`dpagent.privacy.mechanisms.discretised_laplace`, for x in place of a clipped sum). Clamping and all that
follows is post-processing. Rounds compose: x depends on what others saw only by the plan, which is public.

*With trust in the coordinator* the figure is that of its own noise M, and the noise of devices is not
counted: others may not add theirs. The neighbour of a device is one that takes part **without records**: its
numbers are zeros, and it adds its own noise as ever (zero-out of what it contributes, not of its message).
Fix all that others send, and a value n of the device's noise, which does not depend on its records. Then the
sums of both neighbours differ by

    |clamp(x + n) − clamp(n)| ≤ |x|  in each coordinate,

since clamping moves no two numbers apart; so by Δ in the norm of the noise, exactly as without noise of the
device. M hides that at the price of its own multiplier, for each n; and as n is drawn alike in both, also
when it is drawn (a divergence of mixtures with the same weights is at most the mixture of the divergences).
The price is that of ``central`` alone. Rounding w to coarser steps would break this: |round(a) − round(b)|
can exceed |a − b|. So values travel on the full grid.

The coordinator refuses fragments with norms that honest ones have with a probability of at most
:data:`REFUSAL_TAIL` in a round (:mod:`coordinator.influence`), and as noise is drawn, of
:func:`refusal_distance`. A refused fragment could leave the sum of one neighbour and not of the other. So
that probability is added to the distance from the ideal mechanism
(:attr:`CentralMechanism.inexactness <dpagent.privacy.mechanisms.central.CentralMechanism.inexactness>`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.norm import Norm
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.discretised_laplace import DiscretisedLaplace
from dpagent.privacy.mechanisms.mechanism import CalibratedMechanism
from dpagent.privacy.noise.entropy import Entropy
from dpagent.privacy.statement import Adjacency, Trust, Unit

REFUSAL_TAIL: Final = 2.0**-128
"""The probability with which the coordinator may refuse any fragment of an honest device in a round, if its
noise is exact."""
_VALUE_DISTANCE: Final = 2.0**-119
"""Most that the law of one number of noise, as it is drawn, may depart from the exact one, in total
variation."""


def refusal_distance(dimension: int) -> float:
    """Bound on the probability that any fragment of an honest device is refused in a round.

    Args:
        dimension: numbers of an update.
    """
    return REFUSAL_TAIL + dimension * _VALUE_DISTANCE


class DeviceNoise(CalibratedMechanism):
    """Base of both: noise on one device's update, at twice the norm of an update for a sensitivity."""

    __slots__ = ()

    unit: ClassVar[Unit] = Unit.DEVICE
    adjacency: ClassVar[Adjacency] = Adjacency.REPLACE_ONE
    trust: ClassVar[Trust] = Trust.NONE
    reach: ClassVar[float]
    """Standard deviations of the noise that the wire has room for; a value beyond them is clamped."""

    @property
    def sensitivity_units(self) -> int:
        """2Δ: bound on the difference of any two updates, in the mechanism's norm, in grid units."""
        return 2 * self.grid.sensitivity_units

    @property
    def inexactness(self) -> float:
        """Total variation distance of a round from the ideal one: that of the noise. There are no lots."""
        return self.statistical_distance

    @property
    def largest_units(self) -> int:
        """L: bound on the magnitude of a value that a device sends, in grid units."""
        return self.grid.sensitivity_units + math.ceil(self.reach * self.deviation_units)

    def require_noise_as_priced(self, rounds: int, job_epsilon: float, delta: float) -> None:
        """See :meth:`Mechanism.require_noise_as_priced`; :func:`refusal_distance` takes the sampler to be as
        good as it is."""
        if not self.statistical_distance <= self.dimension * _VALUE_DISTANCE:
            raise ParameterError(
                f"noise as it is drawn is {self.statistical_distance:.3g} from exact; expected at most "
                f"{self.dimension * _VALUE_DISTANCE:.3g}. Plan more noise of devices."
            )
        super().require_noise_as_priced(rounds, job_epsilon, delta)

    def _require_one_update(self) -> None:
        """No sampling amplifies: that would be for the presence of a record, not for another value."""
        if (self.sampling_rate, self.steps) != (1.0, 1):
            raise ParameterError(
                f"sampling rate is {self.sampling_rate:g} and steps are {self.steps}; expected 1 and 1: a "
                "device sends one update in each round that it takes part in."
            )

    def add_clamped(self, update: NDArray[np.int64], *, entropy: Entropy = os.urandom) -> NDArray[np.int64]:
        """What a device sends of its update: with noise, and clamped. No longer private.

        Args:
            update: (d,) in grid units, of a norm of at most Δ. Private.
            entropy: to be replaced in tests only.
        """
        return self.add_noise(update, entropy=entropy).clip(-self.largest_units, self.largest_units)


@dataclass(frozen=True, slots=True)
class DeviceGaussian(DeviceNoise, DiscretisedGaussian):
    """L2-clipped updates, each with discrete Gaussian noise of its device. Public.

    Its attributes are those of :class:`DiscretisedGaussian`, of one whole update.

    >>> m = DeviceGaussian(clip_norm=1.0, noise_multiplier=2.0, sampling_rate=1.0, dimension=650)
    >>> round(m.sigma_units / m.grid.sensitivity_units, 6), m.statement(1e-5).sentence()
    (4.0, 'ε = 1.99319, δ = 1e-5 (device-level, replace-one adjacency, trusted party: none)')
    """

    name: ClassVar[str] = "device-gaussian"
    reach: ClassVar[float] = 8.0
    """A coordinate of noise is beyond it with a probability of 10⁻¹⁵."""

    def __post_init__(self) -> None:
        DiscretisedGaussian.__post_init__(self)
        self._require_one_update()

    @classmethod
    def chosen_parameters(cls, noise_multipliers: Sequence[float]) -> dict[str, float]:
        """As of :class:`DiscretisedGaussian`, for twice the sensitivity."""
        return DiscretisedGaussian.chosen_parameters([2 * each for each in noise_multipliers])


@dataclass(frozen=True, slots=True)
class DeviceLaplace(DeviceNoise, DiscretisedLaplace):
    """L1-clipped updates, each with discrete Laplace noise of its device: pure ε. Public.

    Its attributes are those of :class:`DiscretisedLaplace`, of one whole update.
    """

    name: ClassVar[str] = "device-laplace"
    reach: ClassVar[float] = 25.0
    """A coordinate of noise is beyond it with a probability of 10⁻¹⁵."""

    def __post_init__(self) -> None:
        DiscretisedLaplace.__post_init__(self)
        self._require_one_update()

    @classmethod
    def chosen_parameters(cls, noise_multipliers: Sequence[float]) -> dict[str, float]:
        """As of :class:`DiscretisedLaplace`, for twice the sensitivity."""
        return DiscretisedLaplace.chosen_parameters([2 * each for each in noise_multipliers])


DEVICE_NOISE: Final[dict[Norm, type[DeviceNoise]]] = {Norm.L2: DeviceGaussian, Norm.L1: DeviceLaplace}
"""By the norm in which updates are clipped."""
