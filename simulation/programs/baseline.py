"""The same training without noise, for comparison.

``python -m simulation.programs.baseline STATE_DIRECTORY``

Same shards, lots' sampling rate, clipping, cap and optimiser; only the noise and the
network are missing. It reads all shards, which nobody in a real fleet can: it belongs to
the simulation alone, and its figures are not private.

Features of a front end are those that the agents and the coordinator have computed, once they
have. Behind a projection they depend on its directions, and so are computed here again.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from coordinator.settings import FleetSettings, load_fleet_settings
from dpagent.errors import ConfigurationError, DpagentError, ExitCode
from dpagent.learning.data.dataset import Dataset, to_float32
from dpagent.learning.data.formats.npz import open_npz
from dpagent.learning.front_end.features import FeatureSet, FrontEnd, has_features
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.covariance import SecondMoments, leading_directions
from dpagent.privacy.sampling import poisson_lot
from dpagent.storage import disk_errors, write_atomically
from simulation.layout import Layout
from simulation.settings import RunSettings, load_settings_of_run
from simulation.training_loop import TrainingLoop

_LOOK_S: Final = 0.5


def read_baseline(file: Path) -> tuple[float, ...]:
    """Accuracy after each round so far, NaN where none was measured; empty while there is none."""
    try:
        return tuple(
            math.nan if value is None else float(value) for value in json.loads(file.read_text())["accuracy"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def run_baseline(root: Path) -> None:
    """Train and write the accuracies, round by round."""
    run = load_settings_of_run(root, RunSettings)
    if run is None:
        raise ConfigurationError(f"{root} holds no run; expected the state directory of one.")
    layout = Layout(root)
    fleet = load_fleet_settings(layout.fleet_file)
    spec = fleet.model.spec()
    shards: list[Dataset] = [open_npz(layout.shard_file(number)) for number in range(1, run.devices + 1)]
    test: Dataset = open_npz(layout.test_file)
    if spec.projection is not None:
        shards, test = _projected(fleet, spec, shards, test, root / "baseline")
    elif spec.front_end:
        shards, test = _features_of_others(FrontEnd(spec, fleet.model.assets()), shards, test, layout)
    loop = TrainingLoop(fleet, spec, shards, test, noise=False)
    # The first round of a job with a projection sums second moments, and takes no step.
    history: list[float | None] = [None] * (loop.first_round - 1)
    for number in range(loop.first_round, fleet.rounds + 1):
        loop.round(number)
        history.append(loop.accuracy())
        write_atomically(layout.baseline_file, json.dumps({"accuracy": history}).encode())


def _features_of_others(
    front_end: FrontEnd, shards: Sequence[Dataset], test: Dataset, layout: Layout
) -> tuple[list[Dataset], Dataset]:
    """The features that agents and coordinator keep, as soon as all of them have them."""
    places = [layout.agent_state(number) for number in range(1, len(shards) + 1)]
    places.append(layout.coordinator_state)
    while not all(has_features(place, front_end) for place in places):
        time.sleep(_LOOK_S)
    *features, of_test = [
        FeatureSet(dataset, front_end, place) for dataset, place in zip((*shards, test), places, strict=True)
    ]
    return [*features], of_test


def _projected(
    settings: FleetSettings, spec: ModelSpec, shards: Sequence[Dataset], test: Dataset, directory: Path
) -> tuple[list[Dataset], Dataset]:
    """Features behind a projection whose directions are known without noise."""
    assert spec.projection is not None
    assets = settings.model.assets()
    before = FrontEnd(spec, assets, before_projection=True)
    values = math.prod(spec.shape_before_projection)
    moments = SecondMoments(values, settings.privacy.record_norm)
    total = np.zeros(moments.dimension)
    for shard in shards:
        lot = poisson_lot(len(shard), settings.privacy.sampling_rate)
        for inputs, _ in shard.batches(lot):
            total += moments.total(to_float32(before(inputs)).reshape(len(inputs), -1))
    directions = leading_directions(moments.matrix(total), spec.projection.components)
    front_end = FrontEnd(spec, assets | {"projection": directions.astype("<f4").tobytes()})
    features = []
    for number, dataset in enumerate((*shards, test)):
        place = directory / str(number)
        with disk_errors(place):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        features.append(FeatureSet(dataset, front_end, place))
    return [*features[:-1]], features[-1]


def main() -> None:
    """Train for the run in the directory named on the command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.OK))
    try:
        run_baseline(Path(sys.argv[1]))
    except DpagentError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
