"""The image's health check: a daemon that is stopped is told from one that gets on."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from brokers import Broker
from container_store import IMAGES, Container, inspected, missing, podman
from fleets import agent_values, digits

from dpagent.learning.data.formats.npz import save_npz
from dpagent.protocol.signing import Signer

RETRIES = 2
FILE = "/etc/dpagent/agent.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing() or ""),
]


@pytest.fixture
def agent(tmp_path: Path, mosquitto: Broker) -> Iterator[Container]:
    """An agent that waits for a plan. Its check is the image's, but counts from the start and to two."""
    name, key = f"agent-{uuid.uuid4().hex[:8]}", Signer(bytes(range(32)), "testers").public_key
    save_npz(tmp_path / "data.npz", digits(0, 50))
    shutil.copy(mosquitto.password_file, tmp_path / "password")
    values = agent_values(mosquitto, key, state_dir="/var/lib/dpagent/state")
    values["mqtt"]["password_file"] = "password"
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(values))
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    mounts = ("--read-only", "-v", f"{name}:/var/lib/dpagent", "-v", f"{tmp_path}:/etc/dpagent:ro")
    tmp_path.chmod(0o755)
    podman("run", "--rm", *mounts, IMAGES[0], "budget", "init", "--config", FILE)
    check = inspected(IMAGES[0], "image")["Healthcheck"]["Test"][-1]
    podman(
        "run", "--detach", "--name", name, *mounts, "--health-cmd", check, "--health-start-period", "0s",
        "--health-retries", str(RETRIES), "--health-timeout", "60s", IMAGES[0],
    )  # fmt: skip
    try:
        yield Container(name)
    finally:
        podman("rm", "--force", "--time", "1", name, check=False)
        podman("volume", "rm", "--force", name, check=False)


def test_an_agent_is_unhealthy_while_it_is_stopped(agent: Container) -> None:
    agent.wait_to_say("waiting for a plan")
    assert agent.is_healthy()
    assert agent.state["Health"]["Status"] == "healthy"
    podman("kill", "--signal", "STOP", agent.name)
    for number in range(RETRIES):
        assert not agent.is_healthy()
        assert (agent.state["Health"]["Status"] == "unhealthy") == (number + 1 == RETRIES)
    assert "no sign of life" in agent.state["Health"]["Log"][-1]["Output"]
    podman("kill", "--signal", "CONT", agent.name)
    assert agent.is_healthy()
    assert agent.state["Health"]["Status"] == "healthy"
    assert agent.stop() == 0
