"""The queue of jobs: what waits, what runs, and what became of the others.

One job runs at a time, to its end or until it is cancelled (:func:`next_in`). The daemon and commands
beside it share the queue. Each change is one transaction, which looks at the job's state before it changes
it: of two that come together, the second finds what the first one left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final

from coordinator.database.interface import Database, Reader
from coordinator.job import Job
from coordinator.model_state import ModelState
from coordinator.orders import COORDINATOR, Kind, note_order
from coordinator.queued_job import JobState, QueuedJob
from coordinator.settings import FIRST_JOB, CoordinatorSettings
from dpagent import faults
from dpagent.errors import ConfigurationError, UsageError
from dpagent.faults import FaultPoint
from dpagent.schema.base import checked_as
from dpagent.schema.limits import Limits
from dpagent.schema.problems import SchemaError
from dpagent.wording import counted

JobName = Annotated[str, Limits(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
"""A job's name, also that of its directory: letters, digits, ``-`` and ``_``."""

_FORGOTTEN_AT_ONCE: Final = 5_000
"""Some hundredths of a second."""

_IS_OVER: Final = "state IN ('finished', 'cancelled', 'failed')"
_COLUMNS: Final = (
    "number, name, id, settings, terms, budget, state, paused, trouble, sends_model, deadline_s, "
    "minimum_devices, gives_up, added_at, begun_at, ended_at, "
    "EXISTS (SELECT 1 FROM rounds WHERE job = jobs.number AND closed_at IS NULL AND given_up_at IS NULL) "
    "AS is_open, "
    "(SELECT count(*) FROM rounds WHERE job = jobs.number AND closed_at IS NOT NULL) AS closed_rounds, "
    "(SELECT count(*) FROM rounds WHERE job = jobs.number AND (closed_at IS NOT NULL OR given_up_at IS NOT "
    "NULL)) AS over_rounds"
)


def jobs_in(database: Reader, *, only_going_on: bool = False) -> list[QueuedJob]:
    """All jobs, or those that are not over, in the order of the queue."""
    which = f"WHERE NOT {_IS_OVER}" if only_going_on else ""
    rows = database.execute(f"SELECT {_COLUMNS} FROM jobs {which} ORDER BY number")
    return [
        QueuedJob(
            row["number"], row["name"], Job.read(row["id"], row["terms"], row["budget"]), row["settings"],
            JobState(row["state"]), bool(row["paused"]), row["trouble"], bool(row["sends_model"]),
            row["deadline_s"], row["minimum_devices"], row["gives_up"], row["added_at"], row["begun_at"],
            row["ended_at"], bool(row["is_open"]), row["closed_rounds"], row["over_rounds"],
        )
        for row in rows
    ]  # fmt: skip


def next_in(jobs: Sequence[QueuedJob]) -> QueuedJob | None:
    """The job that goes on now, or None.

    That which has begun, whatever comes before it in the queue: a board ends a job when it is charged for
    another one, since the sum of their costs is proven for jobs in sequence alone (:mod:`agent.accounts`). So
    while it is paused, none goes on. Before one has begun, the first that is not paused.
    """
    begun = next((each for each in jobs if each.state is JobState.RUNNING or each.state.is_ending), None)
    if begun is not None:
        return begun if begun.goes_on else None
    return next((each for each in jobs if each.state is JobState.WAITING and not each.is_paused), None)


def current_in(jobs: Sequence[QueuedJob]) -> QueuedJob | None:
    """The job that goes on, or else one that would if it were resumed, or else the one that ended last."""
    going_on = next_in(jobs) or next((each for each in jobs if not each.state.is_over), None)
    return going_on or max(jobs, key=lambda each: each.ended_at or 0.0, default=None)


def find(jobs: Sequence[QueuedJob], name: str) -> QueuedJob:
    """The job of a name.

    Raises:
        ConfigurationError: There is none.
    """
    for each in jobs:
        if each.name == name:
            return each
    names = ", ".join(each.name for each in jobs)
    there = f"the queue has {names}" if names else "the queue has none yet"
    raise ConfigurationError(f"There is no job {name!r}: {there}. `dpagent coordinator job list` shows them.")


def require_name(name: str) -> str:
    """A name that a job can have.

    Raises:
        UsageError: It is none.
    """
    if name == FIRST_JOB:
        raise UsageError(f"{name!r} is the name of the job in fleet.yaml itself; expected another one.")
    try:
        made: str = checked_as(JobName, name)
    except SchemaError as error:
        raise UsageError(
            f"The name of a job is {name[:100]!r}; expected 1 to 63 letters, digits, '-' or '_'."
        ) from error
    return made


def pause_by_itself(database: Database, number: int, trouble: str) -> None:
    """Pause a job by the coordinator's own decision, inside the transaction of what made it necessary.

    Args:
        database: of the coordinator.
        number: of the job.
        trouble: why, and what its operator may do.
    """
    database.execute("UPDATE jobs SET paused = 1, trouble = ? WHERE number = ?", (trouble, number))
    row = database.execute("SELECT name FROM jobs WHERE number = ?", (number,)).fetchone()
    note_order(database, COORDINATOR, Kind.PAUSE, row["name"], trouble)


