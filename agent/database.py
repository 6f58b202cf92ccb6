"""The database of a state directory, opened and locked, and the ledger's heads, which follow each entry.

``ledger.db`` holds the ledger, the states of the rounds and the spool together: a charge and the state that
follows from it become durable in the same transaction, or neither does. The heads follow each commit
(:mod:`agent.heads`).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from agent.heads import HeadLock, LedgerFiles, SecondHead, require_kept, save_head
from agent.ledger import Check, Ledger, create_ledger
from agent.ledger_room import LedgerRoom, TakenRoom, put_log_back
from agent.pricing import replay_apart
from agent.probes import Probes, create_probes
from agent.rounds import Rounds, create_rounds
from agent.spool import Spool, create_spool, require_messages
from agent.token_store import TokenStore, create_tokens
from dpagent import faults
from dpagent.database_file import MOST_LOG_BYTES, database_errors, open_database, require_whole, transaction
from dpagent.errors import DamagedDatabaseError, LedgerError, StorageError
from dpagent.faults import FaultPoint
from dpagent.storage import StateDirectory
from dpagent.wording import counted

_PAGE_BYTES: Final = 512
"""The least of SQLite's. A round of `mnist-cnn` writes 54 kB to the log, and 69 kB with pages of 1024."""
_CACHE_KIB: Final = 512
"""Of pages that SQLite keeps in memory, all of which are in the system's, too. Each round has it keep some
KiB more, up to 2 MiB by default."""
_WRITTEN_EARLY: Final = 3_160
"""Pages of a transaction from which on some are written before its end, and maybe twice: as by default."""
_LOGGED_PAGES: Final = 6_000
"""After which the write-ahead log goes into the database. Most pages are written again in each round, and go
once for all of them: with a sixth of that, it was a sixth of what a round wrote."""
_NOTES_S: Final = 2.0
"""What is noted waits no longer to be written."""
RESTORED = "`dpagent budget restored`"
LOST = (
    f"If it cannot be had back, {RESTORED[:-1]} --write-off-all` gives up all that is left of the budget, "
    "because nothing shows any more how much was spent."
)


@contextmanager
def ledger_errors(database: Path) -> Iterator[None]:
    """As :func:`dpagent.database_file.database_errors`, of the file that has the ledger: damage of it does
    not pass.

    Raises:
        LedgerError: It is damaged.
        StorageError: It cannot be used now.
    """
    try:
        with database_errors(database):
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
        room: Taken on the disk, so that what is written later needs no more; None: as it comes.
        check: Of the ledger's entries when it is opened; by default in a process that ends, so that this one
            needs no numpy.

    Raises:
        StateInUseError: Another program uses it.
        StorageError: It cannot be used, or the disk has not so much room.
        LedgerError: The chain or a price is wrong, or the file is damaged.
    """

    def __init__(
        self, files: LedgerFiles, room: LedgerRoom | None = None, *, check: Check = replay_apart
    ) -> None:
        self._directory = StateDirectory(
            files.state_dir,
            "Do not give the second one a directory of its own: it would spend the budget twice.",
        )
        self._room: TakenRoom | None = None
        self.files, self.file = files, files.database
        self._head_lock = HeadLock(files.second_head)
        self._heads_are_current = False
        self._noted_at = 0.0
        with ExitStack() as if_it_fails, ledger_errors(self.file):
            if_it_fails.callback(self._directory.close)
            if_it_fails.callback(self._close_room)
            kept = put_log_back(self.file)
            self.connection = open_database(
                self.file,
                [
                    create_ledger,
                    create_spool,
                    create_rounds,
                    _create_counters,
                    create_tokens,
                    create_probes,
                ],
                page_bytes=_PAGE_BYTES,
                # A command of the owner's leaves the agent its room.
                most_log_bytes=max(MOST_LOG_BYTES, kept.log_bytes) if room is None else room.log_bytes,
            )
            if_it_fails.callback(self.connection.close)
            if room is not None or kept.log_bytes:
                self._room = TakenRoom(self.file, kept)
            # Debian's SQLite writes zeros over all that is deleted, as much again as the fragments. FAST:
            # only within pages that are written anyway; others take the next round's fragments.
            self.connection.execute("PRAGMA secure_delete = FAST")
            self.connection.execute(f"PRAGMA wal_autocheckpoint = {_LOGGED_PAGES}")
            self.connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self.connection.execute(f"PRAGMA cache_spill = {_WRITTEN_EARLY}")
            # Else rows that a statement changes may be kept in files of the system's, on the same disk.
            self.connection.execute("PRAGMA temp_store = MEMORY")
            require_whole(self.connection, self.file)
            require_messages(self.connection, self.file)
            if room is not None and self._room is not None:
                self._room.take(self.connection, room)
            self.ledger = Ledger(self.connection, check)
            self.spool = Spool(self.connection)
            self.probes = Probes(self.connection)
            self.rounds = Rounds(self.connection)
            self.tokens = TokenStore(self.connection)
            if_it_fails.pop_all()

    def close(self) -> None:
        """Close the database and release the directory."""
        with suppress(StorageError, LedgerError):  # A stop succeeds on a full disk, too.
            self.write_notes()
        self.connection.close()
        self._close_room()
        self._directory.close()

    def _close_room(self) -> None:
        """After the connection, and once: another agent may have the directory by then."""
        room, self._room = self._room, None
        if room is not None:
            room.close()

    @contextmanager
    def written(self) -> Iterator[None]:
        """All statements inside are durable at its end, or none of them takes effect.

        Raises:
            StorageError: They are not durable.
        """
        self.write_notes()
        with ledger_errors(self.file), transaction(self.connection):
            yield
            self.spool.drop_settled()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Statements whose last ones a crash may undo. They wait for others, and each page is written once,
        which spares a memory card.

        Raises:
            StorageError: They take no effect, and with them none that waited.
        """
        with ledger_errors(self.file):
            if not self.connection.in_transaction:
                self._noted_at = time.monotonic()
                self.connection.execute("PRAGMA synchronous=NORMAL")
                self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self.connection.rollback()
                raise

    def write_old_notes(self) -> None:
        """Write what has waited for so long; call it now and then.

        Raises:
            StorageError: It cannot be written, and takes no effect.
        """
        if self.connection.in_transaction and time.monotonic() >= self._noted_at + _NOTES_S:
            self.write_notes()

    def write_notes(self) -> None:
        """Write what waits.

        Raises:
            StorageError: It cannot be written, and takes no effect.
        """
        with ledger_errors(self.file):
            try:
                if self.connection.in_transaction:
                    self.spool.drop_settled()
                self.connection.commit()
            except BaseException:
                self.connection.rollback()
                raise

    @contextmanager
    def entry(self) -> Iterator[None]:
        """A transaction that may append to the ledger; the heads follow it.

        Raises:
            StorageError: The entry is not durable; or, if only a head could not be written, it is.
        """
        if not self._heads_are_current:
            # An earlier attempt failed: the second head must not lag by two.
            self.save_heads()
        self._heads_are_current = False
        try:
            with self.written():
                yield
        except BaseException:
            # The transaction was rolled back: read the ledger from disk again. Its prices were checked when
            # it was opened, and a process that cannot be started now must not take this error's place.
            self.ledger = Ledger(self.connection, lambda records: None)
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

    def holding_second_head(self) -> AbstractContextManager[None]:
        """No other program writes the second head inside: what was read of it is so until it is written.

        Raises:
            StorageError: Another program holds it, or its lock cannot be opened.
        """
        return self._head_lock.held()

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
