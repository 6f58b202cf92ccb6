"""Plans, configuration files, data and programs of a small fleet."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import yaml
from brokers import Broker
from children import Child
from numpy.typing import NDArray

from agent.custody import begin_ledger
from agent.database import StateDatabase
from agent.heads import LedgerFiles
from agent.ledger_room import LedgerRoom
from agent.settings import AgentSettings, load_agent_settings
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import ACCUMULATION_SLACK
from dpagent.privacy.mechanisms.grid import DEFAULT_RESOLUTION
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.wire import round_to_wire
from dpagent.privacy.update_clipping import UpdateClipping
from dpagent.protocol.chunks import content_digest
from dpagent.protocol.messages import MAX_PAYLOAD_BYTES, Plan
from dpagent.protocol.sizes import packed_bytes, report_width, update_width
from dpagent.protocol.task import RoundTask
from dpagent.protocol.updates import query_of_update
from dpagent.protocol.weights import weights_to_bytes

DIGITS = built_in("digits")
SEALING_KEY = bytes(range(32))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``, section by section."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def model_section(spec: ModelSpec) -> dict[str, Any]:
    """What a plan says of a model, but for its weights."""
    return {
        "parameters": spec.parameter_count, "architecture": spec.digest(), "precision": "float32",
        "description": cbor2.dumps(spec.describe(), canonical=True),
    }  # fmt: skip


def plan_values(**changes: Any) -> dict[str, Any]:
    """The map of a valid plan for the ``digits`` model, as it stands on the wire. Changes to the sections of
    its release are given like those to the plan."""
    weights = weights_to_bytes(DIGITS.initial_weights(0), "float32")
    base: dict[str, Any] = {
        "fleet": "testers", "job": b"j" * 16, "round": 1, "state": "open",
        "method": "dp-sgd",
        "model": model_section(DIGITS) | {"digest": content_digest(weights)},
        "assets": [],
        "delta": 1e-5,
        "wire": {"block": 1_000, "bytes": 1_400},
        "sealing_key": SEALING_KEY, "linkability": "none", "mixer": None, "receipts": "fleet",
        "deadline": 4e9, "compute_slot_s": 0.5, "jitter_window_s": 0.5,
    }  # fmt: skip
    base["release"] = {
        "kind": "noisy-sum", "augmentation": None, "projection": None, "step": 16_385,
        "mechanism": {
            "name": "discrete-gaussian", "noise_multipliers": [4.0, 3.0, 2.0],
            "parameters": {"resolution": DEFAULT_RESOLUTION},
        },
        "clipping": {
            "norms": [1.0], "shares": [1.0], "count_weight": 0.0, "accumulation_slack": ACCUMULATION_SLACK,
        },
        "sampling": {
            "rate": 0.25, "expected_lot": 10.0, "local_steps": 1, "local_learning_rate": 0.1,
        },
        "cap": {"kind": "none", "where": "coordinator", "regularisation": 0.5, "floor": 0.01},
    }  # fmt: skip
    of_release = {key: changes.pop(key) for key in base["release"] if key in changes}
    values = merged(merged(base, changes), {"release": of_release})
    wire = values["wire"]
    if "bytes" not in changes.get("wire", {}) and isinstance(wire["block"], int):
        wire["bytes"] = room_for(wire["block"])
    return values


def report_plan(
    *, coordinates: int = 40, block: int = 10, release: dict[str, Any] | None = None, **changes: Any
) -> Plan:
    """A plan that asks for two-point reports of the ``digits`` model."""
    values = plan_values(method="ldp-fl", **changes)
    values["release"] = {
        "kind": "two-point", "noise_multipliers": [0.5, 0.5, 0.25], "coordinates": coordinates,
        "radii": [0.5] * len(DIGITS.parameter_shapes),
        "training": {"steps": 3, "batch": 8, "learning_rate": 0.1},
    }  # fmt: skip
    values["release"] = merged(values["release"], release or {})
    width = report_width(values["model"]["parameters"], coordinates)
    values["wire"] = {"block": block, "bytes": packed_bytes(block, width)}
    return Plan.checked(values)


def published_plan(**changes: Any) -> Plan:
    """A plan for rounds of Algorithm 1 of Luo, Xu and Guan, which guarantee nothing."""
    release = {
        "mechanism": {
            "name": "published-laplace", "noise_multipliers": [1.0, 0.75, 0.6],
            "parameters": {"resolution": 1 << 20},
        },
        "sampling": {"local_steps": 1},
        "cap": {"kind": "published", "regularisation": 0.5, "epsilon": 4.0, "step": 0.3},
        "step": 1,
    }  # fmt: skip
    values = plan_values(method="incrementing", **changes)
    values["release"] = merged(values["release"], release)
    values["release"]["cap"] = release["cap"]
    values["release"]["mechanism"] = release["mechanism"]
    return Plan.checked(values)


def bounded_plan(*, noise_multiplier: float, bound_units: int, **changes: Any) -> Plan:
    """A plan for a round of a job that reserves ε = 6, and chooses each round's noise as it goes."""
    values = plan_values(method="incrementing", **changes)
    values["release"] |= {
        "mechanism": {
            "name": "truncated-laplace", "noise_multipliers": [noise_multiplier],
            "parameters": {"resolution": 1 << 24, "bound_units": bound_units},
        },
        "cap": {
            "kind": "bounded", "regularisation": 0.5, "floor": 0.01, "epsilon": 6.0, "rounds": 5,
            "spent": 0.0, "schedule": {"kind": "uniform", "step": 0.0, "ratio": 1.0, "weights": []},
        },
        "step": 1,
    }  # fmt: skip
    return Plan.checked(values)


