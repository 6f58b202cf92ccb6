"""Sealing and opening a fragment: time, and added bytes.

``seal`` and ``Opener.open`` (HPKE base mode, a fresh key pair for every fragment) for one of the 16
fragments of an update, with the width on the wire that the demo's presets lead to. Sealing and
opening take turns, medians of 201. The overhead is the length of the sealed message minus that of the
packed integers: id, round, position, key and tag.

Limits: one thread. Sealing does not depend on the values, so they are random.
"""

from __future__ import annotations

import os
from functools import partial

import numpy as np

from benchmarks.figures import Figure
from benchmarks.timing import alternate
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.engine import ACCUMULATION_SLACK
from dpagent.privacy.calibration import calibrate
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.mechanism import Query
from dpagent.privacy.mechanisms.registry import DEFAULT_MECHANISM, mechanism_named
from dpagent.privacy.schedules import Schedule
from dpagent.protocol.fragments import pack
from dpagent.protocol.messages import Fragment
from dpagent.protocol.sealing import Opener, new_sealing_secret, seal
from simulation.presets import PRESETS
from simulation.request import KnownData

_FRAGMENTS = 16
_RECORDS: dict[KnownData, int] = {"digits": 287, "mnist": 6_000}
_FLEET = "demo"
_REPEATS = 201


def run() -> list[Figure]:
    """Seal and open a fragment of each preset's model."""
    figures: list[Figure] = []
    for dataset in _RECORDS:
        fragment = _fragment(dataset)
        opener = Opener(new_sealing_secret(), _FLEET)
        key = opener.public_key
        message = seal(fragment, _FLEET, key)
        sealing, opening = alternate(
            partial(seal, fragment, _FLEET, key),
            partial(opener.open, message),
            repeats=_REPEATS,
        )
        payload, model = len(fragment.payload), PRESETS[dataset].model
        figures += [
            Figure(f"{model}: seal a fragment", 1000 * sealing, "ms"),
            Figure(f"{model}: open a fragment", 1000 * opening, "ms"),
            Figure(
                f"{model}: overhead of a sealed fragment", len(message) - payload, "bytes",
                f"packed integers: {payload:,} bytes", (len(message) - payload) / payload,
            ),
        ]  # fmt: skip
    return figures


def _fragment(dataset: KnownData) -> Fragment:
    """A fragment as the preset's first round makes it, with random values."""
    preset = PRESETS[dataset]
    budget = calibrate(
        Schedule(), mechanism_named(DEFAULT_MECHANISM).family(preset.sampling_rate),
        epsilon=preset.epsilon, delta=1e-5, rounds=preset.rounds,
    )  # fmt: skip
    dimension = built_in(preset.model).parameter_count
    query = Query(preset.clip_norm, ACCUMULATION_SLACK, dimension, preset.sampling_rate)
    mechanism = JobNoise.chosen(DEFAULT_MECHANISM, budget.noise_multipliers).at(1, query)
    width = mechanism.wire_form(preset.sampling_rate * _RECORDS[dataset]).width
    reach = 1 << (width - 1)
    values = np.random.default_rng(0).integers(-reach, reach, -(-dimension // _FRAGMENTS))
    return Fragment(
        version=1, kind="fragment", job=os.urandom(16), round=1, id=os.urandom(16), position=bytes(4),
        dummy=False, payload=pack(values, width),
    )  # fmt: skip
