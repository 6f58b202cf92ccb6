"""Sealing and opening a fragment: time, and added bytes.

``seal`` and ``Opener.open`` (HPKE base mode, a fresh key pair for every fragment) for one of the 16
fragments of an update, with the payload that the demo's presets lead to. Sealing and
opening take turns, medians of 201. The overhead is the length of the sealed message minus that of the
payload: version, round, position, id, key and tag.

Limits: one thread. Sealing does not depend on the values, so they are random.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Final

from benchmarks.figures import Figure
from benchmarks.timing import alternate
from coordinator.planning import Planner, new_job
from coordinator.settings import FleetSettings
from coordinator.store import OpenRound
from dpagent.protocol.codec import encode
from dpagent.protocol.messages import Fragment
from dpagent.protocol.sealing import Opener, new_sealing_secret, seal
from dpagent.protocol.task import RoundTask
from dpagent.protocol.weights import weights_to_bytes
from simulation.presets import PRESETS
from simulation.request import KnownData

RECORDS: Final[dict[KnownData, int]] = {"digits": 287, "mnist": 6_000}
"""Of a device of the demo."""
_REPEATS = 201


def run() -> list[Figure]:
    """Seal and open a fragment of each preset's model."""
    figures: list[Figure] = []
    for dataset, records in RECORDS.items():
        opener = Opener(new_sealing_secret(), "demo")
        task = first_task(dataset, records, opener.public_key)
        wire = task.plan.wire
        payload = os.urandom(wire.bytes)
        fragment = encode(Fragment(task.plan.round, 0, os.urandom(16), payload))
        message = seal(fragment, task.plan)
        sealing, opening = alternate(
            partial(seal, fragment, task.plan),
            partial(opener.open, message, task.plan.job),
            repeats=_REPEATS,
        )
        model = task.spec.name
        figures += [
            Figure(f"{model}: seal a fragment", 1000 * sealing, "ms"),
            Figure(f"{model}: open a fragment", 1000 * opening, "ms"),
            Figure(
                f"{model}: overhead of a sealed fragment", len(message) - len(payload), "bytes",
                f"payload: {len(payload):,} bytes", (len(message) - len(payload)) / len(payload),
            ),
        ]  # fmt: skip
    return figures


def first_task(dataset: KnownData, records: int, sealing_key: bytes, **changes: Any) -> RoundTask:
    """The first round of the demo with a preset's settings, that many records on each device, and changes."""
    settings = FleetSettings.checked(fleet_values(dataset, records) | changes)
    spec = settings.model.spec()
    weights = weights_to_bytes(spec.initial_weights(0), settings.model.precision)
    return Planner(settings, spec, new_job(settings), sealing_key).task(OpenRound(1, 0.0, 1.8e9), weights)


def fleet_values(dataset: KnownData, records: int) -> dict[str, Any]:
    """A ``fleet.yaml`` with a preset's settings."""
    preset = PRESETS[dataset]
    return {
        "fleet": "demo", "devices": preset.devices, "records_per_device": records, "rounds": preset.rounds,
        "privacy": {
            "epsilon": preset.epsilon, "sampling_rate": preset.sampling_rate, "clip_norm": preset.clip_norm,
        },
        "model": {"name": preset.model}, "cap": {"kind": preset.cap},
    }  # fmt: skip