def update_plan(
    *,
    block: int = 200,
    name: str = "central-gaussian",
    clip_norm: float = 1.0,
    count_weight: float = 0.0,
    device_noise: list[float] | None = None,
    **changes: Any,
) -> Plan:
    """A plan that asks for updates of the ``digits`` model, to whose sum the coordinator adds noise, and
    devices besides, if they are given noise multipliers."""
    values = plan_values(method="central", **changes)
    noise = JobNoise.announced(name, [2.0, 1.5, 1.0], {"resolution": 1 << (14 if "gaussian" in name else 21)})
    clipping = UpdateClipping(noise.mechanism.norm, clip_norm, DIGITS.parameter_count, count_weight)
    query = query_of_update(clipping)
    largest, own = noise.at(1, query).sensitivity_units, None
    if device_noise is not None:
        added = JobNoise.announced(name.replace("central", "device"), device_noise, noise.parameters)
        largest = added.at(values["round"], query).largest_units
        own = {
            "name": added.mechanism.name,
            "noise_multipliers": device_noise,
            "parameters": dict(noise.parameters),
        }
    values["release"] = {
        "kind": "update", "clip_norm": clip_norm, "count_weight": count_weight, "largest": largest,
        "expected_devices": 4, "device_noise": own,
        "mechanism": {
            "name": name, "noise_multipliers": list(noise.multipliers), "parameters": dict(noise.parameters),
        },
        "training": {"steps": 3, "batch": 8, "learning_rate": 0.1},
    }  # fmt: skip
    values["wire"] = {"block": block, "bytes": packed_bytes(block, update_width(largest))}
    return Plan.checked(values)


def room_for(block: int) -> int:
    """Bytes of a payload that values of up to 127 in magnitude fit in without rounding."""
    return min(block + 400, MAX_PAYLOAD_BYTES)


def terms(
    *,
    noise_multipliers: list[float] | None = None,
    resolution: int | None = None,
    clipping: Mapping[str, Any] | None = None,
    delta: float | None = None,
    **sampling: float,
) -> dict[str, Any]:
    """Changes to the sections of a plan that price it, for :func:`make_plan`."""
    mechanism: dict[str, Any] = {}
    if noise_multipliers is not None:
        mechanism["noise_multipliers"] = noise_multipliers
    if resolution is not None:
        mechanism["parameters"] = {"resolution": resolution}
    changes: dict[str, Any] = {"mechanism": mechanism, "clipping": dict(clipping or {}), "sampling": sampling}
    return changes if delta is None else changes | {"delta": delta}


def make_plan(**changes: Any) -> Plan:
    return Plan.checked(plan_values(**changes))


def make_task(**changes: Any) -> RoundTask:
    """The task of such a plan."""
    return RoundTask.of(make_plan(**changes))


def honest_update(task: RoundTask, lot: int = 0) -> NDArray[np.int64]:
    """The update, (dimension,), of a device whose records all have one gradient, in one coordinate."""
    mechanism = task.release.mechanism
    total = np.zeros(task.release.dimension)
    total[0] = lot * mechanism.clip_norm
    noisy = sum(
        mechanism.add_noise(mechanism.quantize(total)) for _ in range(task.release.sampling.local_steps)
    )
    return round_to_wire(np.asarray(noisy), task.release.terms.step)


def records(count: int) -> ArrayDataset:
    """Made-up records that fit the ``digits`` model."""
    generator = np.random.default_rng(3)
    inputs = generator.random((count, 8, 8, 1), np.float32)
    return ArrayDataset(inputs, np.arange(count, dtype=np.int64) % 10, 10)


@cache
def _digits() -> Any:
    """Read once: it is a text, which takes a tenth of a second."""
    from sklearn.datasets import load_digits

    return load_digits()


def digits(start: int, stop: int) -> ArrayDataset:
    """Records of scikit-learn's handwritten digits."""
    bunch = _digits()
    inputs = (bunch.images[start:stop] / 16.0).astype(np.float32)[..., np.newaxis]
    return ArrayDataset(inputs, bunch.target[start:stop].astype(np.int64), 10)


@cache
def _file_of_digits(shard: int) -> bytes:
    """Fifty of them."""
    with tempfile.TemporaryDirectory() as directory:
        save_npz(Path(directory) / "data.npz", digits(50 * shard, 50 * shard + 50))
        return (Path(directory) / "data.npz").read_bytes()


