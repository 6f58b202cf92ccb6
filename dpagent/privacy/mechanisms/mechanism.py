"""One interface for every mechanism: its parameters, sensitivity, privacy cost and operations.

A mechanism is a frozen record of public parameters; private data are arguments only. The programs use
:class:`Mechanism` and the registry (:mod:`dpagent.privacy.mechanisms.registry`), but no concrete class. In
a round a mechanism

1. is built from a :class:`Query` (the requested sum, with its sensitivity) and announced parameters;
2. quantizes the clipped sum of a lot (:meth:`Mechanism.quantize`), or clips and quantizes records one by one
   (:meth:`Mechanism.constrain`);
3. adds noise (:meth:`Mechanism.add_noise`);
4. says to which step noisy sums are rounded for the wire (:attr:`Mechanism.wire_step`), and how many bits a
   value then has (:meth:`Mechanism.wire_bits`): public parameters decide both;
It also states its privacy cost (:attr:`Mechanism.event`) and guarantee (:meth:`Mechanism.statement`). A new
mechanism is one file with one class, and one line in the registry; CONTRIBUTING.md has an example.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Self, cast

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count, require_positive
from dpagent.norm import Norm
from dpagent.privacy.accounting.imperfect_noise import imperfect_delta
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.grid import Constrained, Grid
from dpagent.privacy.mechanisms.wire import STEPS_OF_NOISE, wire_step
from dpagent.privacy.noise.entropy import Entropy, Sampler
from dpagent.privacy.ranges import NOISE_RANGE
from dpagent.privacy.sampling import LOT_TAIL
from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit

if TYPE_CHECKING:
    from dpagent.privacy.calibration import EventFamily
    from dpagent.privacy.mechanisms.honest_norms import NoiseLaw

#: Assumptions of a job's guarantee, besides the code.
JOB_ASSUMPTIONS: Final = (
    "The noise and the sampling rate of a job are fixed before its first round, or the costs of its rounds "
    "add up within what it reserved.",
    "The operating system's random numbers are uniform and stay secret.",
)

#: Share of a job's δ for what is not exact: the sampler's statistical distance, lots beyond the size that a
#: device can add up (:func:`dpagent.privacy.sampling.largest_lot`), and the lemma on discrete noise in
#: :mod:`dpagent.privacy.accounting.gaussian_loss`. The ε is priced at the rest.
NOISE_SHARE: Final = 1e-6

_SIGNAL: Final = 0.25
"""Norm of the signal that the wire has room for at full precision, in clip norms a record of the expected
lot, spread evenly. The largest in a block of the digits job is 0.09 with records spread evenly, 0.38 with one
class a device."""


@dataclass(frozen=True, slots=True)
class Query:
    """The sum that a round requests from a device, with everything that determines its privacy. Public.

    Attributes:
        clip_norm: C, bound on one record's contribution, in the mechanism's norm.
        accumulation_slack: the most that summing in floating point adds to a record's influence, relative
            to C; None where each record is rounded to whole numbers, whose sum is exact.
        dimension: d, coordinates of the sum.
        sampling_rate: q, the probability with which each record enters a lot, in (0, 1].
        steps: noisy sums in a round, each over a fresh lot with fresh noise.
    """

    clip_norm: float
    accumulation_slack: float | None
    dimension: int
    sampling_rate: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """A public number that a plan announces for a mechanism, and the range that a device runs it in.

    Attributes:
        name: as the mechanism's field, plans and ledgers spell it.
        least: of the range.
        most: of the range.
        meaning: for people.
        whole: whether it is a whole number.
    """

    name: str
    least: float
    most: float
    meaning: str
    whole: bool = False

    def check(self, value: float) -> float:
        """``value``, within the range.

        Raises:
            ParameterError: it is not.
        """
        name = self.name.replace("_", " ")
        if self.whole:
            return require_count(name, cast(int, value), minimum=int(self.least), maximum=int(self.most))
        return require_between(name, value, self.least, self.most)


class Mechanism(ABC):
    """One round's mechanism on one device: its name, its guarantee and its cost."""

    __slots__ = ()

    name: ClassVar[str]
    """As plans and ledgers spell it."""
    unit: ClassVar[Unit]
    """Whose presence is hidden."""
    adjacency: ClassVar[Adjacency]
    """Which data sets are neighbours."""
    trust: ClassVar[Trust]
    """The parties that must follow the protocol for the guarantee to hold."""
    norm: ClassVar[Norm | None]
    """In which norm it needs each record's part to be bounded; None: it bounds none."""
    is_private: ClassVar[bool] = True
    """Whether anything is proven of it. A device runs another only where its owner allows that."""

    noise_multiplier: float
    """The noise's parameter over the sensitivity; it follows from the round's budget."""

    @property
    @abstractmethod
    def event(self) -> Event:
        """The event that an accountant prices for one round."""

    @abstractmethod
    def round_cost(self, delta: float) -> tuple[float, float]:
        """(ε, δ) of one round with ideal noise, at ``delta`` or less."""

    @property
    @abstractmethod
    def statistical_distance(self) -> float:
        """Total variation distance of a round's noise from the ideal; η of ``docs/privacy.md``.

        A mechanism within η of an (ε, δ)-DP one is (ε, δ + (1 + e^ε)·η)-DP.
        """

    @property
    @abstractmethod
    def inexactness(self) -> float:
        """Total variation distance of a round on a device from the ideal one, whatever departs from it."""

    def require_noise_as_priced(self, rounds: int, job_epsilon: float, delta: float) -> None:
        """Check that the drawn noise meets the assumptions of the job's price.

        Args:
            rounds: of the job; this mechanism is that of one of them.
            job_epsilon: reserved for the job.
            delta: of the job.

        Raises:
            ParameterError: the sampler is too far from exact.
        """
        excess = imperfect_delta(job_epsilon, 0.0, rounds * self.inexactness)
        if not excess <= NOISE_SHARE * delta:
            raise ParameterError(
                f"noise as it is drawn would add {excess:.3g} to δ; set aside for that is "
                f"{NOISE_SHARE * delta:.3g}. Plan a smaller ε or a greater δ."
            )

    def statement(self, delta: float = 0.0) -> BudgetStatement:
        """The guarantee of one round, at ``delta`` in [0, 1) plus the share for imperfect noise."""
        epsilon, spent = self.round_cost(delta)
        return BudgetStatement(
            self.unit,
            self.adjacency,
            self.trust,
            self.name,
            epsilon,
            imperfect_delta(epsilon, spent, self.inexactness),
        )

    @classmethod
    def job_statement(cls, epsilon: float, delta: float, *assumptions: str) -> BudgetStatement:
        """The guarantee of one or more jobs of such rounds, whose charges come to (ε, δ).

        Args:
            epsilon: as accounted for, at least 0.
            delta: likewise, with the share for imperfect noise, in [0, 1].
            assumptions: besides those that all jobs rest on.
        """
        return BudgetStatement(
            cls.unit, cls.adjacency, cls.trust, cls.name, epsilon, delta, (*JOB_ASSUMPTIONS, *assumptions)
        )


