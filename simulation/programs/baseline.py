"""The same training without noise, for comparison: ``python -m simulation.programs.baseline DEMO_DIRECTORY``.

Same shards, lots' sampling rate, clipping, cap and optimiser; only the noise and the
network are missing. It reads all shards, which nobody in the real fleet can: it belongs to
the demo alone, and its figures are not private.

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
from numpy.typing import NDArray

from coordinator.planning import clipping_of, gradient_steps
from coordinator.settings import FleetSettings, load_fleet_settings
from dpagent.errors import DpagentError, ExitCode
from dpagent.learning.data.dataset import Dataset, to_float32
from dpagent.learning.data.formats.npz import open_npz
from dpagent.learning.front_end.features import FeatureSet, FrontEnd
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.lots import sum_over_lot
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.privacy.caps import ClampCap
from dpagent.privacy.clipping import adapted_norm
from dpagent.privacy.covariance import SecondMoments, leading_directions
from dpagent.privacy.sampling import poisson_lot, shuffled
from dpagent.storage import disk_errors, write_atomically
from simulation.layout import Layout
from simulation.settings import load_options

_LOOK_S: Final = 0.5


def read_baseline(file: Path) -> tuple[float, ...]:
    """Accuracy after each round so far, NaN where none was measured; empty while there is none."""
    try:
        return tuple(
            math.nan if value is None else float(value) for value in json.loads(file.read_text())["accuracy"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ()


class Baseline:
    """A fleet in one process.

    Args:
        settings: The coordinator's.
        spec: The model.
        shards: The devices' records, or their features.
        test: The test data, or their features.

    Attributes:
        weights: (parameters,) after the last round.
    """

    def __init__(
        self, settings: FleetSettings, spec: ModelSpec, shards: Sequence[Dataset], test: Dataset
    ) -> None:
        self._settings, self._spec = settings, spec
        self._shards, self._test = shards, test
        self._engine = NumpyEngine(self._spec.head)
        self._cap = ClampCap(regularisation=settings.cap.regularisation, floor=settings.cap.floor)
        self._optimiser = settings.optimiser.optimiser()
        self._rates = settings.optimiser.learning_rates(gradient_steps(settings, spec))
        self._clip_norm = settings.privacy.clip_norm
        self.weights = self._spec.initial_weights(settings.model.seed)
        self._state = np.zeros((self._optimiser.rows, len(self.weights)))

    def round(self, number: int) -> float:
        """Take a round's step.

        Args:
            number: Of the step, from 1.

        Returns:
            Accuracy on the test data, from 0 to 1.
        """
        privacy = self._settings.privacy
        clipping = clipping_of(self._settings, self._spec, self._clip_norm)
        expected_lot = privacy.sampling_rate * self._settings.records_per_device
        mean = np.zeros(clipping.dimension)
        for shard in self._shards:
            lot = shuffled(poisson_lot(len(shard), privacy.sampling_rate))
            part = sum_over_lot(self._engine, self.weights, shard, lot, clipping.norms)
            release = clipping.scaled_sum(part.total, int(part.within[0]), len(lot) - part.excluded)
            mean += self._capped("device", release / expected_lot, clipping.radius)
        mean /= len(self._shards)
        gradient = self._capped("coordinator", clipping.gradient(mean), clipping.radius)
        if clipping.count_weight:
            wanted, share = privacy.clipping, clipping.share_within(float(mean[-1]))
            self._clip_norm = adapted_norm(self._clip_norm, share, quantile=wanted.quantile, rate=wanted.rate)
        self.weights, self._state = self._optimiser.step(
            self.weights, self._state, gradient, number=number, learning_rate=self._rates.at(number)
        )
        return self._accuracy()

    def _capped(self, where: str, vector: NDArray[np.float64], radius: float) -> NDArray[np.float64]:
        cap = self._settings.cap
        if cap.kind != "clamp" or cap.where != where:
            return vector
        return self._cap.apply(vector, self.weights, radius=radius)[0]

    def _accuracy(self) -> float:
        right = sum(
            int(np.count_nonzero(self._engine.logits(self.weights, inputs).argmax(axis=1) == labels))
            for inputs, labels in self._test.batches()
        )
        return right / len(self._test)


def run_baseline(root: Path) -> None:
    """Train and write the accuracies, round by round."""
    layout = Layout(root, load_options(root).devices)
    settings = load_fleet_settings(layout.fleet_file)
    spec = settings.model.spec()
    shards: list[Dataset] = [open_npz(layout.shard_file(number)) for number in range(1, layout.devices + 1)]
    test = open_npz(layout.test_file)
    history: list[float | None] = []
    if spec.projection is not None:
        # The first round of such a job releases second moments, and takes no step.
        history.append(None)
        shards, test = _projected(settings, spec, shards, test, root / "baseline")
    elif spec.front_end:
        shards, test = _features_of_others(FrontEnd(spec, settings.model.assets()), shards, test, layout)
    baseline = Baseline(settings, spec, shards, test)
    for number in range(1, gradient_steps(settings, spec) + 1):
        history.append(baseline.round(number))
        write_atomically(layout.baseline_file, json.dumps({"accuracy": history}).encode())


def _features_of_others(
    front_end: FrontEnd, shards: Sequence[Dataset], test: Dataset, layout: Layout
) -> tuple[list[Dataset], Dataset]:
    """The features that agents and coordinator keep, as soon as all of them have them."""
    places = [layout.agent_state(number) for number in range(1, layout.devices + 1)]
    places.append(layout.coordinator_state)
    while not all((place / f"features-{front_end.key}.json").exists() for place in places):
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
    """Run for the demo in the directory named on the command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.OK))
    try:
        run_baseline(Path(sys.argv[1]))
    except DpagentError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
