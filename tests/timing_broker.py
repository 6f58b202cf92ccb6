"""A broker of one device that measures how soon it acknowledges, to fractions of a millisecond.

It speaks as much of MQTT 3.1.1 as the device needs, over a bare socket: a real broker's own threads would
blur the times.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from types import TracebackType
from typing import BinaryIO

from hostile_brokers import length


class TimingBroker:
    """Listens on a free port for one device, from the block it is used in on."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.acknowledged: dict[int, float] = {}
        """Time (of ``perf_counter``) of each acknowledgement, by packet identifier."""
        self.published: list[bytes] = []
        """Payloads that the device published."""
        self.is_subscribed = threading.Event()
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._number = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def publish(self, topic: str, payload: bytes) -> tuple[int, float]:
        """Send a message with QoS 1: its identifier, and the time at which it left."""
        self._number = self._number % 60_000 + 1
        body = struct.pack(">H", len(topic)) + topic.encode() + struct.pack(">H", self._number) + payload
        packet = b"\x32" + length(len(body)) + body
        self.acknowledged.pop(self._number, None)
        left_at = time.perf_counter()
        self._send(packet)
        return self._number, left_at

    def __enter__(self) -> TimingBroker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for each in (self._listener, self._socket):
            if each is not None:
                each.close()

    def _send(self, packet: bytes) -> None:
        assert self._socket is not None
        with self._lock:
            self._socket.sendall(packet)

    def _serve(self) -> None:
        try:
            self._socket, _ = self._listener.accept()
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._socket.makefile("rb") as stream:
                while first := stream.read(1):
                    body = stream.read(_read_length(stream))
                    self._take(first[0], body, time.perf_counter())
        except OSError:
            pass  # The test is over.

    def _take(self, first: int, body: bytes, now: float) -> None:
        match first:
            case 0x10:  # CONNECT
                self._send(b"\x20\x02\x00\x00")
            case 0x82:  # SUBSCRIBE
                topics = _count_topics(body[2:])
                self._send(b"\x90" + length(2 + topics) + body[:2] + b"\x01" * topics)
                self.is_subscribed.set()
            case 0x40:  # PUBACK
                self.acknowledged[struct.unpack(">H", body)[0]] = now
            case 0xC0:  # PINGREQ
                self._send(b"\xd0\x00")
            case 0x32:  # PUBLISH, QoS 1
                (size,) = struct.unpack(">H", body[:2])
                identifier = body[2 + size : 4 + size]
                self.published.append(body[4 + size :])
                self._send(b"\x40\x02" + identifier)


def _read_length(stream: BinaryIO) -> int:
    value, shift = 0, 0
    while True:
        digit = stream.read(1)[0]
        value |= (digit & 127) << shift
        shift += 7
        if not digit & 128:
            return value


def _count_topics(filters: bytes) -> int:
    count = 0
    while filters:
        (length,) = struct.unpack(">H", filters[:2])
        filters = filters[3 + length :]
        count += 1
    return count
