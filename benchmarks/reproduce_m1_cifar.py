"""M1's figure 3: the loss on CIFAR-10 (JPEG) as training goes on, by schedule, and without noise.

Luo, Xu and Guan (2022) show the loss on CIFAR-10 every 200 iterations, and find that it falls faster with
their noise than without. Here one device has all 50,000 records and trains a network of 10,986 parameters
from scratch with lots of 500, a clip norm of 1, a learning rate of 0.5, no cap, discrete Gaussian noise, and
δ = 1e-5 at ε = 1 for all of the rounds, by the product's own steps in one process. The schedules are the even
split ("partition"), one from a least to a greatest budget ("pri-enhanced", here *linear*), and two that grow
by a step; all spend the same ε. Without noise, records are clipped all the same. The loss is the mean
cross-entropy over the 10,000 test records, in nats: 2.303 is chance.

Figures are those after the last round: the loss of each line, and of a schedule also how much it is above
the loss without noise. They are means over three seeds ± their standard error, that of a difference over
pairs with the same initial weights. The curves are in `docs/methods/incrementing-cifar.svg`.

Interpretation: that the loss falls faster with noise is not reproduced. After 100 rounds it has fallen by
0.47 from chance in all lines, and each schedule ends within 0.004 of the line without noise, on either side:
of three pairs, no evidence of a difference. Lots of 500 from 50,000 records in one place leave so little
noise at ε = 1 that no schedule can gain or lose much.

Limits: 100 rounds and three seeds, where the paper looks every 200 iterations and shows curves without
numbers; one learning rate, chosen without a search. Its Algorithm 1, which guarantees nothing, is not among
the lines (`published_attack` is about it). With ``--long`` it is 3,600 rounds, the most that the paper has on
MNIST, a look every 200, and five seeds: about an hour and a half, extrapolated from 0.06 s a round and not
run. The data are not part of the project: without the archive ``../shared/data/cifar10-jpeg.zip``, or the one
that the variable ``CIFAR_ZIP`` names, this benchmark is skipped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
import yaml

from benchmarks.cifar import CIFAR_NETWORK, cifar_10
from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.plots import METHODS, Panel, Point, draw
from benchmarks.reproduce_m1 import SCHEDULES
from benchmarks.simulation import mean_and_error
from coordinator.job_settings import ScheduleSettings
from coordinator.settings import FleetSettings
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from simulation.data.source import Source
from simulation.training_loop import TrainingLoop

_LOT: Final = 500
_NO_NOISE: Final = "without noise"
_SMALL: Final = "thousandths of a nat"
_LINES: Final[Mapping[str, ScheduleSettings | None]] = {_NO_NOISE: None, **SCHEDULES}


def run() -> list[Figure]:
    """Train for few rounds, and draw the picture.

    Raises:
        Skipped: The data are not there.
    """
    return _train(rounds=100, every=20, seeds=range(3))


def run_long() -> list[Figure]:
    """The same for as many rounds as the paper has at most.

    Raises:
        Skipped: The data are not there.
    """
    return _train(rounds=3_600, every=200, seeds=range(5))


def _train(*, rounds: int, every: int, seeds: Sequence[int]) -> list[Figure]:
    source = cifar_10()
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        model = Path(name) / "cifar.yaml"
        model.write_text(yaml.safe_dump(CIFAR_NETWORK))
        found = {
            line: [losses(source, str(model), schedule, rounds, every, seed) for seed in seeds]
            for line, schedule in _LINES.items()
        }
    draw(
        METHODS / "incrementing-cifar.svg", f"CIFAR-10 (JPEG) at ε = 1, {len(seeds)} seeds",
        [[Panel("", {line: _points(curves, every) for line, curves in found.items()})]],
        x="rounds", y="loss on the test records", logarithmic=False,
    )  # fmt: skip
    return _figures(rounds, {line: [curve[-1] for curve in curves] for line, curves in found.items()})


def losses(
    source: Source, model: str, schedule: ScheduleSettings | None, rounds: int, every: int, seed: int
) -> list[float]:
    """The loss on the test records, in nats, after each ``every`` rounds.

    Args:
        source: All records; one device has those to train on.
        model: Its file.
        schedule: Of the budget; None for no noise.
        rounds: A multiple of ``every``.
        every: Rounds from look to look.
        seed: Of the initial weights.
    """
    fleet = FleetSettings.model_validate(_values(len(source.train), model, schedule, rounds, seed))
    spec = fleet.model.spec()
    loop = TrainingLoop(fleet, spec, [source.train], source.test, noise=schedule is not None)
    engine = NumpyEngine(spec.head)
    found = []
    for number in range(1, rounds + 1):
        loop.round(number)
        if number % every == 0:
            found.append(_loss(engine, loop, source.test))
    return found


def _loss(engine: NumpyEngine, loop: TrainingLoop, test: Dataset) -> float:
    total = 0.0
    for inputs, labels in test.batches():
        logits = engine.logits(loop.weights, inputs).astype(np.float64)
        right = logits[np.arange(len(labels)), labels]
        total += float(np.sum(np.logaddexp.reduce(logits, axis=1) - right))
    return total / len(test)


def _values(
    records: int, model: str, schedule: ScheduleSettings | None, rounds: int, seed: int
) -> dict[str, Any]:
    return {
        "fleet": "reproduction", "devices": 1, "rounds": rounds, "records_per_device": records,
        "fragments_per_update": 16, "model": {"name": model, "seed": seed},
        "privacy": {
            "method": "incrementing", "epsilon": 1.0, "delta": 1e-5, "clip_norm": 1.0,
            "sampling_rate": _LOT / records, "schedule": schedule or {"kind": "uniform"},
        },
        "cap": {"kind": "none"}, "optimiser": {"learning_rate": 0.5, "momentum": 0.0},
    }  # fmt: skip


def _points(curves: Sequence[Sequence[float]], every: int) -> list[Point]:
    return [
        Point(every * look, *mean_and_error(values))
        for look, values in enumerate(zip(*curves, strict=True), start=1)
    ]


def _figures(rounds: int, last: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Figures of the last look.

    Args:
        rounds: Before it.
        last: By line, the losses, seed by seed.
    """
    exact = last[_NO_NOISE]
    figures: list[Figure] = []
    for line, values in last.items():
        name = f"loss after {rounds} rounds, {line}"
        loss, error = mean_and_error(values)
        beside = None if line == _NO_NOISE else f"{_NO_NOISE}: {fmean(exact):.3f}"
        figures.append(Figure(name, loss, "nats", beside))
        figures.append(Figure(name + STANDARD_ERROR, error, "nats"))
        if line != _NO_NOISE:
            more, error = mean_and_error(
                [1000 * (one - other) for one, other in zip(values, exact, strict=True)]
            )
            figures.append(Figure(f"{name}, above {_NO_NOISE}", more, _SMALL))
            figures.append(Figure(f"{name}, above {_NO_NOISE}{STANDARD_ERROR}", error, _SMALL))
    return figures
