"""LDP-FL's two-point reports on the bundled digits: accuracy with a guarantee for whole devices.

In one process, with the product's own steps. A linear model of 650 weights; a fifth of the records is held
out.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from benchmarks.figures import Figure
from coordinator.settings import FleetSettings
from dpagent.learning.data.dataset import ArrayDataset
from simulation.training_loop import TrainingLoop

_DEVICES: Final = 20
_ROUNDS: Final = 20
_SEEDS: Final = (0, 1, 2)
_MODEL: Final = """\
name: digits-linear
input_shape: [8, 8, 1]
classes: 10
input_offset: 0.3
input_scale: 0.37
layers:
- dense: {units: 10}
"""
_SIDES: Final = {
    "no noise": (900.0, False),
    "device ε = 900": (900.0, True),
    "device ε = 100": (100.0, True),
    "device ε = 10": (10.0, True),
}


def run() -> list[Figure]:
    """Train with each guarantee."""
    figures = []
    with TemporaryDirectory() as directory:
        file = Path(directory) / "model.yaml"
        file.write_text(_MODEL)
        for name, (epsilon, noise) in _SIDES.items():
            found = [_accuracy(file, epsilon, seed, noise=noise) for seed in _SEEDS]
            error = 100 * float(np.std(found, ddof=1)) / len(found) ** 0.5
            figures += [
                Figure(
                    f"digits-linear, {name}: mean of {len(_SEEDS)} seeds", 100 * float(np.mean(found)), "%"
                ),
                Figure(f"digits-linear, {name}: its standard error", error, "points"),
            ]
    return figures


def _accuracy(file: Path, epsilon: float, seed: int, *, noise: bool) -> float:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(seed).permutation(len(bunch.target))
    inputs = (bunch.images[order] / 16.0).astype(np.float32)[..., np.newaxis]
    data = ArrayDataset(inputs, bunch.target[order].astype(np.int64), 10)
    held_out = len(data) // 5
    shards = np.array_split(np.arange(held_out, len(data)), _DEVICES)
    settings: dict[str, Any] = {
        "fleet": "digits", "devices": _DEVICES, "records_per_device": len(shards[0]), "rounds": _ROUNDS,
        "model": {"name": str(file), "seed": seed},
        "privacy": {
            "method": "ldp-fl", "epsilon": epsilon, "delta": 1e-5, "schedule": {"kind": "uniform"},
            "local_training": {"steps": 20, "batch": 32, "learning_rate": 0.5},
        },
        "cap": {"kind": "none"}, "optimiser": {"learning_rate": 0.5, "momentum": 0.0},
    }  # fmt: skip
    fleet = FleetSettings.checked(settings)
    parts = [ArrayDataset(*data.batch(shard), 10) for shard in shards]
    test = ArrayDataset(*data.batch(np.arange(held_out)), 10)
    loop = TrainingLoop(fleet, fleet.model.spec(), parts, test, noise=noise)
    for number in range(1, _ROUNDS + 1):
        loop.round(number)
    return loop.accuracy()
