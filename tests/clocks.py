"""A clock that a test moves, so that nothing waits for slots, deadlines and resends to come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from brokers import PATIENCE_S


class MovableClock:
    """Implements :class:`dpagent.clock.Clock`; time stands still until the test moves it.

    Args:
        unix: seconds since 1970 to begin with; by default now, for what is announced by others' clocks.
    """

    def __init__(self, unix: float | None = None) -> None:
        self._monotonic, self._processor = 1_000.0, 0.0
        self._unix = time.time() if unix is None else unix

    def monotonic(self) -> float:
        return self._monotonic

    def unix(self) -> float:
        return self._unix

    def processor(self) -> float:
        return self._processor

    def advance(self, seconds: float) -> None:
        """Let time pass, in which nothing is computed."""
        self._monotonic += seconds
        self._unix += seconds

    def compute(self, seconds: float) -> None:
        """Let so much processor time pass, while nothing else wants the processor."""
        self._processor += seconds
        self.advance(seconds)

    def set_by(self, seconds: float) -> None:
        """Let somebody set the board's clock."""
        self._unix += seconds

    def creep(self) -> float:
        """The monotonic time, which a hundred looks at it move by a millisecond."""
        self._monotonic += 1e-5
        return self._monotonic

    def advance_until(self, condition: Callable[[], Any], what: str, step_s: float = 0.5) -> Any:
        """Let time pass in steps until ``condition`` holds, for daemons in threads; the first true value."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if value := condition():
                return value
            self.advance(step_s)
            time.sleep(0.02)
        pytest.fail(f"moved the clock for {PATIENCE_S:g} s in vain: {what}")


class CreepingClock:
    """A clock that an agent may wait for: it comes to the next point of a grid of milliseconds by itself.

    Args:
        clock: that the test moves.
    """

    def __init__(self, clock: MovableClock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.creep()

    def unix(self) -> float:
        return self._clock.unix()

    def processor(self) -> float:
        return self._clock.processor()
