"""A look at a run while it goes on, from outside: at the databases that its programs write."""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass

from agent.audit import open_ledger
from agent.rounds import declined_rounds
from coordinator.reader import RoundRecord, StoreReader
from dpagent.errors import LedgerError, StorageError
from simulation.layout import Layout


@dataclass(frozen=True, slots=True)
class Glimpse:
    """The state of a run while it goes on."""

    rounds: list[RoundRecord]
    epsilon_spent: float
    """Largest ε any device has charged."""
    in_flight: int
    """Fragments charged and neither counted nor expired."""
    declined: int
    """Devices that declined to take part, ever."""
    reason: str | None
    """Why one of them did."""


class Observer:
    """Looks at the databases of a run from outside, while their owners write them.

    Args:
        layout: Where they are.
        devices: How many there are.
    """

    def __init__(self, layout: Layout, devices: int) -> None:
        self._layout, self._count = layout, devices
        self._coordinator: StoreReader | None = None
        self._devices: dict[int, sqlite3.Connection] = {}

    def close(self) -> None:
        """Close all connections."""
        if self._coordinator is not None:
            self._coordinator.close()
        for connection in self._devices.values():
            connection.close()

    def glimpse(self) -> Glimpse:
        """The state now; empty while the programs are starting."""
        rounds: list[RoundRecord] = []
        try:
            if self._coordinator is None:
                self._coordinator = StoreReader(self._layout.coordinator_state)
            rounds = self._coordinator.rounds()
        except (StorageError, sqlite3.Error):
            pass  # Not there yet.
        epsilon, in_flight, declined = 0.0, 0, 0
        why: str | None = None
        for number in range(1, self._count + 1):
            try:
                if number not in self._devices:
                    self._devices[number], _ = open_ledger(self._layout.agent_state(number))
                connection = self._devices[number]
                spent = connection.execute(
                    "SELECT json_extract(body, '$.cumulative_epsilon') FROM entries WHERE kind = 'charge' "
                    "ORDER BY number DESC LIMIT 1"
                ).fetchone()
                if spent is not None:  # null: without bound
                    epsilon = max(epsilon, math.inf if spent[0] is None else spent[0])
                in_flight += connection.execute("SELECT count(*) FROM messages").fetchone()[0]
                if reasons := declined_rounds(connection):
                    declined += 1
                    why = why or f"device {number}: {reasons[0].reason}"
            except (LedgerError, sqlite3.Error):
                continue  # Not there yet.
        return Glimpse(rounds, epsilon, in_flight, declined, why)


def closed_rounds(layout: Layout) -> int:
    """How many rounds are done; 0 where none has begun."""
    observer = Observer(layout, devices=0)
    try:
        return sum(record.closed_at is not None for record in observer.glimpse().rounds)
    finally:
        observer.close()