def cancelled_in_words(queued: QueuedJob) -> str:
    """What a cancellation means for a job that was cancelled just now."""
    if queued.state is JobState.CANCELLED:
        return f"Job {queued.name} is cancelled. No device has heard of it."
    return (
        f"Job {queued.name} is cancelled as soon as the devices are told: by the coordinator that runs, or "
        "else by the next one."
    )


class Queue:
    """The queue in an open database.

    Args:
        database: of the coordinator.
        by: who gives orders by it, for the log (:mod:`coordinator.orders`).
    """

    def __init__(self, database: Database, by: str = COORDINATOR) -> None:
        self._database, self._by = database, by

    def jobs(self) -> list[QueuedJob]:
        """All jobs, in their order."""
        with self._database.errors():
            return jobs_in(self._database)

    def going_on(self) -> list[QueuedJob]:
        """Those that are not over, in their order. What it takes does not grow with the history."""
        with self._database.errors():
            return jobs_in(self._database, only_going_on=True)

    def forget_fragments(self) -> bool:
        """Delete some of the ids of fragments of jobs that are over, once another has begun: nothing is
        counted for them any more.

        Returns:
            Whether there may be more.
        """
        with self._database.transaction():
            deleted = self._database.execute(
                "DELETE FROM fragments WHERE id IN (SELECT id FROM fragments WHERE job IN (SELECT number FROM"
                f" jobs WHERE {_IS_OVER} AND number < (SELECT max(number) FROM jobs WHERE begun_at IS NOT"
                " NULL)) LIMIT ?)",
                (_FORGOTTEN_AT_ONCE,),
            )
        return deleted.rowcount == _FORGOTTEN_AT_ONCE

    def require_free(self, name: str) -> None:
        """Refuse the name of a job that is in the queue.

        Raises:
            ConfigurationError: There is one of that name already.
        """
        if any(each.name == name for each in self.jobs()):
            raise ConfigurationError(
                f"There is a job {name!r} already, and its history is kept. Give this one another name: "
                "--name NAME."
            )

    def add(self, name: str, job: Job, settings: str, now: float, *, is_paused: bool = False) -> QueuedJob:
        """Put a job at the end of the queue.

        Args:
            name: of the job.
            job: what it is.
            settings: its own, as JSON.
            now: Unix time.
            is_paused: whether it waits until it is resumed, and others go before it.

        Raises:
            ConfigurationError: There is one of that name already.
        """
        with self._database.transaction():
            self.require_free(name)
            self._database.execute(
                "INSERT INTO jobs (name, id, terms, budget, settings, state, paused, added_at) "
                "VALUES (?, ?, ?, ?, ?, 'waiting', ?, ?)",
                (name, *job.stored(), settings, int(is_paused), now),
            )
            note_order(self._database, self._by, Kind.ADD, name, "paused" if is_paused else "")
            faults.reached(FaultPoint.QUEUE_ADD_WRITTEN)
        faults.reached(FaultPoint.QUEUE_ADDED)
        return find(self.jobs(), name)

    def begin(self, number: int, model: ModelState, now: float) -> bool:
        """Begin a job with its initial model.

        Returns:
            Whether it has begun, and was not cancelled or paused in this moment.
        """
        with self._database.transaction():
            begun = self._database.execute(
                "UPDATE jobs SET state = 'running', begun_at = ?, trouble = NULL "
                "WHERE number = ? AND state = 'waiting' AND paused = 0",
                (now, number),
            )
            if begun.rowcount:
                self._database.execute(
                    "INSERT INTO models (job, weights, moments, clip_norm, radii) VALUES (?, ?, ?, ?, ?)",
                    (number, *model.stored()),
                )
            faults.reached(FaultPoint.COORDINATOR_JOB_WRITTEN)
        faults.reached(FaultPoint.COORDINATOR_JOB_BEGUN)
        return bool(begun.rowcount)

    def renew_settings(self, number: int, settings: str) -> None:
        """Note the settings of a job anew, whose terms are as they were."""
        with self._database.transaction():
            self._database.execute("UPDATE jobs SET settings = ? WHERE number = ?", (settings, number))

    def halt(self, number: int, trouble: str) -> None:
        """Pause a job that cannot be taken up, also one that its operator has paused and whose round is open.

        Args:
            number: of the job.
            trouble: why.
        """
        with self._database.transaction():
            pause_by_itself(self._database, number, trouble)

    def pause(self, name: str) -> QueuedJob:
        """Open no further round of a job until it is resumed; one that is open closes as it would.

        Args:
            name: of the job.

        Raises:
            ConfigurationError, UsageError: There is no such job, or it is over or it is paused.
        """
        return self._change(
            name,
            QueuedJob.require_pausable,
            "UPDATE jobs SET paused = 1, trouble = NULL WHERE number = ?",
            lambda each: (each.number,),
            (Kind.PAUSE, ""),
        )

    def give_up(self, name: str, shared: CoordinatorSettings) -> QueuedJob:
        """Pause a job, and give up its open round rather than have it close. One that the coordinator has
        paused by itself is taken up for that once more.

        Args:
            name: of the job.
            shared: settings of the coordinator.

        Raises:
            ConfigurationError, UsageError: There is no such job, it is over, or it has no open round or one
                that it cannot do without.
        """
        return self._change(
            name,
            lambda each: each.require_spare_round(shared),
            "UPDATE jobs SET paused = 1, trouble = NULL, gives_up = ? WHERE number = ?",
            lambda each: (each.over_rounds + 1, each.number),
            (Kind.PAUSE, "its open round is given up"),
        )

    def resume(self, name: str) -> QueuedJob:
        """Let the rounds of a paused job go on.

        Raises:
            ConfigurationError, UsageError: There is no such job, or it is over or it is not paused.
        """
        return self._change(
            name,
            QueuedJob.require_paused,
            "UPDATE jobs SET paused = 0, trouble = NULL WHERE number = ?",
            lambda each: (each.number,),
            (Kind.RESUME, ""),
        )

    def set_deadline(
        self, name: str, deadline_s: float, require_possible: Callable[[QueuedJob], object]
    ) -> QueuedJob:
        """Give the rounds of a job another deadline, the open one too.

        Args:
            name: of the job.
            deadline_s: seconds after a round opened.
            require_possible: raises if the job cannot have it.

        Raises:
            ConfigurationError, UsageError: There is no such job, or it is over.
        """
        return self._set(
            name,
            require_possible,
            "UPDATE jobs SET deadline_s = ? WHERE number = ?",
            deadline_s,
            (Kind.DEADLINE, f"{deadline_s:g} s a round"),
        )

    def set_minimum(
        self, name: str, devices: int, require_possible: Callable[[QueuedJob], object]
    ) -> QueuedJob:
        """Let the rounds of a job close with another least number of devices, the open one too.

        Args:
            name: of the job.
            devices: that a round needs.
            require_possible: raises if the job cannot have it.

        Raises:
            ConfigurationError, UsageError: There is no such job, or it is over.
        """
        return self._set(
            name,
            require_possible,
            "UPDATE jobs SET minimum_devices = ? WHERE number = ?",
            devices,
            (Kind.MINIMUM, f"{counted(devices, 'board')} a round"),
        )

    def _set(
        self, name: str, require_possible: Callable[[QueuedJob], object], statement: str, value: float,
        order: tuple[Kind, str],
    ) -> QueuedJob:  # fmt: skip
        """Change what an operator may give all rounds of a job that is not over."""

        def require(each: QueuedJob) -> None:
            each.require_going_on()
            require_possible(each)

        return self._change(name, require, statement, lambda each: (value, each.number), order)

    def cancel(self, name: str, now: float, *, sends_model: bool) -> QueuedJob:
        """Cancel a job: at once if no device has heard of it, and else when the daemon has told the devices.

        Args:
            name: of the job.
            now: Unix time.
            sends_model: whether devices get the model of the rounds that are closed.

        Raises:
            ConfigurationError, UsageError: There is no such job, or it is over or it is cancelled already.
        """
        return self._change(
            name,
            QueuedJob.require_going_on,
            "UPDATE jobs SET sends_model = ?, ended_at = CASE WHEN state = 'waiting' THEN ? ELSE NULL END, "
            "state = CASE WHEN state = 'waiting' THEN 'cancelled' ELSE 'cancelling' END WHERE number = ?",
            lambda each: (int(sends_model), now, each.number),
            (Kind.CANCEL, "devices get the model so far" if sends_model else ""),
        )

    def fail(self, number: int, trouble: str) -> None:
        """A round of a job cannot go on: the job is over when the devices are told."""
        with self._database.transaction():
            self._database.execute(
                "UPDATE jobs SET state = 'failing', trouble = ?, sends_model = 0 "
                "WHERE number = ? AND state = 'running'",
                (trouble, number),
            )

    def end(self, number: int, now: float) -> None:
        """Mark a job as over: as cancelled or failed if it is to be, and else as finished."""
        faults.reached(FaultPoint.COORDINATOR_SAID_GOODBYE)
        with self._database.transaction():
            self._database.execute(
                "UPDATE jobs SET ended_at = ?, "
                "state = CASE state WHEN 'cancelling' THEN 'cancelled' WHEN 'failing' THEN 'failed' "
                "ELSE 'finished' END "
                "WHERE number = ? AND ended_at IS NULL",
                (now, number),
            )
        faults.reached(FaultPoint.COORDINATOR_FINISHED)

    def _change(
        self,
        name: str,
        require: Callable[[QueuedJob], None],
        statement: str,
        values: Callable[[QueuedJob], tuple[object, ...]],
        order: tuple[Kind, str],
    ) -> QueuedJob:
        with self._database.transaction():
            known = find(jobs_in(self._database), name)
            require(known)
            self._database.execute(statement, values(known))
            kind, detail = order
            note_order(self._database, self._by, kind, name, detail)
            faults.reached(FaultPoint.QUEUE_CHANGE_WRITTEN)
        faults.reached(FaultPoint.QUEUE_CHANGED)
        return find(self.jobs(), name)
