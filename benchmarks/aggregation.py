"""Median of means: what it costs where every device is honest, and what it saves where one is not.

The digits job of the demo with ten devices (40 rounds, δ = 1e-5) is trained without its network by the
fleet's own functions: with the mean of all devices, and with the median of the means of random groups, which
are drawn anew for each block and round. All are honest, ten times a setting with the seeds 0 to 9, at the
demo's ε = 4 and at ε = 1; or, at ε = 4 and five times a setting, one device is hostile. It sends one fragment
for each block in each round, always in the same random direction: the strongest that a coordinator counts,
or, as could be done before norms were checked, the largest values that the wire holds. Accuracies are means
over the seeds, ± their standard error. The largest honest signals are over all devices, blocks, rounds and
five seeds; a coordinator's range holds signals up to 1 by default.

Interpretation: the median's noise has 1.35 times the variance of the mean's with three groups, and 1.43 times
with five, as 26 % and 30 % fewer devices would have. Rejecting improbable norms makes the difference between
a model that learns nothing and one that learns less; many groups give back more. This job is a hard case: its
lots have 14 records, so that the noise of one device, which an attack can imitate, is large beside the
gradient of ten.

Limits: one small data set, records spread evenly over the devices, one attack; where devices hold different
data, the median also leans towards what most of them hold. Lots and noise come from the operating system's
entropy, so the figures vary within their errors.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from agent.noisy_sums import clipped_sum
from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.one_process import SEEDS, Run, digits_settings, mean_and_error, over_seeds
from coordinator.influence import HonestNorms
from coordinator.settings import AggregationSettings
from dpagent.protocol.codec import MessageError
from dpagent.protocol.noisy_sum import NoisySum
from simulation.training_loop import TrainingLoop

_DEVICES: Final = 10
_MORE_SEEDS: Final = range(10)
_EPSILONS: Final = (4.0, 1.0)
_MEAN: Final = "the mean"
_LARGEST_BEFORE: Final = 511
"""Of a wire of ten bits a value, which has room for the largest lots of this job."""


class _Watched(TrainingLoop):
    """Keeps the largest signal of a device in a block, in clip norms a record of the expected lot."""

    largest: ClassVar[float] = 0.0

    def _updates(self, release: NoisySum) -> list[NDArray[np.int64]]:
        edges = range(release.plan.wire.block, release.dimension, release.plan.wire.block)
        records = release.sampling.expected_lot * release.mechanism.clip_norm
        for shard in self._shards:
            parts = np.split(clipped_sum(release, self.weights, shard, self._engine), edges)
            found = max(float(np.linalg.norm(part)) for part in parts) / records
            _Watched.largest = max(_Watched.largest, found)
        return TrainingLoop._updates(self, release)


class _Largest(TrainingLoop):
    """The first device sends the largest values of the wire."""

    def _updates(self, release: NoisySum) -> list[NDArray[np.int64]]:
        signs = np.random.default_rng(0).choice(np.array([-1, 1]), release.dimension)
        return [signs * self._value(release), *TrainingLoop._updates(self, release)[1:]]

    def _value(self, release: NoisySum) -> int:
        return _LARGEST_BEFORE


class _Strongest(_Largest):
    """The first device sends the largest values that count in every block."""

    def _value(self, release: NoisySum) -> int:
        norms, value = HonestNorms(release, self._fleet), _Largest._value(self, release)
        while not all(_counts(norms, position, value, release) for position in (0, release.blocks - 1)):
            value -= 1
        return value


def _counts(norms: HonestNorms, position: int, value: int, release: NoisySum) -> bool:
    try:
        norms.require(position, np.full(release.plan.wire.block, value, np.int64), norms.highest_level)
    except MessageError:
        return False
    return True


def run() -> list[Figure]:
    """Simulate all settings."""
    figures = []
    for epsilon in _EPSILONS:
        settings = digits_settings(epsilon, devices=_DEVICES)
        for name, way in _ways(3, 5).items():
            runs = over_seeds(settings, aggregation=way, seeds=_MORE_SEEDS)
            figures += _accuracy(f"ε = {epsilon:g}, all honest, {name}", runs)
    settings = digits_settings(_EPSILONS[0], devices=_DEVICES)
    for name, way in _ways(3, 5, 10).items():
        runs = over_seeds(settings, aggregation=way, seeds=SEEDS, loop=_Strongest)
        figures += _accuracy(f"ε = 4, one hostile, strongest that count, {name}", runs)
    runs = over_seeds(settings, seeds=SEEDS, loop=_Largest)
    figures += _accuracy(f"ε = 4, one hostile, largest on the wire, {_MEAN}", runs)
    one_class = settings.data.with_values({"split": "class", "classes_per_device": 1})
    for name, data in {"records spread evenly": settings.data, "one class a device": one_class}.items():
        _Watched.largest = 0.0
        over_seeds(settings.with_values({"data": data}), loop=_Watched)
        figures.append(
            Figure(
                f"ε = 4, {name}: largest honest signal in a block",
                _Watched.largest,
                "clip norms a record of the expected lot",
            )
        )
    return figures


def _ways(*groups: int) -> dict[str, AggregationSettings]:
    return {_MEAN: AggregationSettings()} | {
        f"median of {each} means": AggregationSettings(kind="median-of-means", groups=each) for each in groups
    }


def _accuracy(name: str, runs: list[Run]) -> list[Figure]:
    accuracy, error = mean_and_error([100 * run.accuracy for run in runs])
    return [
        Figure(f"{name}: accuracy", accuracy, "%"),
        Figure(f"{name}: accuracy{STANDARD_ERROR}", error, "percentage points"),
    ]
