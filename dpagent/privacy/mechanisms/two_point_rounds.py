"""The two-point reports of a whole job: what each round costs a device, and the mechanism of a round.

A device sends k randomised bits a round, each ε₀-LDP, of weights that it trained on its records; positions
are drawn without a look at them. So for any two sets of records, of whatever size, the k bits are k
independent runs of ε₀-DP mechanisms: the event of a round is k runs of ``ApproximateEvent(ε₀)``, without
sampling and without δ. Added up plainly that is k·ε₀; an accountant composes it more tightly at the job's δ
(Kairouz, Oh, Viswanath, *The composition theorem for differential privacy*, ICML 2015; it is exact for such
bits). The unit is the device, adjacency replace-one. Since it holds for any two sets of records, it holds for
those that differ in one record, and a ledger of records can take it.

As for Laplace noise, the noise multiplier of a round is one over the ε₀ of a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Final

from dpagent.errors import ParameterError, PlanError, require_between, require_count
from dpagent.privacy.accounting.composition import exact_sum
from dpagent.privacy.events import ApproximateEvent, Event, SelfComposedEvent
from dpagent.privacy.mechanisms.layer_ranges import LayerRange
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE, Mechanism
from dpagent.privacy.mechanisms.two_point import EPSILON_RANGE, TwoPoint
from dpagent.privacy.ranges import MAX_DIMENSION
from dpagent.privacy.schedules import Schedule
from dpagent.privacy.statement import Adjacency, Trust, Unit

if TYPE_CHECKING:
    from dpagent.privacy.calibration import BudgetPlan, EventFamily

#: ε₀ of a bit: below the least of this range, no bit says anything.
BIT_EPSILON_RANGE: Final = (1e-4, EPSILON_RANGE[1])
_NOISE_RANGE: Final = (1 / BIT_EPSILON_RANGE[1], 1 / BIT_EPSILON_RANGE[0])


@dataclass(frozen=True, slots=True)
class TwoPointRound(Mechanism):
    """One round's reports of one device, as far as its price goes. Public.

    Attributes:
        noise_multiplier: one over ε₀ of a bit, in [1/32, 10,000].
        coordinates: k, bits that the device sends, in [1, d].
        dimension: d, weights of the model.

    Raises:
        ParameterError: a value is out of its range.
    """

    name: ClassVar[str] = "two-point"
    unit: ClassVar[Unit] = Unit.DEVICE
    adjacency: ClassVar[Adjacency] = Adjacency.REPLACE_ONE
    trust: ClassVar[Trust] = Trust.NONE
    norm: ClassVar[None] = None

    noise_multiplier: float
    coordinates: int
    dimension: int

    def __post_init__(self) -> None:
        require_between("noise multiplier", self.noise_multiplier, *_NOISE_RANGE)
        require_count("dimension", self.dimension, maximum=MAX_DIMENSION)
        require_count("coordinates", self.coordinates, maximum=self.dimension)

    @property
    def bit_epsilon(self) -> float:
        """ε₀ of a bit."""
        return min(1 / self.noise_multiplier, BIT_EPSILON_RANGE[1])

    @property
    def event(self) -> Event:
        """k runs of any ε₀-DP mechanism."""
        return SelfComposedEvent(ApproximateEvent(self.bit_epsilon), self.coordinates)

    def round_cost(self, delta: float) -> tuple[float, float]:
        """k·ε₀, rounded up; no δ."""
        return exact_sum([(self.bit_epsilon, self.coordinates)]), 0.0

    @property
    def statistical_distance(self) -> float:
        """Zero: thresholds are whole numbers, drawn from uniform words."""
        return 0.0

    @property
    def inexactness(self) -> float:
        """Zero: batches have a fixed size, whatever the records are."""
        return 0.0

    @classmethod
    def family(cls, coordinates: int) -> EventFamily:
        """The cost of a round of so many bits as a function of the noise multiplier."""
        from dpagent.privacy.calibration import EventFamily  # which training never loads

        return EventFamily(
            lambda noise: SelfComposedEvent(
                ApproximateEvent(min(1 / noise, BIT_EPSILON_RANGE[1])), coordinates
            ),
            "epsilon",
            _NOISE_RANGE,
        )

    def mechanism(self, layers: Sequence[LayerRange]) -> TwoPoint:
        """The mechanism with the ranges of a round.

        Raises:
            ParameterError: the layers have another number of weights.
        """
        found = TwoPoint(tuple(layers), self.bit_epsilon, self.coordinates)
        if found.dimension != self.dimension:
            raise ParameterError(f"layers have {found.dimension:,} weights; expected {self.dimension:,}.")
        return found


@dataclass(frozen=True, slots=True)
class TwoPointRounds:
    """The reports of each round of a job. Public; the first plan announces them, every device pins them.

    Attributes:
        multipliers: the noise multiplier of each round, in order; at least one.
        coordinates: k, the bits that a device sends in each round.
    """

    mechanism: ClassVar[type[TwoPointRound]] = TwoPointRound

    multipliers: tuple[float, ...]
    coordinates: int

    def __post_init__(self) -> None:
        if not self.multipliers:
            raise ParameterError("noise multipliers are empty; expected one for each round.")

    @property
    def parameters(self) -> dict[str, float]:
        """The number of bits, by name."""
        return {"coordinates": self.coordinates}

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.multipliers)

    def at(self, number: int, dimension: int) -> TwoPointRound:
        """The reports of a round.

        Args:
            number: of the round, from 1.
            dimension: d, weights of the model.

        Raises:
            ParameterError: there is no such round, or a value is out of its range.
        """
        require_count("round", number, maximum=self.rounds)
        return TwoPointRound(self.multipliers[number - 1], self.coordinates, dimension)


def calibrated_reports(
    schedule: Schedule, *, epsilon: float, delta: float, rounds: int, dimension: int, coordinates: int | None
) -> tuple[TwoPointRounds, BudgetPlan]:
    """The reports that spend (``epsilon``, ``delta``) over the rounds, and their price.

    The variance of a weight's mean over devices goes with coth²(ε₀/2)/k, ε₀ being that of a bit with k bits a
    round. With plain addition it is least at an ε₀ of 2.18; tight composition favours more bits.

    Args:
        schedule: how the budget is spread.
        epsilon: of the job for each device, above 0.
        delta: in (0, 1).
        rounds: at least 1.
        dimension: d, weights of the model.
        coordinates: k; None takes the number with the least variance.

    Raises:
        ParameterError: a value is out of its range.
        PlanError: no bit can be sent for so little.
    """
    if coordinates is None:
        coordinates = _best_coordinates(schedule, epsilon, delta, rounds, dimension)
    require_count("privacy.two_point.coordinates", coordinates, maximum=dimension)
    budget = _calibrated(schedule, coordinates, epsilon, delta, rounds)
    return TwoPointRounds(budget.noise_multipliers, coordinates), budget


@lru_cache(maxsize=64)
def _calibrated(
    schedule: Schedule, coordinates: int, epsilon: float, delta: float, rounds: int
) -> BudgetPlan:
    from dpagent.privacy.calibration import calibrate

    try:
        found = calibrate(
            schedule,
            TwoPointRound.family(coordinates),
            epsilon=epsilon,
            # Reports are exact; devices leave this share out of any price, and both are to state one ε.
            delta=require_between("delta", delta, 0.0, 1.0, high_open=True) * (1 - NOISE_SHARE),
            rounds=rounds,
        )
        return replace(found, delta=delta)
    except ParameterError:
        raise
    except PlanError as error:
        raise PlanError(
            f"epsilon {epsilon:g} leaves less than {BIT_EPSILON_RANGE[0]:g} for each of {coordinates} bits a"
            f" round in {rounds} rounds: {error}"
        ) from error


def _best_coordinates(schedule: Schedule, epsilon: float, delta: float, rounds: int, dimension: int) -> int:
    """The least k, from one bit up in steps of a quarter, within a twentieth of the least variance.

    The more bits share a budget, the nearer their composition comes to that of Gaussian noise, of which it
    does not matter how finely it is divided. Fewer bits are fewer bytes.
    """
    variances: dict[int, float] = {}
    count = 1
    while count <= dimension:
        try:
            budget = _calibrated(schedule, count, epsilon, delta, rounds)
        except PlanError:
            break
        # The mean over rounds: they differ in ε₀, and share k.
        coths = [1 / math.tanh(0.5 / noise) for noise in budget.noise_multipliers]
        variances[count] = sum(coth**2 for coth in coths) / count
        if variances[count] > 1.2 * min(variances.values()):
            break
        count = max(count + 1, count * 5 // 4)
    if not variances:
        _calibrated(schedule, 1, epsilon, delta, rounds)  # it says why not
    least = min(variances.values())
    return next(count for count, variance in variances.items() if variance <= 1.05 * least)
