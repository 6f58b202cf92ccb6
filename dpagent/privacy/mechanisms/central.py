"""Noise at the coordinator, on the sum of whole device updates.

Not wired: no program imports this yet.

After Huang, *Differential-privacy-based data privacy and security for federated learning*
(Communications Technology, 2022), and McMahan, Ramage, Talwar, Zhang (ICLR 2018): each device's
whole update of a round is clipped, the clipped updates are added up, noise is added once, and the
result is divided by the number of devices and sent back. It protects devices from each other and
from everyone who sees the models, at device level; **it trusts the coordinator**, which sees every
update. Laplace noise goes with clipping in L1, Δ/max(1, ‖Δ‖₁/C), Gaussian noise with L2.

Departures:

- the integers of :mod:`dpagent.privacy.mechanisms.grid` in place of floats: each update becomes whole numbers
  of a norm that is checked exactly, their sum is exact, and the noise is an integer. So cost and
  proof are those of :mod:`dpagent.privacy.mechanisms.discretised_laplace` and
  :mod:`dpagent.privacy.mechanisms.discretised_gaussian`, with devices for records;
- the sum is divided by a **public** count, ``expected_devices``, fixed before the round. The number
  that came is private under add-or-remove-one-device adjacency, under which a device's update is
  present or absent; a device that does not answer counts as zeros;
- the paper adds noise of a fixed standard deviation (0.001 at C = 1, to the mean of 3 or 10
  updates) and states no ε; here the noise follows from ε, or ε from it.

The coordinator may draw each device with probability q, in secret, for amplification by sampling.
A fixed number n of N devices, as in the paper, is not Poisson sampling and not covered by q = n/N.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_positive
from dpagent.norm import Norm
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.discretised_laplace import DiscretisedLaplace
from dpagent.privacy.mechanisms.grid import DEFAULT_RESOLUTION, Constrained, Grid
from dpagent.privacy.mechanisms.mechanism import SumMechanism
from dpagent.privacy.noise.entropy import Entropy, Sampler
from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit

SECRET_LOT: Final = "The coordinator draws each device by itself with probability {rate:g}, in secret."
PUBLIC_COUNT: Final = "The sum is divided by {count:g}, a number fixed before the round."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Central(SumMechanism):
    """Base of both mechanisms; ``_noise`` is the mechanism that does the work.

    Attributes:
        clip_norm: C, the norm that a device's whole update is scaled down to, in [1e-9, 1e9].
        sampling_rate: q, the probability with which each device is drawn, in (0, 1].
        dimension: d, number of coordinates of an update.
        expected_devices: public count that the sum is divided by, above 0.
    """

    unit: ClassVar[Unit] = Unit.DEVICE
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE
    trust: ClassVar[Trust] = Trust.COORDINATOR

    clip_norm: float
    sampling_rate: float
    dimension: int
    expected_devices: float
    steps: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        require_positive("expected devices", self.expected_devices)
        _ = self._noise

    @property
    @abstractmethod
    def _noise(self) -> DiscretisedGaussian | DiscretisedLaplace:
        """The mechanism that does the work, with devices for records."""

    @property
    def grid(self) -> Grid:
        """How updates become whole numbers."""
        return self._noise.grid

    @property
    def sensitivity_units(self) -> int:
        """Bound on the norm of one device's integer vector, in grid units."""
        return self.grid.sensitivity_units

    @property
    def deviation_units(self) -> float:
        """Bound on the standard deviation of the noise, in grid units."""
        return self._noise.deviation_units

    @property
    def statistical_distance(self) -> float:
        """Total variation distance of one round's noise from ideal noise; see ``docs/privacy.md``."""
        return self._noise.statistical_distance

    def constrain(self, updates: NDArray[np.float32]) -> Constrained:
        """Clip, round and add up whole updates, a device's in each row; see :meth:`Grid.constrain`.

        Totals of several calls may be added. ``excluded`` is private.
        """
        return self.grid.constrain(updates, what="updates")

    def round_cost(self, delta: float) -> tuple[float, float]:
        """(ε, δ) of one round with ideal noise, at ``delta`` or less."""
        return self._noise.round_cost(delta)

    def sampler(self, *, entropy: Entropy = os.urandom) -> Sampler:
        """The source of the noise."""
        return self._noise.sampler(entropy=entropy)

    def mean(self, noisy_sum: NDArray[np.int64]) -> NDArray[np.float64]:
        """A noisy sum as a mean update, shape (d,), over the public count of devices."""
        return np.asarray(noisy_sum * (self.granularity / self.expected_devices))

    def statement(self, delta: float = 0.0) -> BudgetStatement:
        """The guarantee of one round for a device; see :meth:`Mechanism.statement`."""
        assumptions = [PUBLIC_COUNT.format(count=self.expected_devices)]
        if self.sampling_rate < 1:
            assumptions.append(SECRET_LOT.format(rate=self.sampling_rate))
        return replace(SumMechanism.statement(self, delta), assumptions=tuple(assumptions))


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralGaussian(_Central):
    """L2-clipped updates, and discrete Gaussian noise on their sum. Public.

    Attributes:
        noise_multiplier: σ, the noise's parameter over the L2 sensitivity.
        resolution: grid units to one clip norm, in [1, 2²⁰].

    Raises:
        ParameterError: an attribute is out of range, or the noise cannot be drawn.
    """

    name: ClassVar[str] = "central-gaussian"
    norm: ClassVar[Norm] = Norm.L2

    noise_multiplier: float
    resolution: int = DEFAULT_RESOLUTION

    @property
    def event(self) -> Event:
        """The charge for one round."""
        return self._noise.event

    @property
    def _noise(self) -> DiscretisedGaussian:
        return DiscretisedGaussian(
            self.clip_norm,
            self.noise_multiplier,
            self.sampling_rate,
            self.dimension,
            resolution=self.resolution,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralLaplace(_Central):
    """L1-clipped updates, and discrete Laplace noise on their sum: pure ε. Public.

    Attributes:
        noise_multiplier: the noise's scale over the L1 sensitivity: 1/ε of a round with known participants.
        resolution: grid units to one clip norm, in [1, 2³⁰]; by default it follows from d.

    Raises:
        ParameterError: an attribute is out of range, or the noise cannot be drawn.
    """

    name: ClassVar[str] = "central-laplace"
    norm: ClassVar[Norm] = Norm.L1

    noise_multiplier: float
    resolution: int | None = None

    @property
    def event(self) -> Event:
        """The charge for one round, sampling included."""
        return self._noise.event

    @property
    def _noise(self) -> DiscretisedLaplace:
        return DiscretisedLaplace(
            self.clip_norm,
            self.noise_multiplier,
            self.sampling_rate,
            self.dimension,
            resolution=self.resolution,
        )
