"""A supervised MQTT session that turns callbacks into a queue of events.

The library's network thread only fills a queue; the program's single thread takes events from
it with :meth:`MqttSession.next_event`. Every connection has its own client object: otherwise
the library would send its queue in one burst after a reconnection, ignoring jitter and rate
limit. The session reconnects by itself with growing pauses, subscribes again each time, and
tries the other protocol version until the broker accepts one. It stores nothing: durable
data are in the caller's database, since neither this library's memory nor a PUBACK
guarantees delivery.

**Back-pressure.** At most :data:`WINDOW` messages wait in memory. With MQTT 5 the broker is told so
(receive maximum) and holds the rest. One that sends more (MQTT 3.1.1 knows no such limit, nor does QoS 0)
finds that this side stops reading from the socket until there is room. Nothing that has arrived is dropped
while the connection lasts.

A *persistent* session acknowledges a message when the program says so (:meth:`MqttSession.acknowledge`), when
what it brought is stored: a message that was not acknowledged comes again, after a lost connection or a
kill of either side. Other sessions acknowledge on arrival, in the library's thread: the broker keeps nothing
for them over a lost connection anyway, so a late acknowledgement would win nothing, and its time would tell
of the program's work.
"""

from __future__ import annotations

import logging
import os
import queue
import ssl
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from dpagent.errors import BrokerError, ConfigurationError
from dpagent.protocol.messages import MAX_MESSAGE_BYTES
from dpagent.transport.settings import MqttSettings

log = logging.getLogger(__name__)

_PERSISTENT_SESSION_S = 7 * 24 * 3600
_SUSPICIOUS_LIVES = 8
"""Older brokers disconnect the older of two clients with the same id, repeatedly and without a reason."""

_MQTT5, _MQTT311 = MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311
_IN_FLIGHT = 20
"""Concurrent publications without a PUBACK: the default limit of brokers."""

WINDOW: Final = 256
"""Maximum number of messages that wait for the program: at most 15 MB."""
_LONGEST_PAYLOAD: Final = MAX_MESSAGE_BYTES + 1
"""More of a payload is not kept: it is too long for any message already."""
_PUT_BACK_S: Final = 0.1
"""Period at which a thread that waits for room looks whether its connection has been given up."""


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


@dataclass(frozen=True, slots=True)
class Connected:
    """The broker accepted the connection; subscriptions are pending."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection was lost or failed; another attempt follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived."""

    topic: str
    payload: bytes
    delivery: tuple[paho.Client, int] | None = field(default=None, compare=False, repr=False)
    """The connection that it came by, and its id there, if it is to be acknowledged."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The broker has taken the publication with this handle."""

    handle: int


