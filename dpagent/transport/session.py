"""A supervised MQTT session that turns callbacks into a queue of events.

The library's network thread only fills a queue; one thread of the program takes events from it with
:meth:`MqttSession.next_event`. Another may publish, and hear. The session reconnects by itself with growing
pauses, subscribes again each time, and tries the other protocol version until the broker accepts one. It
stores nothing: durable data are in the caller's database, since neither the library's memory nor a PUBACK
guarantees delivery.

A *persistent* session acknowledges a message when the program says so (:meth:`MqttSession.acknowledge`), when
what it brought is stored: a message that was not acknowledged comes again, after a lost connection or a
kill of either side. Other sessions acknowledge on arrival, in the library's thread: the broker keeps nothing
for them over a lost connection anyway, so a late acknowledgement would win nothing, and its time would tell
of the program's work.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from dpagent.errors import BrokerError, ConfigurationError
from dpagent.transport.connection import MQTT5, MQTT311, WINDOW, Connection
from dpagent.transport.events import (
    Arrived,
    Connected,
    ConnectionEvent,
    Disconnected,
    Ended,
    Event,
    NotPublished,
    NotSubscribed,
    Received,
    Refused,
)
from dpagent.transport.places import Places
from dpagent.transport.settings import MqttSettings

log = logging.getLogger(__name__)

_SUSPICIOUS_LIVES = 8
"""Older brokers disconnect the older of two clients with the same id, repeatedly and without a reason."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Waiting times of a session, in seconds."""

    answer_s: float = 3.0
    """Time to wait for a CONNACK; doubled at each attempt. Some 3.1.1 brokers neither answer nor close on a
    version 5 CONNECT: they read its properties as a client id and wait for the rest."""
    pause_s: float = 1.0
    """Pause before another attempt; doubled at each."""
    longest_s: float = 60.0
    """Maximum of both times."""
    short_life_s: float = 5.0
    """A shorter connection may have been ended by another client with the same id."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A topic filter to subscribe to, at QoS 1."""

    topic: str
    group: str | None = None
    """Of clients that share the subscription: the broker gives each message to one of them. Since MQTT 5; see
    :attr:`BrokerLimits.shares`."""

    def filter(self, prefix: str) -> str:
        """As the broker is told it.

        Args:
            prefix: levels before the topic, of the broker's own.
        """
        topic = prefix + self.topic
        return topic if self.group is None else f"$share/{self.group}/{topic}"


