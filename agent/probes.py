"""Probes: messages by which a device learns that what it publishes arrives. Nothing depends on their content.

A probe is made of its plan alone, without a token or data, and has the length of any fragment. A device that
may ask for tokens goes on to its next round by the receipt of a probe, whether or not this one has some
(``docs/decisions/2026-11-26-probes.md``). The coordinator knows by name who goes on, and chooses what gets a
receipt: so it learns whose a probe is, and no more. When a probe leaves follows from when its round came up,
and not from the device's grid, on which its fragments leave.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agent.spool import SpooledFragment
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.tokens import token_bytes

_KEPT: Final = 64
"""Of rounds that are over; a coordinator can announce any number of them. A receipt of one may still come."""


def probe_for(plan: Plan, position: int = 0) -> SpooledFragment:
    """A probe with a fresh random id. The zeros that it lacks are added when it leaves."""
    payload = bytes(token_bytes(plan)) + Fragment.PROBE
    return SpooledFragment.of(Fragment(plan.round, position, os.urandom(16), payload))


def create_probes(connection: sqlite3.Connection) -> None:
    """Migration: the table of probes. One without a message leaves no more."""
    connection.execute(
        """CREATE TABLE probes (
            number INTEGER PRIMARY KEY,
            digest BLOB NOT NULL UNIQUE,
            job TEXT NOT NULL,
            round INTEGER NOT NULL,
            message BLOB,
            is_counted INTEGER NOT NULL DEFAULT 0
        ) STRICT"""
    )


class Probes:
    """The probes of an open database. What changes them runs inside a transaction, but for their due times,
    which are in memory as those of fragments are.

    Args:
        connection: a database with :func:`create_probes` applied.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._due_at: dict[bytes, float] = {}

    def put(self, job: str, number: int, probes: Iterable[SpooledFragment]) -> None:
        """Add probes of a round. Those of all others leave no more."""
        self._connection.execute(
            "UPDATE probes SET message = NULL WHERE NOT (job = ? AND round = ?)", (job, number)
        )
        self._connection.executemany(
            "INSERT INTO probes (digest, job, round, message) VALUES (?, ?, ?, ?)",
            [(each.digest, job, number, each.message) for each in probes],
        )
        self._connection.execute(
            "DELETE FROM probes WHERE message IS NULL AND number <= (SELECT max(number) FROM probes) - ?",
            (_KEPT,),
        )

    def are_there(self, job: str, number: int) -> bool:
        """Whether a round has probes that leave, or one that has a receipt."""
        row = self._connection.execute(
            "SELECT 1 FROM probes WHERE job = ? AND round = ? AND (message IS NOT NULL OR is_counted)",
            (job, number),
        ).fetchone()
        return row is not None

    def next_due_at(self) -> float | None:
        """Due time (monotonic seconds) of the next probe of the round whose times were drawn last."""
        return min(self._due_at.values(), default=None)

    def due(self, until: float, limit: int) -> dict[bytes, float]:
        """Due times of up to ``limit`` probes of that round, by digest, the earliest first."""
        found: dict[bytes, float] = {}
        for due_at, digest in sorted((at, digest) for digest, at in self._due_at.items() if at <= until):
            if len(found) == limit:
                break
            if self.message(digest) is None:  # It has a receipt, or another round has come.
                del self._due_at[digest]
            else:
                found[digest] = due_at
        return found

    def pending(self, job: str, number: int) -> list[bytes]:
        """Digests of a round's probes that leave."""
        rows = self._connection.execute(
            "SELECT digest FROM probes WHERE job = ? AND round = ? AND message IS NOT NULL", (job, number)
        )
        return [row["digest"] for row in rows]

    def draw_times(self, due_at: Mapping[bytes, float]) -> None:
        """Let probes leave at these times (monotonic seconds), by digest, and no others."""
        self._due_at = dict(due_at)

    def mark_sent(self, resend_at: Mapping[bytes, float]) -> None:
        """Note that probes were published; without a receipt they leave again at these times, by digest."""
        self._due_at.update(resend_at)

    def message(self, digest: bytes) -> bytes | None:
        """The message of a pending probe, by its digest."""
        row = self._connection.execute(
            "SELECT message FROM probes WHERE digest = ? AND NOT is_counted", (digest,)
        ).fetchone()
        return None if row is None else row["message"]

    def known(self, digests: Iterable[bytes]) -> list[bytes]:
        """Which of these are digests of probes without a receipt."""
        rows = self._connection.execute("SELECT digest FROM probes WHERE NOT is_counted")
        known = {row[0] for row in rows}
        return [digest for digest in digests if digest in known]

    def mark_counted(self, digests: Sequence[bytes]) -> int:
        """Note those that have a receipt, also of a round that is over; return the number of ours. Others of
        its round leave no more."""
        ours = self._connection.executemany(
            "UPDATE probes SET is_counted = 1 WHERE digest = ? AND NOT is_counted",
            [(digest,) for digest in self.known(digests)],
        ).rowcount
        if ours:
            self._connection.execute(
                "UPDATE probes SET message = NULL WHERE (job, round) IN"
                " (SELECT job, round FROM probes WHERE is_counted)"
            )
        return max(0, ours)

    def end_job(self, job: str) -> None:
        """Let those of a job leave no more: it is over, and nobody is left to give them a receipt."""
        self._connection.execute("UPDATE probes SET message = NULL WHERE job = ?", (job,))

    def withdraw(self) -> None:
        """Let none leave any more, in a copy that is kept elsewhere."""
        self._connection.execute("UPDATE probes SET message = NULL")
