"""M4's curves on MNIST and CIFAR-10 (JPEG): four ways to train, levels of noise, clip norms.

Huang (2022) trains ResNet-18 on CIFAR-10 with ten devices, by FedAvg and by FedSGD, with and without noise of
a standard deviation of 0.001 on the mean of the updates, clipped to 1; all four end near 75 %, at about the
same speed, more noise ends lower, and the clip norm hardly matters. Here ten devices share all records and
train small networks (MNIST: 26,010 parameters; CIFAR-10: 10,986) by the product's own steps in one process:
updates clipped whole in L2, in whole numbers, with discrete Gaussian noise on their sum. FedAvg takes 40
steps of 32 records in each of 10 rounds; FedSGD takes one step of 320 in each of 40. All ten take part in all
rounds. Levels of noise, and clip norms with noise of 0.02, differ for FedAvg. The pictures are
`docs/methods/central-mnist.svg` and `docs/methods/central-cifar.svg`.

No ε that a device could accept allows so little noise among ten, so it is set here as the paper sets it, past
the calibration by ε. The least that the product's mechanism draws is five times the paper's: 0.005 on the
mean of ten, a noise multiplier of 0.05. That guarantees nothing either: ten rounds of it are 2,000-zCDP.

Without noise nothing is clipped either, and FedSGD then takes longer steps.

With ``--long`` it is the paper's 100 rounds, and its three epochs of each device's records in a round of
FedAvg: about six hours, extrapolated from the time of a step and not run.

Limits: one run each. Learning rates were chosen with the test sets in view. The networks are smaller than the
paper's, and see fewer records; FedAvg takes all ten devices, where the paper takes three. The data are
not part of the project: without them this benchmark is skipped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.cifar import CIFAR_NETWORK, cifar_10
from benchmarks.figures import Figure
from benchmarks.one_process import mnist
from benchmarks.plots import METHODS, Panel, Point, draw
from coordinator.settings import FleetSettings
from dpagent.learning.data.splits import split
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.mechanisms.job_noise import JobNoise
from simulation.data.source import Source, open_source
from simulation.planning import trial_job, trial_planner
from simulation.training_loop import TrainingLoop

_DEVICES: Final = 10
_LOOKS: Final = 5
"""Points of a curve."""
_LEAST_NOISE: Final = 0.005
_LEVELS: Final = (0.0, 0.005, 0.02, 0.05)
"""Standard deviations of a coordinate of the mean update at a clip norm of 1."""
_CLIP_NORMS: Final = (0.5, 1.0, 2.0, 4.0)
_LEVEL_OF_NORMS: Final = 0.02
_PUBLISHED: Final = "published: near 75 %, ResNet-18"


@dataclass(frozen=True, slots=True)
class _Job:
    """A job's settings. ``deviation`` is that of the noise on a coordinate of the mean."""

    rounds: int = 10
    steps: int = 40
    batch: int = 32
    rate: float = 0.1
    clip_norm: float = 1.0
    deviation: float = _LEAST_NOISE


_FED_AVG: Final = _Job()
_FED_SGD: Final = _Job(rounds=40, steps=1, batch=320, rate=0.5)
_ROUNDS_PUBLISHED: Final = 100
_EPOCHS_PUBLISHED: Final = 3


class _NoiseAsPublished(TrainingLoop):
    """The coordinator's noise has a multiplier that is given, whatever it guarantees."""

    def __init__(self, multiplier: float, fleet: FleetSettings, spec: ModelSpec, *rest: Any) -> None:
        super().__init__(fleet, spec, *rest, noise=True)
        noise = JobNoise.chosen("central-gaussian", (multiplier,) * fleet.rounds)
        self._planner = trial_planner(fleet, spec, replace(trial_job(fleet, spec), noise=noise))


