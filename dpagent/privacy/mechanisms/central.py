"""Noise at the coordinator, on the sum of whole device updates.

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
- the sum is divided by a **public** count, fixed before the round (:mod:`dpagent.protocol.updates`), and not
  by the number that came;
- the neighbour of a device is one that takes part and sends zeros (zero-out), as a device without records
  does. A silent one is no neighbour: a round may close later without it, and where more fragments come than a
  block has seats, another's takes its seat, so that the sum changes by two fragments. Zeros in place of an
  update change the sum by that update, of norm Δ or less, and nothing else. So they cost what the presence or
  absence of a record does in the mechanisms above. Where devices add noise of their own besides, a device
  without records adds it too, and the price is the same (:mod:`dpagent.privacy.mechanisms.device_noise`);
- the paper adds noise of a fixed standard deviation (0.001 at C = 1, to the mean of 3 or 10
  updates) and states no ε; here the noise follows from ε, or ε from it.

A coordinator that draws each device with probability q, in secret, would have amplification by sampling; no
plan asks for that, since the broker sees who sends. A fixed number n of N devices, as in the paper, is not
Poisson sampling and not covered by q = n/N.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.privacy.mechanisms.device_noise import refusal_distance
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.discretised_laplace import DiscretisedLaplace
from dpagent.privacy.mechanisms.grid import Constrained
from dpagent.privacy.mechanisms.mechanism import CalibratedMechanism, SumMechanism
from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit

SECRET_LOT: Final = "The coordinator draws each device by itself with probability {rate:g}, in secret."


class CentralMechanism(CalibratedMechanism):
    """Base of both: the mechanism of a device's records, with devices for records.

    ``accumulation_slack`` is None: each update is rounded by itself, and sums of whole numbers are exact.
    """

    __slots__ = ()

    unit: ClassVar[Unit] = Unit.DEVICE
    adjacency: ClassVar[Adjacency] = Adjacency.ZERO_OUT
    trust: ClassVar[Trust] = Trust.COORDINATOR

    @property
    def inexactness(self) -> float:
        """Total variation distance of a round from the ideal one: that of the noise, and the probability
        that a fragment with noise of its device is refused. There are no lots that could be too large."""
        return self.statistical_distance + refusal_distance(self.dimension)

    def constrain(self, updates: NDArray[np.float32]) -> Constrained:
        """Clip, round and add up whole updates, a device's in each row; see :meth:`Grid.constrain`.

        Totals of several calls may be added. ``excluded`` is private.
        """
        return self.grid.constrain(updates, what="updates")

    def statement(self, delta: float = 0.0) -> BudgetStatement:
        """The guarantee of one round for a device; see :meth:`Mechanism.statement`."""
        stated = SumMechanism.statement(self, delta)
        if self.sampling_rate == 1:
            return stated
        return replace(stated, assumptions=(SECRET_LOT.format(rate=self.sampling_rate),))


@dataclass(frozen=True, slots=True)
class CentralGaussian(CentralMechanism, DiscretisedGaussian):
    """L2-clipped updates, and discrete Gaussian noise on their sum. Public.

    Its attributes are those of :class:`DiscretisedGaussian`, of whole updates.
    """

    name: ClassVar[str] = "central-gaussian"


@dataclass(frozen=True, slots=True)
class CentralLaplace(CentralMechanism, DiscretisedLaplace):
    """L1-clipped updates, and discrete Laplace noise on their sum: pure ε. Public.

    Its attributes are those of :class:`DiscretisedLaplace`, of whole updates.
    """

    name: ClassVar[str] = "central-laplace"
