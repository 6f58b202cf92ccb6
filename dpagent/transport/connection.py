"""One connection to the broker: a client object of the library, whose thread only reports events.

Every connection has its own client object: otherwise the library would send its queue in one burst after a
reconnection, ignoring jitter and rate limit.

**Back-pressure.** At most :data:`WINDOW` messages wait in memory. With MQTT 5 the broker is told so
(receive maximum) and holds the rest. One that sends more (MQTT 3.1.1 knows no such limit, nor does QoS 0)
finds that this side stops reading from the socket until there is room. Nothing that has arrived is dropped
while the connection lasts. What is sent meanwhile leaves all the same.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from dpagent.extras import extra_needed
from dpagent.transport.bounds import (
    MAX_PACKET_BYTES,
    BoundedClient,
    Publication,
    RulesBrokenError,
    require_bounded,
)
from dpagent.transport.events import (
    Acknowledged,
    Arrived,
    BrokerLimits,
    Connected,
    ConnectionEvent,
    Ended,
    NotPublished,
    NotSubscribed,
    Received,
    Refused,
    Subscribed,
)
from dpagent.transport.places import Places
from dpagent.transport.settings import MqttSettings

MQTT5: Final = MQTTProtocolVersion.MQTTv5
MQTT311: Final = MQTTProtocolVersion.MQTTv311

WINDOW: Final = 256
"""Maximum number of messages that wait for the program: at most 15 MB."""

_PERSISTENT_SESSION_S = 0xFFFFFFFF
"""It never ends by itself (MQTT 5, 3.1.2.11.2). Mosquitto 2.0.11 keeps a list of the sessions that end: at
each SIGHUP it adds one whose client is away once more, and reads freed memory when that client is back."""
_IN_FLIGHT = 20
"""Concurrent publications without a PUBACK: the default limit of brokers."""
_FILTERS_AT_ONCE: Final = 8
"""Topic filters in one SUBSCRIBE: as many as AWS IoT Core takes."""
_MOST_ASKED: Final = 256
"""Subscriptions without an answer. Beyond that there is no room for publications, which each may need one."""
_FULL_S: Final = 0.02
"""The library's thread waits no longer for room before it looks what is to be sent."""

Report = Callable[["Connection", ConnectionEvent], None]


