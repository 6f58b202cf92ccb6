"""Holds a process group back: for as long as it must not run, or for a part of the time.

SIGSTOP asks nothing of those who are stopped, and keeps all of them, forks too, from their next instruction
on, also in the middle of a long product of a library. They go on where they were, so what they compute is the
same. A group that is stopped ends all the same: by SIGKILL; and where the one that started it ends first,
the kernel sends SIGHUP and SIGCONT to a group that nobody could let go on (POSIX, *orphaned process group*),
as long as both are of one session, and no ancestor of that session adopts it. Where one does, as in a
container, :mod:`agent.leash` ends the group.

**A part of the time.** The group runs for a turn, and then stands still for so long that the share is kept:
the turn is measured, so that what it took too long is made up for. It follows from the clock alone, and not
from how much the group computes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Final

_CYCLE_S: Final = 0.1
"""A turn, and the time to stand still after it."""


class Brake:
    """The brake of one process group.

    Args:
        group: its id, which is that of its leader, a child of this process that is not waited for yet.
        share: of the time in which it may run, in (0, 1].
    """

    def __init__(self, group: int, share: float = 1.0) -> None:
        self._group, self._share = group, share
        self._lock = threading.Lock()
        self._is_held, self._is_over = False, threading.Event()
        if share < 1:
            threading.Thread(target=self._alternate, name="training turns", daemon=True).start()

    def hold(self) -> None:
        """Stop the group until :meth:`release`."""
        with self._lock:
            self._is_held = True
            self._send(signal.SIGSTOP)

    def release(self) -> None:
        """Let the group go on; where it runs for a part of the time, with its next turn."""
        with self._lock:
            self._is_held = False
            if self._share == 1:
                self._send(signal.SIGCONT)

    def kill(self) -> None:
        """End all of the group, whether it is stopped or not."""
        with self._lock:
            self._send(signal.SIGKILL)

    def let_go(self) -> None:
        """Send no signal any more, but for a last one that lets the group go on: its leader has ended, or
        will, and once that is waited for, its number may be another group's."""
        with self._lock:
            self._send(signal.SIGCONT)
            self._is_over.set()

    def _send(self, number: signal.Signals) -> None:
        if not self._is_over.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, number)

    def _alternate(self) -> None:
        began = time.monotonic()
        while not self._is_over.wait(self._share * _CYCLE_S):
            with self._lock:
                self._send(signal.SIGSTOP)
                ran_s = time.monotonic() - began
            self._is_over.wait(ran_s * (1 / self._share - 1))
            with self._lock:
                began = time.monotonic()
                if not self._is_held:
                    self._send(signal.SIGCONT)
