"""The clamp cap: its effect, and the better place for it.

The digits job of the demo (five devices, 40 rounds, δ = 1e-5) is trained without its network by the
fleet's own functions, five times a setting with the seeds 0 to 4, with no cap, with the ``clamp``
cap at the coordinator and with it on every device, at the demo's ε = 4 and at ε = 1. The cap has its
default bounds. Accuracies are means over the seeds, ± their standard error. The cap
does two things, which are counted apart at the coordinator (a device does not tell): it clamps single
coordinates to max(γ·|w|, floor), and it shortens the vector to the ball in which a mean of clipped
gradients lies. Beside it stands the plainest remedy against much noise: no cap, and a quarter of the
learning rate.

Interpretation: at the coordinator the clamp itself has little effect. With large
noise the ball helps: it shortens every step, as a lower learning rate does; the preset's rate is
tuned for ε = 4. So the cap guards against a learning rate too large for the noise, and does not
replace a good one. On the device the cap meets the noise of one device, larger than that of the mean
by the square root of their number, and removes signal that averaging would keep: it is the worse choice.

Limits: one small data set, two learning rates, records spread evenly over the devices. Lots and noise
come from the operating system's entropy, so the figures vary within their errors.
"""

from __future__ import annotations

from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.one_process import Run, digits_settings, mean_and_error, over_seeds
from coordinator.job_settings import CapSettings
from dpagent.learning.models.built_ins import built_in
from simulation.request import CapPlace

_EPSILONS = (4.0, 1.0)
_SLOWER = 4
_PLACES: dict[str, CapPlace] = {"at the coordinator": "coordinator", "on every device": "device"}


def run() -> list[Figure]:
    """Simulate all settings."""
    defaults = CapSettings()
    figures = [
        Figure("regularisation γ, the default", defaults.regularisation, ""),
        Figure("floor, the default", defaults.floor, "gradient units"),
    ]
    for epsilon in _EPSILONS:
        uncapped = digits_settings(epsilon, cap="none")
        plain = over_seeds(uncapped)
        figures += _accuracy(f"ε = {epsilon:g}, no cap", plain)
        slower = over_seeds(uncapped.with_values({"learning_rate": uncapped.learning_rate / _SLOWER}))
        figures += _accuracy(f"ε = {epsilon:g}, no cap, learning rate divided by {_SLOWER}", slower, plain)
        for where, place in _PLACES.items():
            runs = over_seeds(digits_settings(epsilon, cap_at=place))
            figures += _accuracy(f"ε = {epsilon:g}, cap {where}", runs, plain)
            if place == "coordinator":  # Devices do not report the effect of their cap.
                figures += _work(f"ε = {epsilon:g}, cap {where}", runs)
    return figures


def _accuracy(name: str, runs: list[Run], plain: list[Run] | None = None) -> list[Figure]:
    accuracy, error = mean_and_error([100 * run.accuracy for run in runs])
    other, ratio = None, None
    if plain is not None:
        without, _ = mean_and_error([100 * run.accuracy for run in plain])
        other, ratio = f"no cap: {without:.1f} %", accuracy / without
    return [
        Figure(f"{name}: accuracy", accuracy, "%", other, ratio),
        Figure(f"{name}: accuracy{STANDARD_ERROR}", error, "percentage points"),
    ]


def _work(name: str, runs: list[Run]) -> list[Figure]:
    clamped, _ = mean_and_error([run.clamped for run in runs])
    in_ball, _ = mean_and_error([100 * run.in_ball for run in runs])
    dimension = built_in(digits_settings(1.0).model).parameter_count
    return [
        Figure(f"{name}: coordinates clamped a round", clamped, f"of {dimension:,}"),
        Figure(f"{name}: vectors shortened to the ball", in_ball, "%"),
    ]
