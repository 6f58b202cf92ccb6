"""What a demo run leaves to be shown: one record that the summary, the JSON and the report share."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """A fragment on its way, as its device and the coordinator saw it. Times are Unix times."""

    device: int
    """Known to the demo, which owns the devices' disks; the coordinator cannot tell."""
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
    """What became of the fragments of a run.

    ``charged`` = ``counted`` + ``expired`` + ``lost``: a device pays for all fragments of an update
    before the first one leaves, and whatever becomes of them the charge stands. Lost: not counted,
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
class DemoRecord:
    """A finished run."""

    dataset: str
    split: str
    """How the records were dealt to the devices, in words."""
    shape: tuple[int, ...]
    """Of one record."""
    classes: tuple[str, ...]
    test_records: int
    model: str
    parameters: int
    devices: int
    rounds: int
    records_per_device: float
    schedule: str
    sampling_rate: float
    clip_norm: float
    clipping: str
    """``whole``, ``layers`` or ``quantile``."""
    learning_rate: float
    cap: str
    broker: str
    epsilon_target: float
    delta: float
    noise_multipliers: tuple[float, ...]
    epsilon_spent: tuple[float, ...]
    """Cumulative ε after each round."""
    accuracy_history: tuple[float, ...]
    """Test accuracy after each round, 0 to 1; NaN after one that only found a projection's directions."""
    baseline_history: tuple[float, ...]
    """The same of a run without noise: same lots' rate, clipping and optimiser."""
    clamped: tuple[int, ...]
    """Coordinates beyond the coordinator's cap in each round."""
    kept: tuple[float, ...]
    """Share of the mean gradient's L2 norm that the coordinator's cap left in each round."""
    budgets: tuple[DeviceBudget, ...]
    fragments: FragmentTally
    arrivals: tuple[Arrival, ...]
    bytes_up: float
    """Mean bytes a device published in a round."""
    bytes_down: float
    """Mean bytes a device received in a round."""
    seconds_total: float
    seconds_by_round: tuple[float, ...]
    agent_peak_mib: float | None
    """Largest peak resident memory of an agent; None where the system does not tell."""
    coordinator_peak_mib: float | None
    restarts: int
    """Programs that died and were started again."""
    signal_to_noise: float
    """How much longer than the noise the signal can be at most; see ``outlook.py``."""
    outlook: str
    """``good``, ``doubtful``, ``poor`` or ``hopeless``: what could be expected before the run."""
    warning: str | None
    """Why the outlook is not good."""
    remarks: tuple[str, ...]
    """What was said of the data before the run, a sentence each."""
    guessing: float
    """Accuracy of always guessing the commonest class of the test records."""
    test_file: str
    """The records that were held out."""
    predict: tuple[str, ...]
    """Commands that ask the model: on the records held out, and on new ones."""
    model_file: str
    state_dir: str

    @property
    def minds(self) -> tuple[str, ...]:
        """All that whoever reads the results should know, a sentence each."""
        first = []
        baseline = self.baseline_history[-1] if self.baseline_history else math.nan
        # Within an error of what guessing gets on so many records.
        chance = math.sqrt(self.guessing * (1 - self.guessing) / max(self.test_records, 1))
        if baseline <= self.guessing + chance:
            first.append(
                f"Without noise too, the model is not better than always guessing the commonest class "
                f"({self.guessing:.1%}): it is not the noise. Look at the range of the inputs, the label and "
                "the model."
            )
        return (*first, *self.remarks, *([] if self.warning is None else [self.warning]))

    @property
    def epsilon(self) -> float:
        """ε of the run: the largest that the coordinator's schedule or any device's ledger shows."""
        return max([0.0, *self.epsilon_spent[-1:], *(budget.epsilon_spent for budget in self.budgets)])
