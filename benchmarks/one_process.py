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

import numpy as np
from numpy.typing import NDArray

from agent.noisy_sums import noisy_sum, sum_of_moments
from benchmarks.demo import mnist_directory
from coordinator.aggregation import median_of_means
from coordinator.job_settings import ScheduleSettings
from coordinator.settings import AggregationSettings, FleetSettings
from coordinator.store import OpenRound
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.data.splits import split
from dpagent.learning.front_end.features import FrontEnd
from dpagent.learning.model_files import find_model
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.covariance import leading_directions
from dpagent.protocol.noisy_sum import NoisySum
from simulation.choices import settle
from simulation.data.source import open_source
from simulation.planning import trial_job, trial_planner
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


def _projected(
    fleet: FleetSettings, spec: ModelSpec, shards: Sequence[Dataset], test: Dataset
) -> list[Dataset]:
    """The features of all shards and of the test data, behind the directions that the first round finds."""
    before = FrontEnd(spec, before_projection=True)
    release = trial_planner(fleet, spec, trial_job(fleet, spec)).task(OpenRound(1, 0, 0), b"").release
    assert isinstance(release, NoisySum)
    assert release.second_moments is not None
    assert spec.projection is not None
    total = np.sum([_noisy_moments(release, _behind(before, shard)) for shard in shards], axis=0)
    block = release.plan.wire.block
    sums = {
        place: (len(shards), total[place * block : (place + 1) * block]) for place in range(release.blocks)
    }
    moments = release.second_moments.matrix(median_of_means(release, [sums]))
    directions = leading_directions(moments, spec.projection.components).astype("<f4").tobytes()
    front_end = FrontEnd(spec, {"projection": directions})
    return [_behind(front_end, dataset) for dataset in (*shards, test)]


def _noisy_moments(release: NoisySum, records: Dataset) -> NDArray[np.int64]:
    return noisy_sum(release, np.zeros(0, np.float32), lambda _: sum_of_moments(release, records))


def _behind(front_end: FrontEnd, dataset: Dataset) -> Dataset:
    inputs = np.concatenate([front_end(inputs) for inputs, _ in dataset.batches()])
    return ArrayDataset(inputs, dataset.labels, dataset.classes)


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
    return [simulate(settings.with_values({"seed": seed}), schedule, aggregation, loop) for seed in seeds]


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
        fleet = fleet.with_values({"aggregation": aggregation})
    if schedule is not None:
        privacy = fleet.privacy.with_values({"schedule": schedule})
        fleet = fleet.with_values({"privacy": privacy})
    source = open_source(settings.data, settings.seed)
    dealt = settings.data
    shards: list[Dataset] = [
        *split(
            source.train,
            settings.devices,
            dealt.split,
            seed=settings.seed,
            classes_per_part=dealt.classes_per_device,
        )
    ]
    spec, test = find_model(settings.model), source.test
    if spec.projection is not None:
        *shards, test = _projected(fleet, spec, shards, test)
    fleet_of_run = loop(fleet, spec, shards, test, noise=True)
    rounds = [fleet_of_run.round(number) for number in range(fleet_of_run.first_round, settings.rounds + 1)]
    return Run(
        fleet_of_run.accuracy(),
        statistics.fmean(result.clamped for result in rounds),
        statistics.fmean(result.shortened for result in rounds),
    )
