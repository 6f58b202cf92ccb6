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
_AT_ONCE: Final = 500
"""Ids in one question; SQLite takes 999 or more."""
_TYPES: Final = {"<i1": 7, "<i2": 15, "<i4": 31, "<i8": 63}
"""Of stored values, with the bits of their magnitude."""

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
    spent: int
    """Fragments whose id, and so whose token, another fragment has."""
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
        "CREATE TABLE fragments (id BLOB PRIMARY KEY, job INTEGER NOT NULL REFERENCES jobs, "
        "round INTEGER NOT NULL, position INTEGER NOT NULL, arrived_at REAL NOT NULL) STRICT, WITHOUT ROWID"
    )
    connection.execute("CREATE INDEX fragments_by_round ON fragments (job, round)")
    connection.execute("CREATE TABLE tickets (key BLOB NOT NULL) STRICT")
    connection.execute("INSERT INTO tickets VALUES (?)", (os.urandom(32),))


class Seats:
    """The seats in an open database. What changes them has to run inside a transaction.

    Of all jobs, one round is open at a time, so a seat names no job.

    Args:
        connection: A database with :func:`create_seats` applied.
        job: The number of the job whose fragments are seated.
    """

    def __init__(self, connection: sqlite3.Connection, job: int) -> None:
        self._connection, self._job = connection, job

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
        late = unseated = spent = 0
        taken = self.counts(open_round)
        known = self._known([fragment.id for fragment in fragments if not fragment.dummy])
        # Statements are slow one by one: seats that are free are taken together.
        waiting: list[OpenedFragment] = []
        taken_now: dict[bytes, OpenedFragment] = {}
        for fragment in fragments:
            position = fragment.position
            has_seat = taken.get(position, 0) < seats
            if fragment.round != open_round:
                late += 1
                continue
            if not has_seat:
                self._seat(waiting)
                waiting = []
            if fragment.dummy:
                if has_seat or self._loser_to(fragment) is not None:
                    dummies.append(fragment.id)
                else:
                    unseated += 1
            elif fragment.id in known:
                if self._is_same(fragment, taken_now.get(fragment.id)):
                    repeated.append(fragment.id)
                else:
                    spent += 1
            elif has_seat:
                waiting.append(fragment)
                taken_now[fragment.id] = fragment
                taken[position] = taken.get(position, 0) + 1
                fresh.append(fragment.id)
                known.add(fragment.id)
            else:
                unseated += 1
                if (loser := self._loser_to(fragment)) is not None:
                    self._free(open_round, position, loser)
                    known.discard(loser)
                    self._seat([fragment])
                    taken_now[fragment.id] = fragment
                    fresh.append(fragment.id)
                    known.add(fragment.id)
        self._seat(waiting)
        return Counted(tuple(fresh), tuple(repeated), tuple(dummies), unseated, spent, late)

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

    def _known(self, ids: Sequence[bytes]) -> set[bytes]:
        """Those of the ids that have a seat, or had one in a closed round."""
        found: set[bytes] = set()
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows = self._connection.execute(f"SELECT id FROM fragments WHERE id IN ({marks})", some)
            found.update(row["id"] for row in rows)
        return found

    def _is_same(self, fragment: OpenedFragment, before: OpenedFragment | None) -> bool:
        """Whether a fragment is the one that has its id already, sent again."""
        if before is not None:
            return before.position == fragment.position and np.array_equal(before.values, fragment.values)
        row = self._connection.execute(
            "SELECT units, type FROM seats WHERE round = ? AND position = ? AND ticket = ?",
            (fragment.round, fragment.position, self._ticket(fragment.id)),
        ).fetchone()
        return row is not None and (row["units"], row["type"]) == _stored(fragment.values)

    def _seat(self, fragments: Sequence[OpenedFragment]) -> None:
        if not fragments:
            return
        self._connection.executemany(
            "INSERT INTO fragments VALUES (?, ?, ?, ?, ?)",
            [(each.id, self._job, each.round, each.position, each.arrived_at) for each in fragments],
        )
        self._connection.executemany(
            "INSERT INTO seats VALUES (?, ?, ?, ?, ?, ?)",
            [
                (each.round, each.position, self._ticket(each.id), each.id, *_stored(each.values))
                for each in fragments
            ],
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


def _stored(values: NDArray[np.int64]) -> tuple[bytes, str]:
    """Values in the narrowest type that holds them, mostly one byte each, and the type."""
    largest = int(np.abs(values).max(initial=0))
    kind = next(name for name, bits in _TYPES.items() if largest < 1 << bits)
    return values.astype(kind).tobytes(), kind
