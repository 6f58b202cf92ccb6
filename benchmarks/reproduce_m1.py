"""M1: where does a budget that grows win?

Luo, Xu and Guan (2022) report their schedule best on MNIST at ε = 1, 5 and 10, after 100 to 2,400 rounds,
before an even split ("partition") and one from a least to a greatest budget ("pri-enhanced", here *linear*),
and most so with few rounds and small ε; by an accounting that proves nothing
(`docs/methods/incrementing.md`). This is the same question under sound mechanisms: networks from scratch, few
and many rounds, small and large ε, Gaussian noise and the paper's Laplace noise. All schedules spend the same
ε, to 0.001 %; only its spread over the rounds differs.

The fleet of the demo's digits job (five devices, no network between them, δ = 1e-5) trains the preset's CNN
(9,930 parameters) with Gaussian noise, and a linear model (650) with Laplace noise, which leaves larger ones
at chance; the coordinator's learning rate follows the demo's rule and is the same for all schedules. Means
over twelve seeds ± their standard error; a figure is the difference to the even split, with the error of the
difference. The picture is `docs/methods/incrementing-schedules.svg`.

Of so many differences one in twenty is beyond two errors by chance alone, so the last figures count how many
are, on either side.

Limits: one small data set with 360 test records; the learning rate was tuned for no schedule.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.one_process import DIGITS, mean_and_error, over_seeds
from benchmarks.plots import METHODS, Panel, Point, draw
from coordinator.job_settings import ScheduleSettings
from dpagent.learning.model_files import find_model
from dpagent.learning.models.built_ins import built_in
from simulation.choices import settle
from simulation.request import Request
from simulation.settings import RunSettings

_SEEDS: Final = range(12)
_ROUNDS: Final = (5, 20, 100)
_EPSILONS: Final = {"gaussian": (0.5, 1.0, 4.0), "laplace": (4.0, 10.0, 25.0)}
EVEN: Final = "even split"
SCHEDULES: Final = {
    EVEN: ScheduleSettings(kind="uniform"),
    "linear, ratio 3": ScheduleSettings(kind="linear", ratio=3.0),
    "incrementing, step 0.3": ScheduleSettings(kind="incrementing", step=0.3),
    "incrementing, step 0.9": ScheduleSettings(kind="incrementing", step=0.9),
}
_MODELS: Final = {
    "gaussian": built_in("digits").describe(),
    "laplace": built_in("digits").describe() | {"name": "linear", "layers": [{"dense": 10}]},
}
_BEYOND: Final = 2.0
"""Standard errors."""


def run() -> list[Figure]:
    """Train all settings, and draw the pictures."""
    figures: list[Figure] = []
    better = worse = compared = 0
    rows: list[list[Panel]] = []
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        # As files, so that the demo's rules apply and not the settings that were found for 40 rounds.
        for noise, description in _MODELS.items():
            model = Path(name) / f"{noise}.yaml"
            model.write_text(yaml.safe_dump(description))
            rows.append([])
            for epsilon in _EPSILONS[noise]:
                points: dict[str, list[Point]] = {schedule: [] for schedule in SCHEDULES}
                for rounds in _ROUNDS:
                    found = accuracies(_settings(noise, str(model), epsilon, rounds), _SEEDS)
                    for schedule, (accuracy, error) in found.items():
                        points[schedule].append(Point(rounds, accuracy, error))
                    where = f"{noise}, ε = {epsilon:g}, {rounds} rounds"
                    figures += difference_figures(where, found)
                    scores = [_score(found, schedule) for schedule in SCHEDULES if schedule != EVEN]
                    better += sum(score > _BEYOND for score in scores)
                    worse += sum(score < -_BEYOND for score in scores)
                    compared += len(scores)
                rows[-1].append(Panel(f"{noise.capitalize()}, ε = {epsilon:g}", points))
    draw(
        METHODS / "incrementing-schedules.svg", "Accuracy by rounds and schedule, digits, 12 seeds", rows,
        x="rounds", y="accuracy, %",
    )  # fmt: skip
    said = f"of {compared} differences; {0.02275 * compared:.1f} are expected by chance"
    return [
        *figures,
        Figure("better than the even split by more than two errors", better, said),
        Figure("worse than the even split by more than two errors", worse, said),
    ]


def _settings(noise: str, model: str, epsilon: float, rounds: int) -> RunSettings:
    request = Request(
        method="incrementing", noise=noise, epsilon=epsilon, rounds=rounds, model=model, cap="none"
    )
    return settle(request, DIGITS, model, find_model(model))[0]


def accuracies(settings: RunSettings, seeds: Sequence[int]) -> dict[str, tuple[float, float]]:
    """By schedule: mean accuracy in percent over the seeds, and its standard error."""
    return {
        name: mean_and_error([100 * run.accuracy for run in over_seeds(settings, schedule, seeds=seeds)])
        for name, schedule in SCHEDULES.items()
    }


def _score(found: Mapping[str, tuple[float, float]], schedule: str) -> float:
    """A schedule's difference to the even split in standard errors."""
    (accuracy, error), (even, even_error) = found[schedule], found[EVEN]
    return (accuracy - even) / math.hypot(error, even_error)


def difference_figures(where: str, found: Mapping[str, tuple[float, float]]) -> list[Figure]:
    """Figures of one setting.

    Args:
        where: the setting.
        found: by schedule, mean accuracy in percent and its standard error.
    """
    figures: list[Figure] = []
    even, even_error = found[EVEN]
    for schedule, (accuracy, error) in found.items():
        if schedule == EVEN:
            figures.append(Figure(f"{where}: {EVEN}", accuracy, "%"))
            figures.append(Figure(f"{where}: {EVEN}{STANDARD_ERROR}", error, "%"))
            continue
        name = f"{where}: {schedule}"
        of_difference = math.hypot(error, even_error)
        figures.append(Figure(name, accuracy - even, "percentage points"))
        figures.append(Figure(name + STANDARD_ERROR, of_difference, "percentage points"))
    return figures
