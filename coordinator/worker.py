"""A worker: opens, checks and counts fragments for a coordinator that keeps its state in PostgreSQL.

Any number of them may run, on any machines. They share one subscription, so that the broker gives each
fragment to one of them, and they share the database. A worker has the sealing key and no other: it cannot
sign. It keeps nothing that matters: what it had not counted when it ended has no receipt, and devices send it
again within seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final

from coordinator.database.opening import open_postgresql
from coordinator.database.settings import PostgresqlAddress
from coordinator.intake import Intake
from coordinator.keys import find_opener
from coordinator.own_receipts import OwnReceipts
from coordinator.queue import jobs_in
from coordinator.settings import CoordinatorSettings
from coordinator.shared_store import (
    CountedRound,
    SharedStore,
    Workers,
    require_same,
    shared_sealing_key,
)
from dpagent import __version__
from dpagent.clock import Clock, SystemClock
from dpagent.errors import BrokerError, ConfigurationError
from dpagent.protocol.codec import MessageError, decode
from dpagent.protocol.messages import Plan, ReceiptTopics
from dpagent.protocol.sealing import Opener
from dpagent.protocol.task import RoundTask
from dpagent.protocol.tokens import RoundKey, TokenKeys
from dpagent.protocol.topics import Topics
from dpagent.service_manager import ServiceManager
from dpagent.structured_log import Event, about
from dpagent.transport.events import Connected, Disconnected, Received
from dpagent.transport.session import MqttSession, Subscription
from dpagent.wording import counted

log = logging.getLogger(__name__)

_GROUP: Final = "dpagent-workers"
_IDLE_S: Final = 0.25
_BATCH: Final = 1_024
_SEEN_S: Final = 5.0
_GATHER_S: Final = 0.05
"""How long a batch is gathered once its first fragment is here: a transaction costs as much for one as for
many, and devices wait seconds for a receipt."""


def worker_address(settings: CoordinatorSettings) -> PostgresqlAddress:
    """Where workers find the state.

    Raises:
        ConfigurationError: It is in SQLite, or the password cannot be read.
    """
    address = settings.store.address()
    if address is None:
        raise ConfigurationError(
            "store.url is not set, so the coordinator keeps its state in SQLite and counts by itself; "
            "expected postgresql://USER@HOST/DATABASE, which workers share with it."
        )
    return address


class Worker:
    """A worker of one fleet.

    Args:
        settings: ``fleet.yaml``, with paths resolved.
        name: By which its operator knows it; by default host and process.
        clock: The program's; to be replaced in tests.

    Raises:
        ConfigurationError: The settings are another fleet's or do not allow workers, the key is missing, or
            the coordinator is of another version.
        NotReadyError: No coordinator has begun yet.
        StorageError, DatabaseAwayError: The database cannot be used.
    """

    def __init__(
        self, settings: CoordinatorSettings, *, name: str | None = None, clock: Clock | None = None
    ) -> None:
        self._settings, self._clock = settings, clock or SystemClock()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self._topics = Topics(settings.fleet)
        self._session = MqttSession(
            settings.mqtt.for_one_of_many(),
            client_id=None,
            subscriptions=[Subscription(self._topics.fragments, _GROUP)],
            # What waits for a worker that is gone would wait for nobody.
            persistent=False,
        )
        self._receipts = OwnReceipts(self._session, self._topics, self._clock)
        self._database = open_postgresql(worker_address(settings), f"worker {self.name}")
        with contextlib.ExitStack() as held:
            held.callback(self._database.close)
            self._database.require_current()
            with self._database.errors():
                require_same(self._database, settings.fleet, __version__)
                self._opener = self._key()
                self._workers = Workers(self._database)
                self._number = self._workers.register(self.name, __version__)
            self._held = held.pop_all()
        self._seen_at = time.monotonic()
        self._intake: Intake | None = None
        self._round: CountedRound | None = None

    def _key(self) -> Opener:
        opener = find_opener(self._settings.keys_dir, self._settings.fleet)
        if opener is not None:
            return opener
        if (secret := shared_sealing_key(self._database)) is not None:
            return Opener(secret, self._settings.fleet)
        raise ConfigurationError(
            f"{self._settings.keys_dir / 'sealing.key'} is missing, by which fragments are opened. Copy it "
            "from the coordinator's keys_dir (mode 0600, without signing.key), or have the coordinator "
            "share it through the database: store.shares_sealing_key: true."
        )

    def close(self) -> None:
        """Close the database."""
        self._held.close()

    def run(self, stop: threading.Event) -> None:
        """Count fragments until ``stop`` is set, and close.

        Raises:
            BrokerError: The broker refuses us, or has no shared subscriptions.
            ConfigurationError: The coordinator is of another version now.
            StorageError, DatabaseAwayError: The database cannot be used; fragments with receipts are safe.
        """
        manager = ServiceManager()
        try:
            with self._database.errors(), self._session:
                manager.ready()
                log.info(
                    "worker %s counts for fleet %s", self.name, self._settings.fleet,
                    extra=about(event=Event.STARTED, fleet=self._settings.fleet, worker=self.name),
                )  # fmt: skip
                while not stop.is_set():
                    manager.alive()
                    self._tell_of_life()
                    payloads = self._arrived()
                    # After they arrived: whoever sent them has seen the plan of a round that is open here.
                    self._look_at_round()
                    self._take(payloads)
                    self._receipts.publish_due()
                self._workers.end(self._number)
        finally:
            self.close()

    def _tell_of_life(self) -> None:
        now = time.monotonic()
        if now >= self._seen_at + _SEEN_S:
            self._seen_at = now
            require_same(self._database, self._settings.fleet, __version__)
            self._workers.see(self._number)

    def _arrived(self) -> list[bytes]:
        """Fragments that have arrived, after a short wait if there are none."""
        payloads: list[bytes] = []
        until = time.monotonic() + min(_IDLE_S, self._receipts.due_in_s())
        while len(payloads) < _BATCH:
            event = self._session.next_event(max(0.0, until - time.monotonic()))
            match event:
                case None:
                    break
                case Connected(protocol, limits):
                    self._require_sharing(protocol, shares=limits.shares)
                    log.info(
                        "connected to %s", self._settings.mqtt.url,
                        extra=about(event=Event.CONNECTED, broker=self._settings.mqtt.url),
                    )  # fmt: skip
                case Disconnected(reason):
                    log.warning(
                        "%s; reconnecting", reason, extra=about(event=Event.DISCONNECTED, reason=reason)
                    )
                case Received(_, payload):
                    if not payloads:
                        until = time.monotonic() + _GATHER_S
                    payloads.append(payload)
        return payloads

    def _require_sharing(self, protocol: str, *, shares: bool) -> None:
        """Refuse a broker that would give each worker every fragment, or none.

        Raises:
            BrokerError: It is one.
        """
        if protocol == "5" and shares:
            return
        lacks = (
            f"speaks MQTT {protocol} here, and workers need shared subscriptions (MQTT 5)"
            if protocol != "5"
            else "has no shared subscriptions, and workers need them"
        )
        raise BrokerError(
            f"The broker at {self._settings.mqtt.url} {lacks}. Use a broker that has them, such as "
            f"Mosquitto or EMQX (mqtt.protocol: auto or 5), or let the "
            "coordinator count alone: remove store.url."
        )

    def _look_at_round(self) -> None:
        """Take the round in which fragments count now."""
        place = self._workers.place()
        known = self._round
        if known is not None and place == (known.job, known.number, known.devices):
            return
        self._round = None if place is None else self._workers.round()
        self._intake = None
        if self._round is not None:
            self._intake = self._intake_of(self._round)
            log.info(
                "round %d is counted", self._round.number,
                extra=about(event=Event.ROUND_COUNTED, round=self._round.number),
            )  # fmt: skip

    def _intake_of(self, current: CountedRound) -> Intake:
        """Takes fragments of a round.

        Raises:
            ConfigurationError: Its plan cannot be read, or asks for another key.
        """
        try:
            plan = decode(current.plan, Plan)
            keys = None if current.token_keys is None else decode(current.token_keys, TokenKeys)
        except MessageError as error:
            raise ConfigurationError(
                f"The plan of round {current.number} cannot be read ({error}): another version of dpagent "
                "wrote it. Install the coordinator's version."
            ) from error
        if plan.sealing_key != self._opener.public_key:
            raise ConfigurationError(
                f"Round {current.number} is sealed to another key than this worker has. Copy sealing.key "
                f"from the coordinator's keys_dir to {self._settings.keys_dir}."
            )
        with self._database.errors():
            queued = next(each for each in jobs_in(self._database) if each.number == current.job)
        # How many devices there are is the coordinator's word, whatever stands in this machine's file.
        settings = queued.settings_in(self._settings.with_values({"devices": current.devices}))
        intake = Intake(
            settings,
            queued.job.id,
            store=SharedStore(
                self._database, current.job, self._number, leaves_receipts=plan.receipts == "fleet"
            ),
            opener=self._opener,
            acknowledge=self._acknowledge,
            clock=self._clock,
        )
        key = None if keys is None else RoundKey.of(keys, plan.round, self._settings.fleet)
        intake.begin(RoundTask.of(plan), key)
        return intake

    def _take(self, payloads: Sequence[bytes]) -> None:
        if not payloads:
            return
        if self._intake is None:
            log.debug("dropped %s: no round is counted", counted(len(payloads), "message"))
            return
        self._intake.take(payloads)

    def _acknowledge(self, fragment_ids: Sequence[bytes], receipts: ReceiptTopics, taken_at: float) -> None:
        """Publish receipts on topics of their own. Those for all devices are in the database by now: the
        coordinator signs them."""
        if receipts == "fragment":
            self._receipts.put(fragment_ids, taken_at)
