"""The ledger: the spending on each dataset, append-only and hash-chained.

An entry is one line of canonical JSON and the hash
``SHA-256(previous hash ‖ number ‖ kind ‖ body)``. Triggers refuse every change to an entry;
the chain reveals a change made outside SQLite; the file ``ledger.head`` next to the
database records the length of the chain, and so reveals a shortened or older copy,
as long as that file remains. There are two kinds of entry: ``budget`` (the integrator set a
lifetime budget) and ``charge`` (the price of a round, before any of its data left the device).
:mod:`agent.accounts` adds them up, :mod:`agent.replay` checks them.

The hashes protect against accidents and honest mistakes, not against the owner of the
device, who can rewrite the file and every hash in it.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from agent.accounts import JobAccounts
from agent.charges import Budget, BudgetChange, Charge
from agent.replay import replay
from dpagent.configuration import complaint
from dpagent.errors import LedgerError, StorageError
from dpagent.storage import disk_errors, open_readonly, write_atomically

GENESIS = bytes(32)

_CHARGES = TypeAdapter(Charge)
_BUDGET_CHANGES = TypeAdapter(BudgetChange)


@dataclass(frozen=True, slots=True)
class Entry:
    """One link of the chain."""

    number: int
    record: Charge | BudgetChange
    digest: bytes


@dataclass(frozen=True, slots=True)
class Verification:
    """A summary of a verified ledger."""

    entries: int
    charges: int
    head: str


def create_ledger(connection: sqlite3.Connection) -> None:
    """Migration: the table of entries and the triggers that keep it append-only."""
    connection.execute(
        """CREATE TABLE entries (
            number INTEGER PRIMARY KEY CHECK (number > 0),
            kind TEXT NOT NULL CHECK (kind IN ('budget', 'charge')),
            body TEXT NOT NULL,
            digest BLOB NOT NULL CHECK (length(digest) = 32)
        ) STRICT"""
    )
    connection.execute(
        """CREATE UNIQUE INDEX one_charge_a_round ON entries (
            json_extract(body, '$.dataset'), json_extract(body, '$.job'), json_extract(body, '$.round')
        ) WHERE kind = 'charge'"""
    )
    for verb in ("UPDATE", "DELETE"):
        connection.execute(
            f"""CREATE TRIGGER no_{verb.lower()} BEFORE {verb} ON entries
            BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"""
        )
    # INSERT OR REPLACE removes a row without firing the trigger for it.
    connection.execute(
        """CREATE TRIGGER no_replace BEFORE INSERT ON entries
        WHEN NEW.number IS NOT (SELECT coalesce(max(number), 0) + 1 FROM entries)
        BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"""
    )
    connection.execute(
        """CREATE TRIGGER no_second_charge BEFORE INSERT ON entries
        WHEN NEW.kind = 'charge' AND EXISTS (
            SELECT 1 FROM entries WHERE kind = 'charge'
            AND json_extract(body, '$.dataset') IS json_extract(NEW.body, '$.dataset')
            AND json_extract(body, '$.job') IS json_extract(NEW.body, '$.job')
            AND json_extract(body, '$.round') IS json_extract(NEW.body, '$.round'))
        BEGIN SELECT RAISE(ABORT, 'UNIQUE: this round is charged already'); END"""
    )


def link(previous: bytes, number: int, kind: str, body: str) -> bytes:
    """The hash of an entry: SHA-256 over the previous hash, its number, kind and body."""
    return hashlib.sha256(
        previous + number.to_bytes(8, "big") + kind.encode() + b"\0" + body.encode()
    ).digest()


def read_entries(connection: sqlite3.Connection) -> Iterator[Entry]:
    """All entries in order, each checked against the chain.

    Raises:
        LedgerError: An entry is missing, altered or unreadable; the text names its number.
    """
    previous = GENESIS
    for expected, row in enumerate(connection.execute("SELECT * FROM entries ORDER BY number"), start=1):
        number, kind, body, digest = row["number"], row["kind"], row["body"], row["digest"]
        if not (isinstance(kind, str) and isinstance(body, str) and isinstance(digest, bytes)):
            raise LedgerError(f"Entry {number} is damaged: its columns have the wrong types.")
        if number != expected:
            raise LedgerError(f"The chain is broken: entry {expected} is missing (the next one is {number}).")
        if link(previous, number, kind, body) != digest:
            raise LedgerError(f"The chain is broken at entry {number}: its content does not match its hash.")
        previous = digest
        try:
            record = (_CHARGES if kind == "charge" else _BUDGET_CHANGES).validate_json(body)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise LedgerError(
                f"Entry {number} is not a {kind} that this program can read: {where}: {complaint(problem)}."
            ) from error
        yield Entry(number, record, digest)


class Ledger:
    """The ledger of an open database, for the agent that owns it.

    Args:
        connection: A database with :func:`create_ledger` applied.
        head_file: The file that records the length and last hash of the chain.

    Raises:
        LedgerError: The chain is broken, or shorter than recorded.
    """

    def __init__(self, connection: sqlite3.Connection, head_file: Path) -> None:
        self._connection = connection
        self._head_file = head_file
        verified = read_verified(connection, head_file)
        self._number = len(verified.entries)
        self._head = verified.entries[-1].digest if verified.entries else GENESIS
        self._budgets: dict[str, Budget] = {}
        self._charged: set[tuple[str, str, int]] = set()
        self.accounts = verified.accounts
        """Reservations and spending of every job."""
        for entry in verified.entries:
            self._learn(entry.record)

    def set_budget(self, dataset: str, budget: Budget) -> None:
        """Record the integrator's lifetime budget, unless it is already recorded.

        Must run inside a transaction; :meth:`save_head` follows its commit.
        """
        if self._budgets.get(dataset) != budget:
            self._append("budget", BudgetChange(dataset, budget.epsilon, budget.delta))

    def charge(self, charge: Charge) -> None:
        """Append a charge. Must run inside the transaction that notes the round as charged."""
        self._append("charge", charge)
        self.accounts.add(charge)

    def is_charged(self, dataset: str, job: str, round_number: int) -> bool:
        """Whether the ledger has a charge for that round of that job."""
        return (dataset, job, round_number) in self._charged

    def budget(self, dataset: str) -> Budget:
        """The lifetime budget in force.

        Raises:
            KeyError: None was set.
        """
        return self._budgets[dataset]

    def epsilon_spent(self, dataset: str) -> float:
        """Cumulative ε of the dataset as its last charge states it; 0 before the first."""
        return self.accounts.epsilon_spent(dataset)

    def save_head(self) -> None:
        """Write ``ledger.head``, after a commit: it may lag behind the chain but never lead it."""
        record = {"entries": self._number, "hash": self._head.hex()}
        write_atomically(self._head_file, json.dumps(record).encode() + b"\n", mode=0o600)

    def _append(self, kind: Literal["budget", "charge"], record: Charge | BudgetChange) -> None:
        text = json.dumps(asdict(record), sort_keys=True, separators=(",", ":"), allow_nan=False)
        number = self._number + 1
        digest = link(self._head, number, kind, text)
        self._connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (number, kind, text, digest))
        self._number, self._head = number, digest
        self._learn(record)

    def _learn(self, record: Charge | BudgetChange) -> None:
        if isinstance(record, BudgetChange):
            self._budgets[record.dataset] = Budget(record.epsilon, record.delta)
        else:
            self._charged.add((record.dataset, record.job, record.round))


@dataclass(frozen=True, slots=True)
class VerifiedLedger:
    """A ledger whose chain, prices and head are correct."""

    entries: tuple[Entry, ...]
    accounts: JobAccounts

    @property
    def charges(self) -> tuple[Charge, ...]:
        """The charges alone."""
        return tuple(entry.record for entry in self.entries if isinstance(entry.record, Charge))


def read_verified(connection: sqlite3.Connection, head_file: Path) -> VerifiedLedger:
    """Read a ledger and check its chain, prices and head.

    Raises:
        LedgerError: Naming the first incorrect entry.
    """
    # Read the head before the entries: an agent may be appending, and its head never leads the chain.
    head = _read_head(head_file)
    entries = tuple(read_entries(connection))
    accounts = replay([entry.record for entry in entries])
    _check_head(entries, head, head_file)
    return VerifiedLedger(entries, accounts)


def _read_head(head_file: Path) -> tuple[int, bytes] | None:
    if not head_file.exists():
        return None
    try:
        record = json.loads(head_file.read_text())
        entries, digest = record["entries"], bytes.fromhex(record["hash"])
        if isinstance(entries, bool) or not isinstance(entries, int) or entries < 0:
            raise ValueError("entries is no whole number")
        return entries, digest
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(
            f"{head_file} is not readable ({error}); restore it together with the ledger."
        ) from error


def _check_head(entries: Sequence[Entry], head: tuple[int, bytes] | None, head_file: Path) -> None:
    if head is None:
        return
    count, digest = head
    if count > len(entries):
        raise LedgerError(
            f"Entries are missing: the ledger had {count} and has {len(entries)}. "
            "It was shortened or replaced by an older copy; restore the newest one."
        )
    if digest != (entries[count - 1].digest if count else GENESIS):
        raise LedgerError(
            f"Entry {count} is not the one recorded in {head_file.name}: the ledger was replaced."
        )


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
        with disk_errors(path):
            connection.execute("SELECT count(*) FROM entries").fetchone()
    except StorageError as error:
        raise LedgerError(f"{error} (`--state-dir` names the directory that holds ledger.db.)") from error
    return connection, state_dir / "ledger.head"


def verify(state_dir: Path) -> Verification:
    """Verify a device's ledger: chain, prices, head.

    Raises:
        LedgerError: Naming the fault.
    """
    ledger = audit(state_dir)
    head = ledger.entries[-1].digest if ledger.entries else GENESIS
    return Verification(len(ledger.entries), len(ledger.charges), head.hex())


def audit(state_dir: Path) -> VerifiedLedger:
    """Read and verify a device's ledger.

    Raises:
        LedgerError: Naming the fault.
    """
    connection, head_file = open_ledger(state_dir)
    try:
        with disk_errors(state_dir / "ledger.db"):
            return read_verified(connection, head_file)
    except StorageError as error:
        raise LedgerError(str(error)) from error
    finally:
        connection.close()
