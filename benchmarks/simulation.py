"""The demo's training without its network: the same steps in one process, many times over.

Each device draws its lot, constrains its records' gradients, adds exact discrete Gaussian noise
and rounds for the wire; the coordinator adds up, caps and steps. All with the library's own
functions and the settings of the demo's digits preset; only messages, ledgers and waiting are
missing, and no fragment is lost. The seed sets the split, the shards and the initial weights;
lots and noise come from the operating system's entropy, as they always do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coordinator.settings import CapSettings
from dpagent.learning.data.splits import split
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.engine import ACCUMULATION_SLACK
from dpagent.learning.training.lots import sum_over_lot
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.optimiser import Sgd
from dpagent.privacy.calibration import calibrate, gaussian_family
from dpagent.privacy.caps import ClampCap
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian, finest_resolution
from dpagent.privacy.sampling import poisson_lot, shuffled
from dpagent.privacy.schedules import Schedule
from simulation.data.source import open_source
from simulation.presets import PRESETS, DatasetName
from simulation.settings import DataChoice, DataForm, DemoOptions

SEEDS = range(5)


@dataclass(frozen=True, slots=True)
class Run:
    """How one simulated job ended.

    Attributes:
        accuracy: Of the final model on the test half.
        clamped: Coordinates beyond their bound, mean over the rounds (and the devices, if they cap).
        in_ball: Share of the vectors capped that had to be shortened as a whole.
    """

    accuracy: float
    clamped: float
    in_ball: float


def digits_options(epsilon: float, *, cap: str = "clamp", cap_at: str = "coordinator") -> DemoOptions:
    """The options of ``dpagent demo`` with its digits preset and another ε or cap."""
    preset = PRESETS[DatasetName.DIGITS]
    return DemoOptions(
        data=DataChoice(DatasetName.DIGITS.value), form=DataForm(1437, 360, [8, 8, 1], 10),
        model=preset.model, devices=preset.devices, rounds=preset.rounds, epsilon=epsilon, delta=1e-5,
        schedule="incrementing", step=0.3, sampling_rate=preset.sampling_rate, clip_norm=preset.clip_norm,
        learning_rate=preset.learning_rate,
        momentum=preset.momentum, cap=cap, cap_at=cap_at, seed=0,
        compute_slot_s=preset.compute_slot_s, jitter_window_s=preset.jitter_window_s,
    )  # fmt: skip


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, the values taken as independent; at least two."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def over_seeds(options: DemoOptions, schedule: Schedule | None = None) -> list[Run]:
    """One simulated job for each of :data:`SEEDS`, in place of the seed in ``options``."""
    return [simulate(replace(options, seed=seed), schedule) for seed in SEEDS]


def simulate(options: DemoOptions, schedule: Schedule | None = None) -> Run:
    """Train once.

    Args:
        options: What the demo would be asked for.
        schedule: In place of the one in ``options``.
    """
    spec = built_in(options.model)
    source = open_source(options.data, options.seed)
    test = source.test
    shards = split(source.train, options.devices, seed=options.seed)
    plan = calibrate(
        schedule or Schedule("incrementing", step=options.step), gaussian_family(options.sampling_rate),
        epsilon=options.epsilon, delta=options.delta, rounds=options.rounds,
    )  # fmt: skip
    first = DiscretisedGaussian(
        options.clip_norm, plan.noise_multipliers[0], options.sampling_rate, spec.parameter_count,
        resolution=finest_resolution(max(plan.noise_multipliers)), accumulation_slack=ACCUMULATION_SLACK,
    )  # fmt: skip
    expected_lot = options.sampling_rate * options.records_per_device
    steps_per_unit = expected_lot / first.granularity
    cap = _Cap(options)
    engine, optimiser = NumpyEngine(spec), Sgd(options.momentum)
    weights, state = spec.initial_weights(options.seed), np.zeros((optimiser.rows, spec.parameter_count))
    for number, noise_multiplier in enumerate(plan.noise_multipliers, start=1):
        mechanism = replace(first, noise_multiplier=noise_multiplier)
        form = mechanism.wire_form(expected_lot)
        total = np.zeros(spec.parameter_count, np.int64)
        for shard in shards:
            lot = shuffled(poisson_lot(len(shard), options.sampling_rate))
            part = sum_over_lot(engine, weights, shard, lot, [options.clip_norm])
            released = mechanism.add_noise(mechanism.quantize(part.total))
            if options.cap_at == "device":
                capped = cap.apply(released / steps_per_unit, weights)
                released = np.rint(capped * steps_per_unit).astype(np.int64)
            total += mechanism.round_to_wire(released, form)
        gradient = total.astype(np.float64) * (float(1 << form.shift) / (steps_per_unit * options.devices))
        if options.cap_at == "coordinator":
            gradient = cap.apply(gradient, weights)
        weights, state = optimiser.step(
            weights, state, gradient, number=number, learning_rate=options.learning_rate
        )
    return Run(engine.accuracy(weights, *test.batch(np.arange(len(test)))), *cap.did())


class _Cap:
    """The cap that the options ask for, and a count of what it does."""

    def __init__(self, options: DemoOptions) -> None:
        defaults = CapSettings()
        self._cap = (
            ClampCap(regularisation=defaults.regularisation, floor=defaults.floor)
            if options.cap == "clamp"
            else None
        )
        self._radius = options.clip_norm
        self._clamped: list[int] = []
        self._shortened: list[bool] = []

    def apply(self, gradient: NDArray[np.float64], weights: NDArray[np.float32]) -> NDArray[np.float64]:
        if self._cap is None:
            return gradient
        capped, report = self._cap.apply(gradient, weights, radius=self._radius)
        self._clamped.append(report.coordinates_clamped)
        # A vector that was shortened ends on the ball; none other has exactly that norm.
        self._shortened.append(math.isclose(report.norm_after, self._radius, rel_tol=1e-9))
        return capped

    def did(self) -> tuple[float, float]:
        """Coordinates clamped a vector, and the share of vectors shortened to the ball."""
        if not self._clamped:
            return 0.0, 0.0
        return statistics.fmean(self._clamped), statistics.fmean(self._shortened)
