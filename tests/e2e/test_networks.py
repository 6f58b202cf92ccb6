"""Whole jobs over bad networks: every fragment is counted once, and the job ends as on a good one.

Two boards and a coordinator, in processes of their own, each with a proxy between it and a real Mosquitto.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import Broker, wait_until
from fleets import Program, run_agent, run_coordinator, write_agent, write_fleet
from observers import Observer
from proxies import Network, Proxy
from watched_fleets import WatchedFleet, charges

DEVICES, ROUNDS, BLOCKS = 2, 2, 5
PATIENCE_S = 200.0


class Fleet(WatchedFleet):
    """A coordinator and two boards, each behind a proxy, and an observer who is not."""

    def __init__(
        self,
        directory: Path,
        broker: Broker,
        held: contextlib.ExitStack,
        *,
        keepalive_s: int = 5,
        **timing: Any,
    ) -> None:
        times = {
            "compute_slot_s": 0.5,
            "jitter_window_s": 0.5,
            "deadline_s": 60.0,
            "device_grid_s": 0.001,
        } | timing
        super().__init__(directory, broker, round=times, rounds=ROUNDS, fragments_per_update=BLOCKS)
        self.held = held
        self.center, *self.boards = (Network() for _ in range(1 + DEVICES))
        self.observer = held.enter_context(Observer(broker, self.name))
        center = held.enter_context(Proxy(broker, self.center, keepalive_s=keepalive_s))
        write_fleet(directory / "coordinator", center, **self.changes)
        proxies = [
            held.enter_context(Proxy(broker, network, keepalive_s=keepalive_s)) for network in self.boards
        ]
        self.files = [
            write_agent(directory / f"device-{number}", proxy, self.public_key, number, fleet=self.name)
            for number, proxy in enumerate(proxies)
        ]

    @property
    def networks(self) -> list[Network]:
        return [self.center, *self.boards]

    def start(self) -> Program:
        """Start all; returns the coordinator."""
        for file in self.files:
            self.held.enter_context(run_agent(file))
        return self.held.enter_context(run_coordinator(self.file))

    def has_begun(self) -> bool:
        """Whether a fragment has been counted."""
        return bool(self.counted())

    def require_done(self, coordinator: Program) -> None:
        """The job ends; all is counted once, and the model is what the captured fragments make it."""
        assert coordinator.wait(PATIENCE_S) == 0, coordinator.said()
        assert [record.fragments for record in self.rounds()] == [DEVICES * BLOCKS] * ROUNDS
        assert charges(*self.files) == DEVICES * ROUNDS
        np.testing.assert_array_equal(self.replayed_model(self.observer), self.model())


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def fleet(tmp_path: Path, mosquitto: Broker, held: contextlib.ExitStack) -> Fleet:
    return Fleet(tmp_path, mosquitto, held)


@pytest.mark.parametrize(
    "conditions",
    [
        pytest.param({"late_share": 0.27, "reset_share": 0.03}, id="30 % lost", marks=pytest.mark.slow),
        pytest.param({"bytes_per_s": 8_000.0}, id="64 kbit/s", marks=pytest.mark.slow),
        pytest.param({"latency_s": 0.5}, id="0.5 s latency", marks=pytest.mark.slow),
        pytest.param({"latency_s": 5.0}, id="5 s latency", marks=pytest.mark.slow),
    ],
)
def test_a_job_over_a_bad_network(
    tmp_path: Path, mosquitto: Broker, held: contextlib.ExitStack, conditions: dict[str, float]
) -> None:
    fleet = Fleet(tmp_path, mosquitto, held, keepalive_s=30)
    for network in fleet.networks:
        for name, value in conditions.items():
            setattr(network, name, value)
    fleet.require_done(fleet.start())


@pytest.mark.parametrize(
    ("fault", "whose"),
    [
        pytest.param("is_cut", "center", id="partition of the coordinator", marks=pytest.mark.slow),
        pytest.param("is_cut", "boards", id="partition of the boards", marks=pytest.mark.slow),
        pytest.param("is_silent", "center", id="half-open at the coordinator", marks=pytest.mark.slow),
        pytest.param("is_silent", "boards", id="half-open at the boards", marks=pytest.mark.slow),
    ],
)
def test_a_job_whose_network_goes_and_comes_back(fleet: Fleet, fault: str, whose: str) -> None:
    """Half-open links are noticed by the session's own keep-alives."""
    networks = fleet.boards if whose == "boards" else [fleet.center]
    coordinator = fleet.start()
    wait_until(fleet.has_begun, "the first fragment", PATIENCE_S)
    for network in networks:
        setattr(network, fault, True)
    counted = len(fleet.counted())
    time.sleep(3.0)
    assert len(fleet.counted()) - counted <= DEVICES * BLOCKS
    for network in networks:
        setattr(network, fault, False)
    fleet.require_done(coordinator)


@pytest.mark.parametrize(
    "with_store",
    [
        pytest.param(True, id="with its store", marks=pytest.mark.slow),
        pytest.param(False, id="without its store"),
    ],
)
def test_a_job_whose_broker_comes_back(
    tmp_path: Path, new_broker: Any, held: contextlib.ExitStack, with_store: bool
) -> None:
    """Without the store, the broker has neither the plan nor the sessions nor what waited in them."""
    broker = new_broker("mosquitto").start()
    fleet = Fleet(tmp_path, broker, held)
    coordinator = fleet.start()
    wait_until(fleet.has_begun, "the first fragment", PATIENCE_S)
    broker.kill()
    if not with_store:
        (broker.directory / "mosquitto.db").unlink(missing_ok=True)
    broker.start()
    assert coordinator.wait(PATIENCE_S) == 0, coordinator.said()
    assert [record.fragments for record in fleet.rounds()] == [DEVICES * BLOCKS] * ROUNDS
    assert charges(*fleet.files) == DEVICES * ROUNDS


@pytest.mark.slow
def test_a_board_that_is_away_until_the_job_is_over(
    tmp_path: Path, mosquitto: Broker, held: contextlib.ExitStack
) -> None:
    """Its rounds close at their deadlines without it; what it has in its spool counts no more, and goes."""
    fleet = Fleet(
        tmp_path, mosquitto, held, deadline_s=6.0, minimum_devices=1, compute_slot_s=2.0, jitter_window_s=1.0
    )
    away = fleet.boards[1]
    coordinator = fleet.start()
    wait_until(lambda: charges(fleet.files[1]) == 1, "its charge", PATIENCE_S)
    away.is_cut = True
    assert coordinator.wait(PATIENCE_S) == 0, coordinator.said()
    assert [record.fragments for record in fleet.rounds()] == [BLOCKS] * ROUNDS
    assert spooled(fleet.files[1]) == BLOCKS
    away.is_cut = False
    wait_until(lambda: spooled(fleet.files[1]) == 0, "an empty spool", PATIENCE_S)
    assert charges(fleet.files[1]) == 1
    np.testing.assert_array_equal(fleet.replayed_model(fleet.observer), fleet.model())


def spooled(file: Path) -> int:
    """Fragments that a board still means to send."""
    connection = sqlite3.connect(file.parent / "state" / "ledger.db")
    try:
        return int(
            connection.execute("SELECT count(*) FROM fragments JOIN messages USING (number)").fetchone()[0]
        )
    finally:
        connection.close()