@dataclass(frozen=True, slots=True)
class _Refused:
    """The broker refuses the client permanently."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Ended:
    """A connection, or an attempt to connect, has ended."""

    reason: str
    was_reached: bool = True
    """Whether anything answered at the address."""
    was_accepted: bool = False
    speaks_older: bool = False
    """The broker reported that it does not support this version."""


Event = Connected | Disconnected | Received | Acknowledged


class MqttSession:
    """One connection to the broker, kept alive.

    Args:
        settings: Address and credentials.
        client_id: MQTT client identifier; None for a random one at each connection, by which a broker cannot
            link two of them.
        subscriptions: Topics to receive.
        persistent: Whether the broker keeps messages for this client until the program has acknowledged them,
            also while it is offline.
        pace: Waiting times for answers and between attempts.

    Raises:
        ConfigurationError: The password or certificate file cannot be read.
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
        self._subscriptions = tuple(subscriptions)
        self._persistent = persistent
        self._pace = pace
        self._password = settings.password()
        # No SimpleQueue: in CPython 3.11, its get() waits for ever if a signal interrupts it as its time runs
        # out, so that SIGTERM would not end a program before the next message comes.
        self._inbox: queue.Queue[tuple[paho.Client, Event | _Refused | _Ended]] = queue.Queue()
        self._room = threading.Semaphore(WINDOW)
        self._protocol = _MQTT311 if settings.protocol == "3.1.1" else _MQTT5
        self._client: paho.Client | None = None
        self._accepted: paho.Client | None = None
        """The last client that the broker accepted."""
        self._in_flight: set[int] = set()
        self._asked_at: float | None = None
        """Send time of the pending CONNECT (monotonic seconds)."""
        self._start_at: float | None = None
        """Start time of the next client, after the last one ended."""
        self._has_connected = False
        """Whether the broker ever accepted a connection in the current protocol version."""
        self._failures = 0
        """Consecutive failed attempts."""
        self._connected_at = 0.0
        self._short_lives = 0
        self.bytes_up = 0
        """Bytes of published payloads and topics, including resends."""
        self.bytes_down = 0
        """Bytes of received payloads and topics."""

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted the current client."""
        return self._client is not None and self._accepted is self._client

    @property
    def has_room(self) -> bool:
        """Whether a publication would leave at once, without waiting for other PUBACKs."""
        return self.connected and len(self._in_flight) < _IN_FLIGHT

    def start(self) -> None:
        """Connect in the background. The first event reports the result."""
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=os.urandom(10).hex() if self._client_id is None else self._client_id,
            protocol=self._protocol,
            # Version 5 sets this in CONNECT instead (clean_start and a session expiry).
            clean_session=None if self._protocol == _MQTT5 else not self._persistent,
            reconnect_on_failure=False,
            manual_ack=self._persistent,
        )
        client.max_inflight_messages_set(_IN_FLIGHT)
        if self._settings.username is not None:
            client.username_pw_set(self._settings.username, self._password)
        if self._settings.tls:
            try:
                client.tls_set_context(ssl.create_default_context(cafile=self._settings.ca_file))
            except (OSError, ssl.SSLError) as error:
                raise ConfigurationError(
                    f"mqtt.ca_file {self._settings.ca_file} cannot be used ({error})."
                ) from error
        client.on_socket_open = self._on_socket_open
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        arguments: dict[str, Any] = {}
        if self._protocol == _MQTT5:
            properties = _properties(PacketTypes.CONNECT)
            properties.SessionExpiryInterval = _PERSISTENT_SESSION_S if self._persistent else 0
            properties.MaximumPacketSize = MAX_MESSAGE_BYTES + 1_024
            properties.ReceiveMaximum = WINDOW
            arguments = {"clean_start": not self._persistent, "properties": properties}
        client.connect_async(
            self._settings.host, self._settings.port, keepalive=self._settings.keepalive_s, **arguments
        )
        self._client = client
        client.loop_start()

    def stop(self) -> None:
        """Disconnect and end the network thread."""
        client, self._client = self._client, None
        self._asked_at = self._start_at = None
        self._in_flight.clear()
        if client is not None:
            client.disconnect()
            client.loop_stop()

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
        if self._client is None or not self.connected:
            return None
        info = self._client.publish(topic, payload, qos=1, retain=retain)
        if info.rc != paho.MQTT_ERR_SUCCESS:
            return None
        self._in_flight.add(info.mid)
        self.bytes_up += len(payload) + len(topic)
        return info.mid

    def acknowledge(self, messages: Iterable[Received]) -> None:
        """Let the broker of a persistent session forget these messages, in the order of their arrival.

        Those of an earlier connection come again by this one, and are not acknowledged: their ids may be
        other messages' by now.
        """
        for message in messages:
            if message.delivery is not None:
                client, number = message.delivery
                if client is self._client:
                    # This only queues the packet and wakes the library's thread, as publish() does.
                    client.ack(number, 1)

    def ask_again(self) -> None:
        """Subscribe again, so that the broker resends the retained messages."""
        if self._client is not None and self.connected:
            self._subscribe(self._client)

    def next_event(self, timeout_s: float) -> Event | None:
        """The next event, or ``None`` after ``timeout_s`` seconds.

        Raises:
            BrokerError: The broker refuses the credentials or the client id.
        """
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self._start_at = None
            self.start()
        event = self._wait(timeout_s)
        match event:
            case _Refused(reason):
                raise BrokerError(
                    f"The broker at {self._settings.url} refuses the connection: {reason}. "
                    "Check mqtt.username, mqtt.password_file and the broker's access rules."
                )
            case _Ended():
                return self._plan_next_attempt(event)
            case Acknowledged(handle):
                self._in_flight.discard(handle)
                return event
            case Connected():
                self._failures = 0
                self._has_connected = True
                return event
            case _:
                return event

    def _wait(self, timeout_s: float) -> Event | _Refused | _Ended | None:
        """The next event; an unanswered CONNECT becomes one too."""
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
                client, event = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(event, Received):
                self._room.release()
            if client is self._client:
                return event
            # Ignore events of an abandoned client.
        if asked_at is None or asked_at != self._asked_at or time.monotonic() < asked_at + patience_s:
            return None
        return _Ended(f"no answer from {self._settings.url} within {patience_s:g} s")

    def _plan_next_attempt(self, ended: _Ended) -> Disconnected:
        """Drop the client and schedule the next, in the other version if that may help.

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
        if not ended.was_accepted:
            self._failures += 1
            # A bad network ends attempts as well as connections; another program by our name only these.
            self._short_lives = 0
            pause_s = self._grown(self._pace.pause_s, self._failures - 1)
            if not ended.was_reached:
                pass  # The broker refused no version.
            elif self._settings.protocol == "auto" and not self._has_connected:
                self._protocol = _MQTT311 if self._protocol == _MQTT5 else _MQTT5
                version = "5" if self._protocol == _MQTT5 else "3.1.1"
                log.info("not accepted (%s); trying MQTT version %s", reason, version)
                pause_s = 0.0 if self._failures == 1 else pause_s
            elif self._settings.protocol == "5":
                reason += " (if it supports only MQTT 3.1.1, set mqtt.protocol: auto)"
        self._start_at = time.monotonic() + pause_s
        return Disconnected(reason)

    def _grown(self, seconds: float, doublings: int) -> float:
        """``seconds`` doubled repeatedly, up to the pace's longest wait."""
        # 2.0 ** 1024 overflows, and a broker can be offline for that many attempts.
        return min(self._pace.longest_s, seconds * 2.0 ** min(doublings, 64))

    def _subscribe(self, client: paho.Client) -> None:
        if self._subscriptions:
            client.subscribe([(subscription.topic, 1) for subscription in self._subscriptions])

    # The library's thread runs the methods below.

    def _on_socket_open(self, client: paho.Client, _userdata: Any, _socket: Any) -> None:
        if client is self._client:
            self._asked_at = time.monotonic()

    def _on_connect(
        self,
        client: paho.Client,
        _userdata: Any,
        _flags: Any,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if client is not self._client:
            return
        self._asked_at = None
        name = str(reason)
        if not reason.is_failure:
            self._subscribe(client)
            self._accepted = client
            self._connected_at = time.monotonic()
            self._inbox.put((client, Connected()))
        elif name == "Unsupported protocol version":
            self._inbox.put((client, _Ended("the broker does not support this version", speaks_older=True)))
        elif name in ("Not authorized", "Bad user name or password", "Banned", "Client identifier not valid"):
            self._inbox.put((client, _Refused(name.lower())))
        else:
            self._inbox.put((client, _Ended(name)))

    def _on_subscribe(
        self,
        client: paho.Client,
        _userdata: Any,
        _handle: int,
        reasons: list[ReasonCode],
        _properties: Properties | None,
    ) -> None:
        if any(reason.is_failure for reason in reasons):
            topics = ", ".join(subscription.topic for subscription in self._subscriptions)
            self._inbox.put((client, _Refused(f"no permission to subscribe to {topics}")))

    def _on_connect_fail(self, client: paho.Client, _userdata: Any) -> None:
        # The library calls this while handling the error.
        why = f" ({error})" if (error := sys.exc_info()[1]) is not None else ""
        reason = f"no broker answers at {self._settings.url}{why}"
        client.disconnect()  # Or the library's thread sleeps for a second, and stop() waits for it.
        self._inbox.put((client, _Ended(reason, was_reached=False)))

    def _on_disconnect(
        self,
        client: paho.Client,
        _userdata: Any,
        _flags: Any,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        was_accepted, was_asked = self._accepted is client, self._asked_at is not None
        if client is not self._client:
            return
        self._accepted, self._asked_at = None, None
        event: _Refused | _Ended
        if str(reason) == "Session taken over":
            event = _Refused("another program connected with the same client id; only one may")
        elif was_accepted and self._client_id is not None and self._is_fought_over():
            event = _Refused(
                f"it closed the connection {self._short_lives} times in a row right after it opened; perhaps "
                f"another program uses the client id {self._client_id!r}; "
                "only one coordinator per fleet may run"
            )
        elif was_accepted:
            event = _Ended(f"connection lost: {reason}", was_accepted=True)
        elif was_asked:
            event = _Ended(f"{self._settings.url} closed the connection without an answer")
        else:
            return  # The refusal before it gave the reason.
        self._inbox.put((client, event))

    def _is_fought_over(self) -> bool:
        """Whether connections with a persistent client id repeatedly end right after they open."""
        if time.monotonic() - self._connected_at > self._pace.short_life_s:
            self._short_lives = 0
            return False
        self._short_lives += 1
        return self._persistent and self._short_lives >= _SUSPICIOUS_LIVES

    def _on_message(self, client: paho.Client, _userdata: Any, message: paho.MQTTMessage) -> None:
        self.bytes_down += len(message.payload) + len(message.topic)
        while not self._room.acquire(timeout=_PUT_BACK_S):
            if client is not self._client:
                return
        delivery = (client, message.mid) if self._persistent and message.qos == 1 else None
        payload = bytes(message.payload[:_LONGEST_PAYLOAD])
        self._inbox.put((client, Received(message.topic, payload, delivery)))

    def _on_publish(
        self,
        client: paho.Client,
        _userdata: Any,
        handle: int,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if reason.is_failure:
            self._inbox.put((client, _Refused(f"no permission to publish ({reason})")))
        else:
            self._inbox.put((client, Acknowledged(handle)))


def _properties(packet: int) -> Any:
    """Empty MQTT 5 properties; the library defines their fields dynamically."""
    return Properties(packet)  # type: ignore[no-untyped-call]
