"""The budget registry: what each device was granted, by job and round, and the keys of its tokens.

It is in the fleet's members directory, beside the table of devices, or in the coordinator's database in
PostgreSQL, and spans all jobs. A row is written in
the transaction that signs: a device that may have its tokens is charged for the round, whether it got the
answer or not. Each row keeps the statement that the device signed (:mod:`dpagent.protocol.issuing`).

The secret part of a round's key is erased when the round closes: nobody makes a token of it afterwards.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from coordinator.database.interface import Reader, Row
from coordinator.database.opening import open_members, open_reader
from coordinator.database.schema import Part
from coordinator.database.settings import StorePlace
from dpagent.privacy.statement import BudgetStatement
from dpagent.protocol.issuing import Statement, Verdict, Wish


@dataclass(frozen=True, slots=True)
class StoredKey:
    """The key of a round."""

    round: int
    modulus: bytes
    secret: bytes | None
    """Both factors; None once the round is closed."""


@dataclass(frozen=True, slots=True)
class AnnouncedKey:
    """What was announced of a round: all that the key digest of the devices' statements is of
    (:func:`~dpagent.protocol.tokens.key_digest`)."""

    job: str
    """Its id, in hexadecimal."""
    round: int
    linkability: str
    tokens: int
    """Of a device."""
    sealing_key: bytes
    modulus: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """What a device asked of a round, and what it was answered."""

    device: str
    job: bytes
    round: int
    wish: Wish
    verdict: Verdict
    at: float
    """Unix time."""
    statement: Statement
    signature: bytes
    """Of the statement, by the device."""

    @property
    def is_granted(self) -> bool:
        """Whether the device may have tokens."""
        return self.verdict is Verdict.GRANTED


@dataclass(frozen=True, slots=True)
class LatestLedger:
    """The statement of a device with the most entries, and whether a later one had fewer."""

    statement: bytes
    signature: bytes
    entries: int
    went_back: bool


@dataclass(frozen=True, slots=True)
class Spent:
    """What a device was granted of one job, in one column."""

    job: str
    rounds: int
    """Of which it has, or may have, tokens."""
    statement: dict[str, Any]
    """:meth:`BudgetStatement.as_dict`."""

    @property
    def scope(self) -> tuple[str, str, str]:
        """Unit, adjacency and trust: figures of one scope add up."""
        return self.statement["unit"], self.statement["adjacency"], self.statement["trust"]


class Registry:
    """The open registry. One coordinator writes it.

    Args:
        place: the fleet's members directory, which exists, or PostgreSQL.

    Raises:
        StorageError: The database cannot be used.
    """

    def __init__(self, place: StorePlace) -> None:
        self.database = open_members(place, Part.REGISTRY)
        self.database.erase_what_is_deleted()

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def transaction(self) -> AbstractContextManager[None]:
        """What is read and written inside takes effect together, or not at all."""
        return self.database.transaction()

    # Keys of rounds.

    def key(self, job: bytes, number: int) -> StoredKey | None:
        """The key of a round, if it was made."""
        with self.database.errors():
            row = self.database.execute(
                "SELECT round, modulus, secret FROM keys WHERE job = ? AND round = ?", (job, number)
            ).fetchone()
        return None if row is None else StoredKey(*row)

    def add_key(self, announced: AnnouncedKey, secret: bytes, columns: Sequence[BudgetStatement]) -> None:
        """Keep a round's new key, and what the round brings the job to, in each column of its method."""
        stated = json.dumps([column.as_dict() for column in columns])
        job = bytes.fromhex(announced.job)
        with self.transaction():
            self.database.execute(
                "INSERT INTO keys (job, round, modulus, secret, linkability, tokens, sealing_key) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    job, announced.round, announced.modulus, secret, announced.linkability, announced.tokens,
                    announced.sealing_key,
                ),
            )  # fmt: skip
            self.database.execute("INSERT INTO prices VALUES (?, ?, ?)", (job, announced.round, stated))

    def forget_secrets(self, job: bytes, last_round: int) -> None:
        """Erase the secret keys of all rounds up to one."""
        with self.transaction():
            changed = self.database.execute(
                "UPDATE keys SET secret = NULL WHERE job = ? AND round <= ? AND secret IS NOT NULL",
                (job, last_round),
            ).rowcount
        if changed:
            # Its bytes go from the log too, unless somebody reads: then with the next round's.
            self.database.fold_log()

    # What devices were granted. What changes it is called in a transaction.

    def entry(self, device: str, job: bytes, number: int) -> Entry | None:
        """What a device asked of a round before, or None."""
        row = self.database.execute(
            f"SELECT {_ENTRY} FROM grants WHERE device = ? AND job = ? AND round = ?", (device, job, number)
        ).fetchone()
        return None if row is None else _entry(row)

    def without_tokens(self, job: bytes, number: int) -> list[str]:
        """Devices that have asked for a round, and have no tokens of it: they declined, or were refused."""
        with self.database.errors():
            rows = self.database.execute(
                "SELECT device FROM grants WHERE job = ? AND round = ? AND verdict != ?",
                (job, number, Verdict.GRANTED),
            )
            return [row["device"] for row in rows]

    def put(self, entry: Entry) -> None:
        """Note what a device asked, and its answer, in the place of an earlier one."""
        self.database.execute(
            "INSERT INTO grants VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (device, job, round) DO UPDATE "
            "SET wish = excluded.wish, verdict = excluded.verdict, at = excluded.at, "
            "statement = excluded.statement, signature = excluded.signature",
            (
                entry.device, entry.job, entry.round, entry.wish, entry.verdict, entry.at,
                entry.statement.to_bytes(), entry.signature,
            ),
        )  # fmt: skip

    def ledger(self, device: str) -> LatestLedger | None:
        """How far a device's ledger had come by its own statements."""
        row = self.database.execute(
            "SELECT statement, signature, entries, went_back FROM ledgers WHERE device = ?", (device,)
        ).fetchone()
        return (
            None
            if row is None
            else LatestLedger(row["statement"], row["signature"], row["entries"], bool(row["went_back"]))
        )

    def put_ledger(self, device: str, statement: Statement, signature: bytes) -> None:
        """Note how far a device's ledger has come."""
        self.database.execute(
            "INSERT INTO ledgers VALUES (?, ?, ?, ?, 0) ON CONFLICT (device) DO UPDATE SET entries = "
            "excluded.entries, statement = excluded.statement, signature = excluded.signature, went_back = 0",
            (device, statement.entries, statement.to_bytes(), signature),
        )

    def note_went_back(self, device: str) -> None:
        """Note that a device's ledger is older than its own statement."""
        self.database.execute("UPDATE ledgers SET went_back = 1 WHERE device = ?", (device,))

    def spent(self, devices: Sequence[str]) -> list[Spent]:
        """What was granted to a device, and to those whose place it took."""
        return spent_by(self.database, devices)

    def price(self, job: bytes, number: int) -> list[dict[str, Any]]:
        """What a job costs who is granted a round of it, in each column, as statements."""
        row = self.database.execute(
            "SELECT columns FROM prices WHERE job = ? AND round = ?", (job, number)
        ).fetchone()
        found: list[dict[str, Any]] = json.loads(row["columns"])
        return found


