"""M2's figures: LDP-FL on MNIST by ε, by number of devices, by ranges, and by weights reported.

Sun, Qian and Chen (IJCAI 2021) let each of 100 to 500 devices send a bit for every weight of a CNN, with ε
counted for one weight, and report 96 to 97 % at ε = 1 with 500 devices. Here 60,000 records are dealt at
random to the devices, which train by the product's own functions: a linear model (7,850 weights, 10 steps on
32 records a round, two seeds ± the standard error of their mean), and in single runs the 26,010-parameter CNN
(20 steps). Accuracies are those after 10 rounds. The picture is `docs/methods/ldp-fl-mnist.svg`. With
``--long`` all of it is the CNN, three seeds and 20 rounds, which takes a day.

"ε of a weight" is the paper's count: every device sends all weights at that ε, and pays as much for each of
them in each round to anybody who can link its bits. No device accepts that, so these runs are simulations,
of the same functions without a broker. "ε of a device" is the product's: 1,000, the largest that a lifetime
budget may be, for all that a device sends in all rounds, and trusting nobody. Over Mosquitto, the real
coordinator counts what many devices in one process send (``benchmarks/swarm.py``).

Ranges: *adaptive* are the product's, of the changes of the weights, ±0.1 in the first round and then by layer
as far as reports go; *fixed* are ±0.1, or another width, of the changes in all rounds; *the layer's width*
are the paper's, of the weights themselves, from the least to the greatest of the layer in the model of the
round before, at least ±0.05.

Limits: two seeds. Learning rates were chosen with the test set in view. The data are not part of the project:
without the four IDX files in ``../shared/data/mnist``, or the directory that the variable ``MNIST_DIR``
names, this benchmark is skipped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.one_process import mean_and_error, mnist
from benchmarks.plots import METHODS, Panel, Point, draw
from benchmarks.swarm import run_swarm
from coordinator.settings import FleetSettings
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.splits import split
from dpagent.learning.model_files import find_model
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds
from dpagent.protocol.reports import Reports
from simulation.data.source import Source, open_source
from simulation.fitting_model import linear_model
from simulation.planning import trial_job, trial_planner
from simulation.training_loop import RoundResult, TrainingLoop

_COUNTS: Final = (100, 200, 300, 400, 500)
_MOST: Final = _COUNTS[-1]
_EPSILONS: Final = (0.5, 1.0, 2.0)
_OF_A_WEIGHT: Final = 1.0
_OF_A_DEVICE: Final = 1000.0
_WIDTHS: Final = (0.02, 0.5)
"""Of other fixed ranges."""
_SENT: Final = {"the k weights of the default": None, "all weights": "all"}
_PUBLISHED: Final = "published: 96 to 97 %, CNN"


class _AtEpsilonOfAWeight(TrainingLoop):
    """Devices send all weights at an ε that is counted for one of them, whatever that costs."""

    def __init__(self, epsilon: float, fleet: FleetSettings, spec: ModelSpec, *rest: Any) -> None:
        super().__init__(fleet, spec, *rest, noise=True)
        noise = TwoPointRounds((1 / epsilon,) * fleet.rounds, spec.parameter_count)
        self._planner = trial_planner(fleet, spec, replace(trial_job(fleet, spec), noise=noise))


class _WidthsOfLayers(_AtEpsilonOfAWeight):
    """Devices report weights, and no changes, in ranges as wide as the layers, as the paper has it."""

    _LEAST_RADIUS: Final = 0.05
    """Lets a layer of equal weights move."""

    def _step_by_reports(self, release: Reports) -> RoundResult:
        weights, layers, start = self._received, [], 0
        for layer in release.two_point.layers:
            part = weights[start : start + layer.size].astype(np.float64)
            start += layer.size
            radius = max(self._LEAST_RADIUS, float(np.ptp(part)) / 2)
            layers.append(replace(layer, centre=float(part.min() + part.max()) / 2, radius=radius))
        mechanism = replace(release.two_point, layers=tuple(layers))
        reports = [
            mechanism.report(release.training.train(self._engine, weights, shard)) for shard in self._shards
        ]
        distance = weights - mechanism.estimate(*mechanism.tally(reports)).mean
        self._model = self._stepper.step_by_distance(release, self._model, distance).model
        return RoundResult(0, shortened=False)


@dataclass(frozen=True, slots=True)
class _Ranges:
    """Of reports.

    Attributes:
        two_point: that section of ``fleet.yaml``, but for the coordinates.
        loop: that trains with them.
    """

    two_point: Mapping[str, Any]
    loop: type[_AtEpsilonOfAWeight] = _AtEpsilonOfAWeight


def _fixed(radius: float) -> _Ranges:
    return _Ranges({"radius": radius, "adapts": False})


_ADAPTIVE: Final = _Ranges({})
_RANGES: Final = {
    "adaptive": _ADAPTIVE,
    "fixed, ±0.1": _fixed(0.1),
    "the layer's width": _Ranges({}, _WidthsOfLayers),
}


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
            "cap": {"kind": "none"}, "optimiser": {"learning_rate": 1.0, "momentum": 0.0},
        }  # fmt: skip

    def accuracies(
        self, devices: int, ranges: _Ranges, *, of_a_weight: float | None = None, noise: bool = True
    ) -> list[float]:
        """By seed, in percent.

        Args:
            devices: how many.
            ranges: of their reports.
            of_a_weight: ε of every weight, in place of that of a device.
            noise: whether changes are reported by random bits, or as they are.
        """
        found = []
        for seed in self.seeds:
            coordinates = {} if of_a_weight is None else {"coordinates": "all"}
            values = self.values(devices, seed, {**coordinates, **ranges.two_point})
            fleet = FleetSettings.checked(values)
            parts = self.spec, self.shards(devices, seed), self.source.test
            if of_a_weight is None:
                loop = TrainingLoop(fleet, *parts, noise=noise)
            else:
                loop = ranges.loop(of_a_weight, fleet, *parts)
            for number in range(1, self.rounds + 1):
                loop.round(number)
            found.append(100 * loop.accuracy())
        return found

    def mean(
        self, devices: int, ranges: _Ranges, *, of_a_weight: float | None = None, noise: bool = True
    ) -> Point:
        """Mean over the seeds, at the number of devices; arguments as for ``accuracies``."""
        found = self.accuracies(devices, ranges, of_a_weight=of_a_weight, noise=noise)
        return Point(devices, *mean_and_error(found))

    def over_mosquitto(self, devices: int, two_point: Mapping[str, Any]) -> float:
        """Accuracy in percent of one run."""
        rounds, *_ = run_swarm(self.values(devices, 0, two_point), self.shards(devices, 0), self.source.test)
        accuracy = rounds[-1].accuracy
        assert accuracy is not None
        return 100 * accuracy


def run() -> list[Figure]:
    """Train the linear model in all settings and the CNN in some, and draw the pictures.

    Raises:
        Skipped: The data or Mosquitto are not there.
    """
    data, form = mnist()
    source = open_source(data, 0)
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        model = Path(name) / "linear.yaml"
        model.write_text(yaml.safe_dump(linear_model(form.shape, form.classes).describe()))
        figures = _measure(_Job(source, str(model), rounds=10, local_steps=10, seeds=range(2)))
    return figures + _look(_Job(source, "mnist-cnn", rounds=10, local_steps=20, seeds=range(1)))


def run_long() -> list[Figure]:
    """Train the CNN in all settings, for longer.

    Raises:
        Skipped: The data or Mosquitto are not there.
    """
    data, _ = mnist()
    return _measure(_Job(open_source(data, 0), "mnist-cnn", rounds=20, local_steps=20, seeds=range(3)))


def _look(job: _Job) -> list[Figure]:
    """Single runs."""
    figures = [
        Figure(f"CNN, {_MOST} devices, without noise", job.accuracies(_MOST, _ADAPTIVE, noise=False)[0], "%")
    ]
    for devices, ranges in ((_COUNTS[0], _RANGES), (_MOST, {"adaptive": _ADAPTIVE})):
        for name, each in ranges.items():
            (found,) = job.accuracies(devices, each, of_a_weight=_OF_A_WEIGHT)
            published = _PUBLISHED if devices == _MOST else None
            where = f"CNN, {devices} devices, ε of a weight {_OF_A_WEIGHT:g}, {name}"
            figures.append(Figure(where, found, "%", published))
    return figures


def _measure(job: _Job) -> list[Figure]:
    exact = job.mean(_MOST, _ADAPTIVE, noise=False)
    figures = _shown(f"{_MOST} devices, without noise", exact)
    by_epsilon: dict[str, list[Point]] = {}
    by_devices: dict[str, list[Point]] = {}
    for name, ranges in _RANGES.items():
        for epsilon in _EPSILONS:
            point = job.mean(_MOST, ranges, of_a_weight=epsilon)
            by_epsilon.setdefault(name, []).append(replace(point, x=epsilon))
            published = _PUBLISHED if epsilon == _OF_A_WEIGHT else None
            figures += _shown(f"{_MOST} devices, ε of a weight {epsilon:g}, {name}", point, published)
        for devices in _COUNTS[:-1]:
            point = job.mean(devices, ranges, of_a_weight=_OF_A_WEIGHT)
            by_devices.setdefault(name, []).append(point)
            figures += _shown(f"{devices} devices, ε of a weight {_OF_A_WEIGHT:g}, {name}", point)
        at_most = by_epsilon[name][_EPSILONS.index(_OF_A_WEIGHT)]
        by_devices[name].append(replace(at_most, x=_MOST))
    for width in _WIDTHS:
        point = job.mean(_MOST, _fixed(width), of_a_weight=_OF_A_WEIGHT)
        figures += _shown(f"{_MOST} devices, ε of a weight {_OF_A_WEIGHT:g}, fixed, ±{width:g}", point)
    bits = job.spec.parameter_count * job.rounds
    figures.append(
        Figure(f"ε of a device that sends all at ε = {_OF_A_WEIGHT:g} in all rounds", bits * _OF_A_WEIGHT, "")
    )
    for name, coordinates in _SENT.items():
        point = job.mean(_MOST, _Ranges({"coordinates": coordinates}))
        figures += _shown(f"{_MOST} devices, ε of a device {_OF_A_DEVICE:g}, {name}", point)
    found = job.over_mosquitto(_COUNTS[0], {"coordinates": "all"})
    name = f"{_COUNTS[0]} devices over Mosquitto, ε of a device {_OF_A_DEVICE:g}, all weights"
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
