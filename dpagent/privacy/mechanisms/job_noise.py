"""The noise of a whole job: the mechanism, its grid, and the noise multiplier of each round.

The coordinator chooses it, the first plan announces it, every device pins it. All code that needs the
mechanism of a round, from admission to the report, gets it from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Self

from dpagent.errors import ParameterError, require_between, require_count
from dpagent.privacy.mechanisms.mechanism import (
    NOISE_SHARE,
    CalibratedMechanism,
    PlannedMechanism,
    Query,
)
from dpagent.privacy.mechanisms.registry import calibrated_named, mechanism_named
from dpagent.privacy.schedules import Schedule

if TYPE_CHECKING:
    from dpagent.privacy.calibration import BudgetPlan


@lru_cache(maxsize=16)
def calibrated_noise(
    mechanism: type[CalibratedMechanism],
    schedule: Schedule,
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    sampling_rate: float = 1.0,
    steps: int = 1,
) -> BudgetPlan:
    """What :func:`~dpagent.privacy.calibration.calibrate` finds for a job of this mechanism, with noise as it
    is drawn: the share of δ that pays for what is not exact is left out of the search, as devices leave it
    out of their price. So both state the same ε. It is computed once, though a job is tried, compared with
    others, and then announced.

    Args:
        mechanism: of each round.
        schedule, epsilon, delta, rounds: as of ``calibrate``.
        sampling_rate: of each step.
        steps: of each round.

    Raises:
        ParameterError, PlanError: as ``calibrate`` does.
    """
    from dpagent.privacy.calibration import calibrate  # which training never loads

    found = calibrate(
        schedule,
        mechanism.family(sampling_rate, steps),
        epsilon=epsilon,
        delta=require_between("delta", delta, 0.0, 1.0, high_open=True) * (1 - NOISE_SHARE),
        rounds=rounds,
    )
    return replace(found, delta=float(delta))


@dataclass(frozen=True, slots=True)
class JobNoise:
    """A mechanism for each round of a job. Public.

    Attributes:
        mechanism: of all rounds.
        multipliers: the noise multiplier of each round, in order; at least one.
        parameters: the mechanism's other parameters, alike in all rounds.

    >>> noise = JobNoise.chosen("discrete-gaussian", [4.0, 3.0])
    >>> query = Query(clip_norm=1.0, accumulation_slack=0.001, dimension=10, sampling_rate=0.1)
    >>> mechanism = noise.at(2, query)
    >>> mechanism.noise_multiplier, mechanism.announced
    (3.0, {'resolution': 1048576})
    """

    mechanism: type[PlannedMechanism]
    multipliers: tuple[float, ...]
    parameters: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.multipliers:
            raise ParameterError("noise multipliers are empty; expected one for each round.")

    @classmethod
    def chosen(cls, name: str, multipliers: Sequence[float]) -> Self:
        """As an operator's coordinator chooses it.

        Args:
            name: of the mechanism.
            multipliers: of each round, as calibrated.

        Raises:
            ParameterError: there is no such mechanism, or no grid for such noise.
        """
        mechanism = calibrated_named(name)
        return cls(mechanism, tuple(multipliers), mechanism.chosen_parameters(multipliers))

    @classmethod
    def announced(cls, name: str, multipliers: Sequence[float], parameters: Mapping[str, float]) -> Self:
        """As a plan announces it.

        Raises:
            ParameterError: there is no such mechanism here.
        """
        return cls(mechanism_named(name), tuple(multipliers), dict(parameters))

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.multipliers)

    def at(self, number: int, query: Query) -> PlannedMechanism:
        """The mechanism of a round.

        Args:
            number: of the round, from 1.
            query: of the round.

        Raises:
            ParameterError: there is no such round, or a parameter is out of the mechanism's range.
        """
        require_count("round", number, maximum=self.rounds)
        return self.mechanism.build(query, self.multipliers[number - 1], self.parameters)

    def require_acceptable(self, query: Callable[[int], Query], epsilon: float, delta: float) -> None:
        """See that a device would take every round of the job, as far as its noise goes.

        Args:
            query: of each round, by its number.
            epsilon: of the whole job.
            delta: likewise.

        Raises:
            ParameterError: naming the first round whose noise is out of range, or not what its price takes it
                for.
        """
        for number in range(1, self.rounds + 1):
            try:
                self.at(number, query(number)).require_noise_as_priced(self.rounds, epsilon, delta)
            except ParameterError as error:
                raise ParameterError(f"round {number}: {error}") from error
