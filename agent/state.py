"""The agent's durable state in one database, so that one commit covers all of it.

``ledger.db`` holds the ledger, the states of the rounds and the spool together: a charge and the state that
follows from it become durable in the same transaction, or neither does. The heads of the ledger follow each
commit (:mod:`agent.heads`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agent.charges import Budget, Charge
from agent.heads import LedgerFiles, SecondHead, read_head, read_second_head, save_head
from agent.ledger import Ledger, create_ledger, require_head, require_kept
from agent.rounds import KnownRound, Rounds, RoundState, create_rounds
from agent.spool import Spool, SpooledFragment, create_spool
from dpagent import faults
from dpagent.errors import DamagedDatabaseError, LedgerError
from dpagent.faults import FaultPoint
from dpagent.storage import StateDirectory, disk_errors, open_database, require_whole, transaction
from dpagent.wording import counted

RESTORED = "`dpagent budget restored`"
LOST = (
    f"If it cannot be had back, {RESTORED[:-1]} --write-off-all` gives up all that is left of the budget, "
    "because nothing shows any more how much was spent."
)


class BudgetRaisedError(LedgerError):
    """The configuration has a larger lifetime budget than the ledger."""


@contextmanager
def ledger_errors(database: Path) -> Iterator[None]:
    """As :func:`dpagent.storage.disk_errors`, of the file that has the ledger: damage of it does not pass.

    Raises:
        LedgerError: It is damaged.
        StorageError: It cannot be used now.
    """
    try:
        with disk_errors(database):
            yield
    except DamagedDatabaseError as error:
        raise LedgerError(
            f"{error} Then run {RESTORED}. Without its ledger the device publishes nothing."
        ) from error


def _create_counters(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT")


class StateDatabase:
    """The database of a state directory, opened and locked. It is created where there is none.

    All of it is read, and chain and prices of the ledger checked; :class:`AgentState` checks the heads.

    Args:
        files: The directory and the second head.

    Raises:
        StateInUseError: Another program uses it.
        StorageError: It cannot be used.
        LedgerError: The chain or a price is wrong, or the file is damaged.
    """

    def __init__(self, files: LedgerFiles) -> None:
        self._directory = StateDirectory(files.state_dir)
        self.files, self.file = files, files.database
        self._heads_are_current = False
        try:
            with ledger_errors(self.file):
                self.connection = open_database(
                    self.file, [create_ledger, create_spool, create_rounds, _create_counters]
                )
                require_whole(self.connection, self.file)
                self.ledger = Ledger(self.connection)
                self.spool = Spool(self.connection)
                self.rounds = Rounds(self.connection)
        except BaseException:
            self._directory.close()
            raise

    def close(self) -> None:
        """Close the database and release the directory."""
        self.connection.close()
        self._directory.close()

    @contextmanager
    def entry(self) -> Iterator[None]:
        """A transaction that appends to the ledger; the heads follow it.

        Raises:
            StorageError: The entry is not durable; or, if only a head could not be written, it is.
        """
        if not self._heads_are_current:
            # An earlier attempt failed: the second head must not lag by two.
            self.save_heads()
        self._heads_are_current = False
        try:
            with ledger_errors(self.file), transaction(self.connection):
                yield
        except BaseException:
            # The transaction was rolled back: read the ledger from disk again.
            self.ledger = Ledger(self.connection)
            raise
        faults.reached(FaultPoint.AGENT_CHARGED)
        self.save_heads()

    def save_heads(self) -> None:
        """Write both heads, after a commit: they may lag behind the chain but never lead it.

        Raises:
            StorageError: One cannot be written.
        """
        self._heads_are_current = False
        save_head(self.files.head, self.ledger.head)
        self.save_second_head()
        self._heads_are_current = True

    def save_second_head(self) -> None:
        """Write the second head alone, where the chain is as it was.

        Raises:
            StorageError: It cannot be written.
        """
        save_head(self.files.second_head, self.ledger.second_head(self.repeatable()))

    def repeatable(self) -> list[int]:
        """The charges whose rounds would be run again after a restart, by the number of their entry."""
        with ledger_errors(self.file):
            return self.ledger.charges_for(self.rounds.charged())

    def keeps(self, second: SecondHead) -> bool:
        """Whether this is the state whose second head that is, or a later one."""
        return second.is_reached_by(self.ledger.digests) and not second.knows_as_sent(self.repeatable())

    def require_kept(self, second: SecondHead) -> None:
        """Check that this is the state whose second head that is, or a later one.

        Raises:
            LedgerError: It is an older one, or another.
        """
        require_kept(self.ledger.digests, self.repeatable(), second, self.files.second_head)


class AgentState(StateDatabase):
    """The agent's state directory, opened and locked.

    Args:
        files: The directory and the second head.
        dataset: The ledger's name for the device's records.
        budget: Their lifetime budget, from the device's own configuration.

    Raises:
        StateInUseError: Another agent uses it.
        StorageError: It cannot be used.
        LedgerError: There is no ledger, it does not verify, or it is older than its second head.
        BudgetRaisedError: The budget is larger than the ledger's.
    """

    def __init__(self, files: LedgerFiles, dataset: str, budget: Budget) -> None:
        second = read_second_head(files.second_head)
        if not files.database.exists():
            raise no_ledger(files, second)
        super().__init__(files)
        try:
            self._take_over(second, dataset, budget)
        except BaseException:
            self.close()
            raise

    def _take_over(self, second: SecondHead | None, dataset: str, budget: Budget) -> None:
        require_head(self.ledger.digests, read_head(self.files.head), self.files.head)
        if not self.ledger.digests:
            raise no_ledger(self.files, second)
        if second is None:
            raise no_second_head(self.files)
        self.require_kept(second)
        # A crash may have left the heads one entry behind; and what cannot be written should fail here.
        self.save_heads()
        known = self.ledger.budget(dataset) if dataset in self.ledger.datasets else None
        if known is None or budget.epsilon > known.epsilon or budget.delta > known.delta:
            raise BudgetRaisedError(_raised(self.ledger, dataset, known, budget))
        if budget != known:
            with self.entry():
                self.ledger.set_budget(dataset, budget)

    def round(self, job: str, number: int) -> KnownRound | None:
        """A round on record, or None."""
        with ledger_errors(self.file):
            return self.rounds.find(job, number)

    def latest_round(self, job: str) -> int:
        """The greatest number of a job's rounds on record; 0 if there is none."""
        with ledger_errors(self.file):
            return self.rounds.latest(job)

    def offer(self, job: str, number: int, plan: bytes, now: float) -> None:
        """A plan with the SHA-256 ``plan`` has arrived, at the Unix time ``now``."""
        with ledger_errors(self.file), transaction(self.connection):
            self.rounds.offer(job, number, plan, now)
        faults.reached(FaultPoint.AGENT_OFFERED)

    def decline(
        self, job: str, number: int, reason: str, now: float, dummies: Iterable[SpooledFragment] = ()
    ) -> None:
        """The device does not take part in a round; dummies leave in place of its fragments."""
        with ledger_errors(self.file), transaction(self.connection):
            self.rounds.forget_dummies_of_others(job, number)
            self.rounds.move(job, number, RoundState.DECLINED, now, reason)
            self.spool.put(job, number, dummies)

    def give_up(self, job: str, number: int, now: float, dummies: Iterable[SpooledFragment]) -> None:
        """The device runs a charged round no more, of which nothing has left; dummies leave in its place."""
        with ledger_errors(self.file), transaction(self.connection):
            self.rounds.move(job, number, RoundState.EXPIRED, now)
            self.spool.put(job, number, dummies)
        # From here on, an older copy of the state may not run the round.
        self.save_second_head()

    def charge(self, charge: Charge, now: float) -> None:
        """Charge for a round. Only then may a record be read for it.

        Raises:
            StorageError: The charge is not durable; or, if only a head could not be written, it is.
        """
        faults.reached(FaultPoint.AGENT_ADMITTED)
        with self.entry():
            self.ledger.charge(charge)
            self.rounds.move(charge.job, charge.round, RoundState.CHARGED, now)
            faults.reached(FaultPoint.AGENT_CHARGE_WRITTEN)
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
        with ledger_errors(self.file), transaction(self.connection):
            self.spool.put(job, number, fragments)
            self.rounds.move(job, number, RoundState.SPOOLED, now, failure)
            faults.reached(FaultPoint.AGENT_SPOOL_WRITTEN)
        faults.reached(FaultPoint.AGENT_SPOOLED)
        # From here on, an older copy of the state may not run the round again.
        self.save_second_head()

    def mark_sent(self, resend_at: Mapping[bytes, float], now: float) -> None:
        """Note published fragments, with the resend time of each by digest.

        Not durable: waiting for the disk would delay the next fragment, and bursts of fragments
        could be distinguished from those of other devices. If a note is lost, a fragment is sent
        twice and counted once.
        """
        with ledger_errors(self.file), transaction(self.connection, durable=False):
            for digest, again_at in resend_at.items():
                self.spool.mark_sent(digest, now, again_at)
            self.rounds.follow_fragments(now)
            faults.reached(FaultPoint.AGENT_SENT_WRITTEN)
        faults.reached(FaultPoint.AGENT_SENT_NOTED)

    def mark_counted(self, digests: Sequence[bytes], now: float) -> int:
        """Drop the fragments in a receipt; return the number of ours.

        Not durable, for the same reason: a forgotten fragment is sent and receipted again.
        """
        faults.reached(FaultPoint.AGENT_RECEIPT_ARRIVED)
        with ledger_errors(self.file), transaction(self.connection, durable=False):
            counted = self.spool.mark_counted(digests)
            self.rounds.follow_fragments(now)
            faults.reached(FaultPoint.AGENT_RECEIPT_WRITTEN)
        faults.reached(FaultPoint.AGENT_RECEIPTED)
        return counted

    def reschedule(self, times: Iterable[tuple[float, bytes]]) -> None:
        """Give pending fragments new times."""
        with ledger_errors(self.file), transaction(self.connection):
            self.spool.reschedule(times)
        faults.reached(FaultPoint.AGENT_TIMES_DRAWN)

    def expire_other_rounds(self, job: str, round_number: int, now: float) -> int:
        """Give up all other rounds and their fragments; return the number of fragments."""
        with ledger_errors(self.file), transaction(self.connection):
            self.rounds.expire_others(job, round_number, now)
            self.rounds.forget_dummies_of_others(job, round_number)
            expired = self.spool.expire_others(job, round_number)
        faults.reached(FaultPoint.AGENT_OTHERS_EXPIRED)
        return expired

    def expire_earlier_rounds(self, job: str, round_number: int, now: float) -> int:
        """Give up the earlier rounds of a job and their fragments; return the number of fragments."""
        with ledger_errors(self.file), transaction(self.connection):
            self.rounds.expire_earlier(job, round_number, now)
            self.rounds.forget_earlier_dummies(job, round_number)
            return self.spool.expire_earlier(job, round_number)

    def expire_job(self, job: str, now: float) -> None:
        """Give up the rounds of a job and their fragments."""
        with ledger_errors(self.file), transaction(self.connection):
            self.rounds.expire_job(job, now)
            self.spool.expire_job(job)

    def forget_other_jobs(self, job: str) -> None:
        """Drop the spool's rows of other jobs; the ledger keeps all of its entries."""
        with ledger_errors(self.file), transaction(self.connection):
            self.spool.forget_other_jobs(job)

    def add_to_counters(self, **amounts: int) -> None:
        """Add to the operator's running totals (bytes up and down, rejections)."""
        changed = {name: amount for name, amount in amounts.items() if amount}
        if not changed:
            return
        with ledger_errors(self.file), transaction(self.connection):
            self.connection.executemany(
                "INSERT INTO counters VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                list(changed.items()),
            )


