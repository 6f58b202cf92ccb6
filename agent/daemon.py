"""The agent: the connection, its events, and the loop that drives the cycle.

One thread, one queue, a process for training, others that end once they have answered (:mod:`agent.errand`),
and a thread that sends what is due (:mod:`agent.departures`). :mod:`agent.announcements` takes what the
coordinator announces, :mod:`agent.cycle` has the phases of a round. Nothing of it needs numpy.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from typing import TYPE_CHECKING, Final

from agent.announcements import Announced, Announcements, Phase
from agent.cycle import Cycle
from agent.database import ledger_errors
from agent.disk_writes import DiskWrites
from agent.energy import EnergyMeter
from agent.engine_file import EngineFile
from agent.governor import Governor, require_public_room
from agent.latest_model import LatestModel, current_asset
from agent.ledger_room import LedgerRoom
from agent.limits import shown
from agent.looks import Looks
from agent.marked_log import PRIVATE
from agent.opening import Opening
from agent.pricing import Pricing
from agent.profile import check_board, open_profile
from agent.publisher import Publisher
from agent.quiet_end import wait_to_end
from agent.renewal import Renewal
from agent.row_files import kept_in_memory
from agent.sensors import Sensors
from agent.settings import AgentSettings, on_board
from agent.state import AgentState
from agent.status import Doing, Link, RoundStatus, Status, StatusFile
from agent.tokens import Tokens
from agent.training_messages import MORE_NICENESS
from agent.worker import Worker
from dpagent.clock import Clock, SystemClock
from dpagent.errors import BrokerError, StorageError
from dpagent.learning.data.settings import require_kind
from dpagent.protocol.codec import MessageError
from dpagent.protocol.messages import RECEIPT_DIGEST_BYTES, AssetTerms, ModelChunk, Plan, Receipts
from dpagent.protocol.signing import Verifier
from dpagent.protocol.topics import Topics
from dpagent.service_manager import ServiceManager
from dpagent.structured_log import Event, about
from dpagent.transport.events import Acknowledged, Connected, Disconnected, Received, Subscribed
from dpagent.transport.session import MqttSession, Subscription

if TYPE_CHECKING:
    from agent.identity import Identity

log = logging.getLogger(__name__)

_IDLE_S: Final = 0.5
_COUNT_S: Final = 2.0
"""Counters of rejections are written no more often than this."""
_START_S: Final = 5.0
"""An agent connects first after a whole number of these, or of periods of its grid where that is shorter."""
_SILENCE_S: Final = 30.0
"""Without a plan, after which the log says what that may mean."""
_BATCH: Final = 256
"""Messages handled before the next turn of training and publishing."""


class Agent:
    """The daemon on one device.

    Args:
        settings: ``agent.yaml``, with paths resolved.
        clock: the program's; to be replaced in tests.
        sensors: the board's; likewise.
        opening: the process of its start, if that runs already.
        age_s: for how long the program has run.

    Raises:
        ConfigurationError, DataError, ErrandError, LedgerError, StateInUseError, StorageError: The
            device cannot start; the text gives the reason.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        clock: Clock | None = None,
        sensors: Sensors | None = None,
        opening: Opening | None = None,
        age_s: float = 0.0,
    ) -> None:
        self._clock, sensors = clock or SystemClock(), sensors or Sensors()
        self._began_at = self._clock.monotonic() - age_s
        loaded = open_profile(settings.profile)
        profile = loaded.profile
        check_board(profile)
        log.info("board profile %s: %s", loaded.name, profile.description, extra=PRIVATE)
        self._settings = settings = on_board(settings, profile)
        require_kind(settings.data)
        require_public_room(
            settings.governor, settings.state_dir, settings.data.path, reader=settings.model.reader
        )
        niceness = os.nice(max(0, profile.niceness - os.nice(0)))
        if opening is not None:
            opening.give_way(niceness)
        self._verifier = Verifier(settings.coordinator_key, settings.fleet)
        self._topics = Topics(settings.fleet)
        identity = identity_of(settings)
        # Of the model's chunks, those that the plan names and that have not come: see _topics_of_chunks.
        topics = [self._topics.plan, self._topics.receipts]
        if identity is not None:
            answers = self._topics.answer(identity.device_id)
            topics += [self._topics.token_keys, self._topics.witness, self._topics.evidence, answers]
        self._session = MqttSession(
            settings.mqtt,
            client_id=None,
            subscriptions=[Subscription(topic) for topic in topics],
            persistent=False,
        )
        # It takes the directory's lock: nothing is decoded for a device that is running, or has no ledger.
        room = LedgerRoom.of(settings.limits, has_tokens=identity is not None)
        opening = opening or Opening()
        try:
            self._state = AgentState(
                settings.ledger_files, settings.lifetime_budgets, room, check=opening.replay
            )
        except BaseException:
            opening.end()
            raise
        self._status_file = StatusFile(settings.state_dir, self._clock)
        self._last_receipt_at: float | None = None
        """Unix time."""
        self._status_file.note(Status(Link.STARTING, settings.mqtt.url, self._topics.plan))
        try:
            form = opening.form(settings.data, settings.state_dir)
            self._kept = kept_in_memory(settings.state_dir)
            EngineFile(settings.state_dir).take_room()
            self._renewal = Renewal(settings, self._clock)
        except BaseException:
            self._note_end()
            self._state.close()
            raise
        self._publisher = Publisher(
            self._state,
            self._session,
            self._topics,
            messages_per_second=settings.limits.messages_per_second,
            period_s=settings.limits.minimum_compute_slot_s,
            clock=self._clock,
        )
        self._announcements = Announcements(
            settings.data.name,
            settings.fleet,
            settings.limits,
            takes_graphs=settings.engine != "numpy",
            is_member=identity is not None,
            state=self._state,
            publisher=self._publisher,
            ask_again=self._session.ask_again,
            clock=self._clock,
        )
        self._tokens = Tokens(
            settings.fleet,
            identity,
            verifier=self._verifier,
            topics=self._topics,
            state=self._state,
            session=self._session,
            publisher=self._publisher,
            clock=self._clock,
        )
        self._writes = DiskWrites(sensors, self._state, self._clock)
        self._looks = Looks(settings.data, settings.state_dir, profile.niceness + MORE_NICENESS)
        self._governor = Governor(
            settings.governor,
            settings.state_dir,
            sensors,
            self._clock,
            written_today=self._writes.today,
            readers=lambda: (self._looks.process, *self._latest_model.started),
            may_be_ending=lambda: self._latest_model.may_be_ending,
        )
        self._latest_model = LatestModel(settings, self._clock)
        self._cycle = Cycle(
            self._announcements,
            settings.data.name,
            settings.limits,
            form=form,
            state=self._state,
            prices=Pricing(profile.processes_stay_s),
            worker=Worker(settings, profile, self._looks, self._latest_model),
            publisher=self._publisher,
            tokens=self._tokens,
            governor=self._governor,
            meter=EnergyMeter(sensors.root, self._clock),
            clock=self._clock,
            stays_s=profile.processes_stay_s,
        )
        self._reported_bytes = (0, 0)
        self._rejected = 0
        self._counted_at = 0.0
        self._silent_until = math.inf
        """When to say that no plan has come (monotonic)."""
        self._warned: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set, and close.

        Raises:
            BrokerError: The broker refuses us.
            StorageError: The disk fails; everything published is charged.
            LedgerError: The database was damaged while it ran; likewise.
        """
        spent = self._state.ledger.spending_of(self._settings.data.name)
        log.info(
            "agent of fleet %s, %s", self._settings.fleet, spent,
            extra=about(event=Event.STARTED, fleet=self._settings.fleet),
        )  # fmt: skip
        log.info("limits of this device: %s", shown(self._settings.limits))
        manager = ServiceManager()
        refused_at = None
        try:
            self._wait_to_connect(stop)
            # The session handles network errors; errors here are the disk's.
            with self._session, self._publisher.running(), ledger_errors(self._state.file):
                manager.ready()
                while not stop.is_set():
                    self._looks.tend()
                    manager.alive()
                    status = self._status()
                    manager.status(status.in_words())
                    self._status_file.note(status)
                    self._take_events()
                    self._session.follow(self._topics_of_chunks())
                    self._cycle.advance()
                    self._publisher.publish_due()
                    self._tokens.tend()
                    self._complain_of_silence()
                    self._take_model()
                    self._renewal.tend()
                    if self._rejected and self._clock.monotonic() >= self._counted_at + _COUNT_S:
                        self._count_traffic()
                    self._state.write_old_notes()
        except BrokerError:
            refused_at = self._clock.monotonic()
            raise
        finally:
            manager.stopping()
            ending = [each for each in (self._looks.process, *self._latest_model.processes) if each]
            try:
                self._count_traffic()
            except StorageError as error:  # A stop succeeds on a full disk, too.
                log.warning("the last counts of bytes are lost: %s", error, extra=PRIVATE)
            finally:
                self.close()
            if refused_at is not None:
                wait_to_end(refused_at, ending, self._clock, stop)

    def close(self) -> None:
        """End training, close the database and let go of the directory."""
        self._latest_model.close()
        self._governor.stop()
        self._cycle.rest()
        self._looks.end()
        self._note_end()
        self._state.close()

    def _note_end(self) -> None:
        """The last status. While the directory is this agent's: another's may follow."""
        ended = Status(Link.STOPPED, self._settings.mqtt.url, self._topics.plan)
        self._status_file.note(ended, is_last=True)

    def _wait_to_connect(self, stop: threading.Event) -> None:
        """Wait for a time that follows from when the program began, and not from how long its start took:
        the more records there are, the longer it takes to read them."""
        period_s = min(self._settings.limits.minimum_compute_slot_s, _START_S)
        connects_at = self._began_at + period_s * math.ceil(
            (self._clock.monotonic() - self._began_at) / period_s
        )
        while (left_s := connects_at - self._clock.monotonic()) > 0 and not stop.is_set():
            stop.wait(min(left_s, _IDLE_S))

    def _take_events(self) -> None:
        """Handle the events that have arrived; wait only when nothing else is due."""
        wait_s = min(_IDLE_S, self._publisher.due_in_s(), self._cycle.due_in_s(), self._tokens.due_in_s())
        for number in range(_BATCH):
            event = self._session.next_event(wait_s if number == 0 else 0)
            if event is None:
                break
            match event:
                case Connected():
                    log.info(
                        "connected to %s", self._settings.mqtt.url,
                        extra=about(event=Event.CONNECTED, broker=self._settings.mqtt.url),
                    )  # fmt: skip
                    self._publisher.go_on()
                    self._announcements.draw_probe_times()
                case Subscribed():
                    if self._announcements.current is None:
                        log.info("waiting for a plan on %s", self._topics.plan)
                        self._silent_until = self._clock.monotonic() + _SILENCE_S
                case Disconnected(reason):
                    self._publisher.hold()
                    self._silent_until = math.inf
                    log.warning(
                        "%s; reconnecting", reason, extra=about(event=Event.DISCONNECTED, reason=reason)
                    )
                case Received(topic, payload):
                    self._receive(topic, payload)
                case Acknowledged():
                    pass  # A PUBACK does not confirm delivery; only a receipt does.

    def _topics_of_chunks(self) -> list[str]:
        """The topics of the model's chunks to be subscribed to now."""
        current = self._announcements.current
        if current is None:
            return []
        beside = self._latest_model.fetched(current.plan, self._announcements.finished_model)
        return self._announcements.topics_of_chunks(beside)

    def _take_model(self) -> None:
        """Keep the model of a job that is finished, once it is here; where the owner wants it, of a round."""
        latest, announcements = self._latest_model, self._announcements
        latest.tend()
        if (current := announcements.current) is None:
            return
        finished = announcements.finished_model
        if finished is not None and latest.wants(finished):
            self._take_finished(finished, current)
        elif current.plan.export is not None and latest.keeps_current:
            self._take_current(current)
        else:
            latest.note_absent(current.plan)

    def _take_finished(self, model: AssetTerms, current: Announced) -> None:
        latest, announcements = self._latest_model, self._announcements
        if (data := announcements.asset(model)) is not None:
            latest.take(model, data)
            announcements.finished_model = None
        elif announcements.wait_for_model(current) and latest.note_request(model):
            announcements.finished_model = None

    def _take_current(self, current: Announced) -> None:
        latest, announcements, plan = self._latest_model, self._announcements, current.plan
        asset = current_asset(plan)
        if not latest.wants(asset, is_finished=False) or announcements.too_large(plan):
            return
        if (parts := announcements.current_model(plan)) is not None:
            latest.take_current(plan, *parts)
        elif announcements.wait_for_model(current):
            latest.note_request(asset, is_finished=False)

    def _status(self) -> Status:
        """What the agent does, for its owner."""
        current = self._announcements.current
        return Status(
            Link.CONNECTED if self._session.connected else Link.DISCONNECTED,
            self._settings.mqtt.url,
            self._topics.plan,
            None if current is None else self._status_of(current),
            self._governor.held,
            self._last_receipt_at,
        )

    def _status_of(self, announced: Announced) -> RoundStatus:
        plan, until = announced.plan, math.inf  # monotonic
        match announced.phase:
            case _ if plan.state == "finished":
                doing = Doing.FINISHED
            case Phase.DECIDE | Phase.REPEAT if self._announcements.model_for(plan) is None:
                doing = Doing.MODEL
            case Phase.DECIDE | Phase.REPEAT:
                doing, until = Doing.DECIDE, announced.begins_at
            case Phase.PREPARE:
                doing = Doing.PREPARE
            case Phase.TRAIN:
                doing, until = Doing.TRAIN, announced.fixed_until
            case Phase.SETTLED:
                doing = Doing.SETTLED
        left_s = until - self._clock.monotonic()
        return RoundStatus(
            plan.job.hex(), plan.round, plan.rounds, plan.method, doing,
            self._clock.unix() + left_s if 0 < left_s < math.inf else None,
            plan.deadline,
        )  # fmt: skip

    def _complain_of_silence(self) -> None:
        """Say, once a connection, what it may mean that no plan comes."""
        if self._announcements.current is None and self._clock.monotonic() >= self._silent_until:
            self._silent_until = math.inf
            log.warning(
                "no plan has come on %s for %g s: the coordinator of fleet %s has announced no job, `fleet` "
                "is another's name, or this user may not read the topic. The board goes on waiting; `dpagent "
                "doctor` tries each step",
                self._topics.plan, _SILENCE_S, self._settings.fleet,
            )  # fmt: skip

    def _receive(self, topic: str, payload: bytes) -> None:
        try:
            if topic == self._topics.plan:
                if self._announcements.take_plan(self._verifier.open(payload, Plan, "plan")):
                    self._warned.clear()
                    self._count_traffic()
            elif topic == self._topics.receipts:
                receipts = self._verifier.open(payload, Receipts, "receipts")
                if self._state.mark_counted(receipts.each, self._clock.unix()):
                    self._last_receipt_at = self._clock.unix()
            elif topic.startswith(self._topics.receipt("")):
                self._take_own_receipt(topic.removeprefix(self._topics.receipt("")), payload)
            elif topic == self._topics.token_keys:
                self._tokens.watch.take_keys(payload)
            elif topic == self._topics.witness:
                self._tokens.watch.take_witness(payload)
            elif topic == self._topics.evidence:
                self._tokens.watch.take_evidence(payload)
            elif topic.endswith("/answer"):
                self._tokens.take_answer(payload)
            else:
                self._announcements.take_chunk(self._verifier.open(payload, ModelChunk, "model"))
        except MessageError as error:
            # Once per reason and round: a flood of invalid messages must not flood the log or wear the disk.
            if error.reason not in self._warned:
                log.warning(
                    "rejected a message on %s: %s", topic, error,
                    extra=about(event=Event.REJECTED, count=1, reason=error.reason),
                )  # fmt: skip
                self._warned.add(error.reason)
            self._rejected += 1

    def _take_own_receipt(self, place: str, payload: bytes) -> None:
        """Take a receipt that came on a topic of its own.

        Anything else there is passed over: a note of it on the disk would be what the coordinator has one
        board do whose fragment it knows, and not whose it is.
        """
        now = self._clock.unix()
        if len(payload) == RECEIPT_DIGEST_BYTES and self._state.mark_own_counted(place, payload, now):
            self._last_receipt_at = now

    def _count_traffic(self) -> None:
        up, down = self._session.bytes_up, self._session.bytes_down
        known_up, known_down = self._reported_bytes
        self._state.add_to_counters(
            bytes_up=up - known_up, bytes_down=down - known_down, rejected=self._rejected
        )
        self._writes.keep()
        self._rejected = 0
        self._counted_at = self._clock.monotonic()
        self._reported_bytes = (up, down)


def identity_of(settings: AgentSettings) -> Identity | None:
    """By what the fleet knows this board, if it has enrolled.

    Raises:
        ConfigurationError: one of the files is missing or is another's.
        StorageError: one cannot be read.
    """
    cert_file, key_file = settings.mqtt.cert_file, settings.mqtt.key_file
    if cert_file is None or key_file is None:
        return None
    from agent.identity import Identity  # Boards without one need no X.509.

    return Identity.load(cert_file, key_file)
