"""The agent's durable state in one database, so that one commit covers all of it.

``ledger.db`` holds the ledger, the states of the rounds and the spool together: a charge and the state that
follows from it become durable in the same transaction, or neither does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agent.charges import Budget, Charge
from agent.ledger import Ledger, create_ledger
from agent.rounds import KnownRound, Rounds, RoundState, create_rounds
from agent.spool import Spool, SpooledFragment, create_spool
from dpagent import faults
from dpagent.errors import DamagedDatabaseError, LedgerError
from dpagent.faults import FaultPoint
from dpagent.storage import StateDirectory, disk_errors, open_database, transaction


def _create_counters(connection: sqlite3.Connection) -> None:
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
        self.connection = open_database(
            self.file, [create_ledger, create_spool, create_rounds, _create_counters]
        )
        with disk_errors(self.file):
            self.ledger = Ledger(self.connection, self._head_file)
            self.spool = Spool(self.connection)
            self._rounds = Rounds(self.connection)
            with transaction(self.connection):
                self.ledger.set_budget(dataset, budget)
        self.ledger.save_head()

    def close(self) -> None:
        """Close the database and release the directory."""
        self.connection.close()
        self._directory.close()

    def round(self, job: str, number: int) -> KnownRound | None:
        """A round on record, or None."""
        with disk_errors(self.file):
            return self._rounds.find(job, number)

    def latest_round(self, job: str) -> int:
        """The greatest number of a job's rounds on record; 0 if there is none."""
        with disk_errors(self.file):
            return self._rounds.latest(job)

    def offer(self, job: str, number: int, plan: bytes, now: float) -> None:
        """A plan with the SHA-256 ``plan`` has arrived, at the Unix time ``now``."""
        with disk_errors(self.file), transaction(self.connection):
            self._rounds.offer(job, number, plan, now)
        faults.reached(FaultPoint.AGENT_OFFERED)

    def decline(self, job: str, number: int, reason: str, now: float) -> None:
        """The device does not take part in a round."""
        with disk_errors(self.file), transaction(self.connection):
            self._rounds.move(job, number, RoundState.DECLINED, now, reason)

    def charge(self, charge: Charge, now: float) -> None:
        """Charge for a round. Only then may a record be read for it.

        Raises:
            StorageError: The charge is not durable; or, if only ``ledger.head`` could not be written, it is.
        """
        faults.reached(FaultPoint.AGENT_ADMITTED)
        try:
            with disk_errors(self.file), transaction(self.connection):
                self.ledger.charge(charge)
                self._rounds.move(charge.job, charge.round, RoundState.CHARGED, now)
                faults.reached(FaultPoint.AGENT_CHARGE_WRITTEN)
        except BaseException:
            # The transaction was rolled back: read the ledger from disk again.
            self.ledger = Ledger(self.connection, self._head_file)
            raise
        faults.reached(FaultPoint.AGENT_CHARGED)
        self.ledger.save_head()
        faults.reached(FaultPoint.AGENT_HEAD_SAVED)

    def spool_round(
        self, job: str, number: int, fragments: Iterable[SpooledFragment], now: float, failure: str | None
    ) -> None:
        """Spool the fragments of a charged round. Only then may a byte leave.

        Args:
            job: its job, in hexadecimal.
            number: its number.
            fragments: all of its update.
            now: Unix time.
            failure: why no record counts in it, if none does.
        """
        faults.reached(FaultPoint.AGENT_TRAINED)
        with disk_errors(self.file), transaction(self.connection):
            self.spool.put(job, number, fragments)
            self._rounds.move(job, number, RoundState.SPOOLED, now, failure)
            faults.reached(FaultPoint.AGENT_SPOOL_WRITTEN)
        faults.reached(FaultPoint.AGENT_SPOOLED)

    def mark_sent(self, resend_at: Mapping[bytes, float], now: float) -> None:
        """Note published fragments, with the resend time of each by digest.

        Not durable: waiting for the disk would delay the next fragment, and bursts of fragments
        could be distinguished from those of other devices. If a note is lost, a fragment is sent
        twice and counted once.
        """
        with disk_errors(self.file), transaction(self.connection, durable=False):
            for digest, again_at in resend_at.items():
                self.spool.mark_sent(digest, now, again_at)
            self._rounds.follow_fragments(now)
            faults.reached(FaultPoint.AGENT_SENT_WRITTEN)
        faults.reached(FaultPoint.AGENT_SENT_NOTED)

    def mark_counted(self, digests: Sequence[bytes], now: float) -> int:
        """Drop the fragments in a receipt; return the number of ours.

        Not durable, for the same reason: a forgotten fragment is sent and receipted again.
        """
        faults.reached(FaultPoint.AGENT_RECEIPT_ARRIVED)
        with disk_errors(self.file), transaction(self.connection, durable=False):
            counted = self.spool.mark_counted(digests)
            self._rounds.follow_fragments(now)
            faults.reached(FaultPoint.AGENT_RECEIPT_WRITTEN)
        faults.reached(FaultPoint.AGENT_RECEIPTED)
        return counted

    def reschedule(self, times: Iterable[tuple[float, bytes]]) -> None:
        """Give pending fragments new times."""
        with disk_errors(self.file), transaction(self.connection):
            self.spool.reschedule(times)
        faults.reached(FaultPoint.AGENT_TIMES_DRAWN)

    def expire_other_rounds(self, job: str, round_number: int, now: float) -> int:
        """Give up all other rounds and their fragments; return the number of fragments."""
        with disk_errors(self.file), transaction(self.connection):
            self._rounds.expire_others(job, round_number, now)
            expired = self.spool.expire_others(job, round_number)
        faults.reached(FaultPoint.AGENT_OTHERS_EXPIRED)
        return expired

    def expire_job(self, job: str, now: float) -> None:
        """Give up the rounds of a job and their fragments."""
        with disk_errors(self.file), transaction(self.connection):
            self._rounds.expire_job(job, now)
            self.spool.expire_job(job)

    def forget_other_jobs(self, job: str) -> None:
        """Drop the spool's rows of other jobs; the ledger keeps all of its entries."""
        with disk_errors(self.file), transaction(self.connection):
            self.spool.forget_other_jobs(job)

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
