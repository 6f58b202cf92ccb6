"""The fleet's broker: Mosquitto or the embedded one as a child process, or one that runs already.

Both children listen on loopback only and want a password: without one, some brokers do not
queue for a session that is away.
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from coordinator.brokers.deployment import Deployment, TlsFiles, User
from coordinator.brokers.mosquitto import configuration, find_mosquitto, hashes
from dpagent.errors import BrokerError
from dpagent.protocol.access import Role
from dpagent.storage import disk_errors, write_atomically
from dpagent.transport.events import Connected, Disconnected
from dpagent.transport.session import MqttSession
from dpagent.transport.settings import MqttSettings
from dpagent.wording import named
from simulation.request import STARTED_BROKERS, BrokerRequest

_USER = "dpagent"
_READY_S = 15.0


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """How programs reach the broker."""

    url: str
    username: str | None
    password_file: Path | None
    protocol: Literal["auto", "5", "3.1.1"]
    name: str
    """For people: which broker it is."""
    ca_file: Path | None = None
    """Who issued its certificate, if it has one."""

    @property
    def settings(self) -> MqttSettings:
        """The same as the transport takes it."""
        return MqttSettings(
            url=self.url,
            username=self.username,
            password_file=self.password_file,
            protocol=self.protocol,
            ca_file=self.ca_file,
        )


@dataclass(frozen=True, slots=True)
class BrokerChild:
    """A broker to be started, and its address once it runs."""

    command: list[str]
    address: BrokerAddress


@dataclass(frozen=True, slots=True)
class BrokerTls:
    """A certificate of Mosquitto's on loopback, and who issued it."""

    files: TlsFiles
    ca_file: Path


@contextmanager
def choose_broker(
    request: BrokerRequest, directory: Path, tls: BrokerTls | None = None
) -> Iterator[BrokerChild | BrokerAddress]:
    """The broker that was asked for. Inside of the block the port of a child is reserved for it.

    Args:
        request: Which.
        directory: For the configuration, password and persistence of a child.
        tls: Of Mosquitto as a child.

    Raises:
        BrokerError: Mosquitto is not installed, or the port is taken.
    """
    choice = request.broker
    if choice not in STARTED_BROKERS:
        yield BrokerAddress(choice, request.mqtt_username, request.mqtt_password_file, "auto", choice)
        return
    executable = find_mosquitto()
    if choice == "mosquitto" and executable is None:
        raise BrokerError(
            "Mosquitto is not installed. Install it (apt-get install mosquitto) or use "
            f"{named('broker', 'embedded')}."
        )
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with reserved_port(request.broker_port) as port:
        yield _child(directory, port, None if choice == "embedded" else executable, tls)


def _child(directory: Path, port: int, mosquitto: str | None, tls: BrokerTls | None) -> BrokerChild:
    """Mosquitto, or the embedded broker without it."""
    secret = directory / "password"
    if not secret.exists():
        write_atomically(secret, secrets.token_urlsafe(24).encode() + b"\n", mode=0o600)
    url = f"mqtt://127.0.0.1:{port}"
    if mosquitto is None:
        address = BrokerAddress(url, _USER, secret, "3.1.1", "embedded (amqtt)")
        module = "simulation.programs.embedded_broker"
        return BrokerChild([sys.executable, "-P", "-m", module, str(port), _USER, str(secret)], address)
    file = _configure_mosquitto(directory, port, secret, tls)
    address = BrokerAddress(url, _USER, secret, "auto", "mosquitto")
    if tls is not None:
        address = replace(address, url=f"mqtts://127.0.0.1:{port}", ca_file=tls.ca_file)
    return BrokerChild([mosquitto, "-c", str(file)], address)


@contextmanager
def reserved_port(port: int) -> Iterator[int]:
    """``port``, or a free one for 0, which no other program is given inside of the block.

    A socket stays bound to it and does not listen. Linux lets a broker listen there all the same, since both
    allow reuse of the address; other systems do not, so that there the port is only known to be free.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reservation.bind(("127.0.0.1", port))
        except OSError as error:
            raise BrokerError(
                f"Port {port} cannot be used ({error.strerror}). "
                f"Choose another {named('broker_port')}, or leave it out."
            ) from error
        free = int(reservation.getsockname()[1])
        if sys.platform != "linux":
            reservation.close()
        yield free


def _configure_mosquitto(directory: Path, port: int, secret: Path, tls: BrokerTls | None) -> Path:
    place, file = directory.absolute(), directory / "mosquitto.conf"
    # One user is all roles: everything runs on this machine.
    user = User(_USER, Role.COORDINATOR, secret.read_text().strip())
    deployment = Deployment("demo", place, "127.0.0.1", port, None if tls is None else tls.files, (user,))
    write_atomically(directory / "passwords", hashes(deployment.users).encode(), mode=0o600)
    options = [f"password_file {place}/passwords"]
    text = configuration(deployment, str(place), options, user=getpass.getuser(), autosave_s=5)
    write_atomically(file, text.encode())
    return file


def wait_until_ready(address: BrokerAddress) -> None:
    """Connect once, with the credentials the programs will use.

    Raises:
        BrokerError: Nobody answers in time, or the credentials are refused.
    """
    reason = "no answer"
    session = MqttSession(
        address.settings, client_id=f"dpagent-probe-{os.getpid()}", subscriptions=[], persistent=False
    )
    until = time.monotonic() + _READY_S
    with session:
        while time.monotonic() < until:
            match session.next_event(0.2):
                case Connected():
                    return
                case Disconnected(text):
                    reason = text
    raise BrokerError(
        f"The broker ({address.name}) does not answer within {_READY_S:g} s: {reason}. "
        f"Check the address, or leave {named('broker')} out to have one started."
    )
