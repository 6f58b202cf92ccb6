"""What daemons tell systemd: real daemons, and a socket in systemd's place."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from brokers import Broker, wait_until
from fleets import run_agent, run_coordinator, write_agent, write_fleet

from coordinator.keys import load_signer
from dpagent.protocol.signing import Signer
from dpagent.service_manager import ServiceManager


class Listener:
    """The socket of a service manager."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)
        self.said: list[str] = []

    def hears(self, words: str) -> bool:
        """Whether that has been said."""
        while True:
            try:
                self.said.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return words in self.said

    def close(self) -> None:
        self._socket.close()


@contextmanager
def listening(address: str) -> Iterator[Listener]:
    listener = Listener(address)
    try:
        yield listener
    finally:
        listener.close()


def test_an_agent_says_that_it_is_ready_gets_on_and_what_it_waits_for(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    file = write_agent(
        tmp_path / "board", mosquitto, Signer(bytes(range(32)), "watched").public_key, fleet="watched"
    )
    with listening(address) as listener, run_agent(file) as agent:
        wait_until(lambda: listener.hears("READY=1"), "a word that it is ready")
        words = "STATUS=connected; waiting for a plan on dpagent/v1/watched/plan"
        wait_until(lambda: listener.hears(words), "what it waits for")
        began, before = time.monotonic(), listener.said.count("WATCHDOG=1")
        wait_until(
            lambda: listener.hears("") or listener.said.count("WATCHDOG=1") >= before + 3, "signs of life"
        )
        assert time.monotonic() - began > 0.15, "no more often than it is asked for"
        assert agent.stop() == 0
        wait_until(lambda: listener.hears("STOPPING=1"), "a word that it ends")


def test_a_coordinator_says_that_it_is_ready_and_which_round_is_open(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    file = write_fleet(tmp_path / "fleet", mosquitto, fleet="watched-rounds")
    load_signer(tmp_path / "fleet" / "keys", "watched-rounds")
    with listening(address) as listener, run_coordinator(file) as coordinator:
        wait_until(lambda: listener.hears("READY=1"), "a word that it is ready")
        wait_until(lambda: listener.hears("STATUS=job first: round 1 of 2 is open"), "the round")
        coordinator.stop()


@pytest.mark.parametrize("abstract", [True, False])
def test_both_kinds_of_address_are_understood(tmp_path: Path, abstract: bool) -> None:
    name = f"dpagent-test-{os.getpid()}"
    bound, told = (f"\0{name}", f"@{name}") if abstract else (str(tmp_path / "s"), str(tmp_path / "s"))
    with listening(bound) as listener:
        manager = ServiceManager({"NOTIFY_SOCKET": told})
        manager.status("one\nline")
        manager.status("one\nline")
        manager.alive()
        assert listener.hears("STATUS=one line")
        assert listener.said == ["STATUS=one line"], "said once, and no watchdog asked"


@pytest.mark.parametrize(
    ("environment", "feeds"),
    [
        ({"WATCHDOG_USEC": "1000"}, True),
        ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "own"}, True),
        ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({}, False),
    ],
)
def test_the_watchdog_is_fed_where_it_is_this_programs(
    tmp_path: Path, environment: dict[str, str], feeds: bool
) -> None:
    own = {name: str(os.getpid()) for name, value in environment.items() if value == "own"}
    with listening(str(tmp_path / "s")) as listener:
        ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "s")} | environment | own).alive()
        assert listener.hears("WATCHDOG=1") == feeds


def test_a_manager_that_is_away_or_full_keeps_nobody_waiting(tmp_path: Path) -> None:
    ServiceManager({}).ready()
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "none")}).ready()
    with listening(str(tmp_path / "s")):
        manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "s")})
        for number in range(10_000):
            manager.status(str(number))
