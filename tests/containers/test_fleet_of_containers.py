"""The fleet of compose.yaml: a whole job in containers whose roots are read-only, restarted in the middle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from brokers import wait_until
from container_store import HERE, IN_STORE, STORE, Container, in_store, inspected, missing, podman

from agent.audit import verify
from agent.heads import second_head_beside

ROUNDS = 12
JOB_S = 600.0
AGENTS = ("agent-1", "agent-2", "agent-3")
FLEET_FILE = "/etc/dpagent/fleet.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1_500),
    pytest.mark.skipif(bool(missing()), reason=missing() or ""),
]


class ComposedFleet:
    """The fleet that ``packaging/containers/begin_fleet.py`` begins, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.broker, self.coordinator = self.container("broker"), self.container("coordinator")
        self.agents = [self.container(name) for name in AGENTS]

    def container(self, service: str) -> Container:
        """As podman-compose calls it."""
        return Container(f"{self.directory.name}_{service}_1")

    def begin(self) -> None:
        """Files, keys and ledgers; then fewer rounds than the demo's."""
        subprocess.run(
            [sys.executable, HERE / "packaging/containers/begin_fleet.py", self.directory,
             IN_STORE, STORE, "podman-compose"],
            check=True, timeout=600, cwd=HERE, env=dict(os.environ) | {"PYTHONPATH": str(HERE)},
        )  # fmt: skip
        file = self.directory / "coordinator" / "fleet.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"rounds": ROUNDS}))

    def compose(self, *arguments: str) -> None:
        in_store("podman-compose", *arguments, directory=self.directory)

    def volume(self, service: str) -> Path:
        """Where a service's volume is on this machine."""
        return Path(inspected(f"{self.directory.name}_{service}", "volume")["Mountpoint"])

    def closed_rounds(self) -> int:
        """Of the job; 0 while there is none."""
        status = self.coordinator.dpagent(
            "coordinator", "status", "--json", "--config", FLEET_FILE, check=False
        )
        rounds = json.loads(status.stdout)["rounds"] if status.returncode == 0 else []
        return sum(each["closed_at"] is not None for each in rounds)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ComposedFleet]:
    made = ComposedFleet(tmp_path / f"fleet-{uuid.uuid4().hex[:8]}")
    made.begin()
    try:
        made.compose("up", "--detach", "--no-build")
        yield made
    finally:
        in_store("podman-compose", "down", "--volumes", directory=made.directory, check=False)
        shutil.rmtree(made.directory)


def test_a_job_goes_on_through_restarts_and_every_ledger_verifies(fleet: ComposedFleet) -> None:
    for container in (fleet.coordinator, *fleet.agents):
        found = inspected(container.name)
        assert found["HostConfig"]["ReadonlyRootfs"]
        assert found["EffectiveCaps"] in (None, [])
    wait_until(lambda: fleet.closed_rounds() >= 2, "two rounds", JOB_S)
    first, second, _ = fleet.agents
    podman("restart", "--time", "60", first.name)
    podman("kill", second.name)
    podman("kill", fleet.coordinator.name)
    podman("start", second.name, fleet.coordinator.name)
    assert fleet.closed_rounds() < ROUNDS
    fleet.coordinator.wait_to_say("staying until a stop", JOB_S)
    assert fleet.closed_rounds() == ROUNDS

    model = (fleet.volume("coordinator") / "state" / "jobs" / "first" / "model.onnx").read_bytes()
    for name, container in zip(AGENTS, fleet.agents, strict=True):
        state = fleet.volume(name) / "state"
        wait_until((state / "model.onnx").exists, "the model on a board", JOB_S)
        assert (state / "model.onnx").read_bytes() == model
        assert (
            "charges" in container.dpagent("budget", "verify", "--state-dir", "/var/lib/dpagent/state").stdout
        )
        # Two were away for a while, and a round that they missed is none of theirs.
        assert ROUNDS - 3 <= verify(state, second_head_beside(state)).charges <= ROUNDS
    assert verify(fleet.volume("agent-3") / "state", None).charges == ROUNDS
    assert fleet.coordinator.is_healthy(), "it stays without work"
    wait_until((fleet.volume("broker") / "mosquitto.db").exists, "the broker's store", JOB_S)

    for container in (*fleet.agents, fleet.coordinator):
        assert container.stop() == 0, container.said[-1_000:]
