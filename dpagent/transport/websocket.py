"""MQTT over WebSocket (RFC 6455; MQTT 5.0, section 6), for brokers behind proxies that pass nothing else.

The protocol is that of the ``websockets`` package, without its network code: messages longer than
:data:`MOST_BYTES`, text, and all else that no broker may send end the connection. The MQTT library has a
WebSocket of its own, which keeps whatever length of a message or a line a broker announces.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Final

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidURI
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

MOST_BYTES: Final = 1 << 20
"""Of one message of the broker's, which may hold many packets of MQTT."""
HANDSHAKE_S: Final = 10.0
_READ_BYTES: Final = 1 << 16


class WebSocket:
    """A stream of bytes within WebSocket messages, with the methods of a socket that the MQTT library calls.

    Args:
        inner: A connected socket, with or without TLS.
        url: ``ws://…`` or ``wss://…``, as in the request.

    Raises:
        ConnectionError: The other side does not speak WebSocket with MQTT in it.
    """

    def __init__(self, inner: socket.socket, url: str) -> None:
        self._inner = inner
        self._to_send = bytearray()
        """Frames, of which the system has not taken all."""
        self._claimed = 0
        """Bytes of the caller's that these frames are of."""
        try:
            self._protocol = ClientProtocol(
                parse_uri(url), subprotocols=[Subprotocol("mqtt")], max_size=MOST_BYTES
            )
        except InvalidURI as error:
            raise ConnectionError(f"{url} is no address of a WebSocket") from error
        try:
            self._shake_hands()
        except BaseException:
            inner.close()
            raise

    def recv(self, size: int) -> bytes:
        """The next bytes, however many; none at the end.

        Raises:
            BlockingIOError: There is nothing yet.
        """
        if self._protocol.state is not State.OPEN:
            return b""
        data = self._inner.recv(size)
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        payload = self._received()
        self._to_send += b"".join(self._protocol.data_to_send())  # answers to pings
        self._flush()
        if not payload and self._protocol.state is State.OPEN:
            raise BlockingIOError
        return payload

    def send(self, data: bytes | bytearray) -> int:
        """Send all of ``data`` as one message; return its length.

        Raises:
            BlockingIOError: The system does not take it all yet; the caller comes again with the same data.
        """
        if not self._claimed:
            self._protocol.send_binary(bytes(data))
            self._to_send += b"".join(self._protocol.data_to_send())
            self._claimed = len(data)
        self._flush()
        if self._to_send:
            raise BlockingIOError
        claimed, self._claimed = self._claimed, 0
        return claimed

    def pending(self) -> int:
        """Bytes that TLS has and the system does not show."""
        return self._inner.pending() if isinstance(self._inner, ssl.SSLSocket) else 0

    def close(self) -> None:
        """Close the connection."""
        self._inner.close()

    def fileno(self) -> int:
        """For ``select``."""
        return self._inner.fileno()

    def setblocking(self, flag: bool) -> None:
        """As of any socket."""
        self._inner.setblocking(flag)

    def _shake_hands(self) -> None:
        until = time.monotonic() + HANDSHAKE_S
        self._protocol.send_request(self._protocol.connect())
        self._inner.settimeout(HANDSHAKE_S)
        self._inner.sendall(b"".join(self._protocol.data_to_send()))
        while self._protocol.state is State.CONNECTING:
            if self._protocol.handshake_exc is not None or time.monotonic() > until:
                break
            if data := self._inner.recv(_READ_BYTES):
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
                break
        events = self._protocol.events_received()
        answers = [event for event in events if isinstance(event, Response)]
        # MQTT begins with this side's CONNECT: who sends before that speaks something else.
        if self._protocol.state is State.OPEN and len(events) == 1:
            return
        said = f"status {answers[0].status_code}" if answers else "no answer"
        why = self._protocol.handshake_exc
        raise ConnectionError(f"no WebSocket for MQTT ({why if isinstance(why, InvalidHandshake) else said})")

    def _received(self) -> bytes:
        """The payload of what has arrived."""
        payload = bytearray()
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and event.opcode in (Opcode.BINARY, Opcode.CONT):
                payload += event.data
            elif isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                self._protocol.fail(CloseCode.UNSUPPORTED_DATA)
        return bytes(payload)

    def _flush(self) -> None:
        while self._to_send:
            try:
                sent = self._inner.send(self._to_send)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            del self._to_send[:sent]
