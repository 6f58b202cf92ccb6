"""The clocks of a program, as an argument of everything that waits or counts, so that tests can move them."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Seconds on a clock that is never set; only differences are meaningful."""

    def unix(self) -> float:
        """Seconds since 1970 on the board's clock, which can be wrong and can jump."""

    def processor(self) -> float:
        """Seconds that the calling thread has computed; what other programs take lengthens none of them."""


class SystemClock:
    """The operating system's clocks."""

    def monotonic(self) -> float:
        """See :class:`Clock`."""
        return time.monotonic()

    def unix(self) -> float:
        """See :class:`Clock`."""
        return time.time()

    def processor(self) -> float:
        """See :class:`Clock`."""
        return time.thread_time()
