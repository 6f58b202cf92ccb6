"""A job of the queue that is taken up: its settings, its model files, its rounds."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordinator.announcer import Announcer
from coordinator.budget_export import has_devices
from coordinator.columns import promised_by
from coordinator.cycle import Cycle
from coordinator.database.interface import Database
from coordinator.intake import Intake
from coordinator.invitations import has_invited
from coordinator.job import Job
from coordinator.keys import load_ask_opener, load_opener
from coordinator.models import ModelFiles
from coordinator.planning import Planner, new_job, require_sendable
from coordinator.queue import Queue, next_in, require_name
from coordinator.queued_job import JobState, QueuedJob
from coordinator.settings import (
    FIRST_JOB,
    CoordinatorSettings,
    FleetSettings,
    JobSettings,
    require_same_job,
)
from coordinator.stepping import Stepper
from coordinator.store import Store
from dpagent import faults
from dpagent.clock import Clock
from dpagent.errors import ConfigurationError
from dpagent.faults import FaultPoint
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.input_form import InputForm
from dpagent.learning.data.opening import open_inferred
from dpagent.notation import upwards
from dpagent.privacy.statement import Trust, Unit, delta_warning, epsilon_warning
from dpagent.protocol.sealing import Opener
from dpagent.storage import disk_errors
from dpagent.structured_log import Event, about
from dpagent.transport.events import Received
from dpagent.wording import counted

if TYPE_CHECKING:
    from coordinator.token_office import TokenOffice

log = logging.getLogger(__name__)


class Preparation:
    """All that a job needs and that can be wrong with it, before it is added or taken up.

    Args:
        settings: The job's, in its fleet.
        name: Its name.

    Raises:
        ConfigurationError, DataError, PlanError, StorageError: The job cannot run; the text gives the reason.
    """

    def __init__(self, settings: FleetSettings, name: str) -> None:
        self.settings, self.name = settings, name
        self._warn()
        self.spec = settings.model.spec()
        self.models = ModelFiles(settings, self.spec, settings.directory_of(name), *_load_test_data(settings))
        require_sendable(self.spec, self.models.assets)
        self.stepper = Stepper(settings, self.spec)

    def _warn(self) -> None:
        """Say what is allowed, and weak."""
        privacy = self.settings.privacy
        unit = privacy.mechanism.unit
        units = self.settings.devices if unit is Unit.DEVICE else self.settings.records_per_device
        warnings = [delta_warning(privacy.delta, units, unit)]
        if self.settings.cap.kind != "published":  # whose ε bounds nothing
            warnings.append(epsilon_warning(privacy.epsilon, unit))
        for warning in filter(None, warnings):
            log.warning("%s", warning)

    def new_job(self, sealing_key: bytes) -> Job:
        """The job, which devices can accept.

        Args:
            sealing_key: of the coordinator.

        Raises:
            PlanError: No noise meets its target, or no device would accept a round of it.
        """
        job = new_job(self.settings)
        # A plan that no device would accept must fail here, not on a thousand boards.
        self.planner(job, sealing_key).require_acceptable()
        return job

    def planner(self, job: Job, sealing_key: bytes) -> Planner:
        """Makes the plans of the job."""
        return Planner(self.settings, self.spec, job, sealing_key)


def submit(
    settings: FleetSettings, name: str, queue: Queue, sealing_key: bytes, now: float
) -> Preparation | None:
    """Put a job into the queue, unless it is there: then with the settings that may have changed.

    Args:
        settings: of the job, in its fleet.
        name: of the job.
        queue: of the coordinator.
        sealing_key: of the coordinator.
        now: Unix time.

    Returns:
        The prepared job; None if it is over.

    Raises:
        ConfigurationError: There is another job of that name, or this one cannot run.
        DataError, PlanError, StorageError: It cannot run.
    """
    kept = settings.job().stored()
    known = next((each for each in queue.jobs() if each.name == name), None)
    if known is not None:
        require_same_job(known.job.terms, settings.job_terms(), name)
        if known.state.is_over:
            return None
        if known.settings != kept:
            queue.renew_settings(known.number, kept)
    if known is None:
        _require_linkability(settings, f"job {name!r}")
    prepared = Preparation(settings, name)
    if known is None:
        queue.add(name, prepared.new_job(sealing_key), kept, now)
    return prepared


def add_job(
    shared: CoordinatorSettings,
    own: JobSettings,
    name: str,
    source: str,
    queue: Queue,
    now: float,
    *,
    is_paused: bool = False,
) -> str:
    """Put a job at the end of the queue; the job in ``fleet.yaml``, if there is one, comes before it.

    Args:
        shared: ``fleet.yaml``.
        own: the job.
        name: of the job.
        source: where it is from, for an error.
        queue: of the coordinator.
        now: Unix time.
        is_paused: whether it waits until it is resumed.

    Returns:
        What came of that, in words.

    Raises:
        ConfigurationError, DataError, PlanError, StorageError, UsageError: It cannot be added.
    """
    settings = shared.with_job(own, source)
    queue.require_free(require_name(name))
    _require_linkability(settings, source)
    sealing_key = load_opener(shared.keys_dir, shared.fleet).public_key
    if isinstance(shared, FleetSettings) and all(each.name != FIRST_JOB for each in queue.jobs()):
        submit(shared, FIRST_JOB, queue, sealing_key, now)
    job = Preparation(settings, name).new_job(sealing_key)
    queued = queue.add(name, job, settings.job().stored(), now, is_paused=is_paused)
    text = f"Job {name} is in the queue: {counted(job.rounds, 'round')}, {promised_by(job)[0].sentence()}."
    if job.linkability == "none" and has_devices(shared.members_place):
        text += (
            " It has no tokens (linkability: none): fragments of anybody count who may write to the topic, "
            "and `dpagent coordinator budgets` does not have its cost."
        )
    first = next_in(queue.jobs())
    if is_paused:
        return f"{text} It is paused, and waits until it is resumed."
    if first is not None and first.number != queued.number:
        text += f" Job {first.name} goes on before it."
    return text


def _require_linkability(settings: FleetSettings, source: str) -> None:
    """Have the operator of a fleet with members say whether a job counts their fragments alone. By a default,
    the next job of a fleet whose first one did would count anybody's, without a word.

    Raises:
        ConfigurationError: They do not say.
    """
    if "linkability" not in settings.given and has_invited(settings.members_place):
        raise ConfigurationError(
            f"{source}: linkability is not set, and boards enrol in this fleet; expected fragment (only "
            "their fragments count, and nobody can tell whose they are), round (only theirs, and those of a "
            "round are seen to belong together) or none (anybody's)."
        )


def end_untold(queued: QueuedJob, database: Database, now: float) -> None:
    """End a cancelled or failed job that cannot be taken up, so that devices are not told.

    Its open round is given up: what was counted in it is neither kept nor part of another job's sums.

    Args:
        queued: the job.
        database: of the coordinator.
        now: Unix time.
    """
    store, job = Store(database, queued.number), queued.job
    if (current := store.open_round()) is not None:
        store.give_up_round(
            current.number,
            noise_multiplier=job.noise.multipliers[current.number - 1],
            # Under a bounded cap, what the round cost follows from a plan that cannot be made again.
            epsilon=job.epsilon_by_round[-1],
            least=0,
            given_up_at=now,
        )
    Queue(database).end(queued.number, now)


class RunningJob:
    """A job that is taken up.

    Args:
        queued: the job.
        cycle: its rounds.
        store: what it keeps.
        models: its files.
        announcer: publishes to the fleet, for this job.
        tokens: of members, where fragments have to carry one.
        queue: of the coordinator.
        clock: the program's.
    """

    def __init__(
        self,
        queued: QueuedJob,
        cycle: Cycle,
        *,
        store: Store,
        models: ModelFiles,
        announcer: Announcer,
        tokens: TokenOffice | None,
        queue: Queue,
        clock: Clock,
    ) -> None:
        self.queued, self.cycle, self.store = queued, cycle, store
        self.models, self.announcer = models, announcer
        self._tokens, self._queue, self._clock = tokens, queue, clock

    @classmethod
    def take_up(
        cls,
        queued: QueuedJob,
        shared: CoordinatorSettings,
        *,
        database: Database,
        opener: Opener,
        announcer: Announcer,
        clock: Clock,
        prepared: Preparation | None = None,
    ) -> RunningJob | None:
        """Begin a job, or go on with it.

        Args:
            queued: The job.
            shared: ``fleet.yaml``, with paths resolved.
            database: Of the coordinator.
            opener: Opens fragments.
            announcer: Publishes to the fleet, for this job.
            clock: The program's.
            prepared: The job, if it is prepared already.

        Returns:
            The job; None if it was cancelled or paused in this moment, before it has begun.

        Raises:
            ConfigurationError, DataError, PlanError, StorageError: It cannot be taken up.
        """
        settings, job, queue = queued.settings_in(shared), queued.job, Queue(database)
        prepared = prepared or Preparation(settings, queued.name)
        require_same_job(job.terms, settings.job_terms(), queued.name)
        with disk_errors(settings.directory_of(queued.name)):
            settings.directory_of(queued.name).mkdir(parents=True, exist_ok=True, mode=0o700)
        if job.noise.mechanism.trust is Trust.COORDINATOR:
            database.erase_what_is_deleted()
        store = Store(database, queued.number)
        prepared.models.restore_projection(store.projection())
        if queued.state is not JobState.WAITING:
            log.info(
                "%s continues after round %d", _shown(queued), store.over_rounds(),
                extra=about(event=Event.JOB_CONTINUED, job=job.id.hex(), job_name=queued.name,
                            rounds=job.rounds),
            )  # fmt: skip
        elif queue.begin(queued.number, prepared.stepper.initial(), clock.unix()):
            epsilon = job.epsilon_by_round[-1]
            promised = f"ε = {upwards(epsilon)}" if math.isfinite(epsilon) else "no guarantee"
            log.info(
                "%s begins: %s, %s", _shown(queued), counted(job.rounds, "round"), promised,
                extra=about(event=Event.JOB_BEGUN, job=job.id.hex(), job_name=queued.name, rounds=job.rounds),
            )  # fmt: skip
        else:
            return None
        tokens = _token_office(settings, job, store, announcer, clock)
        cycle = Cycle(
            settings,
            job,
            store=store,
            planner=prepared.planner(job, opener.public_key),
            stepper=prepared.stepper,
            models=prepared.models,
            intake=Intake(
                settings, job.id, store=store, opener=opener, acknowledge=announcer.acknowledge, clock=clock
            ),
            announcer=announcer,
            tokens=tokens,
            clock=clock,
        )
        faults.reached(FaultPoint.QUEUE_TAKEN_UP)
        return cls(
            queued,
            cycle,
            store=store,
            models=prepared.models,
            announcer=announcer,
            tokens=tokens,
            queue=queue,
            clock=clock,
        )

    def connected(self) -> None:
        """The broker is there, perhaps again, and may lack what was published."""
        self.announcer.assets_changed()
        if not self.queued.is_giving_up:  # Boards would begin the round by the plan of before.
            self.cycle.announce()

    @property
    def is_busy(self) -> bool:
        """Whether requests for tokens wait, and are answered: those of a round that is given up are not."""
        return self._tokens is not None and self._tokens.is_busy and not self.queued.is_giving_up

    def take_requests(self, messages: Sequence[Received]) -> None:
        """Take devices' requests for tokens."""
        if self._tokens is not None:
            self._tokens.take(messages)

    def close(self) -> None:
        """Let go of what the job alone has open."""
        if self._tokens is not None:
            self._tokens.close()

    def take_changes(self, queued: QueuedJob) -> None:
        """Take what an operator has changed."""
        before, self.queued = self.queued, queued
        if queued.deadline_s is not None and queued.deadline_s != before.deadline_s:
            self.cycle.change_deadline(queued.deadline_s)
        if queued.minimum_devices is not None and queued.minimum_devices != before.minimum_devices:
            self.cycle.change_minimum(queued.minimum_devices)

    def advance(self) -> None:
        """Take the job's next step, if one is due: of its round, or at its end."""
        if self.queued.state.is_ending:
            is_told = self.cycle.cancel(sends_model=self.queued.sends_model)
        elif self.cycle.is_over:
            is_told = self.cycle.finish()
        elif self.queued.is_giving_up:
            self.cycle.give_up()
            return
        else:
            self.cycle.advance()
            if self._tokens is not None:
                self._tokens.tend()
            return
        if is_told:
            self._queue.end(self.queued.number, self._clock.unix())


def _token_office(
    settings: FleetSettings, job: Job, store: Store, announcer: Announcer, clock: Clock
) -> TokenOffice | None:
    if settings.linkability == "none":
        return None
    from coordinator.token_office import TokenOffice  # It loads what signs.

    opener = load_ask_opener(settings.keys_dir, settings.fleet)
    return TokenOffice(settings, job, store=store, opener=opener, announcer=announcer, clock=clock)


def _shown(queued: QueuedJob) -> str:
    return f"job {queued.name} ({queued.job.id.hex()[:8]})"


def _load_test_data(settings: FleetSettings) -> tuple[Dataset | None, InputForm | None]:
    """The test data, and what their inputs are."""
    if settings.test_data is None:
        return None, None
    dataset, declared = open_inferred(settings.test_data)
    return dataset, InputForm.of(declared)
