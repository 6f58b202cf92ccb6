"""A clip norm of updates that follows a quantile, against one that is given, by the norm of the first round.

Method `central` in one process, by the product's own steps: FedAvg over 10 rounds, each of 20 local steps
of 32 records, δ = 1e-5. Updates are clipped in L2, with discrete Gaussian noise on their sum and ε = 8 for
a device: the bundled digits (a fifth is held out) over 20 devices, 650 weights, and MNIST over 100 devices,
7,850 weights, both with a linear model. And the digits once more with updates clipped in L1, Laplace noise
and ε = 40. *Given*: `clipping: {kind: whole}`. *Followed*: `{kind: quantile, quantile: 0.3, rate: 0.5}`,
which moves the norm by a factor of up to e^0.35 a round; votes cost 3 % more noise in L2 and 25 % in L1.
Accuracies are means over three seeds ± their standard error. The picture is
`docs/methods/central-clipping.svg`.

Interpretation: in L2, where the first norm is ten times too large or too small, a norm that follows wins
back most of what a given one loses, and where it is the best of those tried, which nobody knows without a
look at the accuracies, following costs no more than the error. Where noise dominates, as Laplace noise here
does at any norm, following does harm: the devices' next updates answer the noise in the model and are
longer for it, so the norm rises, and the noise with it.

Limits: one quantile and one rate, found with the held-out records in view. The data of MNIST are not part
of the project: without the four IDX files in ``../shared/data/mnist``, or the directory that the variable
``MNIST_DIR`` names, this benchmark is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import yaml

from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.one_process import mean_and_error, mnist
from benchmarks.plots import METHODS, Panel, Point, draw
from coordinator.settings import FleetSettings
from dpagent.learning.data.splits import split
from simulation.data.source import open_source
from simulation.request import DataSelection
from simulation.training_loop import TrainingLoop

_SEEDS: Final = (0, 1, 2)
_ROUNDS: Final = 10
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "given": {"kind": "whole"},
    "followed": {"kind": "quantile", "quantile": 0.3, "rate": 0.5},
}


@dataclass(frozen=True, slots=True)
class _Fleet:
    """A fleet and its data.

    Attributes:
        data: records of all devices.
        devices: number of them.
        model: its input, as a model file says it.
        rate: learning rate of local steps.
        norms: of the first round.
        noise: its kind.
        epsilon: of the job, for a device.
    """

    data: DataSelection
    devices: int
    model: dict[str, Any]
    rate: float
    norms: tuple[float, ...]
    noise: str = "gaussian"
    epsilon: float = 8.0


def run() -> list[Figure]:
    """Train all settings, and draw the picture.

    Raises:
        Skipped: The data are not there.
    """
    fleets = {
        "digits, 20 devices": _Fleet(
            DataSelection(), 20,
            {"input_shape": [8, 8, 1], "input_offset": 0.3, "input_scale": 0.37},
            0.5, (0.1, 0.3, 1.0, 3.0, 10.0),
        ),
        "digits, Laplace, ε = 40": _Fleet(
            DataSelection(), 20,
            {"input_shape": [8, 8, 1], "input_offset": 0.3, "input_scale": 0.37},
            0.5, (0.5, 1.5, 5.0, 15.0, 50.0), "laplace", 40.0,
        ),
        "MNIST, 100 devices": _Fleet(
            mnist()[0], 100,
            {"input_shape": [28, 28, 1], "input_offset": 0.13, "input_scale": 0.31},
            0.05, (0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        ),
    }  # fmt: skip
    figures: list[Figure] = []
    panels: list[Panel] = []
    with TemporaryDirectory(prefix="dpagent-bench-") as directory:
        for name, fleet in fleets.items():
            file = Path(directory) / f"{len(panels)}.yaml"
            model = {"name": "linear", "classes": 10, "layers": [{"dense": {"units": 10}}]}
            file.write_text(yaml.safe_dump(model | fleet.model))
            lines: dict[str, Sequence[Point]] = {}
            for kind, clipping in _KINDS.items():
                points = []
                for norm in fleet.norms:
                    mean, error = mean_and_error(
                        [_accuracy(fleet, file, clipping, norm, seed) for seed in _SEEDS]
                    )
                    points.append(Point(norm, mean, error))
                    what = f"{name}, first norm {norm:g}, {kind}"
                    figures += [Figure(what, mean, "%"), Figure(f"{what}{STANDARD_ERROR}", error, "%")]
                lines[kind] = points
            panels.append(Panel(name, lines))
    draw(
        METHODS / "central-clipping.svg",
        f"ε = 8 and Gaussian noise unless said, {_ROUNDS} rounds, {len(_SEEDS)} seeds", [panels],
        x="clip norm of the first round", y="accuracy, %",
    )  # fmt: skip
    return figures


def _accuracy(fleet: _Fleet, model: Path, clipping: dict[str, Any], norm: float, seed: int) -> float:
    """In percent, on the held-out records."""
    source = open_source(fleet.data, seed)
    shards = split(source.train, fleet.devices, "iid", seed=seed)
    settings: dict[str, Any] = {
        "fleet": "clipping", "devices": fleet.devices, "rounds": _ROUNDS,
        "records_per_device": len(source.train) // fleet.devices,
        "model": {"name": str(model), "seed": seed},
        "privacy": {
            "method": "central", "noise": fleet.noise, "epsilon": fleet.epsilon, "delta": 1e-5,
            "clip_norm": norm, "clipping": clipping,
            "local_training": {"steps": 20, "batch": 32, "learning_rate": fleet.rate},
        },
        "cap": {"kind": "none"}, "optimiser": {"learning_rate": 1.0, "momentum": 0.0},
    }  # fmt: skip
    job = FleetSettings.checked(settings)
    loop = TrainingLoop(job, job.model.spec(), shards, source.test, noise=True)
    for number in range(1, _ROUNDS + 1):
        loop.round(number)
    return 100 * loop.accuracy()
