"""The coordinator: the connection, its events, and the loop that runs one job after another.

:mod:`coordinator.queue` says which job goes on, :mod:`coordinator.cycle` has the phases of a round.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from coordinator.announcer import Announcer
from coordinator.database.opening import bring_up_to_date, open_database
from coordinator.keys import client_id, load_opener, load_signer
from coordinator.leadership import WorkersDesk, lead
from coordinator.queue import Queue, next_in
from coordinator.queued_job import QueuedJob
from coordinator.running_job import Preparation, RunningJob, end_untold, submit
from coordinator.settings import FIRST_JOB, CoordinatorSettings, FleetSettings
from coordinator.status import Link, StatusFile
from dpagent.clock import Clock, SystemClock
from dpagent.errors import ConfigurationError, DataError, DpagentError, PlanError
from dpagent.privacy.statement import Trust
from dpagent.protocol.codec import MessageError
from dpagent.protocol.messages import Plan
from dpagent.protocol.signing import Verifier
from dpagent.protocol.topics import Topics
from dpagent.service_manager import ServiceManager
from dpagent.storage import StateDirectory
from dpagent.structured_log import Event, about
from dpagent.transport.events import Acknowledged, Connected, Disconnected, Received
from dpagent.transport.session import MqttSession, Subscription
from dpagent.wording import counted

log = logging.getLogger(__name__)

_IDLE_S: Final = 0.25
_BATCH: Final = 256


class Coordinator:
    """The daemon of one fleet: it runs the jobs of its queue, one at a time.

    Args:
        settings: ``fleet.yaml``, with paths resolved. If it holds a job, that is in the queue.
        stays: whether to wait for more jobs when all are over.
        clock: the program's; to be replaced in tests.

    Attributes:
        running: the job that is taken up, or None.

    Raises:
        ConfigurationError, DataError, PlanError, StateInUseError, StorageError: It cannot
            start; the text gives the reason.
    """

    def __init__(
        self, settings: CoordinatorSettings, *, stays: bool = False, clock: Clock | None = None
    ) -> None:
        self._settings, self._stays = settings, stays
        self._clock = clock or SystemClock()
        self._topics = Topics(settings.fleet)
        # Its own plans, too: an older copy of its database knows nothing of some.
        self._has_workers = settings.store.url is not None
        subscriptions = [Subscription(self._topics.plan)]
        if not self._has_workers:
            subscriptions.append(Subscription(self._topics.fragments))
        if settings.has_members:
            subscriptions.append(Subscription(self._topics.asks))
        self._session = MqttSession(
            settings.mqtt,
            client_id=client_id(settings.keys_dir, settings.fleet),
            subscriptions=subscriptions,
            persistent=True,
        )
        self.running: RunningJob | None = None
        self._is_busy = False
        # Last, because from here on the directory is held.
        with contextlib.ExitStack() as held:
            self._signer = load_signer(settings.keys_dir, settings.fleet)
            self._verifier = Verifier(self._signer.public_key, settings.fleet)
            self._opener = load_opener(settings.keys_dir, settings.fleet)
            if self._has_workers:  # Those that stand by need no directory.
                self._database = lead(settings, self._signer.public_key)
                held.callback(self._database.close)
            held.callback(StateDirectory(settings.state_dir).close)
            if not self._has_workers:
                self._database = open_database(settings.state_dir)
                held.callback(self._database.close)
                bring_up_to_date(settings.members_dir)
            self._desk = WorkersDesk(self._database, self._announcer()) if self._has_workers else None
            self._queue = Queue(self._database)
            self._status = StatusFile(settings.state_dir, settings.mqtt.url, self._clock)
            self._version = -1
            self._failures: dict[str, DpagentError] = {}
            """By the name of a job that failed since the start."""
            self._forgets = True
            """Whether there may be ids of fragments to delete."""
            with self._database.errors():
                self._take_stock()
            self._held = held.pop_all()

    def _take_stock(self) -> None:
        """Put the job of ``fleet.yaml`` into the queue, and take up the one that goes on."""
        prepared: Preparation | None = None
        if isinstance(self._settings, FleetSettings):
            key = self._opener.public_key
            prepared = submit(self._settings, FIRST_JOB, self._queue, key, self._clock.unix())
        jobs = self._queue.jobs()
        if any(each.job.noise.mechanism.trust is Trust.COORDINATOR for each in jobs):
            self._database.erase_what_is_deleted()
        self._erase_keys(jobs)
        if not jobs and not self._stays:
            raise ConfigurationError(
                "There is no job: fleet.yaml holds none, and the queue is empty. Add one with `dpagent "
                "coordinator job add FILE`, or wait for one with `dpagent coordinator run --stay`."
            )
        if (wanted := next_in(jobs)) is None:
            return
        if wanted.name == FIRST_JOB and prepared is not None:
            self.running = self._taken_up(wanted, prepared)
        else:
            self.running = self._taken_up_or_paused(wanted)

    def _erase_keys(self, jobs: Sequence[QueuedJob]) -> None:
        """Erase the secrets of rounds' keys that a crash has left, as their rounds were over: a job that is
        paused is not taken up, which would do it."""
        if not any(each.job.linkability != "none" for each in jobs) or not self._settings.has_members:
            return
        from coordinator.registry import Registry  # with what devices sign

        with contextlib.closing(Registry(self._settings.members_place)) as registry:
            for each in jobs:
                over = each.job.rounds if each.state.is_over else each.over_rounds
                registry.forget_secrets(each.job.id, over)

    def close(self) -> None:
        """Close the databases and let go of the directory."""
        self._let_go()
        self._held.close()

    def run(self, stop: threading.Event) -> bool:
        """Run jobs until all are over or ``stop`` is set, and close.

        Returns:
            Whether all jobs are over.

        Raises:
            BrokerError: The broker refuses us.
            StorageError: The disk fails; fragments with receipts are safe.
            ConfigurationError, DataError, PlanError: All jobs are over, and one of them failed.
        """
        try:
            if self._is_done():
                return True
            # The session handles network errors; errors here are the disk's.
            manager = ServiceManager()
            with self._database.errors(), self._session:
                manager.ready()
                log.info(
                    "coordinator of fleet %s", self._settings.fleet,
                    extra=about(event=Event.STARTED, fleet=self._settings.fleet),
                )  # fmt: skip
                while not stop.is_set():
                    manager.alive()
                    self._look_at_queue()
                    manager.status(self._activity())
                    self._note_status()
                    if self.running is None:
                        if self._is_done():
                            self._raise_failure()
                            return True
                    else:
                        with self._failing_alone(self.running):
                            self.running.advance()
                    self._tend_workers()
                    self._take_events()
                    if self.running is not None:
                        self.running.announcer.own_receipts.publish_due()
            return False
        finally:
            self._status.link(Link.STOPPED)
            self._note_status(is_last=True)
            self.close()

    def _tend_workers(self) -> None:
        self._is_busy = False
        if self._desk is not None:
            is_counting = self.running is not None and self.running.cycle.is_open
            self._is_busy = self._desk.tend(is_counting=is_counting)

    def _note_status(self, *, is_last: bool = False) -> None:
        self._status.note(
            self._activity(),
            blocks=0 if self.running is None else self.running.cycle.blocks,
            received=self._session.bytes_down,
            published=self._session.bytes_up,
            is_last=is_last,
        )

    def _activity(self) -> str:
        if self.running is None:
            return "no job goes on"
        return f"job {self.running.queued.name}: {self.running.cycle.activity()}"

    @contextlib.contextmanager
    def _failing_alone(self, running: RunningJob) -> Iterator[None]:
        """A job that cannot go on is over, with the reason; the next one goes on."""
        try:
            yield
        except (ConfigurationError, DataError, PlanError) as error:
            queued = running.queued
            if queued.state.is_ending:
                self._let_go()
                self._end_untold(queued, error)
            else:
                # First of all: the error may tell of noise that was drawn to close a round, and after a
                # crash other noise would be drawn for the same updates.
                self._queue.fail(queued.number, str(error))
                self._failures[queued.name] = error
                log.error(
                    "job %s has failed: %s", queued.name, error,
                    extra=about(event=Event.JOB_FAILED, job=queued.job.id.hex(), job_name=queued.name,
                                reason=str(error)),
                )  # fmt: skip
            self._version = -1

    def _end_untold(self, queued: QueuedJob, error: DpagentError) -> None:
        end_untold(queued, self._database, self._clock.unix())
        log.error("job %s is over, and devices are not told: %s", queued.name, error)

    def _raise_failure(self) -> None:
        """Raise if a job failed: whoever waited until all are over has to know by the exit code."""
        for name, error in self._failures.items():
            raise type(error)(f"Job {name} has failed. {error}")

    def _is_done(self) -> bool:
        """Whether to end: all jobs are over, and no other is waited for."""
        if self._stays or self._queue.going_on():
            return False
        log.info("all jobs are over; their models are in %s", self._settings.state_dir / "jobs")
        return True

    # The queue says which job goes on. Commands write to it while this program runs.

    def _look_at_queue(self) -> None:
        """Take what has changed in the queue, and change to another job if that is to go on."""
        if self._forgets:
            self._forgets = self._queue.forget_fragments()
        is_between = self.running is not None and not self.running.cycle.is_open
        version = self._database.version()
        if version == self._version and not is_between:
            return
        self._version = version
        jobs = self._queue.going_on()
        wanted = next_in(jobs)
        if self.running is not None:
            if wanted is not None and wanted.number == self.running.queued.number:
                with self._failing_alone(self.running):
                    self.running.take_changes(wanted)
                return
            self._let_go()
        if wanted is not None:
            self.running = self._taken_up_or_paused(wanted)
        elif paused := [each.name for each in jobs]:
            log.info("no job goes on: %s paused", ", ".join(paused) + (" is" if len(paused) == 1 else " are"))
        elif self._stays:
            log.info("nothing is left to do; staying until a stop, or another job")

    def _let_go(self) -> None:
        """No job goes on."""
        running, self.running = self.running, None
        if running is not None:
            running.close()

    def _taken_up(self, wanted: QueuedJob, prepared: Preparation | None = None) -> RunningJob | None:
        self._forgets = True
        return RunningJob.take_up(
            wanted,
            self._settings,
            database=self._database,
            opener=self._opener,
            announcer=self._announcer(),
            clock=self._clock,
            prepared=prepared,
        )

    def _announcer(self) -> Announcer:
        return Announcer(self._session, self._signer, self._topics, self._clock)

    def _taken_up_or_paused(self, wanted: QueuedJob) -> RunningJob | None:
        """The job; None if it cannot be taken up: it is paused then, and keeps no other from running."""
        try:
            return self._taken_up(wanted)
        except DpagentError as error:
            if wanted.state.is_ending:
                self._end_untold(wanted, error)
            else:
                log.error(
                    "job %s is paused: %s", wanted.name, error,
                    extra=about(event=Event.JOB_PAUSED, job=wanted.job.id.hex(), job_name=wanted.name,
                                reason=str(error)),
                )  # fmt: skip
                self._queue.halt(wanted.number, str(error))
            self._version = -1  # Its own changes do not show there, and another job may go on.
        return None

    def _take_events(self) -> None:
        """Wait for events, pass the arrived fragments to the job as one batch, then acknowledge them.

        The broker keeps a fragment until it is counted or rejected for good: what a kill
        interrupts comes again.
        """
        messages: list[Received] = []
        is_busy = self._is_busy or (self.running is not None and self.running.is_busy)
        wait_s = 0.0 if is_busy else _IDLE_S
        if self.running is not None:
            wait_s = min(wait_s, self.running.announcer.own_receipts.due_in_s())
        for number in range(_BATCH):
            event = self._session.next_event(wait_s if number == 0 else 0)
            if event is None:
                break
            if self.running is not None:
                self.running.announcer.take(event)
            match event:
                case Connected():
                    log.info(
                        "connected to %s", self._settings.mqtt.url,
                        extra=about(event=Event.CONNECTED, broker=self._settings.mqtt.url),
                    )  # fmt: skip
                    self._status.link(Link.CONNECTED)
                    if self.running is not None:
                        self.running.connected()
                case Disconnected(reason):
                    log.warning(
                        "%s; reconnecting", reason, extra=about(event=Event.DISCONNECTED, reason=reason)
                    )
                    self._status.link(Link.DISCONNECTED, reason)
                case Received():
                    messages.append(event)
                case Acknowledged():
                    pass
        requests = [each for each in messages if each.topic.endswith("/ask")]
        fragments = [each.payload for each in messages if each.topic == self._topics.fragments]
        if self.running is not None:
            for plan in (each.payload for each in messages if each.topic == self._topics.plan):
                with contextlib.suppress(MessageError):  # Of somebody else's, devices complain.
                    self.running.cycle.take_announcement(self._verifier.open(plan, Plan, "plan"))
            if not self._has_workers:
                self.running.cycle.take_fragments(fragments)
            self.running.take_requests(requests)
        elif messages:
            log.debug("dropped %s: no job goes on", counted(len(messages), "message"))
        self._session.acknowledge(messages)
