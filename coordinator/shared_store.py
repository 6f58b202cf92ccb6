"""What a job's store is where several programs share it: one runs rounds, workers count.

A worker's batch is one transaction: ids, partial sums, totals and receipts. It is beside those of other
workers, and before or after whatever the program that runs rounds does: a round that is no longer counted
takes nothing more. Receipts for all devices are left in the database for that program, which alone can sign
them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from coordinator.database.interface import Database, Reader
from coordinator.seats import Counted, OpenedFragment
from coordinator.store import Store
from dpagent.errors import ConfigurationError, NotReadyError, TransactionConflictError
from dpagent.protocol.receipts import receipt_digest

GONE_S: Final = 30.0
"""A worker that was not seen for so long is gone."""
_REMEMBERED_S: Final = 7 * 86_400.0
"""How long those that have ended are on record."""
_RECEIPTS_AT_ONCE: Final = 64
_TRIES: Final = 8
_PAUSE_S: Final = 0.05
_OPEN: Final = "closed_at IS NULL AND given_up_at IS NULL AND counted_at IS NULL"


class SharedStore(Store):
    """A job's store, for a worker.

    Args:
        database: of the coordinator.
        job: the number of the job in the queue.
        worker: its number.
        leaves_receipts: whether receipts are left for the coordinator to publish.
    """

    def __init__(self, database: Database, job: int, worker: int, *, leaves_receipts: bool = True) -> None:
        super().__init__(database, job, worker)
        self._worker, self._leaves_receipts = worker, leaves_receipts

    def count(
        self,
        fragments: Sequence[OpenedFragment],
        open_round: int,
        *,
        seats: int | None,
        keeps_values: bool = True,
    ) -> Counted:
        """See :meth:`Store.count`. What another worker's transaction undoes is tried again."""
        for number in range(_TRIES):
            try:
                return super().count(fragments, open_round, seats=seats, keeps_values=keeps_values)
            except TransactionConflictError:
                if number == _TRIES - 1:
                    raise
                time.sleep(_PAUSE_S * (number + 1))
        raise AssertionError

    def _counting(self) -> AbstractContextManager[None]:
        return self.database.transaction(shared=True)

    def _counts_in(self, number: int) -> bool:
        row = self.database.execute(
            f"SELECT 1 FROM rounds WHERE job = ? AND number = ? AND {_OPEN}", (self.number, number)
        ).fetchone()
        return row is not None

    def _leave(self, counted: Counted) -> None:
        if self._leaves_receipts and (receipted := counted.receipted):
            self.database.execute(
                "INSERT INTO receipts (digests) VALUES (?)", (b"".join(map(receipt_digest, receipted)),)
            )
        self.database.execute(
            "UPDATE workers SET fragments = fragments + ? WHERE number = ?",
            (len(counted.fresh), self._worker),
        )


@dataclass(frozen=True, slots=True)
class CountedRound:
    """The round in which fragments count, as workers see it."""

    job: int
    number: int
    devices: int
    """That are expected."""
    plan: bytes
    token_keys: bytes | None


class Receipts:
    """Receipts that workers have left, until they are published.

    Args:
        database: of the coordinator.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def waiting(self) -> list[tuple[int, bytes]]:
        """The oldest of them: a number, and digests one after the other."""
        rows = self._database.execute(
            "SELECT number, digests FROM receipts ORDER BY number LIMIT ?", (_RECEIPTS_AT_ONCE,)
        )
        return [(row["number"], bytes(row["digests"])) for row in rows]

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop those that are published. Before, a crash has them published again, which harms nobody."""
        with self._database.transaction(shared=True):
            self._database.execute_many(
                "DELETE FROM receipts WHERE number = ?", [(number,) for number in numbers]
            )


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker, as the database knows it. Times are Unix times."""

    number: int
    name: str
    version: str
    began_at: float
    seen_at: float
    fragments: int
    """That have a seat by it, of all rounds."""
    ended_at: float | None = None
    """When it ended, or was given up after :data:`GONE_S` unseen."""


class Workers:
    """The workers, in the database that they share.

    Args:
        database: of the coordinator.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def register(self, name: str, version: str) -> int:
        """Note that a worker begins; its number."""
        now = self._database.now()
        with self._database.transaction(shared=True):
            row = self._database.execute(
                "INSERT INTO workers (name, version, began_at, seen_at) VALUES (?, ?, ?, ?) RETURNING number",
                (name, version, now, now),
            ).fetchone()
        return int(row["number"])

    def see(self, number: int) -> None:
        """Note that a worker goes on."""
        with self._database.transaction(shared=True):
            self._database.execute(
                "UPDATE workers SET seen_at = ?, ended_at = NULL WHERE number = ?",
                (self._database.now(), number),
            )

    def end(self, number: int) -> None:
        """Note that a worker has ended."""
        with self._database.transaction(shared=True):
            self._database.execute(
                "UPDATE workers SET ended_at = ? WHERE number = ?", (self._database.now(), number)
            )

    def take_leave(self) -> list[WorkerRecord]:
        """Note the end of those that were not seen for long, which are returned."""
        now = self._database.now()
        with self._database.transaction(shared=True):
            rows = self._database.execute(
                "UPDATE workers SET ended_at = ? WHERE ended_at IS NULL AND seen_at < ? "
                "RETURNING number, name, version, began_at, seen_at, fragments",
                (now, now - GONE_S),
            ).fetchall()
            self._database.execute("DELETE FROM workers WHERE ended_at < ?", (now - _REMEMBERED_S,))
        return [WorkerRecord(*row) for row in rows]

    def round(self) -> CountedRound | None:
        """The round in which fragments count, if one is open."""
        row = self._database.execute(
            f"SELECT job, number, devices, plan, token_keys FROM rounds WHERE {_OPEN} AND plan IS NOT NULL"
        ).fetchone()
        return None if row is None else CountedRound(*row)

    def place(self) -> tuple[int, int, int] | None:
        """The job and the number of that round, and how many devices are expected: what a worker looks at
        again and again, to see whether :meth:`round` is another."""
        row = self._database.execute(
            f"SELECT job, number, devices FROM rounds WHERE {_OPEN} AND plan IS NOT NULL"
        ).fetchone()
        return None if row is None else (row["job"], row["number"], row["devices"])


