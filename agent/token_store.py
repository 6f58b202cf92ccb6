"""Requests for tokens and the tokens themselves, on disk; and what was seen of the keys that they are signed
by.

A request is durable before it leaves: after a crash the same one leaves again, and has the same answer. What
takes its blinding off goes when its tokens are there, and they go when the round is spooled.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from agent.rounds import LONGEST_REASON
from dpagent.protocol.blind_signatures import PREFIX_BYTES, SIGNATURE_BYTES
from dpagent.protocol.issuing import Verdict, Wish
from dpagent.protocol.tokens import TOKEN_BYTES, RoundKey
from dpagent.wording import shortened

_REQUESTS_KEPT: Final = 64
"""Each without an answer is tried when one comes: those of four jobs at the most."""
_LISTS_KEPT: Final = 64
"""Besides those by which the device has asked."""
_CONFLICTS_KEPT: Final = 64


@dataclass(frozen=True, slots=True)
class Request:
    """A request for the tokens of a round. All but the statement, which is made when it leaves."""

    key: RoundKey
    keys: bytes
    """:func:`dpagent.protocol.tokens.key_digest` of the round's key."""
    sealing_key: bytes
    wish: Wish
    reason: str | None
    """Why the device declines, for its owner."""
    nonces: tuple[bytes, ...]
    """One for each token."""
    blinded: tuple[bytes, ...]
    """As many messages as there are tokens."""
    inverses: tuple[bytes, ...]
    """What takes the blinding off; none once there is an answer."""
    reply_secret: bytes
    verdict: Verdict | None = None
    """The coordinator's, once it has answered."""


