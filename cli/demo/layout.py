"""The files of a demo: data shards, configurations and secrets, each where its program expects it.

Every device gets a directory of its own with its data, its ``agent.yaml`` and its state, as
it would on a board of its own. What is written here is what a real integrator writes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cli.demo.broker import BrokerAddress
from cli.demo.options import DemoOptions
from cli.demo.presets import DatasetName
from coordinator.keys import load_signer
from dpagent.errors import ConfigurationError, DataError
from dpagent.learning import ArrayDataset, Dataset, built_in, check_fits, open_idx, save_npz, split
from dpagent.privacy import DiscretisedGaussian, Schedule, calibrate
from dpagent.storage import disk_errors, write_atomically

_DEMO_MESSAGES_PER_SECOND = 100.0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything of a demo is."""

    root: Path
    devices: int

    @property
    def fleet_file(self) -> Path:
        """The coordinator's configuration."""
        return self.root / "coordinator" / "fleet.yaml"

    @property
    def coordinator_state(self) -> Path:
        """The coordinator's state directory."""
        return self.root / "coordinator" / "state"

    @property
    def coordinator_keys(self) -> Path:
        """The directory of the coordinator's keys."""
        return self.root / "coordinator" / "keys"

    @property
    def test_file(self) -> Path:
        """Public test data."""
        return self.root / "coordinator" / "test.npz"

    @property
    def baseline_file(self) -> Path:
        """Accuracies of the run without noise."""
        return self.root / "baseline.json"

    @property
    def logs(self) -> Path:
        """One log a program."""
        return self.root / "logs"

    def device(self, number: int) -> Path:
        """The directory of device ``number``, from 1."""
        return self.root / f"device-{number:03d}"

    def agent_file(self, number: int) -> Path:
        """A device's configuration."""
        return self.device(number) / "agent.yaml"

    def agent_state(self, number: int) -> Path:
        """A device's state directory, with its ledger."""
        return self.device(number) / "state"

    def shard_file(self, number: int) -> Path:
        """A device's data."""
        return self.device(number) / "data.npz"


def records_per_device(options: DemoOptions) -> int:
    """The public estimate that sums are divided by: training records over devices."""
    total = {DatasetName.DIGITS: 1437, DatasetName.MNIST: 60_000}[DatasetName(options.dataset)]
    return total // options.devices


def load_data(options: DemoOptions) -> tuple[Dataset, Dataset]:
    """Training and test records.

    Raises:
        DataError: They are missing or malformed.
        ConfigurationError: An option is missing, or the demo's packages are.
    """
    if options.dataset == DatasetName.MNIST:
        if options.data_dir is None:
            raise ConfigurationError(
                "--dataset mnist needs --data-dir, the directory of the MNIST IDX files."
            )
        directory = Path(options.data_dir)
        return open_idx(directory, "train"), open_idx(directory, "test")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError("The digits come with scikit-learn: pip install 'dpagent[demo]'.") from error
    digits = load_digits()
    inputs = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(options.seed).permutation(len(labels))
    train, test = order[:1437], order[1437:]
    return ArrayDataset(inputs[train], labels[train], 10), ArrayDataset(inputs[test], labels[test], 10)


def minimum_devices(options: DemoOptions) -> int:
    """Half of the devices must take part for a round to close."""
    return max(1, options.devices // 2)


def require_possible(options: DemoOptions, layout: Layout) -> None:
    """Refuse what cannot be run, before anything is written.

    Raises:
        DataError: Data are missing, or too few, or do not fit the model.
        PlanError: No noise meets the target.
    """
    spec = built_in(options.model)
    if not layout.test_file.exists():
        train, _ = load_data(options)
        check_fits(train, spec)
        if records_per_device(options) < 1:
            raise DataError(
                f"{len(train)} records cannot be split over {options.devices} devices; use fewer devices."
            )
    plan = calibrate(
        Schedule(kind=options.schedule, step=options.step),
        epsilon=options.epsilon,
        delta=options.delta,
        rounds=options.rounds,
        sampling_rate=options.sampling_rate,
    )
    for noise_multiplier in (max(plan.noise_multipliers), min(plan.noise_multipliers)):
        DiscretisedGaussian(options.clip_norm, noise_multiplier, options.sampling_rate, spec.parameter_count)


def prepare_data(options: DemoOptions, layout: Layout) -> None:
    """Split the data over the devices, once.

    Raises:
        DataError: Too few records for so many devices, or data that do not fit the model.
    """
    if layout.test_file.exists():
        return
    train, test = load_data(options)
    for number, shard in enumerate(split(train, options.devices, seed=options.seed), start=1):
        with disk_errors(layout.root):
            layout.device(number).mkdir(parents=True, exist_ok=True, mode=0o700)
        save_npz(layout.shard_file(number), shard)
    with disk_errors(layout.root):
        layout.test_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Last, because it says that all is there.
    save_npz(layout.test_file, test)


def write_configurations(options: DemoOptions, layout: Layout, broker: BrokerAddress) -> None:
    """Write ``fleet.yaml`` and every ``agent.yaml``, as an operator and an integrator would."""
    mqtt: dict[str, Any] = {"url": broker.url, "protocol": broker.protocol}
    if broker.username is not None and broker.password_file is not None:
        # Paths in a configuration file are relative to it, those on a command line to here.
        mqtt |= {"username": broker.username, "password_file": str(broker.password_file.absolute())}
    key = load_signer(layout.coordinator_keys, "demo").public_key
    # A broker that runs already may hold retained messages of earlier demos: a name for each.
    name = f"demo-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    fleet = {
        "fleet": name,
        "devices": options.devices,
        "records_per_device": records_per_device(options),
        "rounds": options.rounds,
        "state_dir": "state",
        "keys_dir": "keys",
        "model": {"name": options.model, "seed": options.seed},
        "privacy": {
            "epsilon": options.epsilon,
            "delta": options.delta,
            "sampling_rate": options.sampling_rate,
            "clip_norm": options.clip_norm,
            "schedule": {"kind": options.schedule, "step": options.step},
        },
        "cap": {"kind": options.cap, "where": options.cap_at},
        "optimiser": {"learning_rate": options.learning_rate, "momentum": options.momentum},
        "round": {
            "deadline_s": 60.0 + options.compute_slot_s + options.jitter_window_s,
            "compute_slot_s": options.compute_slot_s,
            "jitter_window_s": options.jitter_window_s,
            "minimum_devices": minimum_devices(options),
        },
        "fragments_per_update": options.fragments_per_update,
        "test_data": {"path": "test.npz"},
        "mqtt": mqtt,
    }
    _write_yaml(layout.fleet_file, fleet)
    for number in range(1, options.devices + 1):
        agent = {
            "fleet": name,
            "coordinator_key": key,
            "state_dir": "state",
            "data": {"name": options.dataset, "kind": "npz", "path": "data.npz"},
            "budget": {"epsilon": options.epsilon, "delta": options.delta},
            # A loopback broker takes more than the 10 messages a second of a hosted one.
            "limits": {"messages_per_second": _DEMO_MESSAGES_PER_SECOND},
            "mqtt": mqtt,
        }
        _write_yaml(layout.agent_file(number), agent)


def _write_yaml(file: Path, value: dict[str, Any]) -> None:
    write_atomically(file, yaml.safe_dump(value, sort_keys=False).encode())
