"""Tells viewers what has changed: one look at the database for all of them, and none while nobody looks.

A thread asks the database whether another program has written, which costs no read of a table, and looks at
the daemon's status file. When something is new, it reads once, and all viewers get the same bytes. Then it
rests for as long as thirty readings took, so that it takes a thirtieth of a core, or where readings take
long, up to a tenth.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from coordinator.page.view import View
from coordinator.reader import StoreReader
from coordinator.settings import CoordinatorSettings
from dpagent.errors import DpagentError

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.2
_REST: Final = 30.0
"""In readings' times, or as many of them as this would show a change later than"""
_SHOWN_S: Final = 0.7
"""; but at least"""
_LEAST_REST: Final = 10.0
_AT_LEAST_S: Final = 5.0
"""Something may change without a write: a certificate ends, the disk fills, the daemon dies."""
KEEP_ALIVE_S: Final = 15.0


class Watcher:
    """The changes of one coordinator.

    Args:
        settings: ``fleet.yaml``.
        view: reads what is shown.
    """

    def __init__(self, settings: CoordinatorSettings, view: View) -> None:
        self._settings, self._view = settings, view
        self._viewers: set[asyncio.Event] = set()
        self._latest = b""
        self._ended = threading.Event()
        self._wanted = threading.Event()
        self._reader: StoreReader | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def start(self) -> None:
        """Begin; from the loop that the viewers are served by."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End, and let all viewers go."""
        self._ended.set()
        self._wanted.set()
        self._wake()

    @property
    def viewers(self) -> int:
        """How many there are."""
        return len(self._viewers)

    async def changes(self) -> AsyncIterator[bytes]:
        """States as JSON, the present one first; of several at once, only the last. Empty: nothing is new,
        and the connection is to be kept alive."""
        new = asyncio.Event()
        self._viewers.add(new)
        self._wanted.set()
        try:
            sent = b""
            while not self._ended.is_set():
                if self._latest != sent:
                    sent = self._latest
                    yield sent
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(new.wait(), KEEP_ALIVE_S)
                if not new.is_set():
                    yield b""
                new.clear()
        finally:
            self._viewers.discard(new)

    # In the thread.

    def _watch(self) -> None:
        before: Any = None
        due = 0.0
        while not self._ended.is_set():
            if not self._viewers:
                before, self._latest = None, b""  # Of long ago, when somebody comes.
                self._wanted.clear()
                if not self._viewers:
                    self._wanted.wait()
                continue
            now = time.monotonic()
            mark = (self._mark(), self._status_mark(), now // _AT_LEAST_S)
            if mark != before and now >= due:
                before = mark
                self._read()
                took_s = time.monotonic() - now
                due = time.monotonic() + min(_REST * took_s, max(_SHOWN_S, _LEAST_REST * took_s))
            self._ended.wait(_LOOK_S)
        self._close()

    def _read(self) -> None:
        try:
            self._latest = as_json(self._view.state())
        except Exception:
            log.exception("the page cannot read what it shows")  # And goes on: the next look may do better.
            return
        self._wake()

    def _wake(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        for each in self._viewers:
            each.set()

    def _opened(self) -> StoreReader | None:
        try:
            return StoreReader(self._settings.store_place)
        except DpagentError as error:
            log.debug("the database cannot be watched yet: %s", error)
            return None

    def _mark(self) -> str:
        """What changes with each write; a connection that broke is made anew."""
        if self._reader is None:
            self._reader = self._opened()
        try:
            return "" if self._reader is None else self._reader.mark()
        except DpagentError as error:
            log.debug("the database cannot be watched: %s", error)
            self._close()
            return ""

    def _close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _status_mark(self) -> object:
        try:
            found = (self._settings.state_dir / "status.json").stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def as_json(values: Any) -> bytes:
    """Values as JSON, which has no infinity."""
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def server_sent(watcher: Watcher, send: Callable[[bytes], Any]) -> None:
    """Send changes as server-sent events (WHATWG HTML, 9.2) until the watcher ends.

    Args:
        watcher: of the coordinator.
        send: sends bytes, and returns when there is room for more.
    """
    async for state in watcher.changes():
        await send(b"event: state\ndata: " + state + b"\n\n" if state else b": alive\n\n")
