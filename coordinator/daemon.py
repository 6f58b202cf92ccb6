"""The coordinator: the connection, its events, and the loop that drives the cycle.

:mod:`coordinator.cycle` has the phases of a round.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from typing import Final

from coordinator.announcer import Announcer
from coordinator.cycle import Cycle
from coordinator.intake import Intake
from coordinator.keys import load_opener, load_signer
from coordinator.models import ModelFiles
from coordinator.planning import Planner, new_job, require_sendable
from coordinator.settings import FleetSettings, require_same_job
from coordinator.stepping import Stepper
from coordinator.store import Job, Store
from dpagent.clock import Clock, SystemClock
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.input_form import InputForm
from dpagent.learning.data.opening import open_inferred
from dpagent.privacy.statement import Trust, Unit, delta_warning, epsilon_warning
from dpagent.protocol.topics import Topics
from dpagent.service_manager import ServiceManager
from dpagent.storage import StateDirectory, disk_errors
from dpagent.transport.events import Acknowledged, Connected, Disconnected, Received
from dpagent.transport.session import MqttSession, Subscription
from dpagent.wording import counted

log = logging.getLogger(__name__)

_IDLE_S: Final = 0.25
_BATCH: Final = 256


class Coordinator:
    """The daemon of one fleet and one job.

    Args:
        settings: ``fleet.yaml``, with paths resolved.
        clock: the program's; to be replaced in tests.

    Raises:
        ConfigurationError, DataError, PlanError, StateInUseError, StorageError: It cannot
            start; the text gives the reason.
    """

    def __init__(self, settings: FleetSettings, *, clock: Clock | None = None) -> None:
        self._settings = settings
        clock = clock or SystemClock()
        unit = settings.privacy.mechanism.unit
        units = settings.devices if unit is Unit.DEVICE else settings.records_per_device
        warnings = [delta_warning(settings.privacy.delta, units, unit)]
        if settings.cap.kind != "published":  # whose ε bounds nothing
            warnings.append(epsilon_warning(settings.privacy.epsilon, unit))
        for warning in filter(None, warnings):
            log.warning("%s", warning)
        spec = settings.model.spec()
        self._models = ModelFiles(settings, spec, *_load_test_data(settings))
        require_sendable(spec, self._models.assets)
        topics = Topics(settings.fleet)
        self._session = MqttSession(
            settings.mqtt,
            client_id=f"dpagent-coordinator-{settings.fleet}",
            subscriptions=[Subscription(topics.fragments)],
            persistent=True,
        )
        # Last, because from here on the directory is held.
        with contextlib.ExitStack() as held:
            held.callback(StateDirectory(settings.state_dir).close)
            signer = load_signer(settings.keys_dir, settings.fleet)
            opener = load_opener(settings.keys_dir, settings.fleet)
            self._announcer = Announcer(self._session, signer, topics)
            self._store = Store(settings.state_dir)
            held.callback(self._store.close)
            with disk_errors(self._store.file):
                known = self._store.job()
                if known is not None:
                    require_same_job(known.terms, settings.job_terms(), settings.state_dir)
                job = known or new_job(settings)
                if job.noise.mechanism.trust is Trust.COORDINATOR:
                    self._store.erase_what_is_deleted()
                planner = Planner(settings, spec, job, opener.public_key)
                stepper = Stepper(settings, spec)
                if known is None:
                    _begin(settings, job, self._store, planner, stepper)
                else:
                    log.info("job %s continues after round %d", job.id.hex()[:8], self._store.closed_rounds())
                self._cycle = Cycle(
                    settings,
                    job,
                    store=self._store,
                    planner=planner,
                    stepper=stepper,
                    models=self._models,
                    intake=Intake(
                        settings,
                        job.id,
                        store=self._store,
                        opener=opener,
                        announcer=self._announcer,
                        clock=clock,
                    ),
                    announcer=self._announcer,
                    clock=clock,
                )
            self._held = held.pop_all()

    def close(self) -> None:
        """Close the database and let go of the directory."""
        self._held.close()

    def run(self, stop: threading.Event) -> bool:
        """Run rounds until the job is finished or ``stop`` is set, and close.

        Returns:
            Whether the job is finished.

        Raises:
            BrokerError: The broker refuses us.
            StorageError: The disk fails; fragments with receipts are safe.
        """
        try:
            if self._store.is_finished():
                log.info("the job is finished; the model is in %s", self._models.final)
                return True
            # The session handles network errors; errors here are the disk's.
            manager = ServiceManager()
            with disk_errors(self._store.file), self._session:
                manager.ready()
                while not stop.is_set():
                    manager.alive()
                    manager.status(self._cycle.activity())
                    self._cycle.advance()
                    if not self._cycle.is_over:
                        self._take_events()
                    elif self._cycle.finish():
                        return True
            return False
        finally:
            self.close()

    def _take_events(self) -> None:
        """Wait for events, pass the arrived fragments to the cycle as one batch, then acknowledge them.

        The broker keeps a fragment until it is counted or rejected for good: what a kill
        interrupts comes again.
        """
        messages: list[Received] = []
        for number in range(_BATCH):
            event = self._session.next_event(_IDLE_S if number == 0 else 0)
            if event is None:
                break
            match event:
                case Connected():
                    log.info("connected to %s", self._settings.mqtt.url)
                    self._announcer.assets_changed()
                    self._cycle.announce()
                case Disconnected(reason):
                    log.warning("%s; reconnecting", reason)
                case Received():
                    messages.append(event)
                case Acknowledged():
                    pass
        self._cycle.take_fragments([message.payload for message in messages])
        self._session.acknowledge(messages)


def _begin(settings: FleetSettings, job: Job, store: Store, planner: Planner, stepper: Stepper) -> None:
    # A plan that no device would accept must fail here, not on a thousand boards.
    planner.require_acceptable()
    store.begin(job, stepper.initial())
    epsilon = job.epsilon_by_round[-1]
    promised = f"ε = {epsilon:.4g}" if math.isfinite(epsilon) else "no guarantee"
    log.info("job %s begins: %s, %s", job.id.hex()[:8], counted(settings.rounds, "round"), promised)


def _load_test_data(settings: FleetSettings) -> tuple[Dataset | None, InputForm | None]:
    """The test data, and what their inputs are."""
    if settings.test_data is None:
        return None, None
    dataset, declared = open_inferred(settings.test_data)
    return dataset, InputForm.of(declared)
