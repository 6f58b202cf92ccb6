"""A finished run: one record that the summary, the JSON and the report share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from simulation.job_record import JobRecord
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(JobRecord):
    """The settings of a run, and its results: those of its job, and what only the simulation knows."""

    settings: RunSettings
    notes: RunNotes
    outlook: Outlook
    layout: Layout
    """Where the files of the run are."""
    budgets: tuple[DeviceBudget, ...]
    fragments: FragmentTally
    arrivals: tuple[Arrival, ...]
    bytes_up: float
    """Mean bytes a device published in a round."""
    bytes_down: float
    """Mean bytes a device received in a round."""

    @property
    def epsilon(self) -> float:
        """ε of the run: the largest that the coordinator's schedule or any device's ledger shows."""
        return max([0.0, *self.epsilon_spent[-1:], *(budget.epsilon_spent for budget in self.budgets)])

    @property
    def test_records(self) -> int:
        """How many records the model is tested on."""
        return self.settings.form.test_records

    @property
    def baseline_accuracy(self) -> float:
        """Test accuracy of the run without noise, as far as it came; NaN where there was none."""
        return self.baseline_history[-1] if self.baseline_history else math.nan

    @property
    def unverified(self) -> tuple[int, ...]:
        """The devices whose ledgers do not verify."""
        return tuple(budget.device for budget in self.budgets if not budget.verified)

    @property
    def cautions(self) -> tuple[str, ...]:
        """All that a reader of the results should know, a sentence each."""
        found = self.job_cautions()
        majority = f"always answering the commonest class ({self.majority_class_accuracy:.1%})"
        if not math.isnan(self.baseline_accuracy) and not self.beats_majority_class(self.baseline_accuracy):
            found.insert(
                (not self.is_private) + (not math.isnan(self.accuracy) and not self.has_learned),
                f"Training without noise does not beat {majority} either, so noise is not the cause. Look at "
                "the range of the inputs, the label, the sizes of the classes and the model.",
            )
        warning = self.outlook.warning
        return (*found, *self.notes.remarks, *([] if warning is None else [warning]))
