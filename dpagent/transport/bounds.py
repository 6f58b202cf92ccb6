"""The library's client within bounds: no broker makes it take more memory than a few messages.

The library keeps a whole packet before anybody can look at its length, and a length may be 256 MB. MQTT 3.1.1
knows no way to tell a broker the largest that is welcome, and one that is told may ignore it. So
:class:`BoundedSocket` reads packets along: of a message that is too long it passes on as much as shows that,
with a length to match, and drops the rest as it comes. The message is then refused, and acknowledged, like
any other that nobody can read: ending the connection instead would let one client with such a message keep
all others away from a broker.

What no broker may send to such a client ends the connection, before the library keeps state for it: QoS 2
(whose messages wait in memory for an end that never comes), a second CONNACK, answers to nothing that was
asked, a flood of messages whose acknowledgements it does not read.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, cast

import paho.mqtt.client as paho
from paho.mqtt.enums import MQTTErrorCode

from dpagent.errors import ConfigurationError
from dpagent.protocol.messages import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from paho.mqtt.client import SocketLike

MAX_PACKET_BYTES: Final = MAX_MESSAGE_BYTES + 1_024
"""Longest packet that reaches the library: a message, its topic and properties."""
_READ_BYTES: Final = 1 << 16
_MAX_UNANSWERED: Final = 4_096
"""Messages to acknowledge that may arrive while the broker takes no byte."""

_CONNACK, _PUBLISH, _PUBACK, _SUBACK, _UNSUBACK, _PINGRESP, _DISCONNECT = 2, 3, 4, 9, 11, 13, 14
_FROM_BROKERS: Final = frozenset((_CONNACK, _PUBLISH, _PUBACK, _SUBACK, _UNSUBACK, _PINGRESP, _DISCONNECT))
"""Types of packets for a client that publishes and subscribes at QoS 1."""


class RulesBrokenError(Exception):
    """A broker sends what no broker may send. (No OSError, which the library would swallow.)"""


class BoundedSocket:
    """A connected socket, for the library, on which no packet is longer than :data:`MAX_PACKET_BYTES`.

    Where it has nothing to give yet, it raises :class:`BlockingIOError`, or what TLS raises then.

    Args:
        inner: The socket, or a TLS socket.
    """

    def __init__(self, inner: SocketLike) -> None:
        self._inner = inner
        self._ready = bytearray()
        """Bytes that the library has not taken yet."""
        self._header = bytearray()
        """Of a packet whose length is not known yet."""
        self._to_pass, self._to_drop = 0, 0
        """Bytes of the packet that is under way."""
        self._is_greeted = False
        self._unanswered = 0

    def recv(self, size: int) -> bytes:
        """Up to ``size`` bytes, or none if the broker has closed the connection.

        Raises:
            RulesBrokenError: No broker may send that.
        """
        if not self._ready:
            data = self._inner.recv(_READ_BYTES)
            if not data:
                return data
            self._take(data)
            if not self._ready:
                raise BlockingIOError  # All of it is dropped; the library looks after other things meanwhile.
        part = bytes(self._ready[:size])
        del self._ready[:size]
        return part

    def pending(self) -> int:
        """Bytes that are here already, so that nothing may arrive."""
        # Of TLS, also below a WebSocket; a plain socket has nothing that ``select`` does not see.
        look = getattr(self._inner, "pending", None)
        return len(self._ready) + (0 if look is None else look())

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

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._to_pass:
                part = data[at : at + self._to_pass]
                self._ready += part
                self._to_pass -= len(part)
                at += len(part)
            elif self._to_drop:
                dropped = min(self._to_drop, len(data) - at)
                self._to_drop -= dropped
                at += dropped
            else:
                self._header.append(data[at])
                at += 1
                if len(self._header) > 1 and data[at - 1] < 128:
                    self._begin()
                elif len(self._header) == 5:
                    raise RulesBrokenError("a packet has a length of more than four bytes")

    def _begin(self) -> None:
        """Pass on the header of a packet that begins."""
        first, length = self._header[0], _length_in(self._header)
        self._header.clear()
        kind, quality = first >> 4, first >> 1 & 3
        if kind not in _FROM_BROKERS or (kind == _CONNACK) == self._is_greeted:
            raise RulesBrokenError(f"a packet of type {kind} came unasked")
        self._is_greeted = True
        if kind != _PUBLISH and length > MAX_PACKET_BYTES:
            raise RulesBrokenError(f"a packet of type {kind} has {length:,} bytes")
        if kind == _PUBLISH and quality > 1:
            raise RulesBrokenError(f"a message came with QoS {quality}")
        if kind == _PUBLISH and quality == 1:
            self._unanswered += 1
            if self._unanswered > _MAX_UNANSWERED:
                raise RulesBrokenError(f"the broker takes no answer to {_MAX_UNANSWERED:,} messages")
        self._to_pass = min(length, MAX_PACKET_BYTES)
        self._to_drop = length - self._to_pass
        self._ready.append(first)
        self._ready += _encoded_length(self._to_pass)


def _length_in(header: bytearray) -> int:
    return sum((byte & 127) << 7 * place for place, byte in enumerate(header[1:]))


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
    """

    on_break: Callable[[str], None]
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

    def publish_together(self, messages: Iterable[tuple[str, bytes]], *, properties: bytes) -> None:
        """Publish messages at QoS 0, in one write. Of these, nobody is told anything.

        Args:
            messages: Topics and payloads.
            properties: That each has, as MQTT 5 encodes them; empty with 3.1.1.
        """
        packets = bytearray()
        for topic, payload in messages:
            name = topic.encode()
            packets.append(_PUBLISH << 4)
            packets += _encoded_length(2 + len(name) + len(properties) + len(payload))
            packets += len(name).to_bytes(2, "big") + name + properties + payload
        if packets:
            # To the library it is a packet of no kind, after which it has nothing more to do.
            self._packet_queue(0, packets, 0, 0)

    def _create_socket(self) -> SocketLike:
        inner = super()._create_socket()
        if self.websocket_url is not None:
            from dpagent.transport.websocket import WebSocket  # An extra; few boards need it.

            inner = WebSocket(cast(socket.socket, inner), self.websocket_url)
        self._bounded = BoundedSocket(inner)
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
