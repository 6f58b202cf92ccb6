"""Brokers as an operator starts them: by ``dpagent coordinator broker-config … --run``, on loopback.

amqtt has no such configuration: it is the demo's embedded broker, and has no TLS and no access rules here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from brokers import reserved_port, wait_until
from children import Child

from benchmarks.certificates import BrokerCertificate, broker_certificate
from coordinator.brokers.registry import BROKERS
from dpagent.errors import BrokerError
from dpagent.transport.events import Connected
from dpagent.transport.session import MqttSession, Pace, Subscription
from dpagent.transport.settings import MqttSettings

FLEET: Final = "porch"
BOARDS: Final = ("first", "second", "third")
SOFTWARE: Final = ("mosquitto", "rabbitmq", "nats", "amqtt")
"""All that a registry has. EMQX, HiveMQ CE and VerneMQ are in none that is reached here."""
_STARTS_S: Final = 240.0
"""RabbitMQ waits for other nodes before it listens."""
_PACE: Final = Pace(answer_s=10.0, pause_s=0.1, longest_s=10.0)
"""Of the suite's own connections: on a busy machine, TLS takes seconds."""
Admission = Literal["passwords", "certificates"]


class Server:
    """A broker of one fleet.

    Args:
        software: Which.
        directory: For its files.
        admits: Whom it lets in: those with a password, or with a certificate of the fleet's authority.
    """

    def __init__(self, software: str, directory: Path, admits: Admission = "passwords") -> None:
        self.software, self.directory, self.admits = software, directory, admits
        self._reservation = reserved_port()
        self.port: int = self._reservation.getsockname()[1]
        self.has_rules = software != "amqtt"
        self._child: Child | None = None
        # RabbitMQ's name service is a process of its own, for which this is the only setting.
        with reserved_port() as reservation:
            self._epmd_port = str(reservation.getsockname()[1])
        directory.mkdir(parents=True)
        if not self.has_rules:
            password = directory / "password"
            password.write_text("correct horse\n")
            module = "simulation.programs.embedded_broker"
            self._command = [sys.executable, "-P", "-m", module, str(self.port), "all", str(password)]
            return
        if BROKERS[software].find() is None:
            pytest.skip(f"{software} is not installed: {BROKERS[software].package}")
        self.certificates: BrokerCertificate = broker_certificate(
            directory / "tls", clients=("coordinator", *BOARDS)
        )
        fleet_file = directory / "fleet.yaml"
        fleet_file.write_text(
            f"fleet: {FLEET}\ndevices: 2\nrecords_per_device: 50\nrounds: 1\nmodel: {{name: digits}}\n"
            "privacy: {epsilon: 1.0, delta: 1.0e-6, sampling_rate: 0.5}\n"
        )
        tls = self.certificates
        if admits == "passwords":
            who = [word for name in BOARDS for word in ("--board", name)]
        else:
            who = ["--authority", str(tls.authority)]
        self._command = [
            sys.executable, "-P", "-m", "cli.main", "coordinator", "broker-config", software,
            "--config", str(fleet_file), "--directory", str(directory / "broker"),
            "--address", "127.0.0.1", "--port", str(self.port),
            "--certificate", str(tls.certificate), "--key", str(tls.key), *who, "--run",
        ]  # fmt: skip

    def values(self, name: str) -> dict[str, Any]:
        """The ``mqtt`` section of a program: of ``coordinator`` or a board."""
        if not self.has_rules:
            url, user, password = f"mqtt://127.0.0.1:{self.port}", "all", self.directory / "password"
            return {"url": url, "username": user, "password_file": str(password)}
        return {
            "url": f"mqtts://127.0.0.1:{self.port}", "ca_file": str(self.certificates.authority),
            "username": name, "password_file": str(self.directory / "broker" / "users" / name),
        }  # fmt: skip

    def session(
        self, name: str, *topics: str, client_id: str | None = None, persistent: bool = False
    ) -> MqttSession:
        """A connection of one program's; a refused one fails the first wait."""
        # amqtt neither answers nor closes on version 5, which programs wait for and this need not.
        protocol = "auto" if self.has_rules else "3.1.1"
        return MqttSession(
            MqttSettings(**self.values(name), protocol=protocol),
            client_id=client_id, persistent=persistent, pace=_PACE,
            subscriptions=[Subscription(topic) for topic in topics],
        )  # fmt: skip

    def start(self) -> Server:
        log = self.directory / "broker.log"
        environment = {"ERL_EPMD_PORT": self._epmd_port}
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in environment.items():
                patch.setenv(variable, value)
            self._child = Child(self._command, log)
        wait_until(self._listens, f"{self.software} on port {self.port}", _STARTS_S)
        # RabbitMQ listens before it knows its users.
        if self.admits == "passwords":
            wait_until(self._lets_in, f"a login at {self.software}", _STARTS_S)
        return self

    def kill(self) -> None:
        """End it as a power cut does."""
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        """End it in good order."""
        if self._child is not None:
            self._child.stop()

    def give_up(self) -> None:
        """End it, and leave its port to others."""
        with contextlib.suppress(AssertionError):
            self.stop()
        if self.software == "rabbitmq" and (epmd := shutil.which("epmd")) is not None:
            # It was started by the broker, and outlives it.
            environment = os.environ | {"ERL_EPMD_PORT": self._epmd_port, "ERL_EPMD_ADDRESS": "127.0.0.1"}
            subprocess.run([epmd, "-kill"], env=environment, capture_output=True, timeout=30, check=False)
        self._reservation.close()

    def said(self) -> str:
        """Its log."""
        return "" if self._child is None else self._child.said()

    def _lets_in(self) -> bool:
        with self.session("coordinator") as session:
            for _ in range(200):
                try:
                    event = session.next_event(0.1)
                except BrokerError:
                    return False
                if isinstance(event, Connected):
                    return True
        return False

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False
