"""A job as its coordinator knows it, for a report: of a simulated fleet, or of a real one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from dpagent.norm import Norm
from dpagent.privacy.mechanisms.mechanism import Mechanism
from dpagent.privacy.statement import BudgetStatement
from dpagent.wording import counted
from simulation.chance import beats_by_more_than_chance


class Terms(Protocol):
    """The settings of a job that its report names; see :class:`~simulation.settings.RunSettings`."""

    @property
    def devices(self) -> int: ...
    @property
    def records_per_device(self) -> float: ...
    @property
    def rounds(self) -> int: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def delta(self) -> float: ...
    @property
    def method(self) -> str: ...
    @property
    def noise(self) -> str: ...
    @property
    def schedule(self) -> str: ...
    @property
    def sampling_rate(self) -> float: ...
    @property
    def clip_norm(self) -> float: ...
    @property
    def clipping(self) -> str: ...
    @property
    def norm(self) -> Norm | None: ...
    @property
    def device_noise(self) -> float | None: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def cap(self) -> str: ...
    @property
    def cap_at(self) -> str: ...
    @property
    def cap_in_words(self) -> str: ...
    @property
    def mechanism(self) -> type[Mechanism]: ...
    @property
    def mixer(self) -> bool: ...
    @property
    def sends(self) -> str: ...
    @property
    def insecure(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(ABC):
    """The settings of a job, and its results."""

    settings: Terms
    model: str
    parameters: int
    numbers: tuple[int, ...]
    """Of the rounds that closed, in order: the rounds of all figures here. Others were given up."""
    noise_multipliers: tuple[float, ...]
    clip_norms: tuple[float, ...]
    """Of each round, where it follows a quantile; otherwise none."""
    epsilon_spent: tuple[float, ...]
    """Cumulative ε after each round."""
    accuracy_history: tuple[float, ...]
    """Test accuracy after each round, 0 to 1; NaN after one that only found a projection's directions, or
    where there are no test data."""
    baseline_history: tuple[float, ...] = ()
    """The same of a run without noise: same lots' rate, clipping and optimiser. Where devices train locally,
    their weights count as they are, neither clipped nor within ranges. Only a simulation has it."""
    majority_class_accuracy: float
    """Accuracy of always answering the commonest class of the test records; NaN without any."""
    clamped: tuple[int, ...]
    """Coordinates beyond the coordinator's cap in each round."""
    out_of_range: tuple[str, ...]
    """Layers whose changes on the devices lay at the ends of their ranges in some round."""
    kept: tuple[float, ...]
    """Share of the mean gradient's L2 norm that the coordinator's cap left in each round."""
    columns: tuple[BudgetStatement, ...]
    """What the job has spent for whom, its own guarantee first; never added."""
    seconds_by_round: tuple[float, ...]
    is_virtual: bool = False
    """Whether devices were computed on Ray, without broker and boards. Then one ledger stands for all."""

    @property
    @abstractmethod
    def test_records(self) -> int:
        """How many records the model is tested on."""

    @property
    def last_round(self) -> int:
        """The number of the last round that closed; 0 before the first."""
        return self.numbers[-1] if self.numbers else 0

    @property
    def ended_after(self) -> int | None:
        """The number of its last round, where the job ended before all that it was to have; else None."""
        return self.last_round if self.last_round < self.settings.rounds else None

    @property
    def epsilon(self) -> float:
        """ε of the job so far."""
        return max([0.0, *self.epsilon_spent[-1:]])

    @property
    def is_private(self) -> bool:
        """Whether the job guarantees anything."""
        return self.settings.mechanism.is_private and not self.settings.insecure

    @property
    def accuracy(self) -> float:
        """Test accuracy of the last model; NaN where there is none."""
        return self.accuracy_history[-1] if self.accuracy_history else math.nan

    @property
    def has_learned(self) -> bool:
        """Whether the model beats always answering the commonest class by more than chance."""
        return self.beats_majority_class(self.accuracy)

    def beats_majority_class(self, accuracy: float) -> bool:
        """Whether an accuracy does so."""
        return beats_by_more_than_chance(accuracy, self.majority_class_accuracy, self.test_records)

    @property
    def cautions(self) -> tuple[str, ...]:
        """All that a reader of the results should know, a sentence each."""
        return tuple(self.job_cautions())

    def job_cautions(self) -> list[str]:
        """What the job itself gives reason for."""
        first = []
        if not math.isnan(self.accuracy) and not self.has_learned:
            first.append(
                f"The model has not learned: its accuracy of {self.accuracy:.1%} does not beat always "
                f"answering the commonest class ({self.majority_class_accuracy:.1%}) by more than chance."
            )
        if self.settings.insecure:
            first.insert(0, self.settings.insecure)
        elif not self.is_private:
            first.insert(
                0,
                "Nothing is guaranteed: the published cap releases exact gradients wherever it acts. Whoever "
                "sees the models can name records. The ledgers admit no other job on these data.",
            )
        if self.settings.cap == "bounded" and (done := self.ended_after) is not None:
            first.append(
                f"The job ended after {done} of {counted(self.settings.rounds, 'round')}: what was left of ε "
                "met the bounded cap of no further round."
            )
        if self.out_of_range:
            first.append(
                f"On the devices, changes of {', '.join(self.out_of_range)} lay at the ends of their ranges, "
                "and were cut. A larger privacy.two_point.radius or less local training would help."
            )
        return first
