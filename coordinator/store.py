"""What the coordinator keeps of one job: its model, its rounds, and every fragment once.

One transaction stores a fragment's id and its values, so a fragment is counted at most once, despite resends,
replays and interruptions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from coordinator.database.interface import Database
from coordinator.dead_ends import Halt
from coordinator.measurements import NO_TRAFFIC, Traffic, note_measurements
from coordinator.model_state import ModelState
from coordinator.passed_rounds import note_passed_round, passed_round
from coordinator.queue import jobs_in, next_in, pause_by_itself
from coordinator.queued_job import JobState
from coordinator.seats import Counted, OpenedFragment, Seats, Sums
from dpagent import faults
from dpagent.faults import FaultPoint
from dpagent.learning.inference.evaluation import Evaluation

BLOCK_FULL: Final = "block full"
"""Why a fragment that finds no seat is rejected."""
_NONE: Final = -1
"""A round that no fragment is of: whoever sends one writes any number from 0 on into it."""
SPENT: Final = "spent"
"""Why a fragment is rejected whose id another one has: its token has been used."""


@dataclass(frozen=True, slots=True)
class OpenRound:
    """The round that is open. Times are Unix times."""

    number: int
    opened_at: float
    deadline: float
    announced_at: float | None = None
    """When the broker was first given its plan."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What workers have to know of a round: the devices that are expected, and what is announced, encoded."""

    devices: int | None = None
    plan: bytes | None = None
    token_keys: bytes | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The stored result of a closed round."""

    evaluation: Evaluation | None
    clamped: int
    kept: float
    noise_multiplier: float
    epsilon: float
    out_of_range: tuple[str, ...] = ()
    """Layers whose changes on the devices lie at the ends of their ranges."""
    clip_norm: float | None = None
    """Of the round, where it follows a quantile."""
    traffic: Traffic = NO_TRAFFIC

    @property
    def accuracy(self) -> float | None:
        """On the test data, if there are any."""
        return None if self.evaluation is None else self.evaluation.accuracy


class Store:
    """The rounds of one job in an open database.

    Args:
        database: of the coordinator, whose directory this program holds.
        job: the number of the job in the queue.
        counter: of the program that counts, among those that do.
    """

    def __init__(self, database: Database, job: int, counter: int = 0) -> None:
        self.database, self.number = database, job
        self._seats = Seats(database, job, counter)

    def model(self) -> ModelState:
        """The current model."""
        row = self.database.execute(
            "SELECT weights, moments, clip_norm, radii FROM models WHERE job = ?", (self.number,)
        ).fetchone()
        return ModelState.read(*row)

    def projection(self) -> bytes | None:
        """The leading directions of the fleet's second moments, once they are found."""
        row = self.database.execute("SELECT projection FROM models WHERE job = ?", (self.number,)).fetchone()
        return None if row is None or row["projection"] is None else bytes(row["projection"])

    def open_round(self) -> OpenRound | None:
        """The round that is open, if one is."""
        row = self.database.execute(
            "SELECT number, opened_at, deadline, announced_at FROM rounds "
            "WHERE job = ? AND closed_at IS NULL AND given_up_at IS NULL",
            (self.number,),
        ).fetchone()
        return None if row is None else OpenRound(*row)

    def over_rounds(self) -> int:
        """How many rounds are over: closed, or given up. The next one has the number after it."""
        return int(self._figure("count(*)", "closed_at IS NOT NULL OR given_up_at IS NOT NULL"))

    def last_closed(self) -> int:
        """The last round that was closed, whose model is the current one; 0 before the first."""
        return int(self._figure("max(number)", "closed_at IS NOT NULL"))

    def last_round(self) -> int:
        """The last round that was opened, whatever became of it; 0 before the first."""
        row = self.database.execute("SELECT max(number) FROM rounds WHERE job = ?", (self.number,)).fetchone()
        return int(row[0] or 0)

    def epsilon_spent(self) -> float:
        """ε after the rounds that are over. One that was given up counts: devices may have been charged for
        it, and have sent."""
        return float(self._figure("max(epsilon)", "closed_at IS NOT NULL OR given_up_at IS NOT NULL"))

    def epsilon_of_model(self) -> float:
        """ε after the last round that was closed, with those before it that were given up."""
        return float(self._figure("max(epsilon)", "number <= ?", self.last_closed()))

    def least_counted(self) -> int:
        """The fragments that counted in the block with the fewest, of all rounds up to the last one that was
        closed; 0 without any."""
        return int(self._figure("min(least_counted)", "number <= ?", self.last_closed()))

    def _figure(self, figure: str, which: str, *values: object) -> Any:
        row = self.database.execute(
            f"SELECT {figure} FROM rounds WHERE job = ? AND ({which})", (self.number, *values)
        ).fetchone()
        return row[0] or 0

    def start_round(
        self, number: int, opened_at: float, deadline: float, shown: Shown = Shown()
    ) -> OpenRound | None:
        """Open a round, or set a new deadline for the one that is open; fragments count in it from now on.

        Args:
            number: of the round.
            opened_at: Unix time.
            deadline: Unix time.
            shown: what workers have to know of it.

        Returns:
            The round; None if none is opened: the job is paused or cancelled.
        """
        with self.database.transaction():
            if self.open_round() is None and not self._may_open():
                return None
            self.database.execute(
                "INSERT INTO rounds (job, number, opened_at, deadline, devices, plan, token_keys) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (job, number) DO UPDATE SET deadline = "
                "excluded.deadline, "
                "devices = excluded.devices, plan = excluded.plan, token_keys = excluded.token_keys, "
                "counted_at = NULL",
                (self.number, number, opened_at, deadline, shown.devices, shown.plan, shown.token_keys),
            )
        faults.reached(FaultPoint.COORDINATOR_ROUND_OPENED)
        return self.open_round()

    def _may_open(self) -> bool:
        chosen = next_in(jobs_in(self.database, only_going_on=True))
        return (
            chosen is not None
            and chosen.number == self.number
            and chosen.state is JobState.RUNNING
            and not chosen.is_paused
        )

    def passed_round(self) -> int:
        """See :mod:`coordinator.passed_rounds`."""
        return passed_round(self.database, self.number)

    def note_passed_round(self, number: int) -> None:
        """Keep that a later round than the open one was announced."""
        with self.database.transaction():
            note_passed_round(self.database, self.number, number)

    def mark_announced(self, number: int, announced_at: float) -> None:
        """Note when the broker was first given the plan of a round."""
        with self.database.transaction():
            self.database.execute(
                "UPDATE rounds SET announced_at = coalesce(announced_at, ?) WHERE job = ? AND number = ?",
                (announced_at, self.number, number),
            )
        faults.reached(FaultPoint.COORDINATOR_ANNOUNCED)

    def count(
        self,
        fragments: Sequence[OpenedFragment],
        open_round: int,
        *,
        seats: int | None,
        keeps_values: bool = True,
    ) -> Counted:
        """Count each fragment of the open round once, as far as its block has seats; see
        :meth:`Seats.take`."""
        faults.reached(FaultPoint.COORDINATOR_FRAGMENTS_OPENED)
        with self._counting():
            number = open_round if self._counts_in(open_round) else _NONE
            counted = self._seats.take(fragments, number, seats, keeps_values=keeps_values)
            self._leave(counted)
            self._add_to_counters(totals_of(counted))
            faults.reached(FaultPoint.COORDINATOR_COUNT_WRITTEN)
        faults.reached(FaultPoint.COORDINATOR_COUNTED)
        return counted

    # What is another thing where several programs count: see coordinator/shared_store.py.

    def _counting(self) -> AbstractContextManager[None]:
        """The transaction of a batch."""
        return self.database.transaction()

    def _counts_in(self, number: int) -> bool:
        """Whether fragments count in a round."""
        return True

    def _leave(self, counted: Counted) -> None:
        """Keep what else the others have to know of a batch."""

    def stop_counting(self, number: int, at: float, *, seats: int | None) -> None:
        """From now on nothing counts in a round any more, by whatever program; until it is started again.

        Args:
            number: of the round.
            at: Unix time.
            seats: of each block.
        """
        with self.database.transaction():
            self.database.execute(
                "UPDATE rounds SET counted_at = ? WHERE job = ? AND number = ?", (at, self.number, number)
            )
            self._seats.settle(number, seats)

    def counts(self, number: int) -> dict[int, int]:
        """Fragments counted by position in a round."""
        return self._seats.counts(number)

    def keeps_values_of(self, number: int) -> bool:
        """Whether a round's fragments can be dealt to groups; see :meth:`Seats.keeps_values_of`."""
        return self._seats.keeps_values_of(number)

    def sums(self, number: int, *, groups: int = 1) -> list[Sums]:
        """Counts and exact integer sums by position in a round, for each of some random groups."""
        return self._seats.sums(number, groups=groups)

    def close_round(
        self,
        number: int,
        model: ModelState,
        result: RoundResult,
        *,
        closed_at: float,
        projection: bytes | None = None,
    ) -> None:
        """Close a round and store its model, in one transaction.

        Args:
            number: of the round.
            model: after it.
            result: of the round.
            closed_at: Unix time.
            projection: the directions that it found, if it was for that.
        """
        faults.reached(FaultPoint.COORDINATOR_STEPPED)
        with self.database.transaction():
            counts = self.counts(number).values()
            self.database.execute(
                "UPDATE rounds SET closed_at = ?, accuracy = ?, clamped = ?, kept = ?, noise_multiplier = ?, "
                "epsilon = ?, out_of_range = ?, clip_norm = ?, fragments = ?, least_counted = ?, "
                "plan = NULL, token_keys = NULL "
                "WHERE job = ? AND number = ?",
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
                    self.number,
                    number,
                ),
            )
            self.database.execute(
                "UPDATE models SET weights = ?, moments = ?, clip_norm = ?, radii = ? WHERE job = ?",
                (*model.stored(), self.number),
            )
            if projection is not None:
                self.database.execute(
                    "UPDATE models SET projection = ? WHERE job = ?", (projection, self.number)
                )
            note_measurements(self.database, self.number, number, result.evaluation, result.traffic)
            # The values are no longer needed; the counts stay in `rounds`, the ids in `fragments`.
            self._seats.clear(number)
            faults.reached(FaultPoint.COORDINATOR_CLOSE_WRITTEN)
        faults.reached(FaultPoint.COORDINATOR_CLOSED)
        self.database.fold_log()

    def give_up_round(
        self,
        number: int,
        *,
        noise_multiplier: float,
        epsilon: float,
        least: int,
        given_up_at: float,
        halt: Halt | None = None,
    ) -> None:
        """Give up the open round of a job: its values go, and what devices paid for it stays on record.

        Args:
            number: of the round.
            noise_multiplier: of the round.
            epsilon: that it brings the job to.
            least: fragments in the block with the fewest.
            given_up_at: Unix time.
            halt: that goes with it; None where the job is over.
        """
        with self.database.transaction():
            self.database.execute(
                "UPDATE rounds SET given_up_at = ?, noise_multiplier = ?, epsilon = ?, fragments = ?, "
                "least_counted = ?, plan = NULL, token_keys = NULL WHERE job = ? AND number = ?",
                (
                    given_up_at,
                    noise_multiplier,
                    epsilon,
                    sum(self.counts(number).values()),
                    least,
                    self.number,
                    number,
                ),
            )
            self._seats.clear(number)
            if halt is not None:
                self._halt(halt, given_up_at)
        faults.reached(FaultPoint.QUEUE_ROUND_GIVEN_UP)
        self.database.fold_log()

    def halt(self, halt: Halt, at: float) -> None:
        """Pause the job before a round opens.

        Args:
            halt: why, and what is passed over.
            at: Unix time.
        """
        with self.database.transaction():
            self._halt(halt, at)

    def _halt(self, halt: Halt, at: float) -> None:
        spent = self.epsilon_spent()
        self.database.execute_many(
            "INSERT INTO rounds (job, number, opened_at, deadline, given_up_at, epsilon, fragments) "
            "VALUES (?, ?, ?, ?, ?, ?, 0)",
            [(self.number, number, at, at, at, spent) for number in halt.passed_over],
        )
        pause_by_itself(self.database, self.number, halt.trouble)

    def reject(self, reason: str, count: int) -> None:
        """Count rejected messages by reason."""
        with self._counting():
            self._add_to_counters({f"rejected: {reason}": count})

    def _add_to_counters(self, amounts: Mapping[str, int]) -> None:
        self.database.execute_many(
            "INSERT INTO counters VALUES (?, ?, ?) "
            "ON CONFLICT (job, name) DO UPDATE SET value = counters.value + excluded.value",
            [(self.number, name, amount) for name, amount in amounts.items() if amount],
        )


def totals_of(counted: Counted) -> dict[str, int]:
    """The running totals that a batch adds to, by name."""
    return {
        "duplicates": len(counted.repeated),
        "dummies": len(counted.dummies),
        "probes": len(counted.probes),
        "late": counted.late,
        f"rejected: {BLOCK_FULL}": counted.unseated,
        f"rejected: {SPENT}": counted.spent,
    }
