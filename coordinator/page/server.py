"""Serves the page: over HTTP or TLS, on one address, within bounds on what strangers can take."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.page.access import Access
from coordinator.page.app import Page
from coordinator.page.local_users import name_of, plain_address
from coordinator.page.metrics import Metrics
from coordinator.page.tokens import Role, Tokens
from coordinator.page.view import View
from coordinator.page.watcher import Watcher
from coordinator.settings import CoordinatorSettings
from dpagent.errors import ConfigurationError
from dpagent.service_manager import ServiceManager
from dpagent.storage import disk_errors
from dpagent.structured_log import Event, about

log = logging.getLogger(__name__)

REQUEST_S: Final = 10.0
"""For the head of a request, from the connection on."""
_IDLE_S: Final = 30
"""Of a connection between two requests."""
_MOST_CONNECTIONS: Final = 64
"""Besides those of viewers, of which each needs a few more for a moment."""
_MOST_HEAD_BYTES: Final = 16_384
_POLL_S: Final = 0.2
_FAREWELL_S: Final = 3


def require_access(settings: CoordinatorSettings) -> None:
    """Refuse to listen where others could see the page without showing who they are.

    Raises:
        ConfigurationError: Neither a token nor a proxy is there.
    """
    page, tokens = settings.page, Tokens(settings.keys_dir)
    if page.is_local or page.proxies or tokens.any():
        return
    raise ConfigurationError(
        f"page.listen is {page.listen}, which others reach, and nothing says who they are. Make a token "
        f"(`dpagent coordinator page-token --role {Role.OPERATOR.word}`), name a reverse proxy in "
        "page.proxies, or listen on 127.0.0.1."
    )


def require_own(state_dir: Path) -> None:
    """Refuse to give orders as another user than the coordinator's: files of the database would be another's.

    Raises:
        ConfigurationError: The state directory is another user's.
    """
    with disk_errors(state_dir):
        owner = state_dir.stat().st_uid if state_dir.exists() else os.geteuid()
    if owner != os.geteuid():
        raise ConfigurationError(
            f"{state_dir} belongs to user {name_of(owner)}, and this program runs as "
            f"{name_of(os.geteuid())}. Run it as the coordinator does: sudo -u {name_of(owner)}, or User= of "
            "its service."
        )


def serve(
    settings: CoordinatorSettings,
    directory: Path,
    stop: threading.Event,
    make_report: Callable[[str], bytes],
) -> None:
    """Serve the page until ``stop`` is set.

    Args:
        settings: ``fleet.yaml``.
        directory: that it is in.
        stop: ends it.
        make_report: see :class:`~coordinator.page.app.Page`.

    Raises:
        ConfigurationError: It cannot listen, or would listen without knowing who asks.
    """
    require_access(settings)
    require_own(settings.state_dir)
    page = settings.page
    if not page.is_local and page.certificate is None and not page.proxies:
        log.warning(
            "page.listen is %s without page.certificate: tokens cross the network in the clear", page.listen
        )
    # Strangers fill no log with requests that are none.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    listener = _listener(settings)
    with listener:
        asyncio.run(_serve(settings, directory, stop, make_report, listener))


async def _serve(
    settings: CoordinatorSettings,
    directory: Path,
    stop: threading.Event,
    make_report: Callable[[str], bytes],
    listener: socket.socket,
) -> None:
    page, view = settings.page, View(settings)
    watcher = Watcher(settings, view)
    application = Page(
        settings,
        directory,
        access=Access(page, Tokens(settings.keys_dir)),
        view=view,
        watcher=watcher,
        make_report=make_report,
        make_metrics=Metrics(settings, view).exposed,
        is_secure=page.certificate is not None,
    ).application()
    server = _Server(_configuration(settings, application))
    watcher.start()
    stopping = asyncio.ensure_future(_stopped(stop, server, watcher))
    scheme = "http" if page.certificate is None else "https"
    name = f"[{page.listen}]" if ":" in page.listen else page.listen
    manager = ServiceManager()
    manager.ready()
    log.info(
        "the page of fleet %s is at %s://%s:%d/", settings.fleet, scheme, name, listener.getsockname()[1],
        extra=about(event=Event.STARTED, fleet=settings.fleet),
    )  # fmt: skip
    try:
        await server.serve(sockets=[listener])
    finally:
        manager.stopping()
        watcher.stop()
        stopping.cancel()


async def _stopped(stop: threading.Event, server: uvicorn.Server, watcher: Watcher) -> None:
    manager = ServiceManager()
    while not stop.is_set():
        manager.alive()
        await asyncio.sleep(_POLL_S)
    watcher.stop()  # Streams end by themselves, and nobody waits for them.
    server.should_exit = True


def _listener(settings: CoordinatorSettings) -> socket.socket:
    page = settings.page
    family = socket.AF_INET6 if ":" in page.listen else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((page.listen, page.port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"page: cannot listen on {page.listen}, port {page.port} ({error.strerror}). End what listens "
            "there, or set page.listen and page.port."
        ) from error
    return listener


def _configuration(settings: CoordinatorSettings, application: Any) -> uvicorn.Config:
    page = settings.page
    try:
        configuration = uvicorn.Config(
            application,
            http=_bounded(_MOST_CONNECTIONS + 2 * page.most_viewers),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_FAREWELL_S,
            h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
            ssl_certfile=page.certificate,
            ssl_keyfile=page.key,
        )
        configuration.load()
    except OSError as error:
        raise ConfigurationError(
            f"page.certificate and page.key ({page.certificate}, {page.key}) cannot be used: "
            f"{error.strerror or error}."
        ) from error
    return configuration


class _Server(uvicorn.Server):
    """Leaves signals to the program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: the program has its own."""
        yield


def _bounded(most: int) -> type[H11Protocol]:
    """The library's protocol, with bounds on connections: so many, of one address half as many, and in each
    the head of a request within :data:`REQUEST_S`.

    Args:
        most: connections at once.
    """
    open_connections: Counter[str] = Counter()

    class Bounded(H11Protocol):
        _address = ""
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            peer = transport.get_extra_info("peername")
            self._address = plain_address(peer[0]) if peer else "?"
            open_connections[self._address] += 1
            super().connection_made(transport)
            is_full = open_connections.total() > most or open_connections[self._address] > most // 2
            self._deadline = self.loop.call_later(0 if is_full else REQUEST_S, transport.abort)

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and not self._is_answering():
                self._deadline = self.loop.call_later(REQUEST_S, self.transport.abort)
            super().data_received(data)

        def handle_events(self) -> None:
            super().handle_events()
            if self._deadline is not None and self._is_answering():
                self._deadline.cancel()
                self._deadline = None

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def connection_lost(self, exc: Exception | None) -> None:
            open_connections[self._address] -= 1
            if self._deadline is not None:
                self._deadline.cancel()
            super().connection_lost(exc)

    return Bounded
