"""The agent's durable state in one database, so that one commit covers all of it.

``ledger.db`` holds the ledger and the spool together: a charge and its fragments
become durable in the same transaction, or neither does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agent.charges import Budget, Charge
from agent.ledger import Ledger, create_ledger
from agent.spool import Spool, SpooledFragment, create_spool
from dpagent.errors import DamagedDatabaseError, LedgerError
from dpagent.storage import StateDirectory, disk_errors, open_database, transaction


def _create_notes(connection: sqlite3.Connection) -> None:
    connection.execute(
        """CREATE TABLE declined (
            job TEXT NOT NULL, round INTEGER NOT NULL, reason TEXT NOT NULL, declined_at REAL NOT NULL,
            PRIMARY KEY (job, reason)
        ) STRICT"""
    )
    connection.execute("CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT")


class AgentState:
    """The agent's state directory, opened and locked.

    Args:
        path: The directory.
        dataset: The ledger's name for the device's records.
        budget: Their lifetime budget, from the device's own configuration.

    Raises:
        StateInUseError: Another agent uses it.
        StorageError: It cannot be used.
        LedgerError: The ledger does not verify.
    """

    def __init__(self, path: Path, dataset: str, budget: Budget) -> None:
        self._directory = StateDirectory(path)
        try:
            self.file = path / "ledger.db"
            self._head_file = path / "ledger.head"
            try:
                self._open(dataset, budget)
            except DamagedDatabaseError as error:
                raise LedgerError(f"{error} Without its ledger the device publishes nothing.") from error
        except BaseException:
            self._directory.close()
            raise

    def _open(self, dataset: str, budget: Budget) -> None:
        self.connection = open_database(self.file, [create_ledger, create_spool, _create_notes])
        with disk_errors(self.file):
            self.ledger = Ledger(self.connection, self._head_file)
            self.spool = Spool(self.connection)
            with transaction(self.connection):
                self.ledger.set_budget(dataset, budget)
        self.ledger.save_head()

    def close(self) -> None:
        """Close the database and release the directory."""
        self.connection.close()
        self._directory.close()

    def charge_and_spool(self, charge: Charge, fragments: Iterable[SpooledFragment]) -> None:
        """Charge for an update and spool its fragments, in one transaction. Only then may a byte leave.

        Raises:
            StorageError: Neither the charge nor the fragments are durable; or, if only
                ``ledger.head`` could not be written, both are.
        """
        try:
            with disk_errors(self.file), transaction(self.connection):
                self.ledger.charge(charge)
                self.spool.put(charge.job, charge.round, fragments)
        except BaseException:
            # The transaction was rolled back: read the ledger from disk again.
            self.ledger = Ledger(self.connection, self._head_file)
            raise
        self.ledger.save_head()

    def mark_sent(self, resend_at: Mapping[bytes, float], now: float) -> None:
        """Note published fragments, with the resend time of each by digest.

        Not durable: waiting for the disk would delay the next fragment, and bursts of fragments
        could be distinguished from those of other devices. If a note is lost, a fragment is sent
        twice and counted once.
        """
        with disk_errors(self.file), transaction(self.connection, durable=False):
            for digest, again_at in resend_at.items():
                self.spool.mark_sent(digest, now, again_at)

    def mark_counted(self, digests: Sequence[bytes]) -> int:
        """Drop the fragments in a receipt; return the number of ours.

        Not durable, for the same reason: a forgotten fragment is sent and receipted again.
        """
        with disk_errors(self.file), transaction(self.connection, durable=False):
            return self.spool.mark_counted(digests)

    def reschedule(self, times: Iterable[tuple[float, bytes]]) -> None:
        """Give pending fragments new times."""
        with disk_errors(self.file), transaction(self.connection):
            self.spool.reschedule(times)

    def expire_other_rounds(self, job: str | None, round_number: int | None) -> int:
        """Give up the fragments of all other rounds; return their number."""
        with disk_errors(self.file), transaction(self.connection):
            return self.spool.expire(except_job=job, except_round=round_number)

    def forget_other_jobs(self, job: str) -> None:
        """Drop the spool's rows of other jobs; the ledger keeps all of its entries."""
        with disk_errors(self.file), transaction(self.connection):
            self.spool.forget_other_jobs(job)

    def note_declined(self, job: str, round_number: int, reason: str, now: float) -> None:
        """Keep why a plan was declined, once a job and reason."""
        with disk_errors(self.file), transaction(self.connection):
            self.connection.execute(
                "INSERT OR IGNORE INTO declined VALUES (?, ?, ?, ?)", (job, round_number, reason, now)
            )

    def add_to_counters(self, **amounts: int) -> None:
        """Add to the operator's running totals (bytes up and down, rejections)."""
        changed = {name: amount for name, amount in amounts.items() if amount}
        if not changed:
            return
        with disk_errors(self.file), transaction(self.connection):
            self.connection.executemany(
                "INSERT INTO counters VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                list(changed.items()),
            )
