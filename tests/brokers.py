"""Real brokers for the tests: Mosquitto and amqtt as child processes on a free loopback port."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from dpagent.transport.session import Event, MqttSession, Subscription
from dpagent.transport.settings import MqttSettings

PATIENCE_S = 20.0
USER = "tester"
Software = Literal["mosquitto", "amqtt"]
EventT = TypeVar("EventT")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find_mosquitto() -> str | None:
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def wait_until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true value of ``condition``; fails after ``patience_s``."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"waited {patience_s:g} s in vain: {what}")


def wait_for(session: MqttSession, kind: type[EventT], patience_s: float = PATIENCE_S) -> EventT:
    """The next event of one kind, whatever comes before it; fails after ``patience_s``."""
    until = time.monotonic() + patience_s
    seen: list[Event] = []
    while time.monotonic() < until:
        event = session.next_event(0.1)
        if isinstance(event, kind):
            return event
        if event is not None:
            seen.append(event)
    pytest.fail(f"no {kind.__name__} within {patience_s:g} s; there came {seen[:5]}")


class Broker:
    """One broker on one port, which can be killed and started again there."""

    def __init__(self, software: Software, directory: Path, protocol: str = "auto") -> None:
        self.software = software
        self.directory = directory
        self.protocol = protocol
        self.port = free_port()
        self.password_file = directory / "password"
        self.password_file.write_text("correct horse\n")
        self._process: subprocess.Popen[bytes] | None = None
        if software == "mosquitto":
            executable = find_mosquitto()
            if executable is None or shutil.which("mosquitto_passwd") is None:
                pytest.skip("Mosquitto is not installed")
            self._command = [executable, "-c", str(self._configure())]
        else:
            self._command = [
                sys.executable, "-m", "simulation.programs.embedded_broker", str(self.port), USER,
                str(self.password_file),
            ]  # fmt: skip

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def values(self) -> dict[str, Any]:
        """The ``mqtt`` section of a configuration file."""
        return {
            "url": self.url, "username": USER, "password_file": str(self.password_file),
            "protocol": self.protocol,
        }  # fmt: skip

    def settings(self, **changes: Any) -> MqttSettings:
        return MqttSettings(**(self.values | changes))

    def session(self, client_id: str, *topics: str, persistent: bool = False, **changes: Any) -> MqttSession:
        return MqttSession(
            self.settings(**changes), client_id=client_id, persistent=persistent,
            subscriptions=[Subscription(topic) for topic in topics],
        )  # fmt: skip

    def start(self) -> Broker:
        with (self.directory / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(self._answers, f"{self.software} on port {self.port}")
        return self

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)

    def stop(self) -> None:
        """End the broker in good order; one that keeps its state writes it."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            pytest.fail(f"{self.software} ended: {(self.directory / 'broker.log').read_text()[-500:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def _configure(self) -> Path:
        passwords, file = self.directory / "passwords", self.directory / "mosquitto.conf"
        passwords.write_text(f"{USER}:{self.password_file.read_text().strip()}\n")
        passwords.chmod(0o600)
        subprocess.run(
            ["mosquitto_passwd", "-U", str(passwords)], check=True, capture_output=True, timeout=30
        )
        lines = [
            f"listener {self.port} 127.0.0.1", "allow_anonymous false", f"password_file {passwords}",
            f"user {getpass.getuser()}", "persistence true", f"persistence_location {self.directory}/",
            "autosave_interval 1", "max_queued_messages 100000", "log_dest stderr", "log_type error",
        ]  # fmt: skip
        file.write_text("\n".join(lines) + "\n")
        return file