class Connection:
    """One client of the broker, from its CONNECT to its end.

    Args:
        settings: Address and credentials.
        password: For the user name.
        client_id: MQTT client identifier; None for a random one.
        topics: Filters to subscribe to as soon as the connection is accepted, at QoS 1.
        prefix: Of topics, which the program is not told.
        persistent: Whether the broker keeps messages for this client until the program has acknowledged them.
        protocol: The MQTT version.
        room: For messages that wait for the program; whoever takes one lets go of its place.
        report: Takes events, in the library's thread.

    Raises:
        ConfigurationError: A certificate or key, or this version of the library, cannot be used.
    """

    def __init__(
        self,
        settings: MqttSettings,
        password: str | None,
        *,
        client_id: str | None,
        topics: Sequence[str],
        prefix: str,
        persistent: bool,
        protocol: MQTTProtocolVersion,
        room: Places,
        report: Report,
    ) -> None:
        self._settings, self._topics, self._persistent = settings, tuple(topics), persistent
        self._room, self._report, self._prefix = room, report, prefix
        self._version = "5" if protocol == MQTT5 else "3.1.1"
        require_bounded()
        self._is_given_up = False
        self._published = self._answered = 0
        """Publications, counted by whoever publishes, and answers, counted in the library's thread."""
        self._followed: tuple[str, ...] = ()
        self._heard: set[str] = set()
        self._asked: dict[int, tuple[Sequence[str], bool]] = {}
        """Subscriptions without an answer, by handle: topics, and whether the program can do without."""
        self._asking = threading.Lock()
        self.asked_at: float | None = None
        """Send time of the pending CONNECT (monotonic seconds)."""
        self.accepted_at: float | None = None
        """When the broker accepted the connection, as long as it lasts (monotonic seconds)."""
        self._client = client = BoundedClient(
            CallbackAPIVersion.VERSION2,
            client_id=settings.new_client_id(client_id),
            protocol=protocol,
            # Version 5 sets this in CONNECT instead (clean_start and a session expiry).
            clean_session=None if protocol == MQTT5 else not persistent,
            reconnect_on_failure=False,
        )
        client.max_inflight_messages_set(_IN_FLIGHT)
        client.websocket_url = settings.websocket_url
        if client.websocket_url is not None:
            with extra_needed("websockets", "MQTT over WebSocket"):
                import websockets  # noqa: F401 - found missing here, and not in the library's thread
        if settings.username is not None:
            client.username_pw_set(settings.username, password)
        if settings.tls:
            client.tls_set_context(settings.tls_context())
        client.on_socket_open = self._on_socket_open
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_messages = self._on_messages
        client.on_publish = self._on_publish
        client.on_break = self._on_break
        arguments: dict[str, Any] = {}
        if protocol == MQTT5:
            properties = _properties(PacketTypes.CONNECT)
            properties.SessionExpiryInterval = _PERSISTENT_SESSION_S if persistent else 0
            properties.MaximumPacketSize = MAX_PACKET_BYTES
            properties.ReceiveMaximum = WINDOW
            arguments = {"clean_start": not persistent, "properties": properties}
        client.connect_async(settings.host, settings.port, keepalive=settings.keepalive_s, **arguments)

    @property
    def is_accepted(self) -> bool:
        """Whether the broker has accepted the connection, and it lasts."""
        return self.accepted_at is not None

    @property
    def has_room(self) -> bool:
        """Whether a publication would leave at once, without waiting for other PUBACKs or SUBACKs."""
        is_free = self._published - self._answered < _IN_FLIGHT and len(self._asked) <= _MOST_ASKED
        return self.is_accepted and is_free and self._client.has_room

    def open(self) -> None:
        """Connect in the background."""
        self._client.loop_start()

    def close(self) -> None:
        """Disconnect and end the network thread. The connection cannot be used any more."""
        self._is_given_up = True
        self._client.disconnect()
        self._client.loop_stop()
        del self._client  # It refers to this object, so its sockets would wait for the garbage collector.

    def publish(self, topic: str, payload: bytes, *, retain: bool) -> int | None:
        """Send a message at QoS 1; return its handle, or None without a connection."""
        if not self.is_accepted:
            return None
        info = self._client.publish(topic, payload, qos=1, retain=retain)
        if info.rc != paho.MQTT_ERR_SUCCESS:
            return None
        self._published += 1
        return info.mid

    def publish_together(self, messages: Iterable[tuple[str, bytes]]) -> None:
        """Send messages at QoS 0, in one write, if there is a connection."""
        if self.is_accepted:
            self._client.publish_together(messages, properties=b"\0" if self._version == "5" else b"")

    def acknowledge(self, numbers: Iterable[int]) -> None:
        """Let the broker forget messages."""
        # This only queues the packets and wakes the library's thread, as publish() does.
        self._client.acknowledge(numbers)

    def follow(self, topics: Sequence[str]) -> None:
        """Be subscribed to these topics, besides those of the beginning, and to no others any more."""
        before, self._followed = self._followed, tuple(topics)
        for some in _batches([topic for topic in before if topic not in topics]):
            self._client.unsubscribe(list(some))
        self._subscribe([topic for topic in topics if topic not in before])

    def hear(self, topic: str) -> None:
        """Be subscribed to a topic, until :meth:`hear_no_more`."""
        if self.is_accepted and topic not in self._heard:
            self._heard.add(topic)
            self._subscribe([topic], is_optional=True)

    def hear_no_more(self, topic: str) -> None:
        """Be subscribed to a topic no longer, if :meth:`hear` was called of it."""
        if topic in self._heard:
            self._heard.remove(topic)
            self._client.unsubscribe(topic)

    def ask_again(self) -> None:
        """Subscribe again to what stays subscribed, so that the broker sends what it retains."""
        self._subscribe([*self._topics, *self._followed])

    def _subscribe(self, topics: Sequence[str], *, is_optional: bool = False) -> None:
        for some in _batches(topics):
            with self._asking:  # The answer may come before its handle is known.
                _, handle = self._client.subscribe([(topic, 1) for topic in some])
                if handle is not None:
                    self._asked[handle] = some, is_optional

    # The library's thread runs the methods below.

    def _tell(self, event: ConnectionEvent) -> None:
        if not self._is_given_up:
            self._report(self, event)

    def _on_socket_open(self, _client: paho.Client, _userdata: Any, _socket: Any) -> None:
        self.asked_at = time.monotonic()

    def _on_connect(
        self,
        _client: paho.Client,
        _userdata: Any,
        _flags: Any,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        self.asked_at = None
        name = str(reason)
        if not reason.is_failure:
            self._subscribe(self._topics)
            self.accepted_at = time.monotonic()
            self._tell(Connected(self._version, _limits(properties)))
        elif name == "Unsupported protocol version":
            self._tell(Ended("the broker does not support this version", speaks_older=True))
        elif name in ("Not authorized", "Bad user name or password", "Banned", "Client identifier not valid"):
            self._tell(Refused(name.lower()))
        else:
            self._tell(Ended(name))

    def _on_subscribe(
        self,
        _client: paho.Client,
        _userdata: Any,
        handle: int,
        reasons: list[ReasonCode],
        _properties: Properties | None,
    ) -> None:
        with self._asking:
            asked = self._asked.pop(handle, None)
        if asked is None:
            raise RulesBrokenError("an answer to no subscription came")  # Each would wait for the program.
        topics, is_optional = asked
        refused = [reason for reason in reasons if reason.is_failure]
        if not refused:
            self._tell(Subscribed())
        elif is_optional:
            # Without the topic: it is one fragment's, and logs are shown to others.
            self._tell(NotSubscribed(f"a subscription ({refused[0]})"))
        elif any(str(reason) == "Shared subscriptions not supported" for reason in refused):
            self._tell(Refused("it does not support shared subscriptions"))
        else:
            self._tell(Refused(f"no permission to subscribe to one of {', '.join(topics)}"))

    def _on_connect_fail(self, client: paho.Client, _userdata: Any) -> None:
        # The library calls this while handling the error.
        why = f" ({error})" if (error := sys.exc_info()[1]) is not None else ""
        client.disconnect()  # Or the library's thread sleeps for a second, and close() waits for it.
        self._tell(Ended(f"no broker answers at {self._settings.url}{why}", was_reached=False))

    def _on_disconnect(
        self,
        _client: paho.Client,
        _userdata: Any,
        _flags: Any,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        was_asked, lasted_s = self.asked_at is not None, self._end()
        if str(reason) == "Session taken over":
            self._tell(Refused("another program connected with the same client id; only one may"))
        elif lasted_s is not None:
            self._tell(Ended(f"connection lost: {reason}", lasted_s=lasted_s))
        elif was_asked:
            refused = "; it may refuse mqtt.cert_file" if self._settings.cert_file else ""
            self._tell(Ended(f"{self._settings.url} closed the connection without an answer{refused}"))
        # Otherwise the refusal before it gave the reason.

    def _on_break(self, reason: str) -> None:
        reason = f"{self._settings.url} broke the rules of MQTT: {reason}"
        self._tell(Ended(reason, lasted_s=self._end(), broke_the_rules=True))

    def _end(self) -> float | None:
        """Note the end of the connection; return how long it had been accepted, or None if it never was."""
        accepted_at, self.accepted_at, self.asked_at = self.accepted_at, None, None
        return None if accepted_at is None else time.monotonic() - accepted_at

    def _on_messages(self, publications: list[Publication]) -> list[Publication]:
        """Take messages; return those for which there is no room. Waits for a moment only: what is to be sent
        must not wait until the program takes something."""
        self._client.require_answers_taken()
        taken = self._room.take(len(publications), _FULL_S)
        self._hand_over(publications[:taken])
        return publications[taken:]

    def _hand_over(self, publications: Sequence[Publication]) -> None:
        """Give messages to the program, and acknowledge them unless it does that itself."""
        if not publications:
            return
        self._report(self, Arrived([self._received(each) for each in publications]))
        if not self._persistent:
            self._client.acknowledge(each.number for each in publications if each.number is not None)

    def _received(self, publication: Publication) -> Received:
        topic, payload, number = publication
        delivery = None if number is None or not self._persistent else (self, number)
        return Received(topic.removeprefix(self._prefix), payload, delivery)

    def _on_publish(
        self,
        _client: paho.Client,
        _userdata: Any,
        handle: int,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        self._answered += 1
        if not reason.is_failure:
            self._tell(Acknowledged(handle))
        elif self._persistent or str(reason) == "Not authorized":
            self._tell(Refused(f"no permission to publish ({reason})"))
        else:  # A quota, say: of one message, which a device sends again.
            self._tell(NotPublished(f"a message ({reason})"))


def _batches(topics: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(topics), _FILTERS_AT_ONCE):
        yield topics[start : start + _FILTERS_AT_ONCE]


def _limits(properties: Properties | None) -> BrokerLimits:
    standard = BrokerLimits()
    return BrokerLimits(
        getattr(properties, "MaximumPacketSize", standard.maximum_packet_bytes),
        getattr(properties, "MaximumQoS", standard.maximum_qos),
        bool(getattr(properties, "RetainAvailable", standard.retains)),
        bool(getattr(properties, "SharedSubscriptionAvailable", standard.shares)),
    )


def _properties(packet: int) -> Any:
    """Empty MQTT 5 properties; the library defines their fields dynamically."""
    return Properties(packet)  # type: ignore[no-untyped-call]
