"""The mixer: takes sealed fragments from a topic of its own, and publishes them in random order.

It reads the coordinator's plans, and holds messages that answer one of the last few. It keeps nothing on disk
but its key and digests of what has left, and says nothing of single messages in its log. What a crash loses,
devices send again, since no receipt came.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from typing import Final

from dpagent import faults
from dpagent.clock import Clock, SystemClock
from dpagent.faults import FaultPoint
from dpagent.protocol.codec import MessageError
from dpagent.protocol.messages import Plan
from dpagent.protocol.mixing import plan_digest, plan_of
from dpagent.protocol.sealing import sealed_bytes
from dpagent.protocol.signing import Verifier
from dpagent.protocol.topics import Topics
from dpagent.service_manager import ServiceManager
from dpagent.storage import StateDirectory
from dpagent.structured_log import Event, about
from dpagent.transport.events import Acknowledged, Connected, Disconnected, Received
from dpagent.transport.session import MqttSession, Subscription
from mixer.departed import Departed
from mixer.keys import load_outer_opener
from mixer.pools import Pools
from mixer.settings import MixerSettings

log = logging.getLogger(__name__)

_IDLE_S: Final = 0.05
_TAKEN_AT_ONCE: Final = 64
_BURST: Final = 64
_REPORT_S: Final = 60.0


class Mixer:
    """The daemon that mixes one fleet's fragments.

    Args:
        settings: ``mixer.yaml``, with paths resolved.
        clock: the program's; to be replaced in tests.

    Raises:
        ConfigurationError, StateInUseError, StorageError: It cannot start; the text gives the reason.
    """

    def __init__(self, settings: MixerSettings, *, clock: Clock | None = None) -> None:
        self._settings, self._clock = settings, clock or SystemClock()
        self._verifier = Verifier(settings.coordinator_key, settings.fleet)
        self._topics = Topics(settings.fleet)
        self._session = MqttSession(
            settings.mqtt,
            client_id=f"dpagent-mixer-{settings.fleet}",
            # The plan first: messages that come before it are of no plan.
            subscriptions=[Subscription(self._topics.plan), Subscription(self._topics.mixer)],
            persistent=False,
        )
        self._pools = Pools(
            batch=settings.batch,
            least=settings.least,
            longest_s=settings.longest_s,
            memory_bytes=settings.memory_mib << 20,
        )
        self._leaving: deque[bytes] = deque()
        """Departed messages that rate and window do not let out yet, already in random order."""
        self._allowance, self._allowance_at = float(_BURST), self._clock.monotonic()
        self._rejected: Counter[str] = Counter()
        self._published = self._repeats = 0
        self._reported_at = self._clock.monotonic()
        with contextlib.ExitStack() as held:
            held.callback(StateDirectory(settings.keys_dir).close)
            self._opener = load_outer_opener(settings.keys_dir, settings.fleet)
            self._departed = Departed(settings.keys_dir, settings.remembered)
            self._held = held.pop_all()

    def close(self) -> None:
        """Let go of the directory."""
        self._held.close()

    def run(self, stop: threading.Event) -> None:
        """Mix until ``stop`` is set, and close. What it holds then is lost; devices send it again.

        Raises:
            BrokerError: The broker refuses us.
            StorageError: What leaves cannot be noted.
        """
        try:
            manager = ServiceManager()
            with self._session:
                manager.ready()
                log.info(
                    "mixer of fleet %s", self._settings.fleet,
                    extra=about(event=Event.STARTED, fleet=self._settings.fleet),
                )  # fmt: skip
                while not stop.is_set():
                    manager.alive()
                    self._take_events()
                    # While departed messages wait, others stay in their pools, whose memory is bounded.
                    if not self._leaving:
                        self._depart()
                    self._publish()
                    self._report()
        finally:
            self.close()

    def _take_events(self) -> None:
        for number in range(_TAKEN_AT_ONCE):
            event = self._session.next_event(_IDLE_S if number == 0 and not self._may_publish() else 0)
            match event:
                case None:
                    return
                case Connected():
                    log.info(
                        "connected to %s", self._settings.mqtt.url,
                        extra=about(event=Event.CONNECTED, broker=self._settings.mqtt.url),
                    )  # fmt: skip
                case Disconnected(reason):
                    log.warning(
                        "%s; reconnecting", reason, extra=about(event=Event.DISCONNECTED, reason=reason)
                    )
                case Received(topic, payload):
                    self._receive(topic, payload)
                case Acknowledged():
                    pass

    def _receive(self, topic: str, payload: bytes) -> None:
        try:
            if topic == self._topics.plan:
                self._take_plan(self._verifier.open(payload, Plan, "plan"))
            else:
                self._take(payload)
        except MessageError as error:
            self._rejected[error.reason] += 1

    def _take_plan(self, plan: Plan) -> None:
        """Hold messages that answer a plan, if it names this mixer."""
        if plan.fleet != self._settings.fleet:
            raise MessageError("wrong fleet", plan.fleet)
        if plan.mixer == self._opener.public_key and plan.state == "open":
            self._pools.announce(plan_digest(plan), sealed_bytes(plan))

    def _take(self, payload: bytes) -> None:
        self._pools.require(plan_of(payload))  # Before the work of opening what a flood brings.
        inner = self._opener.open(payload)
        faults.reached(FaultPoint.MIXER_OPENED)
        if inner.sealed in self._departed:
            self._repeats += 1
            return
        self._pools.add(inner, self._clock.monotonic())
        faults.reached(FaultPoint.MIXER_HELD)

    def _depart(self) -> None:
        """Let the pools go whose time has come; what leaves is on disk first."""
        batch = self._pools.depart(self._clock.monotonic())
        if batch:
            faults.reached(FaultPoint.MIXER_BATCH_DRAWN)
            self._departed.note(batch)
            faults.reached(FaultPoint.MIXER_BATCH_NOTED)
            self._leaving.extend(batch)

    def _may_publish(self) -> bool:
        return bool(self._leaving) and self._session.has_room and self._allowance >= 1.0

    def _publish(self) -> None:
        """Send what departed, as far as the session and the rate allow."""
        now = self._clock.monotonic()
        passed_s, self._allowance_at = now - self._allowance_at, now
        self._allowance = min(float(_BURST), self._allowance + self._settings.messages_per_second * passed_s)
        while self._may_publish():
            if self._session.publish(self._topics.fragments, self._leaving[0]) is None:
                return
            self._leaving.popleft()
            self._allowance -= 1.0
            self._published += 1
            faults.reached(FaultPoint.MIXER_PUBLISHED)
            if not self._leaving:
                faults.reached(FaultPoint.MIXER_BATCH_LEFT)

    def _report(self) -> None:
        """Totals for the operator, rarely enough to tell nothing of a message."""
        now = self._clock.monotonic()
        if now < self._reported_at + _REPORT_S:
            return
        self._reported_at = now
        rejected = ", ".join(f"{reason} {number}" for reason, number in sorted(self._rejected.items()))
        log.info(
            "published %d, held %d, repeats %d, dropped %d, rejected: %s",
            self._published, self._pools.held, self._repeats + self._pools.repeats, self._pools.dropped,
            rejected or "none",
        )  # fmt: skip
