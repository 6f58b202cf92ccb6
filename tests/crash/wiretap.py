"""Stands between the programs and the broker and writes down what they publish; a process of its own.

``python -I wiretap.py BROKER_PORT CAPTURE CERTIFICATE:KEY NAME...`` listens on a loopback port for each name
and prints the ports as JSON; names that end with ``+tls`` are spoken to over TLS, which needs the certificate
and its key. Each publication of a client is on record before the broker is given its first byte, so the
record lacks nothing that the broker or a subscriber ever had. A record is its length in four bytes and a CBOR
map: ``sender``, ``topic``, ``payload``. It shares no code with the programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys
from collections.abc import Iterator

import cbor2

CONNECT, PUBLISH = 1, 3


class Packets:
    """Cuts what a client sends into packets (MQTT 3.1.1 and 5)."""

    def __init__(self) -> None:
        self._data = b""
        self._level = 0

    def take(self, data: bytes) -> Iterator[tuple[bytes, tuple[str, bytes] | None]]:
        """The packets that end in ``data``, each with its topic and payload if it is a publication."""
        self._data += data
        while (found := _variable(self._data, 1)) is not None:
            length, at = found
            if len(self._data) < at + length:
                return
            packet, self._data = self._data[: at + length], self._data[at + length :]
            yield packet, self._publication(packet[0] >> 4, packet[0] & 15, packet[at:])

    def _publication(self, kind: int, flags: int, body: bytes) -> tuple[str, bytes] | None:
        length = int.from_bytes(body[:2], "big")
        if kind == CONNECT:
            self._level = body[2 + length]
        if kind != PUBLISH:
            return None
        at = 2 + length + (2 if flags & 0b0110 else 0)
        if self._level == 5:
            properties, at = _variable(body, at) or (0, at)
            at += properties
        return body[2 : 2 + length].decode(), body[at:]


def _variable(data: bytes, at: int) -> tuple[int, int] | None:
    """A variable byte integer and where it ends, or None if it is not there whole."""
    value, shift = 0, 0
    for end in range(at, min(at + 4, len(data))):
        value |= (data[end] & 127) << shift
        shift += 7
        if data[end] < 128:
            return value, end + 1
    return None


async def relay(
    name: str, port: int, capture: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One connection of a client to the broker."""
    writers = [writer]

    async def up() -> None:
        packets = Packets()
        while data := await reader.read(65_536):
            for packet, publication in packets.take(data):
                if publication is not None:
                    topic, payload = publication
                    record = cbor2.dumps({"sender": name, "topic": topic, "payload": payload})
                    os.write(capture, len(record).to_bytes(4, "big") + record)
                to_broker.write(packet)
            await to_broker.drain()

    async def down() -> None:
        while data := await from_broker.read(65_536):
            writer.write(data)
            await writer.drain()

    try:
        from_broker, to_broker = await asyncio.open_connection("127.0.0.1", port)
        writers.append(to_broker)
        pumps = [asyncio.create_task(up()), asyncio.create_task(down())]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
    except OSError:
        pass  # The broker is down.
    finally:
        for each in writers:
            with contextlib.suppress(OSError):
                each.close()


def context_of(pair: str) -> ssl.SSLContext | None:
    certificate, _, key = pair.partition(":")
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


async def serve(port: int, capture: int, tls: ssl.SSLContext | None, names: list[str]) -> None:
    """Listen for every name until the process ends."""
    ports: dict[str, int] = {}
    servers = []
    for each in names:
        name = each.removesuffix("+tls")
        server = await asyncio.start_server(
            lambda reader, writer, name=name: relay(name, port, capture, reader, writer), "127.0.0.1", 0,
            ssl=None if name == each else tls,
        )  # fmt: skip
        servers.append(server)
        ports[name] = server.sockets[0].getsockname()[1]
    print(json.dumps(ports), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    file = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    asyncio.run(serve(int(sys.argv[1]), file, context_of(sys.argv[3]), sys.argv[4:]))
