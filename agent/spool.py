"""The spool: fragments on disk until a receipt confirms that they are counted.

A fragment is sealed each time that it leaves, so that the broker cannot tell a resend from another fragment.

A fragment is ``waiting`` until it is first published, then ``sent`` until a receipt
(``counted``) or the end of its round (``expired``). Its bytes are dropped then; its row
remains for the statistics until another job begins, or until there are too many. ``first_sent_at`` is a
Unix time. Due times are in memory alone, which spares the disk: they use the monotonic clock, which setting
the board's clock does not change, and are drawn again after a start.
"""

from __future__ import annotations

import math
import random
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dpagent.database_file import damaged, database_errors
from dpagent.protocol.codec import decode, encode
from dpagent.protocol.messages import Fragment
from dpagent.protocol.receipts import receipt_digest, receipt_place

UNCOUNTED: Final = "fragments.state != 'counted'"
"""A query by digest or by round says it in these words: else SQLite does not use the index."""
_PENDING: Final = f"({UNCOUNTED} AND fragments.state != 'expired')"
SETTLED_KEPT: Final = 8_192
"""Rows of fragments that are counted or expired: some 2 MB. A plan may ask for as many fragments as an
update has coordinates, in each of thousands of rounds."""


@dataclass(frozen=True, slots=True)
class SpooledFragment:
    """A fragment to publish at ``due_at`` or soon after.

    Attributes:
        digest: of its id, as receipts name it.
        message: the encoded fragment, not sealed.
        due_at: monotonic seconds; None while its time is not drawn.
        lets_go_on: whether a receipt of it lets the device go on to its next round; see :mod:`agent.probes`.
    """

    digest: bytes
    message: bytes
    due_at: float | None = None
    lets_go_on: bool = False

    @property
    def receipt_place(self) -> str:
        """Where its receipt goes, if it has a topic of its own."""
        return receipt_place(decode(self.message, Fragment).id)

    @classmethod
    def of(cls, fragment: Fragment, *, lets_go_on: bool = False) -> SpooledFragment:
        """A fragment as it is spooled; its time is drawn once it is on disk."""
        return cls(receipt_digest(fragment.id), encode(fragment), lets_go_on=lets_go_on)


def create_spool(connection: sqlite3.Connection) -> None:
    """Migration: the tables of fragments and of their messages.

    They are two, because a row is written again when its fragment is sent and when it is counted, and a
    message is large. Rows stand in the order in which they came, so that those of a round share few pages.
    Digests are random: an index of all of them would have a page written for each fragment. So the indexes
    have no fragment that is counted, which is nearly all of them. Messages are no foreign keys: SQLite then
    drops all at once, without a look at any of them, which would write the pages of most once more.
    """
    connection.execute(
        """CREATE TABLE fragments (
            number INTEGER PRIMARY KEY,
            digest BLOB NOT NULL,
            job TEXT NOT NULL,
            round INTEGER NOT NULL,
            state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'sent', 'counted', 'expired')),
            first_sent_at REAL,
            lets_go_on INTEGER NOT NULL
        ) STRICT"""
    )
    uncounted = UNCOUNTED.removeprefix("fragments.")
    connection.execute(f"CREATE UNIQUE INDEX by_digest ON fragments (digest) WHERE {uncounted}")
    connection.execute(f"CREATE INDEX by_round ON fragments (job, round) WHERE {uncounted}")
    connection.execute(
        """CREATE TABLE messages (
            number INTEGER PRIMARY KEY,
            message BLOB NOT NULL
        ) STRICT"""
    )
    connection.execute(
        """CREATE TRIGGER forgotten AFTER DELETE ON fragments
        BEGIN DELETE FROM messages WHERE number = OLD.number; END"""
    )


_TIMES: Final = (
    "CREATE TEMP TABLE IF NOT EXISTS times (digest BLOB PRIMARY KEY, due_at REAL NOT NULL) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS temp.by_time ON times (due_at)",
    """CREATE TEMP TRIGGER IF NOT EXISTS timeless
        AFTER UPDATE OF state ON fragments WHEN NEW.state IN ('counted', 'expired')
        BEGIN DELETE FROM times WHERE digest = NEW.digest; END""",
    """CREATE TEMP TRIGGER IF NOT EXISTS gone AFTER DELETE ON fragments
        BEGIN DELETE FROM times WHERE digest = OLD.digest; END""",
)


