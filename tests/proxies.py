"""A TCP proxy between a program and its broker, whose network gets as bad as a test wants.

Packets may be lost or reordered; a connection shows that as delay, as a stall or as a reset. These the proxy
inflicts on its bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from brokers import Broker

_SEGMENT = 1_400


@dataclass(slots=True)
class Network:
    """The state of a network; proxies look at it for every segment.

    Attributes:
        latency_s: of every segment, one way.
        late_share: of segments, that are late as if they had been lost and sent again.
        late_s: how late, from and to.
        reset_share: of segments, that end their connection.
        bytes_per_s: of each connection and direction; 0 for any number.
        is_silent: nothing arrives, and nothing is closed: links that are open now are half-open for ever.
        is_cut: connections are closed, and new ones too.
    """

    latency_s: float = 0.0
    late_share: float = 0.0
    late_s: tuple[float, float] = (0.2, 1.0)
    reset_share: float = 0.0
    bytes_per_s: float = 0.0
    is_silent: bool = False
    is_cut: bool = False
    chance: random.Random = field(default_factory=lambda: random.Random(13))


class Proxy:
    """A port of its own before a broker's, from the block it is used in on.

    Args:
        broker: behind it.
        network: between the two; may change at any time.
        keepalive_s: of the programs' sessions: longer than a round trip. A half-open link is noticed after
            twice as long.
    """

    def __init__(self, broker: Broker, network: Network, *, keepalive_s: int = 5) -> None:
        self.broker, self.network, self.keepalive_s = broker, network, keepalive_s
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._links: set[asyncio.Task[None]] = set()

    @property
    def values(self) -> dict[str, Any]:
        """The ``mqtt`` section of a configuration file."""
        url = f"mqtt://127.0.0.1:{self.port}"
        return self.broker.values | {"url": url, "keepalive_s": self.keepalive_s}

    def take(self, fleet: str) -> None:
        self.broker.take(fleet)

    def __enter__(self) -> Proxy:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        self.port = server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> asyncio.Server:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self._server

    async def _end(self) -> None:
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.ensure_future(self._link(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._links.discard)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; both sides end at once."""
        with contextlib.suppress(OSError), _closed(writer):
            if self.network.is_cut:
                return
            there, back = await asyncio.open_connection("127.0.0.1", self.broker.port)
            with _closed(back):
                silenced = asyncio.Event()
                ways = [
                    asyncio.ensure_future(way)
                    for way in (
                        self._carry(reader, back, silenced),
                        self._carry(there, writer, silenced),
                        self._watch(silenced),
                    )
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _watch(self, silenced: asyncio.Event) -> None:
        while not self.network.is_cut:
            if self.network.is_silent:
                silenced.set()
            await asyncio.sleep(0.02)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silenced: asyncio.Event
    ) -> None:
        """One direction: segments in their order, each no earlier than it arrives."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.ensure_future(self._deliver(under_way, writer, silenced))
        try:
            while data := await reader.read(_SEGMENT):
                network = self.network
                if network.chance.random() < network.reset_share:
                    return
                late = network.chance.random() < network.late_share
                delay = network.latency_s + (network.chance.uniform(*network.late_s) if late else 0.0)
                under_way.put_nowait((self._loop.time() + delay, data))
            await under_way.join()
            if silenced.is_set():
                await asyncio.Event().wait()  # the other side does not learn that this one has gone
        finally:
            delivery.cancel()

    async def _deliver(
        self,
        under_way: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        silenced: asyncio.Event,
    ) -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if self.network.bytes_per_s:
                await asyncio.sleep(len(data) / self.network.bytes_per_s)
            if not silenced.is_set():
                writer.write(data)
                await writer.drain()
            under_way.task_done()


@contextlib.contextmanager
def _closed(writer: asyncio.StreamWriter) -> Iterator[None]:
    try:
        yield
    finally:
        writer.transport.abort()
