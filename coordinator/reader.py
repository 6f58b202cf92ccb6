"""Reads a coordinator's database, also while the coordinator writes to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.database.opening import open_reader
from coordinator.database.settings import StorePlace
from coordinator.job import Job
from coordinator.measurements import Measured, measured_in
from coordinator.orders import Order, orders_in
from coordinator.passed_rounds import passed_round
from coordinator.queue import current_in, find, jobs_in
from coordinator.queued_job import JobState, QueuedJob
from coordinator.shared_store import GONE_S, WorkerRecord, workers_at


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round, for readers of the database."""

    number: int
    opened_at: float
    deadline: float
    announced_at: float | None
    """When the broker was first given its plan."""
    closed_at: float | None
    given_up_at: float | None
    """When it was given up: its job was cancelled while it was open, or too few members were left that could
    send for it. Devices may have been charged for it."""
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
    least_counted: int | None
    """Fragments that counted in the block with the fewest; None in a round that no device was told of."""

    @property
    def is_over(self) -> bool:
        """Whether no fragment counts in it any more."""
        return self.closed_at is not None or self.given_up_at is not None


def least_counted_in(rounds: Sequence[RoundRecord]) -> int:
    """The fragments that counted in the block with the fewest, of all rounds that are over; 0 without any."""
    return min((each.least_counted for each in rounds if each.least_counted is not None), default=0)


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job has come: ε that its rounds have spent, and the accuracy of its last model."""

    epsilon: float
    accuracy: float | None


class StoreReader:
    """Reads what a coordinator keeps of its jobs, or of one of them.

    Args:
        place: Where the coordinator's state is.
        name: Of the job that is read; by default the one that is current when it is first asked for: the one
            that goes on, or else the one that ended last.

    Raises:
        StorageError: There is no such database.
    """

    def __init__(self, place: StorePlace, name: str | None = None) -> None:
        self._database = open_reader(place)
        self._name, self._number = name, None if name is None else self._find(name)

    def _find(self, name: str) -> int:
        try:
            return find(self.jobs(), name).number
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def jobs(self) -> list[QueuedJob]:
        """All jobs, in the order of the queue."""
        with self._database.errors():
            return jobs_in(self._database)

    def queued(self) -> QueuedJob | None:
        """The job that is read, as it is in the queue; None if the queue is empty."""
        jobs = self.jobs()
        if self._number is None and (current := current_in(jobs)) is not None:
            self._number = current.number
        return next((each for each in jobs if each.number == self._number), None)

    def job(self) -> Job | None:
        """The definition of the job that is read; None if the queue is empty."""
        queued = self.queued()
        return None if queued is None else queued.job

    def is_finished(self) -> bool:
        """Whether the job has come to its end, and was not cancelled."""
        queued = self.queued()
        return queued is not None and queued.state is JobState.FINISHED

    def rounds(self) -> list[RoundRecord]:
        """All rounds of the job so far."""
        return [] if self._job is None else self.rounds_of(self._job)

    def passed_round_of(self, number: int) -> int:
        """See :mod:`coordinator.passed_rounds`; of the job at that place of the queue."""
        with self._database.errors():
            return passed_round(self._database, number)

    def rounds_of(self, number: int, after: int = 0) -> list[RoundRecord]:
        """All rounds so far of the job at that place of the queue, after one of them."""
        with self._database.errors():
            rows = self._database.execute(
                "SELECT number, opened_at, deadline, announced_at, closed_at, given_up_at, "
                "noise_multiplier, epsilon, accuracy, clamped, kept, clip_norm, "
                "coalesce(out_of_range, '[]') AS out_of_range, least_counted, "
                "coalesce(fragments, (SELECT CAST(sum(fragments) AS BIGINT) FROM tallies WHERE round = "
                "number), 0) AS fragments FROM rounds WHERE job = ? AND number > ? ORDER BY number",
                (number, after),
            )
            return [
                RoundRecord(**{**row, "out_of_range": tuple(json.loads(row["out_of_range"]))}) for row in rows
            ]

    def progress_of(self, number: int) -> JobProgress:
        """How far the job at that place of the queue has come, without reading all of its rounds."""
        with self._database.errors():
            over = self._database.execute(
                "SELECT max(epsilon) FROM rounds WHERE job = ? "
                "AND (closed_at IS NOT NULL OR given_up_at IS NOT NULL)",
                (number,),
            ).fetchone()
            last = self._database.execute(
                "SELECT accuracy FROM rounds WHERE job = ? AND closed_at IS NOT NULL "
                "ORDER BY number DESC LIMIT 1",
                (number,),
            ).fetchone()
        return JobProgress(over[0] or 0.0, None if last is None else last[0])

    def measured_of(self, number: int, after: int = 0) -> dict[int, Measured]:
        """What was measured of the closed rounds of the job at that place of the queue, after one of them."""
        with self._database.errors():
            return measured_in(self._database, number, after)

    def counts_of(self, open_round: int) -> dict[int, int]:
        """Fragments of the open round that have a seat, by position."""
        with self._database.errors():
            rows = self._database.execute(
                "SELECT position, CAST(sum(fragments) AS BIGINT) FROM tallies WHERE round = ? "
                "GROUP BY position",
                (open_round,),
            )
            return {row[0]: row[1] for row in rows}

    def counters_of(self, number: int) -> dict[str, int]:
        """See :meth:`counters`; of the job at that place of the queue."""
        with self._database.errors():
            rows = self._database.execute("SELECT name, value FROM counters WHERE job = ?", (number,))
            return {row["name"]: row["value"] for row in rows}

    def orders(self, most: int) -> list[Order]:
        """The last orders, the latest first; see :mod:`coordinator.orders`."""
        with self._database.errors():
            return orders_in(self._database, most)

    def mark(self) -> str:
        """What changes whenever the daemon or a command has written to the database."""
        with self._database.errors():
            return self._database.mark()

    def fragments(self) -> dict[bytes, tuple[int, float]]:
        """Round and arrival time (Unix) of every fragment counted in the job, by id."""
        with self._database.errors():
            rows = self._database.execute(
                "SELECT id, round, arrived_at FROM fragments WHERE job = ?", (self._job,)
            )
            return {row["id"]: (row["round"], row["arrived_at"]) for row in rows}

    def least_counted(self) -> int:
        """The fragments that counted in the block with the fewest, of all rounds of the job that are over; 0
        without any."""
        return least_counted_in(self.rounds())

    def counters(self) -> dict[str, int]:
        """Running totals of the job's messages: ``duplicates``, ``dummies``, ``late``, and ``rejected:
        reason`` by reason."""
        return {} if self._job is None else self.counters_of(self._job)

    def workers(self, *, seen_within_s: float = GONE_S) -> list[WorkerRecord]:
        """The workers that go on; none with SQLite.

        Args:
            seen_within_s: longer than that default for those that have ended, too, and were seen since.
        """
        with self._database.errors():
            return workers_at(self._database, seen_within_s=seen_within_s)

    def now(self) -> float:
        """Unix time by the clock of the database, by which workers are seen."""
        with self._database.errors():
            return self._database.now()

    @property
    def _job(self) -> int | None:
        if self._number is None:
            self.queued()
        return self._number