class SumMechanism(Mechanism):
    """A mechanism that adds noise to a clipped sum.

    A subclass is a frozen dataclass with the fields of :class:`Query`, and its own.
    """

    __slots__ = ()

    norm: ClassVar[Norm]
    """In which norm it needs each record's part to be bounded."""

    clip_norm: float
    sampling_rate: float
    dimension: int
    steps: int

    @property
    def inexactness(self) -> float:
        """Total variation distance of a round on a device from the ideal one: of its noise, and of its lots.

        A device adds up lots of up to a largest size; a larger one, with probability LOT_TAIL or less, counts
        as empty.
        """
        return self.statistical_distance + self.steps * LOT_TAIL

    # From a clipped sum to integers that may leave, and back.

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """The grid that turns gradients into integers."""

    @property
    @abstractmethod
    def sensitivity_units(self) -> int:
        """Bound on one record's change of the integer sum, in the mechanism's norm, in grid units."""

    @property
    @abstractmethod
    def deviation_units(self) -> float:
        """Bound on the standard deviation of one step's noise, in grid units."""

    @abstractmethod
    def sampler(self, *, entropy: Entropy = os.urandom) -> Sampler:
        """The source of this mechanism's noise, for instance to draw ahead of need."""

    @property
    def granularity(self) -> float:
        """One grid unit in gradient units."""
        return self.grid.granularity

    def constrain(self, gradients: NDArray[np.float32]) -> Constrained:
        """Clip, round and add up the records of a microbatch; see :meth:`Grid.constrain`."""
        return self.grid.constrain(gradients)

    def quantize(self, total: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round a clipped sum to the grid; see :meth:`Grid.quantize`.

        Raises:
            ParameterError: ``total`` does not fit.
        """
        return self.grid.quantize(total)

    def add_noise(
        self, total: NDArray[np.int64], *, entropy: Entropy = os.urandom, noise: Sampler | None = None
    ) -> NDArray[np.int64]:
        """Add one vector of noise to the quantized sum over one lot.

        Args:
            total: shape (d,), in grid units.
            entropy: gives n uniform bytes for an argument n; to be replaced in tests only.
            noise: a pool over :meth:`sampler`, filled ahead of need; ``entropy`` is then unused.

        Returns:
            Shape (d,), in grid units.

        Raises:
            ParameterError: ``total`` is not an integer vector of d entries.
        """
        self.grid.require_total(total)
        return total + (noise or self.sampler(entropy=entropy)).sample(self.dimension)

    @property
    def wire_step(self) -> int:
        """Grid units to a wire unit; see :func:`dpagent.privacy.mechanisms.wire.wire_step`.

        Raises:
            ParameterError: the noise is above 2⁴⁰ units.
        """
        return wire_step(self.deviation_units * math.sqrt(self.steps))

    def wire_bits(self, expected_lot: float) -> float:
        """Entropy of a value on the wire, as if it were Gaussian: of noise that spans three steps, and of a
        signal of a quarter of what the expected lots can reach.

        Args:
            expected_lot: public expectation of the number of records in a lot, above 0.

        Raises:
            ParameterError: it is not above 0, or the noise is above 2⁴⁰ units.
        """
        lot = require_positive("expected lot", expected_lot)
        signal = _SIGNAL * lot * self.steps * self.sensitivity_units / self.wire_step
        # Spread evenly, a signal of L2 norm s has s/√d in each coordinate, and one of L1 norm s has s/d.
        coordinates = self.dimension if self.norm is Norm.L2 else self.dimension**2
        variance = STEPS_OF_NOISE**2 + 1 / 12 + signal**2 / coordinates
        return math.log2(2 * math.pi * math.e * variance) / 2


class PlannedMechanism(SumMechanism):
    """A mechanism for sums that a plan can name: it can be announced, and built from the announcement.

    A subclass has the fields of :class:`Query`, a ``noise_multiplier``, and a field for each of its
    ``parameters``.
    """

    __slots__ = ()

    noise_range: ClassVar[tuple[float, float]] = NOISE_RANGE
    """Least and greatest noise multiplier that a device runs."""
    deviation_per_multiplier: ClassVar[float] = 1.0
    """Standard deviation of the noise over the sensitivity, for a noise multiplier of 1."""
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    """The parameters that a plan announces besides noise multipliers."""

    accumulation_slack: float | None

    @classmethod
    def build(cls, query: Query, noise_multiplier: float, parameters: Mapping[str, float]) -> Self:
        """The mechanism that answers ``query`` with the noise and the parameters that were announced.

        Raises:
            ParameterError: a parameter is missing, unknown or out of its range.
        """
        known = {parameter.name for parameter in cls.parameters}
        if known != set(parameters):
            given, wanted = (", ".join(sorted(names)) or "none" for names in (parameters, known))
            raise ParameterError(f"parameters of mechanism {cls.name} are {given}; expected {wanted}.")
        require_between("noise multiplier", noise_multiplier, *cls.noise_range)
        checked = {each.name: each.check(parameters[each.name]) for each in cls.parameters}
        make: Callable[..., Self] = cls
        return make(**asdict(query), noise_multiplier=noise_multiplier, **checked)

    @property
    def noise_law(self) -> NoiseLaw | None:
        """What is known of the noise, from which a coordinator derives the norms of honest fragments.

        None, as here by default: nothing is. Fragments of any norm that the wire holds then count, up to
        2³³ units a value, and nothing else bounds the pull of a hostile one.
        """
        return None

    @property
    def announced(self) -> dict[str, float]:
        """The values of ``parameters``: with query and noise multiplier, all that :meth:`build` needs."""
        return {parameter.name: getattr(self, parameter.name) for parameter in self.parameters}


class CalibratedMechanism(PlannedMechanism):
    """A mechanism whose price follows from the noise multiplier alone: a job can choose all of them first."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def family(cls, sampling_rate: float, steps: int = 1) -> EventFamily:
        """The cost of a round as a function of the noise multiplier, for
        :func:`~dpagent.privacy.calibration.calibrate`."""

    @classmethod
    @abstractmethod
    def chosen_parameters(cls, noise_multipliers: Sequence[float]) -> dict[str, float]:
        """The other parameters, chosen once for a job with these noise multipliers."""
