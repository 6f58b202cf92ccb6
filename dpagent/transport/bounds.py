"""The library's client within bounds: no broker makes it take more memory than a few messages.

The library keeps a whole packet before anybody can look at its length, and a length may be 256 MB. MQTT 3.1.1
knows no way to tell a broker the largest that is welcome, and one that is told may ignore it. So
:class:`BoundedSocket` reads packets along. Messages never reach the library, which would take longer over
each than all the rest of a program does: they are handed over here, all that one read brought together, and
acknowledged in one write. Of a message that is too long as much is kept as shows that, and the rest is
dropped as it comes. The message is then refused, and acknowledged, like any other that nobody can read:
ending the connection instead would let one client with such a message keep all others away from a broker.

The library gives a connection up on which nothing comes for a while, and does not see what comes here. So it
is shown the answer to a ping now and then while anything does: the true one waits behind all that the broker
has sent before, which takes a slow link longer than that.

What no broker may send to such a client ends the connection, before the library keeps state for it: QoS 2
(whose messages wait in memory for an end that never comes), a second CONNACK, answers to nothing that was
asked, a flood of messages whose acknowledgements it does not read.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, cast

import paho.mqtt.client as paho
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion

from dpagent.errors import ConfigurationError
from dpagent.protocol.messages import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from paho.mqtt.client import SocketLike

MAX_PACKET_BYTES: Final = MAX_MESSAGE_BYTES + 1_024
"""Longest packet that reaches the library: a message, its topic and properties."""
LONGEST_PAYLOAD: Final = MAX_MESSAGE_BYTES + 1
"""More of a payload is not kept: it is too long for any message already."""
_CONNACK, _PUBLISH, _PUBACK, _SUBACK, _UNSUBACK, _PINGRESP, _DISCONNECT = 2, 3, 4, 9, 11, 13, 14
_READ_BYTES: Final = 1 << 16
_SIGN_OF_LIFE: Final = bytes([_PINGRESP << 4, 0])
_SIGN_EVERY_S: Final = 0.5
_MAX_UNANSWERED: Final = 4_096
"""Messages to acknowledge that may arrive while the broker takes no byte."""
_MOST_WAITING: Final = 256
"""Writes that may wait until the broker takes more; beyond that, what may be lost is dropped, and there is no
room for publications: a broker that reads nothing could acknowledge them all the same."""
_MOST_ANSWERS: Final = 4_096
"""Writes that may wait, of whatever kind, when more messages arrive."""

_PUBACK_HEADER: Final = bytes([_PUBACK << 4, 2])
_FROM_BROKERS: Final = frozenset((_CONNACK, _PUBLISH, _PUBACK, _SUBACK, _UNSUBACK, _PINGRESP, _DISCONNECT))
"""Types of packets for a client that publishes and subscribes at QoS 1."""


class RulesBrokenError(Exception):
    """A broker sends what no broker may send. (No OSError, which the library would swallow.)"""


class Publication(NamedTuple):
    """A message, as the broker sent it.

    Attributes:
        topic: its topic.
        payload: what it says; of one that is too long, the beginning.
        number: its packet identifier, if it is to be acknowledged.
    """

    topic: str
    payload: bytes
    number: int | None


Arrived: TypeAlias = Callable[[list[Publication]], list[Publication]]


class BoundedSocket:
    """A connected socket, for the library, which keeps messages from it.

    Where it has nothing to give yet, it raises :class:`BlockingIOError`, or what TLS raises then.

    Args:
        inner: The socket, or a TLS socket.
        has_properties: Whether packets have the properties of MQTT 5.
        arrived: Takes messages, in the order in which they came, also among the other packets; returns those
            for which there is no room. Nothing more is read until it has taken them, while what is to be sent
            leaves.
    """

    def __init__(self, inner: SocketLike, *, has_properties: bool, arrived: Arrived) -> None:
        self._inner = inner
        self._has_properties, self._arrived = has_properties, arrived
        self._waiting: deque[bytearray | list[Publication]] = deque()
        """What came and was not taken yet: packets for the library, and messages."""
        self._held = bytearray()
        """The beginning of a packet."""
        self._needed = 0
        """Bytes of it until it can be taken."""
        self._to_drop = 0
        """Bytes that are left of a packet that was too long."""
        self._is_greeted = False
        self._unanswered = 0
        self._sign_due_at = 0.0
        """When the library is shown again that the broker is there (monotonic)."""

    def recv(self, size: int) -> bytes:
        """Up to ``size`` bytes, or none if the broker has closed the connection.

        Raises:
            RulesBrokenError: No broker may send that.
        """
        if not self._waiting:
            data = self._inner.recv(_READ_BYTES)
            if not data:
                return data
            self._take(data)
            if self._is_sign_due():
                self._pass_on(_SIGN_OF_LIFE)
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, bytearray):
                part = bytes(first[:size])
                del first[:size]
                if not first:
                    self._waiting.popleft()
                return part
            if rest := self._arrived(first):
                self._waiting[0] = rest
                if not self._is_sign_due():
                    raise BlockingIOError
                self._waiting.appendleft(bytearray(_SIGN_OF_LIFE))
            else:
                self._waiting.popleft()
        raise BlockingIOError  # Nothing of it is the library's, which looks after other things meanwhile.

    def pending(self) -> int:
        """Whether bytes are here already, so that nothing may arrive."""
        # Of TLS, also below a WebSocket; a plain socket has nothing that ``select`` does not see.
        look = getattr(self._inner, "pending", None)
        return len(self._waiting) + (0 if look is None else look())

    def send(self, data: bytes | bytearray) -> int:
        """Send some bytes; return their number."""
        sent = self._inner.send(data)
        self._unanswered = 0
        return sent

    def close(self) -> None:
        """Close the connection."""
        self._inner.close()

    def fileno(self) -> int:
        """For ``select``."""
        return self._inner.fileno()

    def setblocking(self, flag: bool) -> None:
        """As of any socket."""
        self._inner.setblocking(flag)

    def _is_sign_due(self) -> bool:
        if not self._is_greeted or (now := time.monotonic()) < self._sign_due_at:
            return False
        self._sign_due_at = now + _SIGN_EVERY_S
        return True

    def _take(self, data: bytes) -> None:
        """Sort all packets that are whole by now."""
        if self._held:
            self._held += data
            if len(self._held) < self._needed:
                return
            data = bytes(self._held)
            self._held.clear()
        at, end = min(self._to_drop, len(data)), len(data)
        self._to_drop -= at
        while at < end:
            found = _length_at(data, at + 1)
            if found is None:
                self._hold(data[at:], 1 + end - at)
                return
            length, start = found
            self._require_allowed(data[at], length)
            stop = start + min(length, MAX_PACKET_BYTES)
            if stop > end:
                self._hold(data[at:], stop - at)
                return
            self._is_greeted = True
            if data[at] >> 4 == _PUBLISH:
                is_cut = length > MAX_PACKET_BYTES
                self._put(self._publication(data[at], data[start:stop], is_cut=is_cut))
            else:
                self._pass_on(data[at:stop])
            dropped = min(start + length - stop, end - stop)
            self._to_drop = start + length - stop - dropped
            at = stop + dropped

    def _hold(self, beginning: bytes, needed: int) -> None:
        self._held += beginning
        self._needed = needed

    def _put(self, publication: Publication) -> None:
        if self._waiting and isinstance(last := self._waiting[-1], list):
            last.append(publication)
        else:
            self._waiting.append([publication])

    def _pass_on(self, packet: bytes) -> None:
        if self._waiting and isinstance(last := self._waiting[-1], bytearray):
            last += packet
        else:
            self._waiting.append(bytearray(packet))

    def _require_allowed(self, first: int, length: int) -> None:
        """Refuse a packet by its header.

        Raises:
            RulesBrokenError: No broker may send it.
        """
        kind, quality = first >> 4, first >> 1 & 3
        if kind not in _FROM_BROKERS or (kind == _CONNACK) == self._is_greeted:
            raise RulesBrokenError(f"a packet of type {kind} came unasked")
        if kind != _PUBLISH:
            if length > MAX_PACKET_BYTES:
                raise RulesBrokenError(f"a packet of type {kind} has {length:,} bytes")
        elif quality > 1:
            raise RulesBrokenError(f"a message came with QoS {quality}")

    def _publication(self, first: int, body: bytes, *, is_cut: bool) -> Publication:
        """A message, whose beginning is there: of one that is cut, :data:`MAX_PACKET_BYTES`.

        Raises:
            RulesBrokenError: It is none, or the broker takes no acknowledgements.
        """
        number = None
        try:
            at = 2 + (body[0] << 8 | body[1])
            topic = body[2:at].decode()
            if first & 0b0110:
                number = body[at] << 8 | body[at + 1]
                at += 2
            if self._has_properties:
                length, at = body[at], at + 1
                if length > 127:
                    length, at = _length_at(body, at - 1) or (len(body), len(body))
                at += length
        except (IndexError, UnicodeDecodeError) as error:
            raise RulesBrokenError(f"a packet is malformed ({type(error).__name__})") from error
        if at > len(body) and not is_cut:
            raise RulesBrokenError("a packet is malformed (its properties do not end)")
        if number is not None:
            self._unanswered += 1
            if self._unanswered > _MAX_UNANSWERED:
                raise RulesBrokenError(f"the broker takes no answer to {_MAX_UNANSWERED:,} messages")
        # Properties may be too long, too, and any client of the broker's gives them to its message.
        payload = body[at : at + LONGEST_PAYLOAD] if at <= len(body) else bytes(LONGEST_PAYLOAD)
        return Publication(topic, payload, number)


def _length_at(data: bytes, at: int) -> tuple[int, int] | None:
    """A length, and where it ends; None where it is not whole.

    Raises:
        RulesBrokenError: It is none.
    """
    length = shift = 0
    for place in range(at, min(at + 4, len(data))):
        byte = data[place]
        length |= (byte & 127) << shift
        if byte < 128:
            return length, place + 1
        shift += 7
    if len(data) >= at + 4:
        raise RulesBrokenError("a packet has a length of more than four bytes")
    return None


def _encoded_length(length: int) -> bytes:
    encoded = bytearray()
    while True:
        length, low = divmod(length, 128)
        encoded.append(low | (128 if length else 0))
        if not length:
            return bytes(encoded)


class BoundedClient(paho.Client):
    """The library's client on a :class:`BoundedSocket`.

    Attributes:
        on_break: Called in the library's thread, which ends, with the reason if a broker breaks the rules.
        on_messages: Called there with the messages that one read has brought; returns those for which there
            is no room yet.
    """

    on_break: Callable[[str], None]
    on_messages: Arrived
    websocket_url: str | None = None
    """Of a broker that is spoken to over WebSocket."""
    _bounded: BoundedSocket | None = None

    def loop_forever(self, timeout: float = 1.0, retry_first_connection: bool = False) -> MQTTErrorCode:
        """The body of the library's thread."""
        try:
            return super().loop_forever(timeout, retry_first_connection)
        except RulesBrokenError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - all that a malformed packet raises in the library
            reason = f"a packet is malformed ({type(error).__name__})"
        if self._bounded is not None:
            self._bounded.close()
        self.on_break(reason)
        return MQTTErrorCode.MQTT_ERR_PROTOCOL

    @property
    def has_room(self) -> bool:
        """Whether few writes wait until the broker takes more."""
        return len(self._out_packet) <= _MOST_WAITING

    def publish_together(self, messages: Iterable[tuple[str, bytes]], *, properties: bytes) -> None:
        """Publish messages at QoS 0, in one write. Of these, nobody is told anything, and they are dropped if
        the broker has not taken what was written long before.

        Args:
            messages: Topics and payloads.
            properties: That each has, as MQTT 5 encodes them; empty with 3.1.1.
        """
        if not self.has_room:
            return
        packets = bytearray()
        for topic, payload in messages:
            name = topic.encode()
            packets.append(_PUBLISH << 4)
            packets += _encoded_length(2 + len(name) + len(properties) + len(payload))
            packets += len(name).to_bytes(2, "big") + name + properties + payload
        self._write(packets)

    def acknowledge(self, numbers: Iterable[int]) -> None:
        """Acknowledge messages of these packet identifiers, in one write."""
        self._write(b"".join(_PUBACK_HEADER + number.to_bytes(2, "big") for number in numbers))

    def require_answers_taken(self) -> None:
        """See that the broker takes what it is sent, however little at a time, before more of it arrives.

        Raises:
            RulesBrokenError: It does not.
        """
        if len(self._out_packet) > _MOST_ANSWERS:
            raise RulesBrokenError(f"the broker takes less than it sends: {_MOST_ANSWERS:,} writes wait")

    def _write(self, packets: bytes | bytearray) -> None:
        """Send packets. To the library they are one of no kind, after which it has nothing more to do."""
        if packets:
            self._packet_queue(0, packets, 0, 0)

    def _create_socket(self) -> SocketLike:
        inner = super()._create_socket()
        if self.websocket_url is not None:
            from dpagent.transport.websocket import WebSocket  # An extra; few boards need it.

            inner = WebSocket(cast(socket.socket, inner), self.websocket_url)
        self._bounded = BoundedSocket(
            inner, has_properties=self._protocol == MQTTProtocolVersion.MQTTv5, arrived=self.on_messages
        )
        return self._bounded


def require_bounded() -> None:
    """See that the library still makes its sockets, and sends its packets, where :class:`BoundedClient` does:
    these are not public.

    Raises:
        ConfigurationError: It does not.
    """
    if not (hasattr(paho.Client, "_create_socket") and hasattr(paho.Client, "_packet_queue")):
        raise ConfigurationError(
            "This version of paho-mqtt cannot be kept within bounds; expected 2.1 or 2.2."
        )
