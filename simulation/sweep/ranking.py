"""The settings of a sweep, the best first: by the mean accuracy of their runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulation.sweep.sweep import RunOutcome


@dataclass(frozen=True, slots=True)
class Ranked:
    """A setting, and how its runs ended.

    Attributes:
        number: Of the setting, from 1.
        varied: What it is.
        outcomes: Of its runs, at least one.
    """

    number: int
    varied: Mapping[str, Any]
    outcomes: tuple[RunOutcome, ...]

    @property
    def accuracy(self) -> float:
        """Mean of the final models'; NaN where none was measured."""
        return statistics.fmean(each.accuracy for each in self.outcomes)

    @property
    def error(self) -> float | None:
        """Standard error of that mean over the seeds; None for one run."""
        if len(self.outcomes) < 2:
            return None
        values = [each.accuracy for each in self.outcomes]
        return statistics.stdev(values) / math.sqrt(len(values))

    @property
    def history(self) -> list[float]:
        """Mean accuracy after each round."""
        histories = [each.results["accuracy_history"] for each in self.outcomes]
        return [
            statistics.fmean(math.nan if value is None else value for value in values)
            for values in zip(*histories, strict=False)
        ]

    @property
    def has_learned(self) -> bool:
        """Whether it beats always answering the commonest class."""
        majority = max(float(each.results["guessing_accuracy"]) for each in self.outcomes)
        return self.accuracy > majority


def ranked(outcomes: Sequence[RunOutcome]) -> list[Ranked]:
    """The settings, the best first."""
    by_setting: dict[int, list[RunOutcome]] = {}
    for outcome in sorted(outcomes, key=lambda each: each.run.number):
        by_setting.setdefault(outcome.run.setting, []).append(outcome)
    settings = [Ranked(number, runs[0].run.varied, tuple(runs)) for number, runs in by_setting.items()]
    return sorted(
        settings, key=lambda each: -math.inf if math.isnan(each.accuracy) else each.accuracy, reverse=True
    )