def require_messages(connection: sqlite3.Connection, path: Path) -> None:
    """Find rows that a page which was not written has left without each other.

    Raises:
        DamagedDatabaseError: There is a message without its fragment, or a fragment that is to leave without
            its message.
        StorageError: The database cannot be read.
    """
    pending = f"SELECT number FROM fragments WHERE {_PENDING}"
    with database_errors(path):
        alone = connection.execute(
            f"SELECT number FROM messages WHERE number NOT IN ({pending})"
            f" UNION ALL {pending} AND number NOT IN (SELECT number FROM messages) LIMIT 1"
        ).fetchone()
    if alone is not None:
        raise damaged(path, f"of fragment {alone[0]} and its message one is missing")


class Spool:
    """The fragments of an open database.

    Before a transaction ends, :meth:`drop_settled` has to be called.

    Args:
        connection: A database with :func:`create_spool` applied.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._settles = False
        self._known: set[bytes] | None = None
        """Digests of fragments that are not counted; None: they have to be read again."""
        for statement in _TIMES:
            connection.execute(statement)

    def put(self, job: str, round_number: int, fragments: Iterable[SpooledFragment]) -> None:
        """Add fragments. Must run inside the transaction that notes the round as spooled.

        If very many fragments of earlier rounds are settled, their rows go.
        """
        fragments, self._known = list(fragments), None
        self._connection.executemany(
            "INSERT INTO fragments (digest, job, round, lets_go_on) VALUES (?, ?, ?, ?)",
            [(each.digest, job, round_number, each.lets_go_on) for each in fragments],
        )
        self._connection.executemany(
            f"INSERT INTO messages SELECT number, ? FROM fragments WHERE digest = ? AND {UNCOUNTED}",
            [(each.message, each.digest) for each in fragments],
        )
        self.reschedule((each.due_at, each.digest) for each in fragments)
        self._connection.execute(
            f"DELETE FROM fragments WHERE NOT {_PENDING}"
            f" AND (SELECT count(*) FROM fragments WHERE NOT {_PENDING}) > ?",
            (SETTLED_KEPT,),
        )

    def next_due_at(self) -> float | None:
        """Due time of the next fragment."""
        due_at: float | None = self._connection.execute("SELECT min(due_at) FROM times").fetchone()[0]
        return due_at

    def due(self, until: float, limit: int) -> dict[bytes, float]:
        """Due times of up to ``limit`` fragments, by digest, the earliest first."""
        rows = self._connection.execute(
            "SELECT digest, due_at FROM times WHERE due_at <= ? ORDER BY due_at LIMIT ?", (until, limit)
        )
        return dict(rows.fetchall())

    def next_ones(self, now: float, limit: int, kept: Collection[bytes]) -> dict[bytes, float]:
        """Due times of up to ``limit`` fragments that leave next, by digest, the earliest first.

        Where more are due by now (monotonic), they are those that are ``kept``, and others at random: the
        order in which they came to be due would tell whose they are; see :mod:`agent.departures`.
        """
        found = self.due(math.inf, limit)
        if len(found) < limit or max(found.values(), default=math.inf) > now:
            return found
        passed = self.due(now, -1)
        chosen = [digest for digest in kept if digest in passed]
        others = [digest for digest in passed if digest not in kept]
        chosen += random.SystemRandom().sample(others, min(len(others), limit - len(chosen)))
        return {digest: passed[digest] for digest in sorted(chosen, key=passed.__getitem__)}

    def pending(self) -> dict[bytes, tuple[str, int]]:
        """Job and round of all fragments that are neither counted nor expired, by digest."""
        rows = self._connection.execute(f"SELECT digest, job, round FROM fragments WHERE {_PENDING}")
        return {digest: (job, number) for digest, job, number in rows}

    def reschedule(self, times: Iterable[tuple[float | None, bytes]]) -> None:
        """Set ``due_at`` of pending fragments by ``(due_at, digest)``; None takes their time away."""
        for due_at, digest in times:
            if due_at is None:
                self._connection.execute("DELETE FROM times WHERE digest = ?", (digest,))
            else:
                self._connection.execute("REPLACE INTO times VALUES (?, ?)", (digest, due_at))

    def mark_sent(self, digest: bytes, now: float, resend_at: float) -> None:
        """Note that a fragment was published; without a receipt it is resent at ``resend_at``.

        A resend writes nothing: who withholds receipts has a board's disk bear no more for it.
        """
        self._connection.execute(
            "UPDATE fragments SET state = 'sent', first_sent_at = ?"
            f" WHERE digest = ? AND {UNCOUNTED} AND state = 'waiting'",
            (now, digest),
        )
        self._connection.execute("UPDATE times SET due_at = ? WHERE digest = ?", (resend_at, digest))

    def message(self, digest: bytes) -> bytes | None:
        """The message of a pending fragment, by its digest."""
        row = self._connection.execute(
            f"SELECT message FROM fragments JOIN messages USING (number) WHERE digest = ? AND {_PENDING}",
            (digest,),
        ).fetchone()
        return None if row is None else row[0]

    def mark_counted(self, digests: Sequence[bytes]) -> int:
        """Drop the fragments in a receipt, also of a closed round; return the number of ours."""
        ours = self.known(digests)
        if not ours:
            return 0
        self._known, self._settles = None, True
        cursor = self._connection.executemany(
            f"UPDATE fragments SET state = 'counted' WHERE digest = ? AND {UNCOUNTED}",
            [(digest,) for digest in ours],
        )
        return cursor.rowcount

    def known(self, digests: Iterable[bytes]) -> list[bytes]:
        """Which of these are digests of fragments that are not counted, in this order. Most receipts are of
        other devices: the database is not asked for each of them."""
        if self._known is None:
            rows = self._connection.execute(f"SELECT digest FROM fragments WHERE {UNCOUNTED}")
            self._known = {row[0] for row in rows}
        return [digest for digest in digests if digest in self._known]

    def forget_other_jobs(self, job: str) -> None:
        """Drop the rows of all other jobs, except of pending fragments."""
        self._known = None
        self._connection.execute(f"DELETE FROM fragments WHERE job != ? AND NOT {_PENDING}", (job,))

    def expire_others(self, job: str, round_number: int) -> int:
        """Give up all pending fragments of other rounds; return their number."""
        return self._expire("NOT (job = ? AND round = ?)", (job, round_number))

    def expire_earlier(self, job: str, round_number: int) -> int:
        """Give up all pending fragments of a job's earlier rounds; return their number, without dummies.

        Must run when the rounds themselves have been given up.
        """
        earlier = "job = ? AND round < ?"
        given_up = "(job, round) IN (SELECT job, round FROM rounds WHERE state = 'expired')"
        number = self._expire(f"{earlier} AND {given_up}", (job, round_number))
        self._expire(earlier, (job, round_number))
        return number

    def expire_job(self, job: str) -> int:
        """Give up all pending fragments of a job; return their number."""
        return self._expire("job = ?", (job,))

    def expire_all(self) -> int:
        """Give up all pending fragments; return their number."""
        return self._expire("true", ())

    def empty(self) -> None:
        """Drop all rows, in a copy that is kept elsewhere."""
        self._known = None
        self._connection.execute("DELETE FROM messages")
        self._connection.execute("DELETE FROM fragments")

    def drop_settled(self) -> None:
        """Drop the messages of fragments that are counted or expired, where some came to be so."""
        if not self._settles:
            return
        pending = f"SELECT number FROM fragments WHERE {_PENDING}"
        if self._connection.execute(f"SELECT EXISTS ({pending})").fetchone()[0]:
            self._connection.execute(f"DELETE FROM messages WHERE number NOT IN ({pending})")
        else:
            self._connection.execute("DELETE FROM messages")
        self._settles = False

    def _expire(self, which: str, values: tuple[str | int, ...]) -> int:
        cursor = self._connection.execute(
            f"UPDATE fragments SET state = 'expired' WHERE {_PENDING} AND {which}",
            values,
        )
        self._settles |= cursor.rowcount > 0
        return cursor.rowcount