@dataclass(frozen=True, slots=True)
class _Data:
    """Records, and the model that learns them."""

    title: str
    source: Source
    model: str

    def curve(self, job: _Job) -> list[Point]:
        """Accuracy in percent after each part of the rounds, in percent of them."""
        fleet = FleetSettings.checked(self._values(job))
        parts = (
            fleet.model.spec(), list(split(self.source.train, _DEVICES, "iid", seed=0)), self.source.test
        )  # fmt: skip
        if job.deviation:
            multiplier = job.deviation * _DEVICES / job.clip_norm
            loop: TrainingLoop = _NoiseAsPublished(multiplier, fleet, *parts)
        else:
            loop = TrainingLoop(fleet, *parts, noise=False)
        points = []
        for number in range(1, job.rounds + 1):
            loop.round(number)
            if number * _LOOKS % job.rounds == 0:
                points.append(Point(100 * number / job.rounds, 100 * loop.accuracy(), 0.0))
        return points

    def _values(self, job: _Job) -> dict[str, Any]:
        return {
            "fleet": "reproduction", "devices": _DEVICES, "rounds": job.rounds,
            "records_per_device": len(self.source.train) // _DEVICES, "fragments_per_update": 16,
            "model": {"name": self.model, "seed": 0},
            "privacy": {
                "method": "central", "epsilon": 1000.0, "delta": 1e-5, "clip_norm": job.clip_norm,
                "schedule": {"kind": "uniform"},
                "local_training": {"steps": job.steps, "batch": job.batch, "learning_rate": job.rate},
            },
            "cap": {"kind": "none"}, "optimiser": {"learning_rate": 1.0, "momentum": 0.0},
        }  # fmt: skip


def run() -> list[Figure]:
    """Train in all settings, and draw the pictures.

    Raises:
        Skipped: The data are not there.
    """
    return _run(lambda _: _FED_AVG, _FED_SGD)


def run_long() -> list[Figure]:
    """The same for as many rounds and local epochs as in the paper.

    Raises:
        Skipped: The data are not there.
    """
    return _run(as_published, replace(_FED_SGD, rounds=_ROUNDS_PUBLISHED))


def as_published(records: int) -> _Job:
    """FedAvg over as many rounds and local epochs as in the paper, where devices have ``records`` in all."""
    steps = round(_EPOCHS_PUBLISHED * records / _DEVICES / _FED_AVG.batch)
    return replace(_FED_AVG, rounds=_ROUNDS_PUBLISHED, steps=steps)


def _run(fed_avg: Callable[[int], _Job], fed_sgd: _Job) -> list[Figure]:
    """Train on both data; ``fed_avg`` gives the job for a number of records."""
    selection, _ = mnist()
    digits, pictures = open_source(selection, 0), cifar_10()
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        model = Path(name) / "cifar.yaml"
        model.write_text(yaml.safe_dump(CIFAR_NETWORK))
        return [
            *_measure(
                _Data("MNIST", digits, "mnist-cnn"), "central-mnist.svg", fed_avg(len(digits.train)), fed_sgd
            ),
            *_measure(
                _Data("CIFAR-10 (JPEG)", pictures, str(model)), "central-cifar.svg",
                fed_avg(len(pictures.train)), fed_sgd, _PUBLISHED,
            ),
        ]  # fmt: skip


def _measure(
    data: _Data, picture: str, fed_avg: _Job, fed_sgd: _Job, published: str | None = None
) -> list[Figure]:
    curve = cache(data.curve)  # each panel has the default setting
    jobs = {
        "FedAvg without noise": replace(fed_avg, deviation=0.0),
        "FedAvg with noise": fed_avg,
        "FedSGD without noise": replace(fed_sgd, deviation=0.0),
        "FedSGD with noise": fed_sgd,
    }
    curves = {name: curve(job) for name, job in jobs.items()}
    figures = [
        Figure(f"{data.title}, {name}", points[-1].y, "%", published) for name, points in curves.items()
    ]
    levels = {level: curve(replace(fed_avg, deviation=level))[-1].y for level in _LEVELS}
    norms = {
        norm: curve(replace(fed_avg, clip_norm=norm, deviation=_LEVEL_OF_NORMS))[-1].y for norm in _CLIP_NORMS
    }
    for what, found in {"deviation of the noise": levels, "clip norm": norms}.items():
        figures += [Figure(f"{data.title}, FedAvg, {what} {x:g}", y, "%") for x, y in found.items()]
    draw(
        METHODS / picture, f"{data.title}, {_DEVICES} devices, one run each",
        [[
            Panel("rounds, in percent", curves, logarithmic=False),
            Panel("deviation of the noise on the mean", _line(levels), logarithmic=False),
            Panel("clip norm", _line(norms)),
        ]],
        x="", y="accuracy, %",
    )  # fmt: skip
    return figures


def _line(found: Mapping[float, float]) -> dict[str, Sequence[Point]]:
    return {"FedAvg with noise": [Point(x, y, 0.0) for x, y in found.items()]}
