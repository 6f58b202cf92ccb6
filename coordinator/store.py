"""The coordinator's database: the job, its rounds, and every fragment once.

One transaction stores a fragment's id and its values, so a fragment is counted at most once, despite resends,
replays and interruptions.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from coordinator.model_state import ModelState
from coordinator.seats import Counted, OpenedFragment, Seats, Sums, create_seats
from dpagent import faults
from dpagent.faults import FaultPoint
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds
from dpagent.storage import disk_errors, open_database, open_readonly, transaction

log = logging.getLogger(__name__)

BLOCK_FULL: Final = "block full"
"""Why a fragment that finds no seat is rejected."""


@dataclass(frozen=True, slots=True)
class NoiseOfDevices:
    """Noise that devices add to their updates besides the coordinator's, and the ε without trust that each
    round brings it to."""

    noise: JobNoise
    epsilon_by_round: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """The job's definition, fixed at its start."""

    id: bytes
    terms: dict[str, object]
    noise: JobNoise | TwoPointRounds
    epsilon_by_round: tuple[float, ...]
    device: NoiseOfDevices | None = None

    @property
    def delta(self) -> float:
        """δ of the job."""
        privacy: Any = self.terms["privacy"]
        return float(privacy["delta"])

    @property
    def fragments_per_update(self) -> int:
        """Fragments of a device's update."""
        fragments: Any = self.terms["fragments_per_update"]
        return int(fragments)


@dataclass(frozen=True, slots=True)
class OpenRound:
    """The round that is open. Times are Unix times."""

    number: int
    opened_at: float
    deadline: float
    announced_at: float | None = None
    """When the broker was first given its plan."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The stored result of a closed round."""

    accuracy: float | None
    clamped: int
    kept: float
    noise_multiplier: float
    epsilon: float
    out_of_range: tuple[str, ...] = ()
    """Layers whose changes on the devices lie at the ends of their ranges."""
    clip_norm: float | None = None
    """Of the round, where it follows a quantile."""


def _create(connection: sqlite3.Connection) -> None:
    connection.execute(
        "CREATE TABLE job (one INTEGER PRIMARY KEY CHECK (one = 1), id BLOB NOT NULL, terms TEXT NOT NULL, "
        "budget TEXT NOT NULL, finished_at REAL) STRICT"
    )
    connection.execute(
        "CREATE TABLE model (one INTEGER PRIMARY KEY CHECK (one = 1), weights BLOB NOT NULL, "
        "moments BLOB NOT NULL, clip_norm REAL NOT NULL, radii TEXT NOT NULL) STRICT"
    )
    connection.execute(
        """CREATE TABLE rounds (
            number INTEGER PRIMARY KEY, opened_at REAL NOT NULL, deadline REAL NOT NULL, announced_at REAL,
            closed_at REAL, noise_multiplier REAL, epsilon REAL, accuracy REAL, clamped INTEGER, kept REAL,
            fragments INTEGER, least_counted INTEGER, out_of_range TEXT, clip_norm REAL
        ) STRICT"""
    )
    create_seats(connection)
    connection.execute("CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT")


def _columns(model: ModelState) -> tuple[bytes, bytes, float, str]:
    return model.weights.tobytes(), model.moments.tobytes(), model.clip_norm, json.dumps(model.radii)


def _job_in(connection: sqlite3.Connection) -> Job | None:
    row = connection.execute("SELECT id, terms, budget FROM job").fetchone()
    if row is None:
        return None
    budget = json.loads(row["budget"])
    noise, own = _noise_of(budget), budget["device"]
    device = None
    if own is not None:
        added = JobNoise.announced(own["mechanism"], own["noise_multipliers"], own["parameters"])
        device = NoiseOfDevices(added, tuple(own["epsilon_by_round"]))
    return Job(row["id"], json.loads(row["terms"]), noise, tuple(budget["epsilon_by_round"]), device)


