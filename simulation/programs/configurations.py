"""The configuration files of a fleet, as a real operator and real integrators write them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import yaml

from coordinator.keys import load_signer
from coordinator.settings import FleetSettings
from dpagent.errors import UsageError
from dpagent.learning.data.formats.npz import records_in
from dpagent.learning.model_files import load_assets, load_model
from dpagent.learning.models.built_ins import BUILT_IN, built_in
from dpagent.learning.models.costs import features_mib
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.onnx_graph.signature import graph_digest, known_digests
from dpagent.norm import Norm
from dpagent.privacy.statement import Trust
from dpagent.protocol.mixing import key_text
from dpagent.schema.problems import SchemaError
from dpagent.storage import write_atomically
from mixer.keys import load_outer_opener
from mixer.settings import load_mixer_settings
from simulation.layout import Layout
from simulation.presets import LOCAL_TRAINING
from simulation.programs.broker import BrokerAddress
from simulation.programs.timing import RoundTimes, round_times
from simulation.settings import RunSettings

_PERIODS: Final = 16
"""Points of a device's grid to a compute slot, so that no round waits long for one."""
_BOUNDED: Final = 3.0
"""Clip norms that noise may reach under a bounded cap, at the least."""
_MESSAGES_PER_SECOND = 100.0
"""A loopback broker takes more than the 10 messages a second of a hosted one."""
_CHARGES: Final = 500
_MOST_MIXED: Final = 1_000
"""Messages of a batch, where a round has more."""
_AFTER_THE_WINDOW_S: Final = 2.0
"""That a mixer waits for the rest of a round."""
_MODEL_FILE = "model.yaml"


def spec_of(settings: RunSettings, layout: Layout) -> ModelSpec:
    """The model of a run whose data are prepared.

    Raises:
        ConfigurationError: Its file cannot be used any more.
    """
    return built_in(settings.model) if settings.model in BUILT_IN else load_model(layout.model_file)


def assets_of(settings: RunSettings, layout: Layout) -> dict[str, bytes]:
    """The model's assets besides its weights, by role."""
    return {} if settings.model in BUILT_IN else load_assets(layout.model_file)


def fleet_settings(settings: RunSettings) -> FleetSettings:
    """The coordinator's settings that determine the job; without slots, names and addresses.

    Raises:
        UsageError: Some of them do not go together.
    """
    try:
        return FleetSettings.checked(_fleet("demo", settings, RoundTimes(1.0, 3600.0, 0.0), {}, None))
    except SchemaError as error:
        raise UsageError(f"{error.first.complaint()}.") from error


def write_configurations(settings: RunSettings, layout: Layout, broker: BrokerAddress) -> RoundTimes:
    """Write ``fleet.yaml``, every ``agent.yaml``, and ``mixer.yaml`` if the run has a mixer.

    Returns:
        The times of a round that they are made for.
    """
    spec, assets = spec_of(settings, layout), assets_of(settings, layout)
    times = round_times(settings, spec, assets)
    mqtt: dict[str, Any] = {"url": broker.url, "protocol": broker.protocol}
    if broker.username is not None and broker.password_file is not None:
        # Paths in a configuration file are relative to it, those on a command line to here.
        mqtt |= {"username": broker.username, "password_file": str(broker.password_file.absolute())}
    key = load_signer(layout.coordinator_keys, "demo").public_key
    # A broker that runs already may hold retained messages of earlier demos: a name for each.
    name = f"demo-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    mixer_key = _write_mixer(name, key, settings, layout, mqtt) if settings.mixer else None
    _write_yaml(layout.fleet_file, _fleet(name, settings, times, mqtt, mixer_key))
    trusted, records = _trusted(settings, spec, assets), _records(settings, layout, spec)
    for number in range(1, settings.devices + 1):
        agent = {
            "fleet": name,
            "coordinator_key": key,
            "state_dir": "state",
            "data": records,
            "budget": _budget(settings),
            # The fleet's own times, which are shorter than those that a device of a stranger's fleet accepts.
            "limits": {
                "messages_per_second": _MESSAGES_PER_SECOND,
                "minimum_compute_slot_s": times.compute_slot_s / _PERIODS,
                "minimum_jitter_window_s": settings.jitter_window_s,
                "minimum_fragments": 1,
                # What a device takes of the disk at its first start, which many have here together.
                "maximum_charges": max(_CHARGES, 4 * settings.rounds),
                **({"maximum_update_mib": _update_mib(spec)} if spec.projection is None else {}),
                "methods": [settings.method],
                "trust": [str(settings.mechanism.trust)],
                "allow_unproven": settings.cap == "published",
                **({} if mixer_key is None else {"mixer_keys": [mixer_key], "require_mixer": True}),
            },
            "engine": settings.engine,
            "mqtt": mqtt,
        }
        if trusted:
            agent["trusted_graphs"] = trusted
        _write_yaml(layout.agent_file(number), agent)
    return times


def _update_mib(spec: ModelSpec) -> int:
    """Enough for any update of a model, in as many fragments as there may be: four bytes a value are more
    than any takes."""
    return 5 + (4 * spec.parameter_count >> 20)


