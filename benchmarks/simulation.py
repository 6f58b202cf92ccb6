"""The demo's training without its network: the same steps in one process, many times over.

All of it is the fleet's own (``simulation/training_loop.py``), with the settings of the demo's digits
preset; only messages, ledgers and waiting are missing, and no fragment is lost. The seed sets the split,
the shards and the initial weights; lots and noise come from the operating system's entropy, as they always
do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.demo import mnist_directory
from coordinator.job_settings import ScheduleSettings
from coordinator.settings import AggregationSettings
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.data.splits import split
from dpagent.learning.model_files import find_model
from dpagent.learning.models.built_ins import built_in
from simulation.choices import settle
from simulation.data.source import open_source
from simulation.programs.configurations import fleet_settings
from simulation.request import CapKind, CapPlace, DataSelection, Request
from simulation.settings import DataForm, RunSettings
from simulation.training_loop import TrainingLoop

SEEDS = range(5)
DIGITS = DataForm(train_records=1437, test_records=360, shape=(8, 8, 1), classes=10)


@dataclass(frozen=True, slots=True)
class Run:
    """How one simulated job ended.

    Attributes:
        accuracy: Of the final model on the test half.
        clamped: Coordinates beyond the coordinator's bound, mean over the rounds.
        in_ball: Share of the gradients that the coordinator had to shorten as a whole.
    """

    accuracy: float
    clamped: float
    in_ball: float


def digits_settings(
    epsilon: float,
    *,
    cap: CapKind = "clamp",
    cap_at: CapPlace = "coordinator",
    devices: int | None = None,
) -> RunSettings:
    """The settings of ``dpagent demo`` with its digits preset and another ε, cap or number of devices."""
    request = Request(epsilon=epsilon, cap=cap, cap_at=cap_at, devices=devices)
    settings, _ = settle(request, DIGITS, "digits", built_in("digits"))
    return settings


def mnist() -> tuple[DataSelection, DataForm]:
    """MNIST as the data of a request, and their form.

    Raises:
        Skipped: they are not there.
    """
    data = DataSelection(dataset="mnist", train=DatasetSettings(path=mnist_directory()))
    return data, open_source(data, 0).form


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, the values taken as independent; at least two."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def over_seeds(
    settings: RunSettings,
    schedule: ScheduleSettings | None = None,
    aggregation: AggregationSettings | None = None,
    seeds: Sequence[int] = SEEDS,
    loop: type[TrainingLoop] = TrainingLoop,
) -> list[Run]:
    """One simulated job for each seed, in place of the one in ``settings``."""
    return [
        simulate(settings.model_copy(update={"seed": seed}), schedule, aggregation, loop) for seed in seeds
    ]


def simulate(
    settings: RunSettings,
    schedule: ScheduleSettings | None = None,
    aggregation: AggregationSettings | None = None,
    loop: type[TrainingLoop] = TrainingLoop,
) -> Run:
    """Train once.

    Args:
        settings: Of the run.
        schedule: In place of the one in ``settings``.
        aggregation: In place of the mean.
        loop: Of a fleet with hostile devices, in place of an honest one.
    """
    fleet = fleet_settings(settings)
    if aggregation is not None:
        fleet = fleet.model_copy(update={"aggregation": aggregation})
    if schedule is not None:
        privacy = fleet.privacy.model_copy(update={"schedule": schedule})
        fleet = fleet.model_copy(update={"privacy": privacy})
    source = open_source(settings.data, settings.seed)
    dealt = settings.data
    shards = split(
        source.train,
        settings.devices,
        dealt.split,
        seed=settings.seed,
        classes_per_part=dealt.classes_per_device,
    )
    fleet_of_run = loop(fleet, find_model(settings.model), shards, source.test, noise=True)
    rounds = [fleet_of_run.round(number) for number in range(fleet_of_run.first_round, settings.rounds + 1)]
    return Run(
        fleet_of_run.accuracy(),
        statistics.fmean(result.clamped for result in rounds),
        statistics.fmean(result.shortened for result in rounds),
    )
