"""Mosquitto as `broker-config --members` writes it reads its files again while the coordinator is away."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from brokers import find_mosquitto, reserved_port, wait_for, wait_until
from children import Child
from commands import dpagent
from fleets import write_shared

from dpagent.transport.events import Connected
from dpagent.transport.session import MqttSession
from dpagent.transport.settings import MqttSettings


def test_a_coordinator_that_comes_back_after_a_revocation_finds_its_broker_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mosquitto 2.0.11 reads memory that it has freed, if the coordinator's session is one that ends."""
    if (mosquitto := find_mosquitto()) is None:
        pytest.skip("Mosquitto is not installed")
    fleet = write_shared(tmp_path, None)
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
    for words in (
        ["ca", "init"], ["ca", "server", "127.0.0.1", "--out", tmp_path / "broker"],
        ["ca", "client", "coordinator"],
        ["broker-config", "mosquitto", "--members", "--port", str(port), "--address", "127.0.0.1"],
    ):  # fmt: skip
        result = dpagent("coordinator", *words, "--config", fleet)
        assert result.returncode == 0, result.stderr
    members = tmp_path / "members"
    settings = MqttSettings(
        url=f"mqtts://127.0.0.1:{port}", ca_file=members / "ca.crt", protocol="5",
        cert_file=members / "coordinator.crt", key_file=members / "coordinator.key",
    )  # fmt: skip

    def connects() -> None:
        with MqttSession(settings, client_id="coordinator", subscriptions=[], persistent=True) as session:
            wait_for(session, Connected)

    # Freed memory is filled, and not kept for the next block of its size: who reads it crashes at once.
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.perturb=170")
    with Child([mosquitto, "-c", str(tmp_path / "broker" / "mosquitto.conf")], tmp_path / "log") as broker:
        wait_until(lambda: _answers(port), "the broker")
        connects()
        time.sleep(0.5)  # It has seen the connection end; and then it has read its files.
        os.kill(broker.process.pid, signal.SIGHUP)
        time.sleep(0.5)
        connects()
        # It looks once a second for sessions that have ended.
        for _ in range(3):
            time.sleep(1.0)
            connects()
        assert broker.process.poll() is None, broker.said()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
