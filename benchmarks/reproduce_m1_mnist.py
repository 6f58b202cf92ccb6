"""M1's figures 4 to 6: MNIST after 100 and 300 rounds at ε = 1, 5 and 10, by schedule.

Luo, Xu and Guan (2022) train the CNN of Abadi et al. at ε = 1, 5 and 10 and find their growing budget
first, then the one from a least to a greatest budget ("pri-enhanced", here *linear*), then the even split
("partition"), most clearly at ε = 1 after 100 iterations, all by an accounting that proves nothing; the
curves come without numbers. Here ten devices with 6,000 records each train the 26,010-parameter CNN from
scratch without a network between them, with a lot of 120 on each, discrete Gaussian noise and δ = 1e-5, by
the demo's own settings otherwise. All schedules spend the same ε. Means over five seeds ± their standard
error; a figure is the difference to the even split, with the error of the difference. With ``--long`` it is
600 rounds too. The picture is `docs/methods/incrementing-mnist.svg`.

Interpretation: the paper's order is not reproduced, but reversed. Of the 18 differences to the even split
eight are worse by more than two errors, the steep schedule (step 0.9) at each ε and number of rounds; none is
better by as much as one. Chance makes 0.4 of 18 on either side. (With three seeds, before, a step of 0.3 at
ε = 1 after 300 rounds was better by 0.6 ± 0.3: with these five it is worse by 0.5 ± 0.3.) Three times the
rounds do not help at ε = 1: the even split comes to 87.4 % in place of 92.2.

Limits: one learning rate. The data are not part of the project: without the four IDX files in
``../shared/data/mnist``, or the directory that the variable ``MNIST_DIR`` names, this benchmark is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.figures import Figure
from benchmarks.one_process import SEEDS, mnist
from benchmarks.plots import METHODS, Panel, Point, draw
from benchmarks.reproduce_m1 import SCHEDULES, accuracies, difference_figures
from dpagent.learning.models.built_ins import built_in
from simulation.choices import settle
from simulation.request import DataSelection, Request
from simulation.settings import DataForm, RunSettings

_EPSILONS: Final = (1.0, 5.0, 10.0)
LOT: Final = 0.02
"""The probability of a record in a round."""


def run() -> list[Figure]:
    """Train for 100 and 300 rounds by all schedules, and draw the picture.

    Raises:
        Skipped: The data are not there.
    """
    return _train(rounds_of_panels=(100, 300))


def run_long() -> list[Figure]:
    """The same for 600 rounds too.

    Raises:
        Skipped: The data are not there.
    """
    return _train(rounds_of_panels=(100, 300, 600))


def _train(*, rounds_of_panels: Sequence[int]) -> list[Figure]:
    data, form = mnist()
    figures: list[Figure] = []
    panels: list[Panel] = []
    for rounds in rounds_of_panels:
        points: dict[str, list[Point]] = {schedule: [] for schedule in SCHEDULES}
        for epsilon in _EPSILONS:
            found = accuracies(settings_of(data, form, epsilon=epsilon, rounds=rounds), SEEDS)
            for schedule, (accuracy, error) in found.items():
                points[schedule].append(Point(epsilon, accuracy, error))
            figures += difference_figures(f"{rounds} rounds, ε = {epsilon:g}", found)
        panels.append(Panel(f"{rounds} rounds", points))
    draw(
        METHODS / "incrementing-mnist.svg", f"MNIST by ε and schedule, {len(SEEDS)} seeds", [panels],
        x="ε", y="accuracy, %",
    )  # fmt: skip
    return figures


def settings_of(
    data: DataSelection, form: DataForm, *, epsilon: float, rounds: int, lot: float = LOT
) -> RunSettings:
    """The settings of a run on MNIST.

    Args:
        data: where MNIST is.
        form: of these data.
        epsilon: that the job spends.
        rounds: of training.
        lot: the probability of a record in a round.
    """
    request = Request(data=data, method="incrementing", epsilon=epsilon, rounds=rounds, sampling_rate=lot)
    return settle(request, form, "mnist-cnn", built_in("mnist-cnn"))[0]