def _write_mixer(
    name: str, coordinator_key: str, settings: RunSettings, layout: Layout, mqtt: dict[str, Any]
) -> str:
    """Write ``mixer.yaml``; return the mixer's key, made if need be.

    A batch is a whole round, as long as all devices send in the window. Then two messages are enough: what a
    program lost that was killed, or not up yet, is not to cost its round the deadline.
    """
    mixer = {
        "fleet": name,
        "coordinator_key": coordinator_key,
        "keys_dir": "keys",
        "batch": min(settings.devices * settings.fragments_per_update, _MOST_MIXED),
        "least": 2,
        "longest_s": settings.jitter_window_s + _AFTER_THE_WINDOW_S,
        "messages_per_second": _MESSAGES_PER_SECOND * settings.devices,
        "mqtt": mqtt,
    }
    layout.mixer_file.parent.mkdir(parents=True, exist_ok=True)
    _write_yaml(layout.mixer_file, mixer)
    keys_dir = load_mixer_settings(layout.mixer_file).keys_dir
    return key_text(load_outer_opener(keys_dir, name).public_key)


def _fleet(
    name: str, settings: RunSettings, times: RoundTimes, mqtt: dict[str, Any], mixer_key: str | None
) -> dict[str, Any]:
    return {
        "fleet": name,
        "mixer_key": mixer_key,
        "devices": settings.devices,
        "records_per_device": settings.records_per_device,
        "rounds": settings.rounds,
        "state_dir": "state",
        "keys_dir": "keys",
        "model": {
            "name": settings.model if settings.model in BUILT_IN else _MODEL_FILE,
            "seed": settings.seed,
            **_inputs(settings),
        },
        "privacy": {
            "method": settings.method,
            "noise": settings.noise,
            "epsilon": settings.epsilon,
            "delta": settings.delta,
            "sampling_rate": settings.sampling_rate,
            "clip_norm": settings.clip_norm,
            "clipping": {"kind": settings.clipping},
            "device_noise": settings.device_noise and {"epsilon": settings.device_noise},
            "schedule": {"kind": settings.schedule, "step": settings.step},
            "local_training": LOCAL_TRAINING,
        },
        "cap": _cap(settings),
        "optimiser": {"learning_rate": settings.learning_rate, "momentum": settings.momentum},
        "round": {
            "deadline_s": times.deadline_s,
            "compute_slot_s": times.compute_slot_s,
            "device_grid_s": times.compute_slot_s / _PERIODS,
            "jitter_window_s": settings.jitter_window_s,
            "minimum_devices": settings.minimum_devices,
        },
        "fragments_per_update": settings.fragments_per_update,
        "test_data": {"kind": "npz", "path": "test.npz"},
        "mqtt": mqtt,
    }


def _inputs(settings: RunSettings) -> dict[str, Any]:
    """What the records of the whole run were made by, before the devices got theirs as arrays."""
    form = settings.form.inputs
    return {} if form is None else {"inputs": form.as_dict(only_set=True)}


def _budget(settings: RunSettings) -> dict[str, Any]:
    """What the job costs, in the account that it is charged to; next to nothing in another."""
    wanted = {"epsilon": settings.epsilon, "delta": settings.delta}
    if settings.mechanism.trust is not Trust.COORDINATOR:
        return wanted
    return wanted | {"epsilon": settings.device_noise or settings.epsilon, "coordinator": wanted}


def _cap(settings: RunSettings) -> dict[str, Any]:
    """The noise cap; a bounded one leaves room for noise that some ε can meet."""
    cap: dict[str, Any] = {"kind": settings.cap, "where": settings.cap_at}
    if settings.cap == "bounded":
        lot = settings.sampling_rate * settings.records_per_device
        cap["floor"] = float(f"{_BOUNDED * settings.clip_norm / lot:.3g}")
    if settings.cap == "published":
        cap["allow_unproven"] = True
    return cap


def _records(settings: RunSettings, layout: Layout, spec: ModelSpec) -> dict[str, Any]:
    """The records of every device, declared alike for all of them."""
    form = settings.form
    # Each device reserves room for as many: the largest shard, since shards do not grow.
    most = max(records_in(layout.shard_file(number + 1)) for number in range(settings.devices))
    room = {"features_mib": features_mib(spec, most)} if spec.front_end else {}
    return {
        "name": settings.data.name,
        "kind": "npz",
        "path": "data.npz",
        "classes": list(form.class_names) or form.classes,
        "shape": list(form.shape),
        "dtype": form.dtype,
        "max_records": most,
        **room,
    }


def _trusted(settings: RunSettings, spec: ModelSpec, assets: Mapping[str, bytes]) -> list[str]:
    """The digests that the owner of these devices trusts: the user of a simulation chose the network."""
    networks = [data for role, data in assets.items() if role == "frozen-network"]
    return [*(hashlib.sha256(data).hexdigest() for data in networks), *_trusted_graphs(settings, spec)]


def _trusted_graphs(settings: RunSettings, spec: ModelSpec) -> list[str]:
    """The training graph of a model of one's own, which she builds herself."""
    if settings.engine == "numpy" or settings.gradient_norm is Norm.L1:  # graphs clip in L2
        return []
    from dpagent.learning.training.onnx_graph.build import build_training_graph

    graph = build_training_graph(spec.head, views=1, per_layer=settings.clipping == "layers")
    digest = graph_digest(graph)
    return [] if (spec.head.digest().hex(), digest) in known_digests() else [digest]


def _write_yaml(file: Any, value: dict[str, Any]) -> None:
    write_atomically(file, yaml.safe_dump(value, sort_keys=False).encode())