def create_tokens(connection: sqlite3.Connection) -> None:
    """Migration: the tables of requests, of signed lists of keys, and of two that disagree."""
    connection.execute(
        """CREATE TABLE token_requests (
            number INTEGER PRIMARY KEY, job BLOB NOT NULL, round INTEGER NOT NULL, keys BLOB NOT NULL,
            linkability TEXT NOT NULL, tokens INTEGER NOT NULL, modulus BLOB NOT NULL,
            sealing_key BLOB NOT NULL, wish INTEGER NOT NULL, reason TEXT, nonces BLOB NOT NULL,
            blinded BLOB NOT NULL, inverses BLOB NOT NULL, reply_secret BLOB NOT NULL, verdict INTEGER,
            tokens_granted BLOB, UNIQUE (job, round)
        ) STRICT"""
    )
    connection.execute(
        "CREATE TABLE token_lists (number INTEGER PRIMARY KEY, job BLOB NOT NULL, message BLOB NOT NULL "
        "UNIQUE) STRICT"
    )
    connection.execute(
        "CREATE TABLE token_conflicts (job BLOB PRIMARY KEY, round INTEGER NOT NULL, one BLOB NOT NULL, "
        "other BLOB NOT NULL, found_at REAL NOT NULL) STRICT, WITHOUT ROWID"
    )
    connection.execute("CREATE TABLE token_secret (secret BLOB NOT NULL) STRICT")
    connection.execute("INSERT INTO token_secret VALUES (?)", (os.urandom(32),))


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two signed lists of keys that disagree: no coordinator that shows all boards the same signs both.

    Attributes:
        job: 16 bytes.
        number: a round on which they disagree.
        one, other: the messages as they came, in their envelopes.
        found_at: Unix time.
    """

    job: bytes
    number: int
    one: bytes
    other: bytes
    found_at: float


class TokenStore:
    """The requests, tokens and lists of an open database. What changes them runs inside a transaction.

    Args:
        connection: a database with :func:`create_tokens` applied.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    # Requests and tokens.

    def request(self, job: bytes, number: int, fleet: str) -> Request | None:
        """The request for a round's tokens, or None."""
        row = self._connection.execute(
            "SELECT * FROM token_requests WHERE job = ? AND round = ?", (job, number)
        ).fetchone()
        return None if row is None else _request(row, fleet)

    def asked(self) -> set[tuple[bytes, int]]:
        """Jobs and rounds of all requests that are kept."""
        rows = self._connection.execute("SELECT job, round FROM token_requests")
        return {(row["job"], row["round"]) for row in rows}

    def unanswered(self, fleet: str) -> list[Request]:
        """All requests without an answer, in their order."""
        rows = self._connection.execute("SELECT * FROM token_requests WHERE verdict IS NULL ORDER BY number")
        return [_request(row, fleet) for row in rows]

    def put(self, request: Request) -> None:
        """Keep a request. The oldest go if there are very many."""
        key = request.key
        self._connection.execute(
            "INSERT INTO token_requests (job, round, keys, linkability, tokens, modulus, sealing_key, wish, "
            "reason, nonces, blinded, inverses, reply_secret) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                key.job, key.number, request.keys, key.linkability, key.tokens, key.modulus,
                request.sealing_key, request.wish, _kept(request.reason), b"".join(request.nonces),
                b"".join(request.blinded), b"".join(request.inverses), request.reply_secret,
            ),
        )  # fmt: skip
        self._connection.execute(
            "DELETE FROM token_requests WHERE number <= (SELECT max(number) FROM token_requests) - ?",
            (_REQUESTS_KEPT,),
        )

    def settle(
        self, job: bytes, number: int, verdict: Verdict, tokens: Sequence[bytes], reason: str | None = None
    ) -> None:
        """Keep the answer to a request; nothing shows any more which blinded message became which token."""
        self._connection.execute(
            "UPDATE token_requests SET verdict = ?, tokens_granted = ?, inverses = x'', blinded = x'', "
            "nonces = x'', reason = coalesce(?, reason) WHERE job = ? AND round = ?",
            (verdict, b"".join(tokens), _kept(reason), job, number),
        )

    def tokens(self, job: bytes, number: int) -> tuple[bytes, ...]:
        """The tokens of a round that are there and not spent."""
        row = self._connection.execute(
            "SELECT tokens_granted FROM token_requests WHERE job = ? AND round = ?", (job, number)
        ).fetchone()
        return _cut((row and row["tokens_granted"]) or b"", TOKEN_BYTES)

    def spend(self, job: bytes, number: int) -> None:
        """The tokens of a round are in the spool."""
        self._connection.execute(
            "UPDATE token_requests SET tokens_granted = NULL WHERE job = ? AND round = ?", (job, number)
        )

    def forget_before(self, job: bytes, number: int) -> None:
        """Drop what there is of a job's earlier rounds."""
        self._connection.execute("DELETE FROM token_requests WHERE job = ? AND round < ?", (job, number))

    def empty(self) -> None:
        """Drop all requests and tokens, in a copy that is kept elsewhere."""
        self._connection.execute("DELETE FROM token_requests")

    def stated(self, digest: bytes) -> bytes:
        """What a statement says of a ledger's entry. Not its digest: an entry can be guessed, and with it the
        owner's budget, or to a second when a round was charged."""
        secret = self._connection.execute("SELECT secret FROM token_secret").fetchone()["secret"]
        return hashlib.sha256(b"dpagent v1 ledger head\0" + secret + digest).digest()

    # What was seen of the keys.

    def lists(self) -> list[bytes]:
        """The signed lists that were seen, oldest first."""
        return [
            row["message"]
            for row in self._connection.execute("SELECT message FROM token_lists ORDER BY number")
        ]

    def put_list(self, job: bytes, message: bytes, spared: Collection[bytes] = ()) -> None:
        """Keep a signed list. The oldest go if there are very many.

        Args:
            job: of the list.
            message: the list.
            spared: lists that do not go: of requests that are kept, and so no more than those.
        """
        self._connection.execute(
            "INSERT OR IGNORE INTO token_lists (job, message) VALUES (?, ?)", (job, message)
        )
        marks = ", ".join("?" * len(spared))
        self._connection.execute(
            f"DELETE FROM token_lists WHERE message NOT IN ({marks}) AND number NOT IN "
            "(SELECT number FROM token_lists ORDER BY number DESC LIMIT ?)",
            (*spared, _LISTS_KEPT),
        )

    def conflicting_round(self, job: bytes) -> int | None:
        """A round of which two signed lists say different keys, or None. Where as many conflicts are kept as
        there may be, it is one of any job: who has signed so many is believed no more."""
        of_all = " OR 1" if self.is_full_of_conflicts else ""
        row = self._connection.execute(
            f"SELECT round FROM token_conflicts WHERE job = ?{of_all} ORDER BY job != ?", (job, job)
        ).fetchone()
        return None if row is None else int(row["round"])

    @property
    def is_full_of_conflicts(self) -> bool:
        """Whether as many are kept as there may be."""
        (count,) = self._connection.execute("SELECT count(*) FROM token_conflicts").fetchone()
        return bool(count >= _CONFLICTS_KEPT)

    def conflicts(self) -> list[Conflict]:
        """All that were kept, the oldest first."""
        rows = self._connection.execute("SELECT * FROM token_conflicts ORDER BY found_at, job")
        return [Conflict(row["job"], row["round"], row["one"], row["other"], row["found_at"]) for row in rows]

    def put_conflict(self, job: bytes, number: int, one: bytes, other: bytes, now: float) -> None:
        """Keep two signed lists that disagree, for good. If there are very many, the first ones stay: later
        ones, which cost a coordinator nothing, would else have a board forget the one that matters."""
        if not self.is_full_of_conflicts:
            self._connection.execute(
                "INSERT OR IGNORE INTO token_conflicts VALUES (?, ?, ?, ?, ?)", (job, number, one, other, now)
            )

    def drop_conflicts(self, jobs: Iterable[bytes]) -> None:
        """Drop those of some jobs."""
        self._connection.executemany("DELETE FROM token_conflicts WHERE job = ?", [(job,) for job in jobs])


def _request(row: sqlite3.Row, fleet: str) -> Request:
    key = RoundKey(fleet, row["job"], row["round"], row["linkability"], row["tokens"], row["modulus"])
    return Request(
        key, row["keys"], row["sealing_key"], Wish(row["wish"]), row["reason"],
        _cut(row["nonces"], PREFIX_BYTES), _cut(row["blinded"], SIGNATURE_BYTES),
        _cut(row["inverses"], SIGNATURE_BYTES), row["reply_secret"],
        None if row["verdict"] is None else Verdict(row["verdict"]),
    )  # fmt: skip


def _kept(reason: str | None) -> str | None:
    return None if reason is None else shortened(reason, LONGEST_REASON)


def _cut(data: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(data[at : at + size] for at in range(0, len(data), size))
