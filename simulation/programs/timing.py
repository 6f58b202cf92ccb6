"""How long a round takes on this machine, tried before it begins: slots and deadlines are made of it.

The timed inputs are public: made-up records and initial weights.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from dpagent.learning.front_end.features import FrontEnd
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine_choice import Bench
from dpagent.norm import Norm
from dpagent.privacy.methods import method_named
from dpagent.privacy.sampling import largest_lot
from simulation.presets import LOCAL_TRAINING
from simulation.settings import RunSettings

_TRIED_RECORDS: Final = 64
_TRIED_FEATURES: Final = 4
_SHORTEST_SLOT_S: Final = 0.3
_SPARE: Final = 1.5
_ALONE: Final = 2.1
"""So many times its work, at least, for a device not to take two slots by its own trial."""
_AGENT_S: Final = 0.02
_PARAMETER_S: Final = 1e-6
"""Of an agent's round, for each parameter: noise, packing, the model's way."""
_DEADLINE_S: Final = 60.0
_FEATURES_SPARE: Final = 3.0


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Of a run, in seconds."""

    compute_slot_s: float
    deadline_s: float
    """From a round's beginning. The first round of a model with a front end fits as well."""
    features_s: float
    """Estimate of how long all agents together compute features in their first round."""


def round_times(settings: RunSettings, spec: ModelSpec, assets: Mapping[str, bytes]) -> RoundTimes:
    """Slots and deadlines for all agents on this machine at once.

    Args:
        settings: The run.
        spec: Its model.
        assets: Of the model's front end, by role.
    """
    share = settings.devices / min(settings.devices, _cores())
    slot_s = settings.compute_slot_s
    if not slot_s:
        # Devices do the work of the largest lot, whatever their lots are.
        lot = _most_records(settings)
        work_s = (
            lot * _record_s(spec, settings.gradient_norm) + _AGENT_S + _PARAMETER_S * spec.parameter_count
        )
        slot_s = max(_SHORTEST_SLOT_S, float(f"{max(_SPARE * share, _ALONE) * work_s:.2g}"))
    features_s = share * settings.records_per_device * _feature_s(spec, assets)
    deadline_s = _DEADLINE_S + 3 * slot_s + settings.jitter_window_s + _FEATURES_SPARE * features_s
    return RoundTimes(slot_s, round(deadline_s, 1), features_s)


def _most_records(settings: RunSettings) -> int:
    """Records whose gradients a device computes in a round, at most."""
    if method_named(settings.method).trains_locally:
        return round(LOCAL_TRAINING["steps"] * LOCAL_TRAINING["batch"])
    return largest_lot(math.ceil(settings.records_per_device), settings.sampling_rate)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _record_s(spec: ModelSpec, norm: Norm) -> float:
    """Seconds that a record's clipped gradient takes."""
    engine = Bench(spec.head, norm=norm).make("numpy")
    generator = np.random.default_rng(0)
    inputs = generator.random((_TRIED_RECORDS, *spec.head.input_shape), np.float32)
    labels = generator.integers(0, spec.classes, _TRIED_RECORDS)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        engine.clipped_sum(spec.initial_weights(0), inputs, labels, [1.0])
        seconds.append(time.perf_counter() - began)
    return min(seconds) / _TRIED_RECORDS


def _feature_s(spec: ModelSpec, assets: Mapping[str, bytes]) -> float:
    """Seconds that a record's features take; 0 without a front end."""
    if not spec.front_end:
        return 0.0
    front_end = FrontEnd(spec, assets, before_projection=spec.projection is not None)
    inputs = np.random.default_rng(0).random((_TRIED_FEATURES, *spec.input_shape), np.float32)
    front_end(inputs[:1])
    began = time.perf_counter()
    front_end(inputs)
    return (time.perf_counter() - began) / _TRIED_FEATURES