def fleet_values(broker: Broker | None, **changes: Any) -> dict[str, Any]:
    """A ``fleet.yaml`` for two devices and two rounds."""
    base: dict[str, Any] = {
        "fleet": "testers", "devices": 2, "records_per_device": 50, "rounds": 2, "state_dir": "state",
        "model": {"name": "digits"},
        "privacy": {"epsilon": 4.0, "delta": 1e-4, "sampling_rate": 0.5, "schedule": {"kind": "uniform"}},
        "round": {"deadline_s": 60.0, "compute_slot_s": 0.5, "jitter_window_s": 0.5, "device_grid_s": 0.001},
        "fragments_per_update": 5,
    }  # fmt: skip
    if broker is not None:
        base["mqtt"] = broker.values
    values = merged(base, changes)
    if broker is not None:
        broker.take(values["fleet"])
    return values


JOB_KEYS = ("records_per_device", "rounds", "model", "privacy", "round", "fragments_per_update")


def write_shared(directory: Path, broker: Broker | None, **changes: Any) -> Path:
    """A ``fleet.yaml`` without a job."""
    values = {key: value for key, value in fleet_values(broker, **changes).items() if key not in JOB_KEYS}
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "fleet.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def write_job(file: Path, **changes: Any) -> Path:
    """A job file for such a fleet."""
    values = fleet_values(None, **changes)
    job = {key: value for key, value in values.items() if key in JOB_KEYS or key in changes}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(job, sort_keys=False))
    return file


def write_fleet(directory: Path, broker: Broker | None, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "fleet.yaml"
    file.write_text(yaml.safe_dump(fleet_values(broker, **changes), sort_keys=False))
    return file


def agent_values(broker: Broker | None, key: str, **changes: Any) -> dict[str, Any]:
    """An ``agent.yaml``, for the engine that needs no trial: a trial takes longer than most tests."""
    base: dict[str, Any] = {
        "fleet": "testers", "coordinator_key": key, "state_dir": "state", "engine": "numpy",
        "data": {
            "name": "digits", "kind": "npz", "path": "data.npz", "classes": 10, "shape": [8, 8, 1],
            "dtype": "float32", "max_records": 60,
        },
        "budget": {"epsilon": 4.0, "delta": 1e-4},
        "limits": {
            "messages_per_second": 200, "minimum_compute_slot_s": 0.001, "minimum_jitter_window_s": 0.0,
            "minimum_fragments": 1, "maximum_charges": 500, "maximum_update_mib": 1,
        },
    }  # fmt: skip
    if broker is not None:
        base["mqtt"] = broker.values
    return merged(base, changes)


@cache
def _database_with(room: LedgerRoom) -> bytes:
    """What an agent's first start makes of a state directory without a ledger."""
    with tempfile.TemporaryDirectory() as place:
        files = LedgerFiles(Path(place) / "state", Path(place) / "head")
        StateDatabase(files, room).close()
        return files.database.read_bytes()


def _take_room(settings: AgentSettings) -> None:
    """Take the room of the books before the ledger begins, as a copy: an agent's first start takes a tenth of
    a second of a processor for it, or three."""
    room = LedgerRoom.of(settings.limits, has_tokens=settings.mqtt.cert_file is not None)
    database = settings.ledger_files.database
    database.parent.mkdir(mode=0o700, exist_ok=True)
    database.touch(mode=0o600)
    database.write_bytes(_database_with(room))
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE token_secret SET secret = ?", (os.urandom(32),))


def write_agent(
    directory: Path,
    broker: Broker | None,
    key: str,
    shard: int = 0,
    *,
    has_room: bool = True,
    **changes: Any,
) -> Path:
    """An ``agent.yaml`` with 50 digits beside it, and a ledger unless it has one.

    Args:
        directory: for all of it.
        broker: whose settings it has; None: as changed.
        key: the coordinator's.
        shard: which 50 digits.
        has_room: whether the room of the books is taken; otherwise the agent takes it when it starts.
        **changes: of the configuration.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "data.npz").write_bytes(_file_of_digits(shard))
    file = directory / "agent.yaml"
    file.write_text(yaml.dump(agent_values(broker, key, **changes), Dumper=yaml.CSafeDumper, sort_keys=False))
    settings = load_agent_settings(file)
    if not settings.ledger_files.second_head.exists():
        if has_room and not settings.ledger_files.database.exists():
            _take_room(settings)
        begin_ledger(settings.ledger_files, settings.lifetime_budgets)
    return file


class Program(Child):
    """A daemon in a process of its own, ended with the block it is used in."""

    def __init__(self, *arguments: str | Path, log: Path) -> None:
        # -P: not from this directory, whose folders are called like the packages.
        super().__init__(
            [sys.executable, "-P", "-m", "cli.main", *map(str, arguments), "--log-level", "debug"], log
        )


def run_agent(file: Path) -> Program:
    return Program("run", "--config", file, log=file.with_suffix(".log"))


def run_coordinator(file: Path, *options: str) -> Program:
    return Program("coordinator", "run", "--config", file, *options, log=file.with_suffix(".log"))
