"""The ledger: what has been spent on each dataset, append-only and hash-chained.

An entry is one line of canonical JSON and the hash
``SHA-256(previous hash ‖ number ‖ kind ‖ body)``. Triggers refuse every change to an entry;
the chain shows a change made behind SQLite's back; the file ``ledger.head`` beside the
database remembers how far the chain had come, so that a shortened or older copy is noticed
as long as that file is left. Two kinds of entry exist: ``budget`` (the integrator set a
lifetime budget) and ``charge`` (a release was paid for, before it left the device).

Inside a job the schedule is announced with the first round and pinned, so its charges compose
tightly (RDP). Across jobs, whose parameters a coordinator may choose after seeing what earlier
ones gave, the (ε, δ) of the jobs are added: basic composition is a valid privacy filter for
adaptively chosen parameters (Rogers, Roth, Ullman, Vadhan, "Privacy odometers and filters",
NeurIPS 2016), and a sum over orders chosen afterwards is not known to be. A job is reserved
whole, at its first charge: whenever it stops, each fixed order's divergence is at most that of
the announced schedule.

The hashes are a proof against accidents and honest mistakes, not against the owner of the
device, who can rewrite the file and every hash in it.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dpagent.errors import LedgerError, StorageError
from dpagent.privacy import PrivacyLossEvent, RdpAccountant
from dpagent.storage import disk_errors, open_readonly, write_atomically

GENESIS = bytes(32)

# A re-computed ε may differ from the one written down by rounding, never by more than this.
_EPSILON_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Budget:
    """The lifetime budget of one dataset."""

    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class Charge:
    """One release, with everything an auditor needs to price it again."""

    dataset: str
    job: str
    round: int
    mechanism: str
    noise_multiplier: float
    sampling_rate: float
    steps: int
    clip_norm: float
    granularity: float
    dimension: int
    statistical_distance: float
    schedule: str
    """SHA-256 of the job's announced schedule, pinned at its first charge."""
    job_epsilon: float
    """ε reserved for the whole job, at ``delta``, when it was first charged."""
    delta: float
    """δ of the job."""
    cumulative_epsilon: float
    """What other jobs reserved plus what this one has spent up to and including this charge."""
    cumulative_delta: float
    """Sum of the δ of all jobs on the dataset."""
    charged_at: str

    @property
    def event(self) -> PrivacyLossEvent:
        """The charge as the accountant counts it."""
        return PrivacyLossEvent(self.noise_multiplier, self.sampling_rate, self.steps)


@dataclass(frozen=True, slots=True)
class Entry:
    """One link of the chain."""

    number: int
    kind: Literal["budget", "charge"]
    body: dict[str, Any]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verified ledger holds."""

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
        if number != expected:
            raise LedgerError(f"The chain is broken: entry {expected} is missing (the next one is {number}).")
        if link(previous, number, kind, body) != digest:
            raise LedgerError(f"The chain is broken at entry {number}: its content does not match its hash.")
        previous = digest
        yield Entry(number, kind, json.loads(body), digest)


@dataclass(slots=True)
class JobAccount:
    """One job's spending on one dataset."""

    schedule: str
    """Digest of the announced schedule, pinned."""
    epsilon: float
    """Reserved at the first charge."""
    delta: float
    spent: RdpAccountant


