"""A broker that a test plays byte by byte."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from children import PATIENCE_S

PUBLISH_QOS_1, PUBACK = 0x32, 0x40
LONGEST = (1 << 28) - 1
"""Most bytes after a fixed header: 256 MB."""


def length(value: int) -> bytes:
    """A variable byte integer."""
    encoded = bytearray()
    while True:
        value, low = divmod(value, 128)
        encoded.append(low | (128 if value else 0))
        if not value:
            return bytes(encoded)


def publication(topic: str, payload: bytes, number: int, *, version: int, size: int | None = None) -> bytes:
    """A message at QoS 1, or its begin if it announces ``size`` bytes of payload."""
    head = len(topic).to_bytes(2, "big") + topic.encode() + number.to_bytes(2, "big")
    head += b"\0" if version == 5 else b""
    announced = len(head) + (len(payload) if size is None else size)
    return bytes([PUBLISH_QOS_1]) + length(announced) + head + payload


class Link:
    """A client's connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        self._connection = connection
        self._data = b""
        self.version = 0

    def greet(self) -> None:
        """Answer to CONNECT, and to SUBSCRIBE if that comes."""
        kind, body = self.packet()
        assert kind == 0x10
        self.version = body[6]
        self.send(b"\x20\x03\0\0\0" if self.version == 5 else b"\x20\x02\0\0")

    def take_subscription(self) -> None:
        kind, body = self.packet()
        assert kind == 0x82
        filters, at = 0, 2 + (1 if self.version == 5 else 0)
        while at < len(body):
            at += 2 + int.from_bytes(body[at : at + 2], "big") + 1
            filters += 1
        answer = body[:2] + (b"\0" if self.version == 5 else b"") + b"\1" * filters
        self.send(b"\x90" + length(len(answer)) + answer)

    def packet(self) -> tuple[int, bytes]:
        """The next one: its first byte and what follows its length."""
        first, size, shift = self._read(1)[0], 0, 0
        while True:
            byte = self._read(1)[0]
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return first, self._read(size)

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def stop_reading(self) -> None:
        """Read no byte any more, and let the system hold few."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)

    def is_closed(self) -> bool:
        """Whether the client closes the connection; what it sends before is ignored."""
        with contextlib.suppress(ConnectionError):
            while self._connection.recv(1 << 16):
                pass
        return True

    def _read(self, size: int) -> bytes:
        while len(self._data) < size:
            more = self._connection.recv(1 << 16)
            if not more:
                raise ConnectionError("the client has closed the connection")
            self._data += more
        part, self._data = self._data[:size], self._data[size:]
        return part


class HostileBroker:
    """Listens on a loopback port, and does what the test says."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(PATIENCE_S)
        self.url = f"mqtt://127.0.0.1:{self._server.getsockname()[1]}"

    @contextlib.contextmanager
    def link(self) -> Iterator[Link]:
        """The next connection."""
        connection, _ = self._server.accept()
        with connection:
            yield Link(connection)

    def __enter__(self) -> HostileBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
