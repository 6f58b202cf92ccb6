"""Writes the fleet of compose.yaml into a new directory, and begins it: keys, passwords, records and ledgers.

    python packaging/containers/begin_fleet.py DIRECTORY [COMPOSE...]

COMPOSE is the command that runs containers, ``docker compose`` by default; the images must be there.
scikit-learn (the extra ``demo``) has the records, handwritten digits. Each service sees its own directory
alone. The ledgers are begun here, once and on purpose, as an integrator begins those of boards.
"""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from coordinator.brokers.deployment import Deployment, User
from coordinator.brokers.mosquitto import access, configuration, hashes
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.data.splits import split
from dpagent.protocol.access import Role
from simulation.data.source import open_source
from simulation.presets import PRESETS
from simulation.request import DataSelection

HERE: Final = Path(__file__).parent
FLEET: Final = "digits"
DELTA: Final = 1e-5
GRID_S: Final = 0.1
AGENTS: Final = tuple(
    name
    for name in yaml.safe_load((HERE / "compose.yaml").read_text())["services"]
    if name.startswith("agent")
)
CONFIGURED: Final = Path("/etc/dpagent")
"""Where each daemon sees its directory."""

KEY: Final = "[A-Za-z0-9+/]{43}="
BEGUN: Final = ".*ledger.*"

Values = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Begin a fleet; returns an exit code."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    directory, compose = Path(arguments[0]), list(arguments[1:]) or ["docker", "compose"]
    if directory.exists():
        print(f"{directory} exists; give the name of a new directory.", file=sys.stderr)
        return 2
    write_fleet(directory)
    fleet_file, agent_file = (str(CONFIGURED / file) for file in ("fleet.yaml", "agent.yaml"))
    key = said(KEY, compose, directory, "coordinator", "coordinator", "key", "--config", fleet_file)
    for name in AGENTS:
        write_yaml(directory / name / "agent.yaml", agent(name, key))
        print(f"{name}: {said(BEGUN, compose, directory, name, 'budget', 'init', '--config', agent_file)}")
    print(f"Next: cd {directory} && {' '.join(compose)} up")
    return 0


def write_fleet(directory: Path) -> None:
    """All files but those that need the coordinator's key."""
    # What a daemon in a container reads, others may read; but nobody else comes into the directory.
    directory.mkdir(mode=0o700, parents=True)
    shutil.copy(HERE / "compose.yaml", directory)
    passwords = {name: secrets.token_urlsafe(32) for name in ("coordinator", *AGENTS)}
    for name, password in passwords.items():
        (directory / name).mkdir()
        (directory / name / "password").write_text(f"{password}\n")
    source = open_source(DataSelection(), 0)
    for name, shard in zip(AGENTS, split(source.train, len(AGENTS), "iid", seed=0), strict=True):
        save_npz(directory / name / "data.npz", shard)
    save_npz(directory / "coordinator" / "test.npz", source.test)
    write_yaml(directory / "coordinator" / "fleet.yaml", coordinator(len(source.train) / len(AGENTS)))
    broker = directory / "broker"
    broker.mkdir()
    for name, text in broker_files(passwords).items():
        (broker / name).write_text(text)
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def coordinator(records_per_device: float) -> Values:
    """``fleet.yaml``, with the demo's settings for these data."""
    preset = PRESETS["digits"]
    return {
        "fleet": FLEET,
        "devices": len(AGENTS),
        "records_per_device": records_per_device,
        "rounds": preset.rounds,
        "state_dir": "/var/lib/dpagent/state",
        "keys_dir": "/var/lib/dpagent/keys",
        "model": {"name": preset.model},
        "privacy": {
            "epsilon": preset.epsilon,
            "delta": DELTA,
            "sampling_rate": preset.sampling_rate,
            "clip_norm": preset.clip_norm,
        },
        "cap": {"kind": preset.cap},
        "optimiser": {"learning_rate": preset.learning_rate, "momentum": preset.momentum},
        "round": {
            "deadline_s": 60.0,
            "compute_slot_s": 1.0,
            "device_grid_s": GRID_S,
            "jitter_window_s": preset.jitter_window_s,
        },
        "test_data": {"kind": "npz", "path": "test.npz"},
        "mqtt": mqtt("coordinator"),
    }


def agent(name: str, key: str) -> Values:
    """``agent.yaml``: a budget for one such job, and the times of this fleet, which are shorter than those
    that a board accepts of strangers."""
    preset = PRESETS["digits"]
    return {
        "fleet": FLEET,
        "coordinator_key": key,
        "state_dir": "/var/lib/dpagent/state",
        "data": {
            "name": "digits",
            "path": "data.npz",
            "kind": "npz",
            "classes": 10,
            "shape": [8, 8, 1],
            "dtype": "float32",
            "max_records": 500,
        },
        "budget": {"epsilon": preset.epsilon, "delta": DELTA},
        "limits": {
            "messages_per_second": 100.0,
            "minimum_compute_slot_s": GRID_S,
            "minimum_jitter_window_s": preset.jitter_window_s,
        },
        "mqtt": mqtt(name),
    }


def mqtt(user: str) -> Values:
    """The broker, on the network that the containers have for themselves."""
    return {"url": "mqtt://broker:1883", "username": user, "password_file": "password"}


def broker_files(passwords: dict[str, str]) -> dict[str, str]:
    """Mosquitto's, which listens on the network that the containers have for themselves."""
    roles = {"coordinator": Role.COORDINATOR}
    users = tuple(User(name, roles.get(name, Role.BOARD), word) for name, word in passwords.items())
    place = Path("/mosquitto/config")
    deployment = Deployment(FLEET, place, "", 1883, None, users)
    options = [f"password_file {place}/passwords", f"acl_file {place}/access"]
    return {
        "mosquitto.conf": configuration(deployment, "/mosquitto/data", options, user=None),
        "passwords": hashes(users),
        "access": access(deployment),
    }


def said(expected: str, compose: Sequence[str], directory: Path, service: str, *command: str) -> str:
    """The line that is expected of a command in a service's container: podman-compose says more, and that it
    has succeeded in any case.

    Raises:
        SystemExit: there is none.
    """
    ended = subprocess.run(
        [*compose, "run", "--rm", "--no-deps", "-T", service, *command],
        cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.search(rf"(?m)^{expected}$", ended.stdout)
    if found is None:
        shown = " ".join([*compose, "run", service, *command])
        sys.exit(f"`{shown}` failed: {ended.stdout}{ended.stderr}")
    return found.group()


def write_yaml(file: Path, values: Values) -> None:
    file.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