class JobAccounts:
    """Spending by dataset and job, built from charges in order."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, JobAccount]] = {}
        self.last_epsilon: dict[str, float] = {}
        """By dataset, the cumulative ε its last charge states."""

    def job(self, dataset: str, job: str) -> JobAccount | None:
        """The account of a job, once it has been charged."""
        return self._jobs.get(dataset, {}).get(job)

    def others(self, dataset: str, job: str) -> Budget:
        """Sum of ε and δ that all other jobs on the dataset have reserved."""
        rest = [account for name, account in self._jobs.get(dataset, {}).items() if name != job]
        return Budget(sum(account.epsilon for account in rest), sum(account.delta for account in rest))

    def add(self, charge: Charge) -> Budget:
        """Add a charge; returns the cumulative ε and δ it comes to."""
        jobs = self._jobs.setdefault(charge.dataset, {})
        account = jobs.setdefault(
            charge.job, JobAccount(charge.schedule, charge.job_epsilon, charge.delta, RdpAccountant())
        )
        account.spent.compose(charge.event)
        others = self.others(charge.dataset, charge.job)
        total = Budget(others.epsilon + account.spent.epsilon(account.delta), others.delta + account.delta)
        self.last_epsilon[charge.dataset] = total.epsilon
        return total


class Ledger:
    """The ledger of an open database, for the agent that owns it.

    Args:
        connection: A database with :func:`create_ledger` applied.
        head_file: The file that remembers how far the chain has come.

    Raises:
        LedgerError: The chain is broken, or shorter than it was.
    """

    def __init__(self, connection: sqlite3.Connection, head_file: Path) -> None:
        self._connection = connection
        self._head_file = head_file
        entries = verify_entries(connection, head_file)
        self._number = len(entries)
        self._head = entries[-1].digest if entries else GENESIS
        self._budgets: dict[str, Budget] = {}
        self._accounts = JobAccounts()
        self._charged: set[tuple[str, str, int]] = set()
        for entry in entries:
            self._learn(entry.kind, entry.body)
        self.save_head()

    def set_budget(self, dataset: str, budget: Budget) -> None:
        """Record the integrator's lifetime budget, if it is not the recorded one already.

        Must run inside a transaction; :meth:`save_head` follows its commit.
        """
        if self._budgets.get(dataset) != budget:
            self._append("budget", {"dataset": dataset, **asdict(budget)})

    def charge(self, charge: Charge) -> None:
        """Append a charge. Must run inside the transaction that spools what it pays for."""
        self._append("charge", asdict(charge))

    def is_charged(self, dataset: str, job: str, round_number: int) -> bool:
        """Whether that round of that job has been paid for."""
        return (dataset, job, round_number) in self._charged

    @property
    def accounts(self) -> JobAccounts:
        """What every job has reserved and spent."""
        return self._accounts

    def budget(self, dataset: str) -> Budget:
        """The lifetime budget in force.

        Raises:
            KeyError: None was set.
        """
        return self._budgets[dataset]

    def epsilon_spent(self, dataset: str) -> float:
        """Cumulative ε of the dataset as its last charge states it; 0 before the first."""
        return self._accounts.last_epsilon.get(dataset, 0.0)

    def save_head(self) -> None:
        """Write ``ledger.head``. After a commit: it may lag behind the chain, never lead it."""
        record = {"entries": self._number, "hash": self._head.hex()}
        write_atomically(self._head_file, json.dumps(record).encode() + b"\n", mode=0o600)

    def _append(self, kind: Literal["budget", "charge"], body: dict[str, Any]) -> None:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        number = self._number + 1
        digest = link(self._head, number, kind, text)
        self._connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (number, kind, text, digest))
        self._number, self._head = number, digest
        self._learn(kind, body)

    def _learn(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "budget":
            self._budgets[body["dataset"]] = Budget(body["epsilon"], body["delta"])
        else:
            charge = Charge(**body)
            self._accounts.add(charge)
            self._charged.add((charge.dataset, charge.job, charge.round))


def verify_entries(connection: sqlite3.Connection, head_file: Path) -> list[Entry]:
    """All entries of a ledger whose chain, prices and head are in order.

    Raises:
        LedgerError: Naming the first entry that is not.
    """
    entries = list(read_entries(connection))
    accounts = JobAccounts()
    for entry in entries:
        if entry.kind != "charge":
            continue
        try:
            charge = Charge(**entry.body)
            epsilon = accounts.add(charge).epsilon
            account = accounts.job(charge.dataset, charge.job)
        except (TypeError, ValueError) as error:
            raise LedgerError(f"Entry {entry.number} is not a charge this program knows: {error}.") from error
        if abs(epsilon - charge.cumulative_epsilon) > _EPSILON_TOLERANCE * max(1.0, epsilon):
            raise LedgerError(
                f"Entry {entry.number} states a cumulative ε of {charge.cumulative_epsilon:.6g}; "
                f"the charges up to it come to {epsilon:.6g}."
            )
        if account is None or (account.schedule, account.delta) != (charge.schedule, charge.delta):
            raise LedgerError(f"Entry {entry.number} changes the schedule or δ that its job had announced.")
    _check_head(entries, head_file)
    return entries


def _check_head(entries: Sequence[Entry], head_file: Path) -> None:
    if not head_file.exists():
        return
    try:
        record = json.loads(head_file.read_text())
        count, digest = int(record["entries"]), bytes.fromhex(record["hash"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"{head_file} is not readable ({error}); restore it together with the ledger."
        ) from error
    if count > len(entries):
        raise LedgerError(
            f"Entries are missing: the ledger had {count} and has {len(entries)}. "
            "It was shortened or replaced by an older copy; restore the newest one."
        )
    if count and entries[count - 1].digest != digest:
        raise LedgerError(
            f"Entry {count} is not the one that {head_file.name} remembers: the ledger was replaced."
        )


def open_ledger(state_dir: Path) -> tuple[sqlite3.Connection, Path]:
    """Open the ledger in a state directory for reading, beside a running agent if need be.

    Returns:
        The connection and the path of ``ledger.head``.

    Raises:
        LedgerError: There is none, or the file is no ledger.
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
        LedgerError: Naming what is wrong.
    """
    connection, head_file = open_ledger(state_dir)
    try:
        with disk_errors(state_dir / "ledger.db"):
            entries = verify_entries(connection, head_file)
    except StorageError as error:
        raise LedgerError(str(error)) from error
    finally:
        connection.close()
    charges = sum(entry.kind == "charge" for entry in entries)
    return Verification(len(entries), charges, (entries[-1].digest if entries else GENESIS).hex())
