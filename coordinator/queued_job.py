"""A job in the queue: what became of it so far, and what may be ordered of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from coordinator.job import Job
from coordinator.settings import CoordinatorSettings, FleetSettings, JobSettings
from dpagent.errors import ConfigurationError, UsageError
from dpagent.schema.problems import SchemaError


class JobState(StrEnum):
    """What became of a job so far."""

    WAITING = "waiting"
    """Not begun."""
    RUNNING = "running"
    """Begun; no other runs before it is over, though it may be paused."""
    CANCELLING = "cancelling"
    """The operator has cancelled it, and the devices are not told yet."""
    FAILING = "failing"
    """A round of it could not go on, and the devices are not told yet that it is over."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether nothing of the job is left to do."""
        return self in _OVER

    @property
    def is_ending(self) -> bool:
        """Whether it is over but for the word to the devices."""
        return self in (JobState.CANCELLING, JobState.FAILING)


_OVER: Final = (JobState.FINISHED, JobState.CANCELLED, JobState.FAILED)


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job in the queue. Times are Unix times."""

    number: int
    """Its place: jobs begin in this order."""
    name: str
    job: Job
    settings: str
    """Its settings as JSON; see ``JobSettings.stored``."""
    state: JobState
    is_paused: bool
    """Whether no further round opens until it is resumed."""
    trouble: str | None
    """Why the coordinator has paused it by itself, or why it failed."""
    sends_model: bool
    """Whether devices get the model of a job that is cancelled."""
    deadline_s: float | None
    """Of its rounds, if the operator has changed it."""
    minimum_devices: int | None
    """That a round needs, if the operator has changed it."""
    gives_up: int | None
    """The number of the last round that the operator has ordered to be given up."""
    added_at: float
    begun_at: float | None
    ended_at: float | None
    is_open: bool
    """Whether a round of it is open."""
    closed_rounds: int
    over_rounds: int
    """Those, and the ones that were given up."""

    def state_in_words(self) -> str:
        """The state, and whether it is paused."""
        state = str(self.state)
        if self.state.is_over or self.state.is_ending or not self.is_paused:
            return state
        if self.is_giving_up:
            return f"{state}, to pause with its open round given up"
        return f"{state}, to pause after its open round" if self.is_open else f"{state}, paused"

    @property
    def is_giving_up(self) -> bool:
        """Whether its open round is to be given up."""
        return self.is_open and self.gives_up == self.over_rounds + 1

    @property
    def trouble_now(self) -> str | None:
        """Why the coordinator has paused a job that is not over, or why one failed."""
        found = self.trouble_in_words()
        return None if found is None else found[1]

    def trouble_in_words(self) -> tuple[str, str] | None:
        """What is wrong with a job by the coordinator's own word, and why."""
        if self.trouble is None:
            return None
        if self.state in (JobState.FAILING, JobState.FAILED):
            return "failed", self.trouble
        if self.state.is_over or self.state.is_ending:
            return None
        return "is paused by the coordinator", self.trouble

    @property
    def goes_on(self) -> bool:
        """Whether, once begun, something is to be done for it now: a round may open, or what is open or done
        is to be ended. A pause leaves the latter; one of the coordinator's own means that it cannot."""
        if self.state.is_ending or not self.is_paused:
            return True
        return self.trouble is None and (self.is_open or self.over_rounds >= self.job.rounds)

    def settings_in(self, shared: CoordinatorSettings) -> FleetSettings:
        """Its settings, with what its operator has changed since.

        Args:
            shared: those of the coordinator.

        Raises:
            ConfigurationError: They do not go together any more.
        """
        where = f"job {self.name!r}"
        try:
            own = JobSettings.from_json(self.settings)
        except SchemaError as error:
            keys = [each.key for each in error.problems]
            raise ConfigurationError(
                f"Job {self.name!r} was added by another version of dpagent: its {', '.join(keys)} cannot be "
                "read by this one. Go on with that version, or cancel the job and add it anew."
            ) from error
        settings = shared.with_job(own, where)
        if self.deadline_s is not None:
            settings = settings.with_deadline(self.deadline_s, where)
        if self.minimum_devices is not None:
            settings = settings.with_minimum(self.minimum_devices, where)
        return settings

    # What may be ordered of it.

    def require_going_on(self) -> None:
        """Raise a UsageError if it is over, or about to be."""
        match self.state:
            case JobState.FINISHED:
                raise UsageError(f"Job {self.name!r} is finished; expected one that is not over.")
            case JobState.FAILED | JobState.FAILING:
                raise UsageError(f"Job {self.name!r} has failed; expected one that is not over.")
            case JobState.CANCELLED | JobState.CANCELLING:
                raise UsageError(f"Job {self.name!r} is cancelled already; expected one that is not over.")

    def require_pausable(self) -> None:
        """Raise a UsageError if it is over, or paused."""
        self.require_going_on()
        if self.is_paused:
            raise UsageError(
                f"Job {self.name!r} is paused already. `dpagent coordinator job resume` lets it go on."
            )

    def require_spare_round(self, shared: CoordinatorSettings) -> None:
        """Raise a UsageError if it has no open round that can be given up.

        Args:
            shared: settings of the coordinator.
        """
        self.require_going_on()
        if not self.is_open:
            raise UsageError(f"Job {self.name!r} has no open round, so there is none to give up.")
        if self.is_giving_up:
            raise UsageError(
                f"Round {self.gives_up} of job {self.name!r} is given up already, as soon as the coordinator "
                "can tell the boards."
            )
        if self.over_rounds == 0 and self.settings_in(shared).model.spec().projection is not None:
            raise UsageError(
                f"Round 1 of job {self.name!r} finds the directions that all others need, so it cannot be "
                "given up; expected a later round. `dpagent coordinator job cancel` ends the job."
            )

    def require_paused(self) -> None:
        """Raise a UsageError if it is over, or not paused."""
        self.require_going_on()
        if not self.is_paused:
            raise UsageError(f"Job {self.name!r} is not paused, so there is nothing to resume.")
