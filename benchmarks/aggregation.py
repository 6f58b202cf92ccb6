"""Median of means: what it costs in accuracy where every device is honest.

The digits job of the demo with ten devices (40 rounds, δ = 1e-5) is trained without its network by the
fleet's own functions, ten times a setting with the seeds 0 to 9, at the demo's ε = 4 and at ε = 1: with the
mean of all devices, and with the median of the means of three and of five random groups, which are drawn anew
for each block and round. Accuracies are means over the seeds, ± their standard error.

Interpretation: the median's noise has 1.35 times the variance of the mean's with three groups, and 1.43 times
    with five, as 26 % and 30 % fewer devices would have.

Limits: one small data set, records spread evenly over the devices; where devices hold different data, the
    median also leans towards what most of them hold. Lots and noise come from the operating system's entropy,
    so the figures vary within their errors.
"""

from __future__ import annotations

from typing import Final

from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.simulation import digits_settings, mean_and_error, over_seeds
from coordinator.settings import AggregationSettings

_DEVICES: Final = 10
_SEEDS: Final = range(10)
_EPSILONS: Final = (4.0, 1.0)
_GROUPS: Final = (3, 5)


def run() -> list[Figure]:
    """Simulate all settings."""
    figures = []
    for epsilon in _EPSILONS:
        settings = digits_settings(epsilon, devices=_DEVICES)
        ways = {"the mean": AggregationSettings()} | {
            f"median of {groups} means": AggregationSettings(kind="median-of-means", groups=groups)
            for groups in _GROUPS
        }
        for name, way in ways.items():
            runs = over_seeds(settings, aggregation=way, seeds=_SEEDS)
            accuracy, error = mean_and_error([100 * run.accuracy for run in runs])
            figures += [
                Figure(f"ε = {epsilon:g}, {name}: accuracy", accuracy, "%"),
                Figure(f"ε = {epsilon:g}, {name}: accuracy{STANDARD_ERROR}", error, "percentage points"),
            ]
    return figures
