"""The two clocks of a program, handed to whatever waits, so that a test can move them."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

    def monotonic(self) -> float:
        """Seconds on a clock that is never set; only differences mean anything."""

    def unix(self) -> float:
        """Seconds since 1970, as the board's clock has them; may be wrong, and may jump."""


class SystemClock:
    """The operating system's clocks."""

    def monotonic(self) -> float:
        """See :class:`Clock`."""
        return time.monotonic()

    def unix(self) -> float:
        """See :class:`Clock`."""
        return time.time()
