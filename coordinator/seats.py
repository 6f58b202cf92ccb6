"""The seats of a round's blocks: which fragments count, each once, and their exact sums.

A block has as many seats as there are devices. Each fragment draws a ticket, a keyed hash of its id, and
the least tickets hold the seats. If more fragments arrive, each has the same chance, in whatever order
they came: a flood that comes first does not shut honest fragments out, and sending one again draws nothing
new. The order of the tickets also deals a block's fragments to groups.

A dummy takes no seat, and nothing of it is kept. It gets a receipt where a fragment in its place would have a
seat: otherwise a flood of fragments would tell dummies by the receipts.

A seat keeps its fragment's values, so that it can be given up. Sums are 64-bit integers: the same
fragments give the same bits in any order.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

_TICKET_BYTES: Final = 16

Sums = dict[int, tuple[int, NDArray[np.int64]]]
"""By block position, a number of fragments and their exact integer sum."""


@dataclass(frozen=True, slots=True)
class OpenedFragment:
    """An opened fragment, checked against the plan."""

    id: bytes
    round: int
    position: int
    values: NDArray[np.int64]
    arrived_at: float
    dummy: bool = False


@dataclass(frozen=True, slots=True)
class Counted:
    """The result of counting a batch of fragments."""

    fresh: tuple[bytes, ...]
    """Ids that took a seat now. One may lose it later, to a fragment with a smaller ticket."""
    repeated: tuple[bytes, ...]
    """Ids that took a seat before: their receipt was lost."""
    dummies: tuple[bytes, ...]
    """Ids of dummies for which there would be a seat."""
    unseated: int
    """Fragments that found no seat, or lost theirs to another, and dummies without one."""
    late: int
    """Messages with fragments of closed rounds. Only their number is stored: anyone can seal any number
    of them, and storing them would fill the disk. They get no receipt, even if they counted in their round: a
    dummy of a closed round could not get one."""

    @property
    def receipted(self) -> list[bytes]:
        """Ids that get a receipt, in an order that does not tell dummies from others."""
        return sorted((*self.fresh, *self.repeated, *self.dummies))


def create_seats(connection: sqlite3.Connection) -> None:
    """Part of a migration: the tables."""
    connection.execute(
        """CREATE TABLE seats (
            round INTEGER NOT NULL, position INTEGER NOT NULL, ticket BLOB NOT NULL, id BLOB NOT NULL,
            units BLOB NOT NULL, type TEXT NOT NULL, PRIMARY KEY (round, position, ticket)
        ) STRICT"""
    )
    connection.execute(
        "CREATE TABLE fragments (id BLOB PRIMARY KEY, round INTEGER NOT NULL, position INTEGER NOT NULL, "
        "arrived_at REAL NOT NULL) STRICT, WITHOUT ROWID"
    )
    connection.execute("CREATE INDEX fragments_by_round ON fragments (round)")
    connection.execute("CREATE TABLE tickets (key BLOB NOT NULL) STRICT")
    connection.execute("INSERT INTO tickets VALUES (?)", (os.urandom(32),))


class Seats:
    """The seats in an open database. What changes them has to run inside a transaction.

    Args:
        connection: A database with :func:`create_seats` applied.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def take(self, fragments: Sequence[OpenedFragment], open_round: int, seats: int) -> Counted:
        """Seat the fragments of the open round, each once.

        Args:
            fragments: checked against the plan.
            open_round: the number of the open round.
            seats: of each block.
        """
        fresh: list[bytes] = []
        repeated: list[bytes] = []
        dummies: list[bytes] = []
        late = unseated = 0
        taken = self.counts(open_round)
        for fragment in fragments:
            position = fragment.position
            if fragment.round != open_round:
                late += 1
            elif fragment.dummy:
                if taken.get(position, 0) < seats or self._loser_to(fragment) is not None:
                    dummies.append(fragment.id)
                else:
                    unseated += 1
            elif self._is_known(fragment):
                repeated.append(fragment.id)
            elif taken.get(position, 0) < seats:
                self._seat(fragment)
                taken[position] = taken.get(position, 0) + 1
                fresh.append(fragment.id)
            else:
                unseated += 1
                if (loser := self._loser_to(fragment)) is not None:
                    self._free(open_round, position, loser)
                    self._seat(fragment)
                    fresh.append(fragment.id)
        return Counted(tuple(fresh), tuple(repeated), tuple(dummies), unseated, late)

    def counts(self, number: int) -> dict[int, int]:
        """Taken seats of a round by position."""
        rows = self._connection.execute(
            "SELECT position, count(*) AS taken FROM seats WHERE round = ? GROUP BY position", (number,)
        )
        return {row["position"]: row["taken"] for row in rows}

    def sums(self, number: int, *, groups: int = 1) -> list[Sums]:
        """Counts and exact integer sums of a round's fragments, dealt to random groups.

        The groups of a block are of equal size, give or take one fragment. If it has fewer fragments than
        groups, some groups have none.

        Args:
            number: of the round.
            groups: at least 1.

        Returns:
            One for each group.
        """
        found: list[Sums] = [{} for _ in range(groups)]
        dealt: dict[int, int] = {}
        for row in self._connection.execute(
            "SELECT position, units, type FROM seats WHERE round = ? ORDER BY position, ticket", (number,)
        ):
            position, units = row["position"], np.frombuffer(row["units"], row["type"])
            place = dealt[position] = dealt.get(position, -1) + 1
            group = found[place % groups]
            count, total = group.get(position, (0, np.zeros(len(units), np.int64)))
            total += units
            group[position] = (count + 1, total)
        return found

    def clear(self, number: int) -> None:
        """Drop the values of a closed round; the ids remain."""
        self._connection.execute("DELETE FROM seats WHERE round = ?", (number,))

    def _is_known(self, fragment: OpenedFragment) -> bool:
        row = self._connection.execute("SELECT 1 FROM fragments WHERE id = ?", (fragment.id,)).fetchone()
        return row is not None

    def _seat(self, fragment: OpenedFragment) -> None:
        self._connection.execute(
            "INSERT INTO fragments VALUES (?, ?, ?, ?)",
            (fragment.id, fragment.round, fragment.position, fragment.arrived_at),
        )
        # Values on the wire have at most 32 bits, mostly less than 16.
        kind = "<i2" if bool((np.abs(fragment.values) < 1 << 15).all()) else "<i4"
        units, ticket = fragment.values.astype(kind).tobytes(), self._ticket(fragment.id)
        self._connection.execute(
            "INSERT INTO seats VALUES (?, ?, ?, ?, ?, ?)",
            (fragment.round, fragment.position, ticket, fragment.id, units, kind),
        )

    def _loser_to(self, fragment: OpenedFragment) -> bytes | None:
        """The id in the block's seat with the greatest ticket, if that is greater than the fragment's."""
        last = self._connection.execute(
            "SELECT ticket, id FROM seats WHERE round = ? AND position = ? ORDER BY ticket DESC LIMIT 1",
            (fragment.round, fragment.position),
        ).fetchone()
        if last is None or last["ticket"] < self._ticket(fragment.id):
            return None
        return bytes(last["id"])

    def _free(self, number: int, position: int, fragment_id: bytes) -> None:
        """Take a fragment's seat in a round's block from it."""
        self._connection.execute(
            "DELETE FROM seats WHERE round = ? AND position = ? AND ticket = ?",
            (number, position, self._ticket(fragment_id)),
        )
        self._connection.execute("DELETE FROM fragments WHERE id = ?", (fragment_id,))

    def _ticket(self, fragment_id: bytes) -> bytes:
        return hashlib.blake2b(fragment_id, key=self._key, digest_size=_TICKET_BYTES).digest()

    @cached_property
    def _key(self) -> bytes:
        # Nobody who chooses an id knows it, so nobody chooses a ticket.
        return bytes(self._connection.execute("SELECT key FROM tickets").fetchone()["key"])
