"""The spread of the budget over the rounds, and its effect on accuracy.

The digits job of the demo (five devices, 40 rounds, δ = 1e-5, the default cap at the coordinator) is
trained without its network by the fleet's own functions, five times a setting with the seeds 0 to
4, at ε = 4 and at ε = 1. All schedules spend the same ε, to 0.001 %; only its spread over
the rounds differs. Means over the seeds ± their standard error; the ratio is to the
uniform schedule.

Limits: one small data set and one learning rate. Differences below two or three standard errors mean
nothing. ``dpagent plan`` shows the noise of any schedule beside the uniform one.
"""

from __future__ import annotations

from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.simulation import digits_settings, mean_and_error, over_seeds
from coordinator.job_settings import ScheduleSettings

_EPSILONS = (4.0, 1.0)
_SCHEDULES = {
    "incrementing, step 0.3 (the default)": ScheduleSettings(kind="incrementing", step=0.3),
    "incrementing, step 0.9": ScheduleSettings(kind="incrementing", step=0.9),
    "linear, ratio 3": ScheduleSettings(kind="linear", ratio=3.0),
}


def run() -> list[Figure]:
    """Simulate all settings, the uniform schedule first."""
    figures: list[Figure] = []
    for epsilon in _EPSILONS:
        uniform, error = _accuracy(epsilon, ScheduleSettings(kind="uniform"))
        figures += _figures(f"ε = {epsilon:g}, uniform", uniform, error)
        for name, schedule in _SCHEDULES.items():
            accuracy, error = _accuracy(epsilon, schedule)
            figures += _figures(f"ε = {epsilon:g}, {name}", accuracy, error, uniform)
    return figures


def _accuracy(epsilon: float, schedule: ScheduleSettings) -> tuple[float, float]:
    """Mean accuracy in percent, and its standard error."""
    runs = over_seeds(digits_settings(epsilon), schedule)
    return mean_and_error([100 * run.accuracy for run in runs])


def _figures(name: str, accuracy: float, error: float, uniform: float | None = None) -> list[Figure]:
    return [
        Figure(
            f"{name}: accuracy", accuracy, "%",
            None if uniform is None else f"uniform: {uniform:.1f} %",
            None if uniform is None else accuracy / uniform,
        ),
        Figure(f"{name}: accuracy{STANDARD_ERROR}", error, "percentage points"),
    ]  # fmt: skip
