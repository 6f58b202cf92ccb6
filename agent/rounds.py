"""The states of a device's rounds, on disk.

    offered ──► charged ──► spooled ──► published ──► receipted
       │           └────────────┴───────────┴───────► expired
       ├► sitting out ──► sat out
       └► declined, or missed

*Offered*: its signed plan has arrived. Admission, which reads no record, declines it or ends it in *charged*;
the charge and that state are one transaction, so that no state lies between them. A *charged* round has left
nothing: after a crash it is done again under the same charge, with a fresh lot and fresh noise, but only for
the very plan that was charged, as the ledger has it. *Spooled*: its fragments are on disk, and no record is
read for it again. *Published*: each fragment has left at least once. *Receipted*: the coordinator has counted
all of them. *Expired*: another round of its job began before that, or one of another was charged; or the
device's limits exclude the round by now.

*Missed*: another round of its job began, or the job ended, before it was decided on. It is over.

A *declined* round is decided on again when its deadline is put off, or after a restart. Where dummies hide
that a device takes no part, a round goes through states in pairs: *sitting out* is written when *charged*
would be, and *sat out* when *spooled* or *expired* would be, with dummies in the spool in place of
fragments. What
follows from one of a pair, after a crash or another announcement, follows from the other. The state of a
round does not follow its dummies.

Of each job the last round that was *decided on* (charged, or sat out) stays on record for good, as charges
stay in the ledger: neither it nor an earlier one is decided on again, whatever else has been forgotten since.
Beside it stand the last round of which fragments or dummies were to leave, and the last of which a receipt
came that lets the device go on: see :meth:`Rounds.awaits_receipt`.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from agent.spool import UNCOUNTED
from dpagent.wording import shortened

LONGEST_REASON: Final = 500
"""Bytes of a reason on record. It may quote a plan, whose descriptions are as long as its signer likes."""
_KEPT: Final = 2_000
"""Rounds that stay on record of those that are not decided on, and of those that are over; a coordinator can
offer any number of them."""


class RoundState(StrEnum):
    """Where a round stands; see the module's text."""

    OFFERED = "offered"
    DECLINED = "declined"
    SITTING_OUT = "sitting out"
    SAT_OUT = "sat out"
    CHARGED = "charged"
    SPOOLED = "spooled"
    PUBLISHED = "published"
    RECEIPTED = "receipted"
    EXPIRED = "expired"
    MISSED = "missed"


_DECIDED: Final = (RoundState.CHARGED, RoundState.SITTING_OUT, RoundState.SAT_OUT)
"""One of these a round reaches when it is decided on."""
_NOISE_ALONE: Final = (
    "state NOT IN ('offered', 'declined', 'sitting out', 'sat out', 'missed') AND reason IS NOT NULL"
)


@dataclass(frozen=True, slots=True)
class KnownRound:
    """A round on record.

    Attributes:
        state: where it stands.
        plan: SHA-256 of its plan.
        reason: why it is declined, or sat out, or holds noise alone; or None.
    """

    state: RoundState
    plan: bytes
    reason: str | None = None


def create_rounds(connection: sqlite3.Connection) -> None:
    """Migration: the tables of rounds, and of the last one of each job that was decided on."""
    connection.execute(
        f"""CREATE TABLE rounds (
            number INTEGER PRIMARY KEY,
            job TEXT NOT NULL,
            round INTEGER NOT NULL,
            plan BLOB NOT NULL CHECK (length(plan) = 32),
            state TEXT NOT NULL CHECK (state IN ({", ".join(f"'{state}'" for state in RoundState)})),
            reason TEXT,
            changed_at REAL NOT NULL,
            energy_j REAL,
            energy_source TEXT,
            UNIQUE (job, round)
        ) STRICT"""
    )
    connection.execute(
        """CREATE TABLE decided (
            job TEXT PRIMARY KEY,
            round INTEGER NOT NULL,
            spooled INTEGER NOT NULL DEFAULT 0,
            receipted INTEGER NOT NULL DEFAULT 0
        ) STRICT, WITHOUT ROWID"""
    )