_ENTRY: Final = "device, job, round, wish, verdict, at, statement, signature"


def _entry(row: Row) -> Entry:
    return Entry(
        row["device"], row["job"], row["round"], Wish(row["wish"]), Verdict(row["verdict"]), row["at"],
        Statement.from_bytes(row["statement"]), row["signature"],
    )  # fmt: skip


def spent_by(database: Reader, devices: Sequence[str]) -> list[Spent]:
    """See :meth:`Registry.spent`: of each job by the last round that was granted."""
    marks = ", ".join("?" * len(devices))
    rows = database.execute(
        f"""SELECT last.job, last.rounds, prices.columns FROM (
            SELECT job, max(round) AS round, count(DISTINCT round) AS rounds FROM grants
            WHERE verdict = ? AND device IN ({marks}) GROUP BY job
        ) AS last JOIN prices ON prices.job = last.job AND prices.round = last.round ORDER BY last.job""",
        (Verdict.GRANTED, *devices),
    )
    return [
        Spent(bytes(row["job"]).hex(), row["rounds"], statement)
        for row in rows
        for statement in json.loads(row["columns"])
    ]


def spent_of(
    granted: Iterable[tuple[str, int]], prices: Mapping[tuple[str, int], Sequence[dict[str, Any]]]
) -> list[Spent]:
    """As :func:`spent_by`, of what was read before.

    Args:
        granted: job and round of each grant of a device, and of those whose place it took.
        prices: of each job and round, in each column.
    """
    rounds: dict[str, set[int]] = defaultdict(set)
    for job, number in granted:
        rounds[job].add(number)
    return [
        Spent(job, len(numbers), statement)
        for job, numbers in sorted(rounds.items())
        for statement in prices.get((job, max(numbers)), ())
    ]


class RegistryReader:
    """Reads a registry, also while the coordinator writes to it.

    Args:
        place: the fleet's members directory, or PostgreSQL.

    Raises:
        StorageError: There is no registry.
    """

    def __init__(self, place: StorePlace) -> None:
        self._database = open_reader(place, Part.REGISTRY)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def entries(self, device: str | None = None) -> list[Entry]:
        """What devices asked, by job and round; of one device or of all."""
        where = "" if device is None else "WHERE device = ?"
        with self._database.errors():
            rows = self._database.execute(
                f"SELECT {_ENTRY} FROM grants {where} ORDER BY at, job, round, device",
                () if device is None else (device,),
            )
            return [_entry(row) for row in rows]

    def of_round(self, job: bytes, number: int) -> list[Entry]:
        """What devices asked of one round."""
        with self._database.errors():
            rows = self._database.execute(
                f"SELECT {_ENTRY} FROM grants WHERE job = ? AND round = ? ORDER BY device", (job, number)
            )
            return [_entry(row) for row in rows]

    def spent(self, devices: Sequence[str]) -> list[Spent]:
        """What was granted to a device, and to those whose place it took."""
        with self._database.errors():
            return spent_by(self._database, devices)

    def went_back(self) -> set[str]:
        """Devices whose ledger is older than a statement of theirs."""
        with self._database.errors():
            rows = self._database.execute("SELECT device FROM ledgers WHERE went_back = 1")
            return {row["device"] for row in rows}

    def prices(self) -> list[tuple[str, int, list[dict[str, Any]]]]:
        """Job, round, and what the round brings the job to, in each column, as statements."""
        with self._database.errors():
            rows = self._database.execute("SELECT job, round, columns FROM prices ORDER BY job, round")
            return [(bytes(row["job"]).hex(), row["round"], json.loads(row["columns"])) for row in rows]

    def keys(self) -> list[AnnouncedKey]:
        """Every key; but for those of a version that did not keep what was announced with them."""
        with self._database.errors():
            rows = self._database.execute(
                "SELECT job, round, linkability, tokens, sealing_key, modulus FROM keys "
                "WHERE linkability IS NOT NULL ORDER BY job, round"
            )
            return [
                AnnouncedKey(
                    bytes(row["job"]).hex(), row["round"], row["linkability"], row["tokens"],
                    bytes(row["sealing_key"]), bytes(row["modulus"]),
                )
                for row in rows
            ]  # fmt: skip