def _least_counted(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT min(least_counted) FROM rounds WHERE closed_at IS NOT NULL").fetchone()
    return int(row[0] or 0)


def _budget_of(noise: JobNoise | TwoPointRounds, epsilon_by_round: Sequence[float]) -> dict[str, Any]:
    return {
        "mechanism": noise.mechanism.name,
        "noise_multipliers": noise.multipliers,
        "parameters": dict(noise.parameters),
        "epsilon_by_round": epsilon_by_round,
    }


def _noise_of(budget: dict[str, Any]) -> JobNoise | TwoPointRounds:
    name, multipliers, parameters = budget["mechanism"], budget["noise_multipliers"], budget["parameters"]
    if name == TwoPointRounds.mechanism.name:
        return TwoPointRounds(tuple(multipliers), parameters["coordinates"])
    return JobNoise.announced(name, multipliers, parameters)


class Store:
    """The open database of one job.

    Args:
        state_dir: The directory; its owner holds the lock.

    Raises:
        StorageError: The database cannot be used.
    """

    def __init__(self, state_dir: Path) -> None:
        self.file = state_dir / "coordinator.db"
        self.connection = open_database(self.file, [_create])
        self._seats = Seats(self.connection)
        self._erases = False

    def erase_what_is_deleted(self) -> None:
        """From now on leave no byte of a closed round's values in the files: no noise hides them.

        A crash just after a round closed may have left some in the log: they go now.
        """
        self.connection.execute("PRAGMA secure_delete = ON")
        self._erases = True
        self._cut_log()

    def close(self) -> None:
        """Close the database."""
        self.connection.close()

    def job(self) -> Job | None:
        """The job, if one has begun."""
        return _job_in(self.connection)

    def begin(self, job: Job, model: ModelState) -> None:
        """Begin the job with its initial model."""
        own = job.device and _budget_of(job.device.noise, job.device.epsilon_by_round)
        budget = _budget_of(job.noise, job.epsilon_by_round) | {"device": own}
        with disk_errors(self.file), transaction(self.connection):
            self.connection.execute(
                "INSERT INTO job (one, id, terms, budget) VALUES (1, ?, ?, ?)",
                (job.id, json.dumps(job.terms, sort_keys=True), json.dumps(budget)),
            )
            self.connection.execute("INSERT INTO model VALUES (1, ?, ?, ?, ?)", _columns(model))
            faults.reached(FaultPoint.COORDINATOR_JOB_WRITTEN)
        faults.reached(FaultPoint.COORDINATOR_JOB_BEGUN)

    def model(self) -> ModelState:
        """The current model."""
        row = self.connection.execute("SELECT weights, moments, clip_norm, radii FROM model").fetchone()
        weights = np.frombuffer(row["weights"], np.float32).copy()
        moments = np.frombuffer(row["moments"], np.float64).reshape(-1, len(weights)).copy()
        return ModelState(weights, moments, float(row["clip_norm"]), tuple(json.loads(row["radii"])))

    def open_round(self) -> OpenRound | None:
        """The round that is open, if one is."""
        row = self.connection.execute(
            "SELECT number, opened_at, deadline, announced_at FROM rounds WHERE closed_at IS NULL"
        ).fetchone()
        return None if row is None else OpenRound(*row)

    def closed_rounds(self) -> int:
        """How many rounds are over."""
        return int(
            self.connection.execute("SELECT count(*) FROM rounds WHERE closed_at IS NOT NULL").fetchone()[0]
        )

    def epsilon_spent(self) -> float:
        """ε after the rounds that are over."""
        row = self.connection.execute(
            "SELECT max(epsilon) FROM rounds WHERE closed_at IS NOT NULL"
        ).fetchone()
        return float(row[0] or 0.0)

    def least_counted(self) -> int:
        """The fragments that counted in the block with the fewest, of all rounds that are over; 0 without
        any."""
        return _least_counted(self.connection)

    def start_round(self, number: int, opened_at: float, deadline: float) -> OpenRound:
        """Open a round, or set a new deadline for the one that is open."""
        with disk_errors(self.file), transaction(self.connection):
            self.connection.execute(
                "INSERT INTO rounds (number, opened_at, deadline) VALUES (?, ?, ?) "
                "ON CONFLICT (number) DO UPDATE SET deadline = excluded.deadline",
                (number, opened_at, deadline),
            )
        faults.reached(FaultPoint.COORDINATOR_ROUND_OPENED)
        current = self.open_round()
        assert current is not None
        return current

    def mark_announced(self, number: int, announced_at: float) -> None:
        """Note when the broker was first given the plan of a round."""
        with disk_errors(self.file), transaction(self.connection):
            self.connection.execute(
                "UPDATE rounds SET announced_at = coalesce(announced_at, ?) WHERE number = ?",
                (announced_at, number),
            )
        faults.reached(FaultPoint.COORDINATOR_ANNOUNCED)

    def count(self, fragments: Sequence[OpenedFragment], open_round: int, *, seats: int) -> Counted:
        """Count each fragment of the open round once, as far as its block has seats; see :class:`Seats`."""
        faults.reached(FaultPoint.COORDINATOR_FRAGMENTS_OPENED)
        with disk_errors(self.file), transaction(self.connection):
            counted = self._seats.take(fragments, open_round, seats)
            self._add_to_counters(
                {
                    "duplicates": len(counted.repeated),
                    "dummies": len(counted.dummies),
                    "late": counted.late,
                    f"rejected: {BLOCK_FULL}": counted.unseated,
                }
            )
            faults.reached(FaultPoint.COORDINATOR_COUNT_WRITTEN)
        faults.reached(FaultPoint.COORDINATOR_COUNTED)
        return counted

    def counts(self, number: int) -> dict[int, int]:
        """Fragments counted by position in a round."""
        return self._seats.counts(number)

    def sums(self, number: int, *, groups: int = 1) -> list[Sums]:
        """Counts and exact integer sums by position in a round, for each of some random groups."""
        return self._seats.sums(number, groups=groups)

    def close_round(self, number: int, model: ModelState, result: RoundResult, *, closed_at: float) -> None:
        """Close a round and store its model, in one transaction."""
        faults.reached(FaultPoint.COORDINATOR_STEPPED)
        with disk_errors(self.file), transaction(self.connection):
            counts = self.counts(number).values()
            self.connection.execute(
                "UPDATE rounds SET closed_at = ?, accuracy = ?, clamped = ?, kept = ?, noise_multiplier = ?, "
                "epsilon = ?, out_of_range = ?, clip_norm = ?, fragments = ?, least_counted = ? "
                "WHERE number = ?",
                (
                    closed_at,
                    result.accuracy,
                    result.clamped,
                    result.kept,
                    result.noise_multiplier,
                    result.epsilon,
                    json.dumps(result.out_of_range),
                    result.clip_norm,
                    sum(counts),
                    min(counts, default=0),
                    number,
                ),
            )
            self.connection.execute(
                "UPDATE model SET weights = ?, moments = ?, clip_norm = ?, radii = ?", _columns(model)
            )
            # The values are no longer needed; the counts stay in `rounds`, the ids in `fragments`.
            self._seats.clear(number)
            faults.reached(FaultPoint.COORDINATOR_CLOSE_WRITTEN)
        faults.reached(FaultPoint.COORDINATOR_CLOSED)
        if self._erases:
            self._cut_log()

    def _cut_log(self) -> None:
        """Fold the log, which has deleted values too, into the database."""
        with disk_errors(self.file):
            is_busy, *_ = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            log.warning(
                "%s-wal: another program reads the database, so values of the closed round stay in its log "
                "until the next round closes, or the coordinator starts again", self.file,
            )  # fmt: skip

    def is_finished(self) -> bool:
        """Whether the job is over and the broker took its announcement."""
        return self.connection.execute("SELECT finished_at FROM job").fetchone()["finished_at"] is not None

    def finish(self, finished_at: float) -> None:
        """Mark the job as finished."""
        faults.reached(FaultPoint.COORDINATOR_SAID_GOODBYE)
        with disk_errors(self.file), transaction(self.connection):
            self.connection.execute("UPDATE job SET finished_at = coalesce(finished_at, ?)", (finished_at,))
        faults.reached(FaultPoint.COORDINATOR_FINISHED)

    def reject(self, reason: str, count: int) -> None:
        """Count rejected messages by reason."""
        with disk_errors(self.file), transaction(self.connection):
            self._add_to_counters({f"rejected: {reason}": count})

    def _add_to_counters(self, amounts: dict[str, int]) -> None:
        self.connection.executemany(
            "INSERT INTO counters VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            [(name, amount) for name, amount in amounts.items() if amount],
        )


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round, for readers of the database."""

    number: int
    opened_at: float
    closed_at: float | None
    noise_multiplier: float | None
    epsilon: float | None
    accuracy: float | None
    clamped: int | None
    kept: float | None
    out_of_range: tuple[str, ...]
    """Layers whose changes on the devices lie at the ends of their ranges."""
    clip_norm: float | None
    """Of the round, where it follows a quantile."""
    fragments: int


class StoreReader:
    """Reads a coordinator's database, also while the coordinator writes to it.

    Args:
        state_dir: The coordinator's state directory.

    Raises:
        StorageError: There is no such database.
    """

    def __init__(self, state_dir: Path) -> None:
        self.file = state_dir / "coordinator.db"
        self._connection = open_readonly(self.file)

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def rounds(self) -> list[RoundRecord]:
        """All rounds so far."""
        with disk_errors(self.file):
            rows = self._connection.execute(
                "SELECT number, opened_at, closed_at, noise_multiplier, epsilon, accuracy, clamped, kept, "
                "clip_norm, coalesce(out_of_range, '[]') AS out_of_range, "
                "coalesce(fragments, (SELECT count(*) FROM seats WHERE round = number)) AS fragments "
                "FROM rounds ORDER BY number"
            )
            return [
                RoundRecord(**{**row, "out_of_range": tuple(json.loads(row["out_of_range"]))}) for row in rows
            ]

    def job(self) -> Job | None:
        """The job, if one has begun."""
        with disk_errors(self.file):
            return _job_in(self._connection)

    def is_finished(self) -> bool:
        """Whether the job is over."""
        with disk_errors(self.file):
            row = self._connection.execute("SELECT finished_at FROM job").fetchone()
        return row is not None and row["finished_at"] is not None

    def fragments(self) -> dict[bytes, tuple[int, float]]:
        """Round and arrival time (Unix) of every counted fragment, by id."""
        with disk_errors(self.file):
            rows = self._connection.execute("SELECT id, round, arrived_at FROM fragments")
            return {row["id"]: (row["round"], row["arrived_at"]) for row in rows}

    def least_counted(self) -> int:
        """The fragments that counted in the block with the fewest, of all closed rounds; 0 without any."""
        with disk_errors(self.file):
            return _least_counted(self._connection)

    def counters(self) -> dict[str, int]:
        """Running totals of messages: ``duplicates``, ``dummies``, ``late``, and ``rejected: reason`` by
        reason."""
        with disk_errors(self.file):
            rows = self._connection.execute("SELECT name, value FROM counters")
            return {row["name"]: row["value"] for row in rows}