class MqttSession:
    """Connections to the broker, one after the other.

    Args:
        settings: Address and credentials.
        client_id: MQTT client identifier; None for a random one at each connection, by which a broker cannot
            link two of them.
        subscriptions: Topics to receive.
        persistent: Whether the broker keeps messages for this client until the program has acknowledged them,
            also while it is offline.
        pace: Waiting times for answers and between attempts.

    Raises:
        ConfigurationError: The password or certificate file cannot be read, or the client id cannot be used.
    """

    def __init__(
        self,
        settings: MqttSettings,
        *,
        client_id: str | None,
        subscriptions: Sequence[Subscription],
        persistent: bool,
        pace: Pace = Pace(),
    ) -> None:
        self._settings = settings
        self._client_id = client_id
        # Levels of the broker's own, of which the program knows nothing.
        self._prefix = f"{settings.topic_prefix}/" if settings.topic_prefix else ""
        self._topics = [subscription.filter(self._prefix) for subscription in subscriptions]
        self._followed: tuple[str, ...] = ()
        self._persistent = persistent
        self._pace = pace
        self._password = settings.password()
        settings.require_whole_pair()
        if persistent and "{random}" in settings.client_id_template(client_id):
            raise ConfigurationError(
                f"mqtt.client_id is {settings.client_id}; expected one without {{random}}: the broker keeps "
                "what arrives for this program while it is away, by its client id."
            )
        # No SimpleQueue: in CPython 3.11, its get() waits for ever if a signal interrupts it as its time runs
        # out, so that SIGTERM would not end a program before the next message comes.
        self._inbox: queue.Queue[tuple[Connection, ConnectionEvent]] = queue.Queue()
        self._room = Places(WINDOW)
        self._arrived: deque[Received] = deque()
        """Messages of the current connection that wait for the program, taken from the inbox."""
        self._arrived_together = 0
        """How many these were, whose places are let go of when the last of them is taken."""
        self._protocol = MQTT311 if settings.protocol == "3.1.1" else MQTT5
        self._lock = threading.RLock()
        """Held while the connection changes, and while something is sent."""
        self._connection: Connection | None = None
        self._has_said_refused = False
        """Whether it was said of this connection that the broker does not take everything."""
        self._start_at: float | None = None
        """Start time of the next connection, after the last one ended."""
        self._has_connected = False
        """Whether the broker ever accepted a connection in the current protocol version."""
        self._failures = 0
        """Consecutive failed attempts."""
        self._short_lives = 0
        """Consecutive connections that ended right after they began."""
        self._broken_rules = 0
        """Consecutive connections on which the broker broke the rules."""
        self.bytes_up = 0
        """Bytes of published payloads and topics, including resends."""
        self.bytes_down = 0
        """Bytes of received payloads and topics."""

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted the current connection."""
        return self._connection is not None and self._connection.is_accepted

    @property
    def has_room(self) -> bool:
        """Whether a publication would leave at once, without waiting for other PUBACKs."""
        with self._lock:
            return self._connection is not None and self._connection.has_room

    def start(self) -> None:
        """Connect in the background. The first event reports the result."""
        with self._lock:
            self._has_said_refused = False
            self._connection = Connection(
                self._settings, self._password, client_id=self._client_id, topics=self._topics,
                prefix=self._prefix, persistent=self._persistent, protocol=self._protocol, room=self._room,
                report=self._report,
            )  # fmt: skip
            self._connection.open()

    def stop(self) -> None:
        """Disconnect and end the network thread."""
        with self._lock:
            connection, self._connection = self._connection, None
        self._start_at = None
        self._arrived.clear()
        self._let_go()
        if connection is not None:
            connection.close()

    def __enter__(self) -> MqttSession:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> int | None:
        """Send a message to the broker at QoS 1.

        It has no MQTT 5 property: an expiry, for example, would reveal the error of a board's
        clock, and so which fragments come from one board.

        Args:
            topic: The topic.
            payload: The message.
            retain: Whether the broker keeps it for later subscribers.

        Returns:
            A handle that :class:`Acknowledged` contains, or ``None`` without a connection.
        """
        with self._lock:
            if self._connection is None:
                return None
            topic = self._prefix + topic
            handle = self._connection.publish(topic, payload, retain=retain)
            if handle is not None:
                self.bytes_up += len(payload) + len(topic)
            return handle

    def publish_together(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Send short messages to the broker at QoS 0, in one write: any of them may be lost, and without a
        connection all are.

        Args:
            messages: Topics and payloads.
        """
        if self._connection is None or not self._connection.is_accepted:
            return
        prefixed = [(self._prefix + topic, payload) for topic, payload in messages]
        self._connection.publish_together(prefixed)
        self.bytes_up += sum(len(topic) + len(payload) for topic, payload in prefixed)

    def acknowledge(self, messages: Iterable[Received]) -> None:
        """Let the broker of a persistent session forget these messages, in the order of their arrival.

        Those of an earlier connection come again by this one, and are not acknowledged: their ids may be
        other messages' by now.
        """
        if self._connection is not None:
            deliveries = [message.delivery for message in messages if message.delivery is not None]
            self._connection.acknowledge(
                number for connection, number in deliveries if connection is self._connection
            )

    def follow(self, topics: Sequence[str]) -> None:
        """Subscribe to topics besides the session's own, on this connection and those to come.

        Args:
            topics: All of them, by their exact names; the session unsubscribes from others of before.
        """
        if (wanted := tuple(self._prefix + topic for topic in topics)) == self._followed:
            return
        self._followed = wanted
        if self._connection is not None and self._connection.is_accepted:
            self._connection.follow(wanted)

    def hear(self, topic: str) -> None:
        """Subscribe to a topic besides, before whatever is published after this, on this connection alone."""
        with self._lock:
            if self._connection is not None:
                self._connection.hear(self._prefix + topic)

    def hear_no_more(self, topic: str) -> None:
        """Unsubscribe from a topic, if this connection has heard of it by :meth:`hear`."""
        with self._lock:
            if self._connection is not None:
                self._connection.hear_no_more(self._prefix + topic)

    def ask_again(self) -> None:
        """Subscribe again, so that the broker resends the retained messages."""
        if self._connection is not None and self._connection.is_accepted:
            self._connection.ask_again()

    def next_event(self, timeout_s: float) -> Event | None:
        """The next event, or ``None`` after ``timeout_s`` seconds.

        Raises:
            BrokerError: The broker refuses the credentials or the client id.
        """
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self._start_at = None
            try:
                self.start()
            except ConfigurationError as error:  # Such as of a file that is being renewed.
                return self._plan_next_attempt(Ended(str(error), was_reached=False))
        event = self._arrived.popleft() if self._arrived else self._wait(timeout_s)
        match event:
            case Refused(reason):
                raise self._refusal(reason)
            case Ended():
                return self._plan_next_attempt(event)
            case NotSubscribed(reason) | NotPublished(reason):
                if not self._has_said_refused:
                    self._has_said_refused = True
                    log.warning("the broker does not take everything that it is sent: %s", reason)
                return None
            case Received(topic, payload):
                if not self._arrived:
                    self._let_go()
                self.bytes_down += len(self._prefix) + len(topic) + len(payload)
                return event
            case Connected():
                self._failures = 0
                self._has_connected = True
                if self._connection is not None:
                    self._connection.follow(self._followed)
        return event

    def _let_go(self) -> None:
        """Let others arrive in the places of those that were taken."""
        together, self._arrived_together = self._arrived_together, 0
        if together:
            self._room.let_go(together)

    def _report(self, connection: Connection, event: ConnectionEvent) -> None:
        """Take an event, in the library's thread."""
        self._inbox.put((connection, event))

    def _wait(self, timeout_s: float) -> Event | NotSubscribed | NotPublished | Refused | Ended | None:
        """The next event; an unanswered CONNECT becomes one too. Of messages that arrived together it is the
        first; the others wait."""
        until = time.monotonic() + timeout_s
        patience_s = self._grown(self._pace.answer_s, self._failures)
        # Read once: the network thread sets and clears it.
        asked_at = self._asked_at
        if asked_at is not None:
            until = min(until, asked_at + patience_s)
        if self._start_at is not None:
            until = min(until, self._start_at)
        while True:
            try:
                connection, event = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if connection is not self._connection:
                # Ignore events of an abandoned connection.
                if isinstance(event, Arrived):
                    self._room.let_go(len(event.messages))
                continue
            if not isinstance(event, Arrived):
                return event
            self._arrived.extend(event.messages)
            self._arrived_together = len(event.messages)
            return self._arrived.popleft()
        if asked_at is None or asked_at != self._asked_at or time.monotonic() < asked_at + patience_s:
            return None
        return Ended(f"no answer from {self._settings.url} within {patience_s:g} s")

    @property
    def _asked_at(self) -> float | None:
        return None if self._connection is None else self._connection.asked_at

    def _plan_next_attempt(self, ended: Ended) -> Disconnected:
        """Drop the connection and schedule the next, in the other version if that may help.

        A broker that once accepted a connection supports the current version. Before
        that the versions take turns: some 3.1.1 brokers close the socket on a version 5
        CONNECT without an answer, and others wait forever.
        """
        if ended.speaks_older and self._settings.protocol == "5":
            raise BrokerError(
                f"The broker at {self._settings.url} does not support MQTT 5; set mqtt.protocol: auto."
            )
        self.stop()
        reason, pause_s = ended.reason, self._pace.pause_s
        if ended.lasted_s is not None:
            pause_s = self._grown(pause_s, self._doublings_after(ended, ended.lasted_s))
        else:
            self._failures += 1
            # A bad network ends attempts as well as connections; another program by our name only these.
            self._short_lives = 0
            pause_s = self._grown(self._pace.pause_s, self._failures - 1)
            if not ended.was_reached:
                pass  # The broker refused no version.
            elif self._settings.protocol == "auto" and not self._has_connected:
                self._protocol = MQTT311 if self._protocol == MQTT5 else MQTT5
                version = "5" if self._protocol == MQTT5 else "3.1.1"
                log.info("not accepted (%s); trying MQTT version %s", reason, version)
                pause_s = 0.0 if self._failures == 1 else pause_s
            elif self._settings.protocol == "5":
                reason += " (if it supports only MQTT 3.1.1, set mqtt.protocol: auto)"
        self._start_at = time.monotonic() + pause_s
        return Disconnected(reason)

    def _doublings_after(self, ended: Ended, lasted_s: float) -> int:
        """How often the pause doubles after the end of a connection that had been accepted.

        Raises:
            BrokerError: Connections with a persistent client id repeatedly end right after they open.
        """
        if ended.broke_the_rules:
            self._broken_rules += 1
            return self._broken_rules - 1
        self._broken_rules = 0
        if lasted_s > self._pace.short_life_s:
            self._short_lives = 0
            return 0
        self._short_lives += 1
        if self._client_id is not None and self._persistent and self._short_lives >= _SUSPICIOUS_LIVES:
            raise self._refusal(
                f"it closed the connection {self._short_lives} times in a row right after it opened; perhaps "
                f"another program uses the client id {self._client_id!r}; "
                "only one coordinator per fleet may run"
            )
        return 0

    def _refusal(self, reason: str) -> BrokerError:
        return BrokerError(
            f"The broker at {self._settings.url} refuses the connection: {reason}. "
            "Check mqtt.username, mqtt.password_file and the broker's access rules."
        )

    def _grown(self, seconds: float, doublings: int) -> float:
        """``seconds`` doubled repeatedly, up to the pace's longest wait."""
        # 2.0 ** 1024 overflows, and a broker can be offline for that many attempts.
        return min(self._pace.longest_s, seconds * 2.0 ** min(doublings, 64))
