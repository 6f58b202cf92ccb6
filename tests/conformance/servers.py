"""Brokers as an operator starts them: by ``dpagent coordinator broker-config … --run``, on loopback.

amqtt has no such configuration: it is the demo's embedded broker, and has no TLS and no access rules here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from brokers import reserved_port, wait_until
from children import Child
from enrolments import EnrolmentFleet, enrol
from fleets import write_fleet

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
_CONNECT: Final = b"\x10\x16\x00\x04MQTT\x04\x02\x00\x3c\x00\x0aresumption"
"""A clean session of version 3.1.1 without a name (MQTT 3.1.1, section 3.1)."""
_ACCEPTED: Final = b"\x20\x02\x00\x00"
_OWN: Final = (("certificate", "broker.crt"), ("key", "broker.key"))
Admission = Literal["passwords", "certificates"]


class Server:
    """A broker of one fleet.

    Args:
        software: Which.
        directory: For its files.
        admits: Whom it lets in: those with a password, or members of the fleet, by their certificates.
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
        self.fleet: EnrolmentFleet | None = None
        if admits == "passwords":
            tls: BrokerCertificate = broker_certificate(directory / "tls")
            self.ca_file = tls.authority
            fleet_file = write_fleet(directory, None, fleet=FLEET)
            who = [word for name in BOARDS for word in ("--board", name)]
            files = [("--certificate", tls.certificate), ("--key", tls.key)]
        else:
            url = f"mqtts://127.0.0.1:{self.port}"
            self.fleet = EnrolmentFleet(directory / "fleet", url, fleet=FLEET).start()
            self.ca_file, fleet_file, who = self.fleet.members / "ca.crt", self.fleet.file, ["--members"]
            files = [(f"--{option}", self.fleet.members / name) for option, name in _OWN]
        self.passwords = fleet_file.parent / "broker" / "users"
        self._command = [
            sys.executable, "-P", "-m", "cli.main", "coordinator", "broker-config", software,
            "--config", str(fleet_file), "--address", "127.0.0.1", "--port", str(self.port),
            *(str(word) for pair in files for word in pair), *who,
            *(["--worker"] if software == "mosquitto" else []), "--run",
        ]  # fmt: skip

    def pair(self, name: str) -> tuple[Path, Path]:
        """Certificate and key of the coordinator, or of a board, which enrols when it is first asked for."""
        assert self.fleet is not None
        if name == "coordinator":
            return self.fleet.members / "coordinator.crt", self.fleet.members / "coordinator.key"
        board = self.directory / name
        if not board.exists():
            (code,) = self.fleet.invite()
            result = enrol(code, board, "--no-connect")
            assert (result.returncode, result.stderr) == (0, "")
        return board / "identity" / "device.crt", board / "identity" / "device.key"

    def password(self, name: str) -> str | None:
        """What a program gives besides its certificate, where the broker wants that."""
        file = self.passwords / name
        return file.read_text().strip() if file.exists() else None

    def values(self, name: str) -> dict[str, Any]:
        """The ``mqtt`` section of a program: of ``coordinator`` or a board."""
        if not self.has_rules:
            url, user, password = f"mqtt://127.0.0.1:{self.port}", "all", self.directory / "password"
            return {"url": url, "username": user, "password_file": str(password)}
        return {
            "url": f"mqtts://127.0.0.1:{self.port}", "ca_file": str(self.ca_file),
            "username": name, "password_file": str(self.passwords / name),
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

    def shared_session(self, name: str, topic: str) -> MqttSession:
        """A connection of one of several programs that share a subscription."""
        return MqttSession(
            MqttSettings(**self.values(name)), client_id=None, persistent=False, pace=_PACE,
            subscriptions=[Subscription(topic, "workers")],
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
        wait_until(self._lets_in, f"a login at {self.software}", _STARTS_S)
        return self

    def gets_in(self, pair: tuple[Path, Path]) -> bool:
        """Whether a certificate is a login, with no name besides."""
        context = ssl.create_default_context(cafile=self.ca_file)
        context.load_cert_chain(*pair)
        return self.attempt(context, None)[0]

    def attempt(
        self, context: ssl.SSLContext, session: ssl.SSLSession | None
    ) -> tuple[bool, ssl.SSLSession | None]:
        """Whether the broker takes a CONNECT, and the session of TLS, to resume."""
        try:
            with (
                socket.create_connection(("127.0.0.1", self.port), 20) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection,
            ):
                connection.sendall(_CONNECT)
                return connection.recv(4) == _ACCEPTED, connection.session
        except OSError:
            return False, None

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
        if self.has_rules and self.fleet is not None:
            self.fleet.stop()
        self._reservation.close()

    def said(self) -> str:
        """Its log."""
        return "" if self._child is None else self._child.said()

    def _lets_in(self) -> bool:
        if self.admits == "certificates":
            return self.gets_in(self.pair("coordinator"))
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
