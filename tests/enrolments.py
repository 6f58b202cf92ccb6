"""A fleet that boards enrol in: its authority, its endpoint as a process, a Mosquitto with mutual TLS."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import Any

import numpy as np
from brokers import Broker, BrokerFactory, reserved_port, wait_until
from children import Child
from commands import Result, dpagent
from fleets import Program, merged, write_fleet

import cli.enrol
from coordinator.devices import Devices
from coordinator.settings import CoordinatorSettings, load_coordinator_settings
from dpagent import faults

DIED = 77
"""Exit code of a program that was ended on purpose."""


class EnrolmentFleet:
    """The operator's side.

    Args:
        directory: of ``fleet.yaml``.
        broker: that it names; not started.
        changes: of ``fleet.yaml``.
    """

    def __init__(self, directory: Path, broker_url: str, **changes: Any) -> None:
        self._reservation = reserved_port()
        self.port: int = self._reservation.getsockname()[1]
        self.directory = directory
        members = {"ca_file": "members/ca.crt", "cert_file": "members/coordinator.crt",
                   "key_file": "members/coordinator.key"}  # fmt: skip
        section = {"address": f"127.0.0.1:{self.port}", "listen": "127.0.0.1"}
        self.file = write_fleet(
            directory,
            None,
            **merged(
                {"enrolment": section, "mqtt": {"url": broker_url} | members, "linkability": "none"}, changes
            ),
        )
        self.endpoint: Child | None = None
        for words in (("ca", "init"), ("ca", "server", "127.0.0.1"), ("ca", "client", "coordinator")):
            assert self.run(*words).returncode == 0

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def settings(self) -> CoordinatorSettings:
        return load_coordinator_settings(self.file)

    @property
    def members(self) -> Path:
        return self.directory / "members"

    def run(self, *words: str) -> Result:
        """A command of the operator's."""
        return dpagent("coordinator", *words, "--config", self.file)

    def invite(self, *options: str) -> list[str]:
        result = self.run("invite", *options)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    def start(self) -> EnrolmentFleet:
        self.endpoint = Program("coordinator", "enrolment", "--config", self.file, log=self.directory / "log")
        wait_until(self._answers, "the endpoint")
        return self

    def stop(self) -> None:
        if self.endpoint is not None:
            assert self.endpoint.stop() == 0
            assert "Traceback" not in self.endpoint.said()
            self.endpoint = None
        self._reservation.close()

    def devices(self) -> Devices:
        return Devices(self.members)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False

    def connection(self, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
        """A connection to the endpoint, of a client that trusts the fleet."""
        context = context or ssl.create_default_context(cafile=self.members / "ca.crt")
        plain = socket.create_connection(("127.0.0.1", self.port), 20)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")


def mutual_tls(new_broker: BrokerFactory, members: Path) -> Broker:
    """A Mosquitto that lets those in that the fleet's authority knows, not yet started."""
    return new_broker(
        options=[
            f"cafile {members}/ca.crt", f"certfile {members}/broker.crt", f"keyfile {members}/broker.key",
            f"crlfile {members}/revoked.crl", "require_certificate true", "use_identity_as_username true",
        ]
    )  # fmt: skip


def enrol(code: str, board: Path, *options: str) -> Result:
    """A board enrols, with sixty records of its own."""
    board.mkdir(exist_ok=True)
    data = board / "data.npz"
    if not data.exists():
        np.savez(data, inputs=np.ones((60, 4), np.float32), labels=np.arange(60) % 3)
    return dpagent(
        "enrol", code, "--config", board / "agent.yaml", "--data", data, "--epsilon", "6", *options
    )


def die_at(number: int) -> None:
    """Let this process end at so many fault points from here."""
    left = number

    def reached(_point: faults.FaultPoint) -> None:
        nonlocal left
        left -= 1
        if not left:
            os._exit(DIED)

    faults.reached = reached


def die_with_an_identity() -> None:
    """Let this process end where an enrolment would keep what the coordinator has answered."""
    cli.enrol._keep = lambda *_, **__: os._exit(DIED)  # type: ignore[assignment]