def workers_at(database: Reader, *, seen_within_s: float = GONE_S) -> list[WorkerRecord]:
    """The workers that go on.

    Args:
        database: of the coordinator.
        seen_within_s: longer than :data:`GONE_S` for those that have ended, too, and were seen since.
    """
    which = "" if seen_within_s > GONE_S else "ended_at IS NULL AND "
    rows = database.execute(
        "SELECT number, name, version, began_at, seen_at, fragments, ended_at FROM workers "
        f"WHERE {which}seen_at >= ? ORDER BY number",
        (database.now() - seen_within_s,),
    )
    return [WorkerRecord(*row) for row in rows]


def claim(
    database: Database,
    fleet: str,
    signing_key: str,
    *,
    version: str,
    leader: str,
    sealing_key: bytes | None,
) -> None:
    """Note whose database this is, who leads, and what version workers have to be of.

    Args:
        database: that the caller leads.
        fleet: its name.
        signing_key: of the coordinator, public.
        version: of dpagent.
        leader: the caller, for a person.
        sealing_key: the secret, if workers are to have it from here.

    Raises:
        ConfigurationError: It is another coordinator's.
    """
    with database.transaction():
        row = database.execute("SELECT name, signing_key FROM fleet").fetchone()
        if row is not None and (row["name"], row["signing_key"]) != (fleet, signing_key):
            raise ConfigurationError(
                f"{database.name} is the store of fleet {row['name']!r} with coordinator key "
                f"{row['signing_key']}; this is fleet {fleet!r} with {signing_key}. Two coordinators "
                "cannot share it: give this one a database or schema of its own, or the keys_dir of the "
                "other."
            )
        database.execute("DELETE FROM fleet")
        database.execute(
            "INSERT INTO fleet VALUES (1, ?, ?, ?, ?, ?, ?)",
            (fleet, signing_key, version, leader, database.now(), sealing_key),
        )


def shared_sealing_key(database: Reader) -> bytes | None:
    """The secret of the sealing key, if the coordinator shares it."""
    row = database.execute("SELECT sealing_key FROM fleet").fetchone()
    return None if row is None or row["sealing_key"] is None else bytes(row["sealing_key"])


def require_same(database: Reader, fleet: str, version: str) -> None:
    """Refuse to work for another fleet, or beside a coordinator of another version.

    Raises:
        NotReadyError: No coordinator has begun yet.
        ConfigurationError: It is another fleet's, or the coordinator is of another version.
    """
    row = database.execute("SELECT name, version FROM fleet").fetchone()
    if row is None:
        raise NotReadyError(
            f"{database.name} has no coordinator yet: start `dpagent coordinator run`. Waiting for it."
        )
    if row["name"] != fleet:
        raise ConfigurationError(
            f"{database.name} is the store of fleet {row['name']!r}, and this is a worker of {fleet!r}. "
            "Check fleet and store.url."
        )
    if row["version"] != version:
        raise ConfigurationError(
            f"This worker is dpagent {version}, and the coordinator {row['version']}. Install the version "
            "of the coordinator: another one may read fragments otherwise."
        )