class Rounds:
    """The rounds of an open database. Each method must run inside a transaction.

    Args:
        connection: a database with :func:`create_rounds` applied.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def find(self, job: str, number: int) -> KnownRound | None:
        """A round, or None if it was never offered, or long ago; see :meth:`last_decided`."""
        row = self._connection.execute(
            "SELECT state, plan, reason FROM rounds WHERE job = ? AND round = ?", (job, number)
        ).fetchone()
        return None if row is None else KnownRound(RoundState(row["state"]), row["plan"], row["reason"])

    def latest(self, job: str) -> int:
        """The greatest number of a job's rounds on record; 0 if there is none."""
        (number,) = self._connection.execute("SELECT max(round) FROM rounds WHERE job = ?", (job,)).fetchone()
        return max(number or 0, self.last_decided(job))

    def last_decided(self, job: str) -> int:
        """The greatest number of a job's rounds that were ever decided on; 0 if there is none."""
        row = self._connection.execute("SELECT round FROM decided WHERE job = ?", (job,)).fetchone()
        return 0 if row is None else int(row["round"])

    def awaits_receipt(self, job: str, *, by_probe: bool) -> bool:
        """Whether no receipt has come of the last round of a job of which anything was to leave, or of a
        later probe.

        What this device publishes may then not arrive: over MQTT 3.1.1, a broker acknowledges what its access
        rules refuse. No other round of the job is decided on before. A round that another replaces before its
        update is spooled counts, since it is charged. It follows from receipts alone, and is the same whether
        the device took part or sat out. Of a round whose fragments carry tokens, the receipt of a probe alone
        counts (:mod:`agent.probes`).

        Args:
            job: in hexadecimal.
            by_probe: whether of any round the receipt of a probe alone counts.
        """
        row = self._connection.execute(
            "SELECT spooled > max(CASE WHEN ? THEN 0 ELSE receipted END, coalesce((SELECT max(round)"
            " FROM probes WHERE probes.job = decided.job AND is_counted), 0)) FROM decided WHERE job = ?",
            (by_probe, job),
        ).fetchone()
        return row is not None and bool(row[0])

    def note_leaving(self, job: str, number: int) -> None:
        """Fragments or dummies of a round are in the spool, or will be: its budget is spent already."""
        self._connection.execute("UPDATE decided SET spooled = max(spooled, ?) WHERE job = ?", (number, job))

    def note_receipts(self) -> None:
        """Receipts have come: note, by job, the last round of which one lets the device go on."""
        self._connection.execute(
            "UPDATE decided SET receipted = max(receipted, coalesce((SELECT max(round) FROM fragments"
            " WHERE fragments.job = decided.job AND state = 'counted' AND lets_go_on), 0))"
            " WHERE spooled > receipted"
        )

    def jobs_decided(self) -> int:
        """The number of jobs of which a round was ever decided on."""
        return int(self._connection.execute("SELECT count(*) FROM decided").fetchone()[0])

    def offer(self, job: str, number: int, plan: bytes, now: float) -> None:
        """A plan has arrived. A round that is charged or beyond stays as it is.

        The oldest rounds are forgotten, but none that is charged and not yet receipted or expired: without
        its state, a charged round would not be run again after a crash. Those that are not decided on, which
        cost a coordinator nothing, make it forget no others, which the owner reads.
        """
        self._connection.execute(
            """INSERT INTO rounds (job, round, plan, state, changed_at) VALUES (?, ?, ?, 'offered', ?)
            ON CONFLICT (job, round) DO UPDATE SET plan = excluded.plan, state = 'offered', reason = NULL,
                changed_at = excluded.changed_at WHERE state IN ('offered', 'declined')""",
            (job, number, plan, now),
        )
        for which in ("'offered', 'declined', 'missed'", "'sat out', 'receipted', 'expired'"):
            self._connection.execute(
                f"""DELETE FROM rounds WHERE state IN ({which}) AND number <= (SELECT number FROM rounds
                WHERE state IN ({which}) ORDER BY number DESC LIMIT 1 OFFSET ?)""",
                (_KEPT,),
            )

    def move(
        self,
        job: str,
        number: int,
        state: RoundState,
        now: float,
        reason: str | None = None,
        plan: bytes | None = None,
    ) -> None:
        """Bring a round to a state.

        Args:
            job: its job, in hexadecimal.
            number: its number.
            state: the new one.
            now: Unix time.
            reason: why it was declined, or why it holds noise alone, of which :data:`LONGEST_REASON` bytes
                are kept; otherwise the one on record stays.
            plan: SHA-256 of the plan that this was decided for; otherwise the one on record stays.
        """
        if reason is not None:
            reason = shortened(reason, LONGEST_REASON)
        self._connection.execute(
            "UPDATE rounds SET state = ?, reason = coalesce(?, reason), plan = coalesce(?, plan),"
            " changed_at = ? WHERE job = ? AND round = ?",
            (state, reason, plan, now, job, number),
        )
        if state in _DECIDED:
            self._connection.execute(
                "INSERT INTO decided (job, round) VALUES (?, ?)"
                " ON CONFLICT (job) DO UPDATE SET round = max(round, excluded.round)",
                (job, number),
            )
        if state in (RoundState.CHARGED, RoundState.SITTING_OUT):
            self.note_leaving(job, number)

    def add_energy(self, job: str, number: int, joules: float, source: str) -> None:
        """Add to the energy that a round has taken, as a sensor of the board measures it."""
        self._connection.execute(
            "UPDATE rounds SET energy_j = coalesce(energy_j, 0) + ?, energy_source = ?"
            " WHERE job = ? AND round = ?",
            (joules, source, job, number),
        )

    def charged(self) -> set[tuple[str, int]]:
        """Job and number of all rounds that stand at *charged*: after a crash they are run again."""
        rows = self._connection.execute("SELECT job, round FROM rounds WHERE state = 'charged'")
        return {(row["job"], row["round"]) for row in rows}

    def follow_fragments(self, now: float) -> None:
        """Bring spooled rounds to the state that their fragments have reached."""
        for state, before, besides in (
            (RoundState.RECEIPTED, "'spooled', 'published'", ""),
            (RoundState.PUBLISHED, "'spooled'", " AND fragments.state != 'sent'"),
        ):
            self._connection.execute(
                f"""UPDATE rounds SET state = ?, changed_at = ? WHERE state IN ({before}) AND NOT EXISTS (
                    SELECT 1 FROM fragments WHERE fragments.job = rounds.job
                    AND fragments.round = rounds.round AND {UNCOUNTED}{besides})""",
                (state, now),
            )

    def expire_others(self, job: str, number: int, now: float) -> None:
        """Give up all rounds that are decided on and not receipted, but for one."""
        self._expire("NOT (job = ? AND round = ?)", (job, number), now)

    def expire_earlier(self, job: str, number: int, now: float) -> None:
        """Give up a job's earlier rounds that are not receipted."""
        self._expire("job = ? AND round < ?", (job, number), now)
        self._miss("job = ? AND round < ?", (job, number), now)

    def forget_dummies_of_others(self, job: str, number: int) -> None:
        """Drop the spool's rows of rounds that are sat out, but for one: no budget bounds their number."""
        self._forget_dummies("NOT (job = ? AND round = ?)", (job, number))

    def forget_earlier_dummies(self, job: str, number: int) -> None:
        """Drop the spool's rows of a job's earlier rounds that are sat out, but for the last: as with
        fragments, a receipt of it may still come."""
        self._forget_dummies(
            "job = ? AND round < min(?, (SELECT spooled FROM decided WHERE decided.job = rounds.job))",
            (job, number),
        )

    def _forget_dummies(self, which: str, values: tuple[str | int, ...]) -> None:
        self._connection.execute(
            "DELETE FROM fragments WHERE (job, round) IN ("
            f"SELECT job, round FROM rounds WHERE state = 'sat out' AND {which})",
            values,
        )

    def expire_job(self, job: str, now: float) -> None:
        """Give up a job's rounds that are not receipted."""
        self._expire("job = ?", (job,), now)
        self._miss("job = ?", (job,), now)

    def expire_all(self, now: float) -> None:
        """Give up all rounds that are decided on and not receipted."""
        self._expire("true", (), now)

    def expire_spooled(self) -> None:
        """Give up the rounds whose fragments may have left, in a copy that has no fragments."""
        self._connection.execute(
            "UPDATE rounds SET state = 'expired' WHERE state IN ('spooled', 'published')"
        )

    def forget_work(self) -> None:
        """Drop, in a copy, what the board has taken for rounds, and why they held noise alone: both come of
        work on records."""
        self._connection.execute("UPDATE rounds SET energy_j = NULL, energy_source = NULL")
        self._connection.execute(f"UPDATE rounds SET reason = NULL WHERE {_NOISE_ALONE}")

    def _expire(self, which: str, values: tuple[str | int, ...], now: float) -> None:
        self._connection.execute(
            "UPDATE rounds SET state = 'expired', changed_at = ? WHERE state IN ('charged', 'spooled',"
            f" 'published') AND {which}",
            (now, *values),
        )
        self._connection.execute(
            f"UPDATE rounds SET state = 'sat out', changed_at = ? WHERE state = 'sitting out' AND {which}",
            (now, *values),
        )

    def _miss(self, which: str, values: tuple[str | int, ...], now: float) -> None:
        self._connection.execute(
            f"UPDATE rounds SET state = 'missed', changed_at = ? WHERE state = 'offered' AND {which}",
            (now, *values),
        )


