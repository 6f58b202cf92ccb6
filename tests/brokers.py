"""Real brokers for the tests: Mosquitto and amqtt as child processes on a loopback port of their own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import pytest
from children import PATIENCE_S, Child, deaths, states

from dpagent.transport.events import Event
from dpagent.transport.session import MqttSession, Pace, Subscription
from dpagent.transport.settings import MqttSettings

USER = "tester"
HURRIED = Pace(answer_s=0.5, pause_s=0.1, longest_s=5.0)
"""Of sessions whose broker goes and comes in a test."""
Software = Literal["mosquitto", "amqtt"]
EventT = TypeVar("EventT")


def find_mosquitto() -> str | None:
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def wait_until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true value of ``condition``.

    Fails after ``patience_s``, and at once when a child has failed: it may have been the one to wait for.
    """
    return _first(condition, lambda: what, patience_s, pause_s=0.02)


def wait_for(session: MqttSession, kind: type[EventT], patience_s: float = PATIENCE_S) -> EventT:
    """The next event of one kind, whatever comes before it; fails as :func:`wait_until` does."""
    seen: list[Event] = []

    def arrives() -> EventT | None:
        event = session.next_event(0.1)
        if isinstance(event, kind):
            return event
        if event is not None:
            seen.append(event)
        return None

    def what() -> str:
        return f"{kind.__name__}; there came {seen[:5]}"

    return cast(EventT, _first(arrives, what, patience_s, pause_s=0.0))


def _first(condition: Callable[[], Any], what: Callable[[], str], patience_s: float, pause_s: float) -> Any:
    until = time.monotonic() + patience_s
    while True:
        if value := condition():
            return value
        if failed := deaths():
            pytest.fail("\n".join([f"a child failed during the wait for {what()}", *failed]))
        if time.monotonic() >= until:
            pytest.fail("\n".join([f"waited {patience_s:g} s in vain for {what()}", *states()]))
        time.sleep(pause_s)


def reserved_port() -> socket.socket:
    """A loopback port that nobody else is given while this socket is open.

    It is bound and does not listen, so a broker may listen there (both sides allow the address to be
    reused), connections are refused until it does, and the kernel offers the port to nobody.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation


class Broker:
    """One broker on one port, which can be killed and started again there.

    Args:
        software: Which.
        directory: For its files.
        protocol: What programs are told of the version.
        options: Lines of Mosquitto's configuration: of the listener, and of access.
    """

    def __init__(
        self, software: Software, directory: Path, protocol: str = "auto", *, options: Sequence[str] = ()
    ) -> None:
        self.software, self._options = software, options
        self.directory = directory
        self.protocol = protocol
        self.tests_by_fleet: dict[str, str] | None = None
        """Of a broker that tests share: it keeps a plan, and the next coordinator has another key."""
        self._reservation = reserved_port()
        self._others: list[socket.socket] = []
        self.port: int = self._reservation.getsockname()[1]
        self.password_file = directory / "password"
        self.password_file.write_text("correct horse\n")
        self._child: Child | None = None
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

    def take(self, fleet: str) -> None:
        """Refuse a fleet's name that another test has used on this broker."""
        if self.tests_by_fleet is not None:
            test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
            other = self.tests_by_fleet.setdefault(fleet, test)
            assert other == test, f"fleet {fleet!r} is that of {other} on the same broker: name another"

    def settings(self, **changes: Any) -> MqttSettings:
        return MqttSettings(**(self.values | changes))

    @property
    def child(self) -> Child:
        """Its process."""
        assert self._child is not None
        return self._child

    def session(self, client_id: str, *topics: str, persistent: bool = False, **changes: Any) -> MqttSession:
        return MqttSession(
            self.settings(**changes), client_id=client_id, persistent=persistent,
            subscriptions=[Subscription(topic) for topic in topics], pace=HURRIED,
        )  # fmt: skip

    def start(self) -> Broker:
        self._child = Child(self._command, self.directory / "broker.log")
        wait_until(self._answers, f"{self.software} on port {self.port}")
        return self

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._child is not None
        return self._child.process.pid

    def wait_until_stored(self) -> None:
        """Wait until Mosquitto has stored all that it has acknowledged.

        It saves its store now and then, between packets; what came since the last time, a kill loses.
        """
        now_ns, store = time.time_ns(), self.directory / "mosquitto.db"
        wait_until(lambda: store.exists() and store.stat().st_mtime_ns > now_ns, "the broker's store")

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        """End the broker in good order; one that keeps its state writes it."""
        if self._child is not None:
            self._child.stop()

    def another_port(self) -> int:
        """A port for one more listener."""
        self._others.append(reserved_port())
        port: int = self._others[-1].getsockname()[1]
        return port

    def give_up(self) -> None:
        """End the broker and leave its ports to others."""
        self.stop()
        for reservation in (self._reservation, *self._others):
            reservation.close()

    def _answers(self) -> bool:
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
            *self._options,
        ]  # fmt: skip
        file.write_text("\n".join(lines) + "\n")
        return file


BrokerFactory = Callable[..., Broker]
"""Of the fixture ``new_broker``."""