def no_second_head(files: LedgerFiles) -> LedgerError:
    """An error for a second head that is missing, with the choices."""
    return LedgerError(
        f"The second head of the ledger, {files.second_head}, is missing: without it an older copy of "
        f"{files.state_dir} looks like the newest. Put it back (is its disk mounted?). {LOST}"
    )


def no_ledger(files: LedgerFiles, second: SecondHead | None) -> LedgerError:
    """An error for a ledger that is missing, with the choices."""
    if second is None:
        return LedgerError(
            f"{files.state_dir} holds no ledger. If these data have never had one, begin it: "
            "`dpagent budget init`. If it was deleted or lost, put the newest copy of it back, and its "
            f"second head at {files.second_head}, and run {RESTORED}. {LOST}"
        )
    known = counted(second.entries, "entry")
    return LedgerError(
        f"{files.state_dir} holds no ledger, but {files.second_head} knows one of {known}: it was deleted or "
        f"lost. Put a copy of it back if you have one, and run {RESTORED}: it writes off what was reserved "
        "since, or, without a copy, everything that was reserved."
    )


def _raised(ledger: Ledger, dataset: str, known: Budget | None, budget: Budget) -> str:
    if known is None:
        names = ", ".join(map(repr, ledger.datasets))
        had = f"has none for them, but for {names}. One more name is one more budget"
    else:
        had = f"has ε = {known.epsilon:g}, δ = {known.delta:g}"
    return (
        f"The configuration sets a lifetime budget of ε = {budget.epsilon:g}, δ = {budget.delta:g} for "
        f"{dataset!r}; the ledger {had}. A budget grows only by `dpagent budget raise`; otherwise put the "
        "old value back."
    )
