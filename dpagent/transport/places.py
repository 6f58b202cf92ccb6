"""Places for messages that wait, shared by the thread that brings them and the one that takes them."""

from __future__ import annotations

import threading


class Places:
    """A number of places, of which many are taken or let go of at once: a semaphore lets them go one by one.

    Args:
        number: how many there are.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._changed = threading.Condition(threading.Lock())

    def take(self, most: int, timeout_s: float) -> int:
        """Take as many places as there are, up to some; wait for one where there is none.

        Args:
            most: at least 1.
            timeout_s: to wait.

        Returns:
            How many were taken; 0 if the time ran out.
        """
        with self._changed:
            if not self._free:
                self._changed.wait(timeout_s)
            taken = min(most, self._free)
            self._free -= taken
            return taken

    def let_go(self, number: int) -> None:
        """Let places be taken again."""
        with self._changed:
            self._free += number
            self._changed.notify()
