"""The audit: a ledger read from its files, also while an agent runs; its chain, prices and heads checked."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agent.accounts import JobAccounts
from agent.charges import Charge, WriteOff
from agent.heads import GENESIS, Head, read_head, read_second_head, require_head, require_kept
from agent.ledger import Entry, read_entries
from agent.replay import replay
from agent.rounds import Rounds
from agent.token_store import Conflict, TokenStore
from dpagent.database_file import database_errors, open_readonly
from dpagent.errors import LedgerError, StorageError


@dataclass(frozen=True, slots=True)
class VerifiedLedger:
    """A ledger whose chain, prices and head are correct."""

    entries: tuple[Entry, ...]
    accounts: JobAccounts

    @property
    def charges(self) -> tuple[Charge, ...]:
        """The charges alone."""
        return tuple(entry.record for entry in self.entries if isinstance(entry.record, Charge))

    @property
    def write_offs(self) -> tuple[WriteOff, ...]:
        """The write-offs alone."""
        return tuple(entry.record for entry in self.entries if isinstance(entry.record, WriteOff))


def verified_by(connection: sqlite3.Connection, head: Head | None, head_file: Path) -> VerifiedLedger:
    """Read a ledger and check its chain, its prices and that it reaches a head, if there is one.

    Args:
        connection: A database with a ledger.
        head: As ``head_file`` had it, read before: an agent may be appending, and its head never leads the
            chain.
        head_file: That had it.

    Raises:
        LedgerError: Naming the first incorrect entry.
    """
    entries = tuple(read_entries(connection))
    accounts = replay([entry.record for entry in entries])
    require_head([entry.digest for entry in entries], head, head_file)
    return VerifiedLedger(entries, accounts)


@dataclass(frozen=True, slots=True)
class Verification:
    """A summary of a verified ledger."""

    entries: int
    charges: int
    head: str


def open_ledger(state_dir: Path) -> tuple[sqlite3.Connection, Path]:
    """Open the ledger in a state directory for reading, also while an agent runs.

    Returns:
        The connection and the path of ``ledger.head``.

    Raises:
        LedgerError: There is none, or the file is not a ledger.
    """
    path = state_dir / "ledger.db"
    try:
        connection = open_readonly(path)
        with database_errors(path):
            connection.execute("SELECT count(*) FROM entries").fetchone()
    except StorageError as error:
        raise LedgerError(f"{error} (`--state-dir` names the directory that holds ledger.db.)") from error
    return connection, state_dir / "ledger.head"


def verify(state_dir: Path, second_head: Path | None = None) -> Verification:
    """Verify a device's ledger: chain, prices, head.

    Args:
        state_dir: The directory.
        second_head: The file of that name, to see that the directory is no older copy; None leaves that open.

    Raises:
        LedgerError: Naming the fault.
    """
    # Before the entries, as for ``ledger.head``.
    second = None if second_head is None else read_second_head(second_head)
    ledger = audit(state_dir)
    if second_head is not None:
        if second is None:
            raise LedgerError(f"{second_head}, the second head of the ledger, is missing.")
        repeatable = _repeatable(state_dir, ledger.entries)
        require_kept([entry.digest for entry in ledger.entries], repeatable, second, second_head)
    head = ledger.entries[-1].digest if ledger.entries else GENESIS
    return Verification(len(ledger.entries), len(ledger.charges), head.hex())


def evidence(state_dir: Path) -> list[Conflict]:
    """What a board has kept of keys that its coordinator has not shown to all boards alike.

    Raises:
        LedgerError: There is no ledger.
    """
    with closing(open_ledger(state_dir)[0]) as connection, database_errors(state_dir / "ledger.db"):
        return TokenStore(connection).conflicts()


def _repeatable(state_dir: Path, entries: Sequence[Entry]) -> list[int]:
    """The charges whose rounds an agent would run again, by the number of their entry."""
    with closing(open_ledger(state_dir)[0]) as connection, database_errors(state_dir / "ledger.db"):
        charged = Rounds(connection).charged()
    return [
        entry.number
        for entry in entries
        if isinstance(entry.record, Charge) and (entry.record.job, entry.record.round) in charged
    ]


def audit(state_dir: Path) -> VerifiedLedger:
    """Read and verify a device's ledger.

    Raises:
        LedgerError: Naming the fault.
    """
    connection, head_file = open_ledger(state_dir)
    try:
        with database_errors(state_dir / "ledger.db"):
            return verified_by(connection, read_head(head_file), head_file)
    except StorageError as error:
        raise LedgerError(str(error)) from error
    finally:
        connection.close()
