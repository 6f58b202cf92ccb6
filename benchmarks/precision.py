"""Few bits both ways: the accuracy that they cost.

The digits job of the demo (40 rounds, ε = 4) is trained without its network by the fleet's own functions,
twenty times a setting with the seeds 0 to 19: as it is, with sums on a grid on which the noise spans three
steps and the model coming down at 8 bits a weight; with the model coming down as float32; and so with a grid
eight times as fine, too. Accuracies are means over the seeds, ± their standard error.

Interpretation: no setting differs from another by more than the error. Rounding to the grid adds 0.9 % to the
noise's variance; the rounding of weights is much smaller than what noise does to them.

Limits: one small data set with a test set of 360 records. Lots and noise come from the operating system's
entropy, so the figures vary within their errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.one_process import digits_settings, mean_and_error, over_seeds
from dpagent.protocol.noisy_sum import NoisySum
from simulation.settings import RunSettings
from simulation.training_loop import TrainingLoop

_SEEDS: Final = range(20)
_FINER: Final = 8


class _Float32(TrainingLoop):
    """The model comes down as it is."""

    def __init__(self, fleet: Any, *rest: Any, **options: Any) -> None:
        model = fleet.model.with_values({"precision": "float32"})
        super().__init__(fleet.with_values({"model": model}), *rest, **options)


class _Fine(_Float32):
    """So it does, and sums go up on a finer grid."""

    def _noisy_mean(self, release: NoisySum) -> NDArray[np.float64]:
        finer = release.terms.with_values({"step": release.terms.step // _FINER | 1})
        return super()._noisy_mean(replace(release, terms=finer))


_SIDES: Final[dict[str, type[TrainingLoop]]] = {
    "few bits both ways": TrainingLoop,
    "float32 down": _Float32,
    f"float32 down, a grid {_FINER} times as fine": _Fine,
}


def run() -> list[Figure]:
    """Simulate all settings."""
    return sides(digits_settings(4.0), _SEEDS)


def sides(settings: RunSettings, seeds: Sequence[int]) -> list[Figure]:
    """The accuracy of a job in each of the three ways."""
    figures: list[Figure] = []
    for name, loop in _SIDES.items():
        runs = over_seeds(settings, seeds=seeds, loop=loop)
        accuracy, error = mean_and_error([100 * run.accuracy for run in runs])
        figures += [
            Figure(f"{name}: accuracy", accuracy, "%"),
            Figure(f"{name}: accuracy{STANDARD_ERROR}", error, "percentage points"),
        ]
    return figures
