"""A finished run: one record that the summary, the JSON and the report share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpagent.privacy.statement import BudgetStatement
from dpagent.wording import counted
from simulation.chance import beats_by_more_than_chance
from simulation.layout import Layout
from simulation.notes import RunNotes
from simulation.outlook import Outlook
from simulation.settings import RunSettings


@dataclass(frozen=True, slots=True)
class Arrival:
    """A fragment on its way, as its device and the coordinator saw it. Times are Unix times."""

    device: int
    """Known here, because the simulation owns the devices' disks; the coordinator cannot tell."""
    round: int
    sent_at: float
    arrived_at: float


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """A device's lifetime budget, from its own ledger."""

    device: int
    epsilon_spent: float
    epsilon_total: float
    charges: int
    verified: bool


@dataclass(frozen=True, slots=True)
class FragmentTally:
    """The fate of a run's fragments.

    ``charged`` = ``counted`` + ``expired`` + ``lost``: a device pays for all fragments of an update
    before the first one leaves, and the charge stands in every case. Lost: not counted,
    although the device holds a receipt for it, or sent it in good time before its round closed.
    Expired: all others that are not counted; the round was over before they arrived, or they
    never left. ``sent`` are those that left at all, and is no part of that sum.

    ``duplicates`` and ``rejected`` are messages, not fragments.
    """

    charged: int
    sent: int
    counted: int
    expired: int
    duplicates: int
    rejected: int
    lost: int


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The settings of a run, and its results."""

    settings: RunSettings
    notes: RunNotes
    outlook: Outlook
    layout: Layout
    """Where the files of the run are."""
    model: str
    parameters: int
    noise_multipliers: tuple[float, ...]
    clip_norms: tuple[float, ...]
    """Of each round, where it follows a quantile; otherwise none."""
    epsilon_spent: tuple[float, ...]
    """Cumulative ε after each round."""
    accuracy_history: tuple[float, ...]
    """Test accuracy after each round, 0 to 1; NaN after one that only found a projection's directions."""
    baseline_history: tuple[float, ...]
    """The same of a run without noise: same lots' rate, clipping and optimiser. Where devices train locally,
    their weights count as they are, neither clipped nor within ranges."""
    majority_class_accuracy: float
    """Accuracy of always answering the commonest class of the test records."""
    clamped: tuple[int, ...]
    """Coordinates beyond the coordinator's cap in each round."""
    out_of_range: tuple[str, ...]
    """Layers whose changes on the devices lay at the ends of their ranges in some round."""
    kept: tuple[float, ...]
    """Share of the mean gradient's L2 norm that the coordinator's cap left in each round."""
    columns: tuple[BudgetStatement, ...]
    """What the run has spent for whom, its own guarantee first; never added."""
    budgets: tuple[DeviceBudget, ...]
    fragments: FragmentTally
    arrivals: tuple[Arrival, ...]
    bytes_up: float
    """Mean bytes a device published in a round."""
    bytes_down: float
    """Mean bytes a device received in a round."""
    seconds_by_round: tuple[float, ...]
    is_virtual: bool = False
    """Whether devices were computed on Ray, without broker and boards. Then one ledger stands for all."""

    @property
    def epsilon(self) -> float:
        """ε of the run: the largest that the coordinator's schedule or any device's ledger shows."""
        return max([0.0, *self.epsilon_spent[-1:], *(budget.epsilon_spent for budget in self.budgets)])

    @property
    def is_private(self) -> bool:
        """Whether the run guarantees anything."""
        return self.settings.mechanism.is_private and not self.settings.insecure

    @property
    def accuracy(self) -> float:
        """Test accuracy of the final model; NaN where there is none."""
        return self.accuracy_history[-1] if self.accuracy_history else math.nan

    @property
    def baseline_accuracy(self) -> float:
        """The same of the run without noise, as far as it came; NaN where there was none."""
        return self.baseline_history[-1] if self.baseline_history else math.nan

    @property
    def has_learned(self) -> bool:
        """Whether the model beats always answering the commonest class by more than chance."""
        return self._beats_majority_class(self.accuracy)

    @property
    def unverified(self) -> tuple[int, ...]:
        """The devices whose ledgers do not verify."""
        return tuple(budget.device for budget in self.budgets if not budget.verified)

    @property
    def cautions(self) -> tuple[str, ...]:
        """All that a reader of the results should know, a sentence each."""
        first = []
        majority = f"always answering the commonest class ({self.majority_class_accuracy:.1%})"
        if not math.isnan(self.accuracy) and not self.has_learned:
            first.append(
                f"The model has not learned: its accuracy of {self.accuracy:.1%} does not beat {majority} by "
                "more than chance."
            )
        if not math.isnan(self.baseline_accuracy) and not self._beats_majority_class(self.baseline_accuracy):
            first.append(
                f"Training without noise does not beat {majority} either, so noise is not the cause. Look at "
                "the range of the inputs, the label, the sizes of the classes and the model."
            )
        if self.settings.insecure:
            first.insert(0, self.settings.insecure)
        elif not self.is_private:
            first.insert(
                0,
                "Nothing is guaranteed: the published cap releases exact gradients wherever it acts. Whoever "
                "sees the models can name records. The ledgers admit no other job on these data.",
            )
        if self.settings.cap == "bounded" and (done := len(self.epsilon_spent)) < self.settings.rounds:
            first.append(
                f"The job ended after {done} of {counted(self.settings.rounds, 'round')}: what was left of ε "
                "met the bounded cap of no further round."
            )
        if self.out_of_range:
            first.append(
                f"On the devices, changes of {', '.join(self.out_of_range)} lay at the ends of their ranges, "
                "and were cut. A larger privacy.two_point.radius or less local training would help."
            )
        warning = self.outlook.warning
        return (*first, *self.notes.remarks, *([] if warning is None else [warning]))

    def _beats_majority_class(self, accuracy: float) -> bool:
        return beats_by_more_than_chance(
            accuracy, self.majority_class_accuracy, self.settings.form.test_records
        )
