"""The ledger: the spending on each dataset, append-only and hash-chained.

An entry is one line of canonical JSON and the hash
``SHA-256(previous hash ‖ number ‖ kind ‖ body)``. Triggers refuse every change to an entry;
the chain reveals a change made outside SQLite; its heads (:mod:`agent.heads`) reveal a shortened or older
copy. There are three kinds of entry: ``budget`` (the integrator set a lifetime budget), ``charge`` (the price
of a round in one account, before any of its data left the device) and ``write-off`` (the ledger was restored
from a backup: what its missing entries may have cost). :mod:`agent.accounts` adds them up,
:mod:`agent.replay` checks them, :mod:`agent.audit` reads a ledger that another program owns.

The hashes protect against accidents and honest mistakes, not against the owner of the
device, who can rewrite the files and every hash in them.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from agent.accounts import Books, JobAccounts
from agent.charges import Budget, BudgetChange, Charge, Record, ReportCharge, SumCharge, WriteOff
from agent.columns import SCOPES, account_name, scope_of
from agent.heads import GENESIS, Head, SecondHead, Totals
from dpagent.errors import LedgerError
from dpagent.notation import plain_bound, upwards
from dpagent.privacy.statement import Trust
from dpagent.schema.base import read_json
from dpagent.schema.problems import SchemaError

_KINDS: Final[dict[type[Record], str]] = {
    BudgetChange: "budget", SumCharge: "charge", ReportCharge: "charge", WriteOff: "write-off",
}  # fmt: skip
_READERS: Final[dict[str, Any]] = {
    "budget": BudgetChange, "charge": SumCharge | ReportCharge, "write-off": WriteOff,
}  # fmt: skip


Check: TypeAlias = Callable[[Sequence[Record]], object]
"""Checks the records of a ledger: :func:`agent.replay.replay`, here or in another process
(:func:`agent.pricing.replay_apart`)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One link of the chain."""

    number: int
    record: Record
    digest: bytes


class _Charged(NamedTuple):
    """A charge, by its account, the number of its entry, and the plan that it is for."""

    account: str
    entry: int
    plan: str


def create_ledger(connection: sqlite3.Connection) -> None:
    """Migration: the table of entries and the triggers that keep it append-only."""
    connection.execute(
        """CREATE TABLE entries (
            number INTEGER PRIMARY KEY CHECK (number > 0),
            kind TEXT NOT NULL CHECK (kind IN ('budget', 'charge', 'write-off')),
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
        if not (kind in _READERS and isinstance(body, str) and isinstance(digest, bytes)):
            raise LedgerError(f"Entry {number} is damaged: its columns have values of no entry.")
        if number != expected:
            raise LedgerError(f"The chain is broken: entry {expected} is missing (the next one is {number}).")
        if link(previous, number, kind, body) != digest:
            raise LedgerError(f"The chain is broken at entry {number}: its content does not match its hash.")
        previous = digest
        try:
            record = read_json(_READERS[kind], body)
        except SchemaError as error:
            said = error.first.sentence(shows_value=False)
            raise LedgerError(
                f"Entry {number} is not a {kind} that this program can read: {said}."
            ) from error
        yield Entry(number, record, digest)


class Ledger:
    """The ledger of an open database, for the program that owns it.

    Args:
        connection: A database with :func:`create_ledger` applied.
        check: Of the prices of all charges, and of each entry against those before it.

    Raises:
        LedgerError: The chain is broken, or an entry contradicts those before it.
        StorageError: They cannot be checked on this board now.
    """

    def __init__(self, connection: sqlite3.Connection, check: Check) -> None:
        self._connection = connection
        self.accounts = JobAccounts()
        """Reservations and spending of every job."""
        self._budgets: dict[str, Budget] = {}
        self._charged: set[str] = set()
        """The accounts that have charges."""
        self._number_of_charges = 0
        chain = self._read(check)
        self.digests = [chain[at : at + len(GENESIS)] for at in range(0, len(chain), len(GENESIS))]
        """The hashes of all entries, in order."""

    def _read(self, check: Check) -> bytes:
        """Learn all entries; return their hashes, one after the other. Objects of their own among what is
        read would keep the memory of all of it from the system."""
        entries = tuple(read_entries(self._connection))
        check([entry.record for entry in entries])
        for entry in entries:
            self._learn(entry.record)
        return b"".join(entry.digest for entry in entries)

    def set_budget(self, dataset: str, budget: Budget) -> None:
        """Append a lifetime budget, unless it is the one in force. Must run inside a transaction."""
        if self._budgets.get(dataset) != budget:
            self._append(BudgetChange(dataset, budget.epsilon, budget.delta))

    def charge(self, charge: Charge) -> None:
        """Append a charge. Must run inside the transaction that notes the round's state, with all other
        charges for the round."""
        self._append(charge)

    def write_off(self, lost: WriteOff) -> None:
        """Append a write-off. Must run inside the transaction that gives up all rounds."""
        self._append(lost)

    def plans_charged(self, job: str, round_number: int) -> set[str]:
        """The plans, by their digest in hexadecimal, that a round was charged for, on any dataset: one, if it
        was charged at all."""
        return {charged.plan for charged in self._charges(job, round_number)}

    def trusts_of(self, dataset: str, job: str, round_number: int) -> tuple[Trust, ...]:
        """The parties that the charges for a round trust, one for each account of the dataset that has
        one."""
        charged = {each.account for each in self._charges(job, round_number)}
        return tuple(trust for trust in SCOPES if account_name(dataset, trust) in charged)

    @property
    def books(self) -> Books:
        """What admission has to know of the ledger."""
        return Books(self.accounts, dict(self._budgets), self._number_of_charges)

    @property
    def number_of_charges(self) -> int:
        """Of all data sets."""
        return self._number_of_charges

    def charges_for(self, rounds: Collection[tuple[str, int]]) -> list[int]:
        """The numbers of the charges for rounds, given by job and number, on any dataset."""
        return [charged.entry for each in rounds for charged in self._charges(*each)]

    def _charges(self, job: str, round_number: int) -> list[_Charged]:
        """The charges for a round: read again, by the index that keeps them from being two, since a board's
        memory would grow with each."""
        statement = (
            "SELECT json_extract(body, '$.dataset'), number, json_extract(body, '$.plan') FROM entries"
            " WHERE kind = 'charge' AND json_extract(body, '$.dataset') = ?"
            " AND json_extract(body, '$.job') = ? AND json_extract(body, '$.round') = ?"
        )
        asked = (self._connection.execute(statement, (each, job, round_number)) for each in self._charged)
        return [_Charged(*row) for rows in asked for row in rows]

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets that have a budget."""
        return tuple(self._budgets)

    def budget(self, dataset: str) -> Budget:
        """The lifetime budget in force.

        Raises:
            KeyError: None was set.
        """
        return self._budgets[dataset]

    def epsilon_spent(self, dataset: str) -> float:
        """Cumulative ε of the dataset as its last charge or write-off states it; 0 before the first."""
        return self.accounts.epsilon_spent(dataset)

    def spending_of(self, dataset: str) -> str:
        """For the log: :meth:`spending` of each account of a dataset."""
        accounts = (account_name(dataset, trust) for trust in SCOPES)
        return "; ".join(self.spending(account) for account in accounts if account in self._budgets)

    def spending(self, dataset: str) -> str:
        """For the log: the spent ε of an account, and its budget."""
        budget, epsilon = self.budget(dataset), self.epsilon_spent(dataset)
        if self.accounts.is_exposed(dataset):
            return f"no guarantee for {dataset!r}: rounds without one have been run on these records"
        most = f"{plain_bound(budget.epsilon)} at δ = {plain_bound(budget.delta)}"
        unit, _, trust = scope_of(dataset)
        return (
            f"spent ε = {upwards(epsilon, of=budget.epsilon)} of {most} on {dataset!r} "
            f"({unit} level{'' if trust is Trust.NONE else f', trusting the {trust}'})"
        )

    @property
    def head(self) -> Head:
        """Length and last hash of the chain."""
        return Head(len(self.digests), (self.digests[-1] if self.digests else GENESIS).hex())

    def second_head(self, unsent: Collection[int]) -> SecondHead:
        """The head, with what the entries add up to; ``unsent`` as there."""
        totals = {}
        for dataset, budget in self._budgets.items():
            reserved = self.accounts.reserved(dataset)
            totals[dataset] = Totals(budget.epsilon, budget.delta, reserved.epsilon, reserved.delta)
        return SecondHead(self.head.entries, self.head.hash, tuple(sorted(unsent)), totals)

    def _append(self, record: Record) -> None:
        body = {key: None if value == math.inf else value for key, value in asdict(record).items()}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        number, kind = len(self.digests) + 1, _KINDS[type(record)]
        digest = link(self.digests[-1] if self.digests else GENESIS, number, kind, text)
        self._connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (number, kind, text, digest))
        self.digests.append(digest)
        self._learn(record)

    def _learn(self, record: Record) -> None:
        match record:
            case BudgetChange():
                self._budgets[record.dataset] = Budget(record.epsilon, record.delta)
            case Charge():
                self.accounts.add(record)
                self._charged.add(record.dataset)
                self._number_of_charges += 1
            case WriteOff():
                self.accounts.write_off(record)