@dataclass(frozen=True, slots=True)
class Explained:
    """A round that needs an explanation. Only for the owner of the device."""

    job: str
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobEnergy:
    """The energy that the rounds of a job have taken, as far as they are on record and were measured."""

    job: str
    rounds: int
    joules: float
    source: str


def energy_of_jobs(connection: sqlite3.Connection) -> list[JobEnergy]:
    """The energy of each job, by each sensor that measured it, in order."""
    rows = connection.execute(
        "SELECT job, count(*) AS rounds, sum(energy_j) AS joules, energy_source AS source FROM rounds"
        " WHERE energy_j IS NOT NULL GROUP BY job, energy_source ORDER BY min(number)"
    )
    return [JobEnergy(**row) for row in rows]


def declined_rounds(connection: sqlite3.Connection) -> list[Explained]:
    """Rounds that the device does not take part in, in order, the first of each job and reason."""
    which = "state IN ('declined', 'sitting out', 'sat out') GROUP BY job, reason HAVING number = min(number)"
    return _explained(connection, which)


def noise_alone_rounds(connection: sqlite3.Connection) -> list[Explained]:
    """Rounds for which the device sent noise alone, in order."""
    return _explained(connection, _NOISE_ALONE)


def _explained(connection: sqlite3.Connection, which: str) -> list[Explained]:
    rows = connection.execute(f"SELECT job, round, reason FROM rounds WHERE {which} ORDER BY number")
    return [Explained(row["job"], row["round"], row["reason"]) for row in rows]
