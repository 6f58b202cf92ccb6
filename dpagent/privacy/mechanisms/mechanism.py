"""What every mechanism states and can do, whatever its noise.

A mechanism is a frozen record of public parameters; private data are arguments only. It brings
the records' vectors onto a grid on which their norms are bounded, adds them up, and adds noise:
:class:`~dpagent.privacy.mechanisms.discretised_gaussian.DiscretisedGaussian`,
:class:`~dpagent.privacy.mechanisms.discretised_laplace.DiscretisedLaplace` and
:class:`~dpagent.privacy.mechanisms.truncated_laplace.TruncatedLaplace` on the device,
:class:`~dpagent.privacy.mechanisms.central.CentralGaussian` and
:class:`~dpagent.privacy.mechanisms.central.CentralLaplace` at the coordinator.
Norms for single layers become one norm before that, see :mod:`dpagent.privacy.clipping`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.grid import Constrained, Norm
from dpagent.privacy.statement import Adjacency, Trust, Unit


class Mechanism(Protocol):
    """One release on one integer grid: scope, sensitivity, cost, and how to make it."""

    @property
    def name(self) -> str:
        """As plans and ledgers spell it."""

    @property
    def unit(self) -> Unit:
        """Whose presence is hidden."""

    @property
    def adjacency(self) -> Adjacency:
        """Which data sets are neighbours."""

    @property
    def trust(self) -> Trust:
        """Who has to keep to the protocol for the guarantee to hold."""

    @property
    def norm(self) -> Norm:
        """In which norm the sensitivity is stated."""

    @property
    def dimension(self) -> int:
        """d, number of coordinates released."""

    @property
    def steps(self) -> int:
        """Noisy steps in one release, each with a fresh lot and fresh noise."""

    @property
    def granularity(self) -> float:
        """One fine-grid step in gradient units."""

    @property
    def sensitivity_steps(self) -> int:
        """Bound on the norm of one record's integer vector, in fine-grid steps."""

    @property
    def deviation_steps(self) -> float:
        """Bound on the standard deviation of one step's noise, in fine-grid steps."""

    @property
    def reach_steps(self) -> float:
        """The noise of all steps exceeds this with probability below 1e-14 a coordinate."""

    @property
    def event(self) -> Event:
        """The charge for one release."""

    @property
    def statistical_distance(self) -> float:
        """Total variation distance of one release from ideal noise."""

    def constrain(self, gradients: NDArray[np.float32], /) -> Constrained:
        """Clip, round and add up the records of a microbatch, shape (m, d)."""

    def perturb(self, total: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Add one step's noise to the exact sum over a lot, shape (d,)."""
