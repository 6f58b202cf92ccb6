"""An event that a signal sets."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref


class StopEvent(threading.Event):
    """An event that the handler of a signal may set, whatever its own thread is at.

    ``threading.Event`` has a lock: where the signal comes while the main thread holds it, as it does at the
    beginning of each wait, the handler, which is the same thread, waits for it for ever. This one has a flag,
    and a pipe that wakes who waits. It is set once and for all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        weakref.finalize(self, _close, self._woken, self._wakes)

    def is_set(self) -> bool:
        """As of :class:`threading.Event`."""
        return self._is_set

    def set(self) -> None:
        """As of :class:`threading.Event`."""
        self._is_set = True
        with contextlib.suppress(BlockingIOError):  # It is full of what wakes.
            os.write(self._wakes, b"\0")

    def wait(self, timeout: float | None = None) -> bool:
        """As of :class:`threading.Event`."""
        if not self._is_set:
            waiting = select.poll()
            waiting.register(self._woken, select.POLLIN)
            waiting.poll(None if timeout is None else max(0.0, timeout * 1_000))
        return self._is_set


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
