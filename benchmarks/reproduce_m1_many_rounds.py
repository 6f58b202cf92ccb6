"""M1's figure 5: MNIST at ε = 1 after 600, 2,400 and 3,600 rounds, by schedule.

Luo, Xu and Guan (2022) find their growing budget first after 100, 600 and 2,400 iterations, and go up to
3,600 elsewhere. Here it is `reproduce_m1_mnist` (ten devices with 6,000 records, the 26,010-parameter CNN
from scratch, discrete Gaussian noise, δ = 1e-5) with more rounds and smaller lots, of 30 records on each
device. All schedules spend the same ε. Means over three seeds ± their standard error; a figure is the
difference to the even split, with the error of the difference. With ``--long`` the lots are of 120 records,
as in `reproduce_m1_mnist`.

Interpretation: the paper's order is not reproduced. No schedule is better by as much as one error; a step of
0.3 is worse by two after 2,400 rounds, and not after 3,600. More rounds of the same ε do not help any of
them: noise grows with their number, and lots of 30 leave little of the signal.

Limits: three seeds and one learning rate, the demo's for so many rounds and such lots. The data are not part
of the project: without them this benchmark is skipped, as `reproduce_m1_mnist` says.
"""

from __future__ import annotations

from typing import Final

from benchmarks.figures import Figure
from benchmarks.one_process import mnist
from benchmarks.reproduce_m1 import accuracies, difference_figures
from benchmarks.reproduce_m1_mnist import LOT, settings_of

_EPSILON: Final = 1.0
_SEEDS: Final = range(3)
_ROUNDS: Final = (600, 2_400, 3_600)


def run() -> list[Figure]:
    """Train by all schedules.

    Raises:
        Skipped: The data are not there.
    """
    return _train(LOT / 4)


def run_long() -> list[Figure]:
    """The same with larger lots.

    Raises:
        Skipped: The data are not there.
    """
    return _train(LOT)


def _train(lot: float) -> list[Figure]:
    data, form = mnist()
    figures: list[Figure] = []
    for rounds in _ROUNDS:
        settings = settings_of(data, form, epsilon=_EPSILON, rounds=rounds, lot=lot)
        figures += difference_figures(f"{rounds:,} rounds", accuracies(settings, _SEEDS))
    return figures
