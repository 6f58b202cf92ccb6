"""Forks of the training process: for its other cores, and for the trials of engines.

A fork has what its parent has imported and computed, and the system copies a page of memory only when either
writes to it. It serves its parent by one socket, and ends when that does, whatever it is at.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from dpagent.resident_memory import stay_in_memory

_PR_SET_PDEATHSIG: Final = 1
"""Of prctl(2): the signal that the kernel sends when the thread ends that has forked."""


def forked(serve: Callable[[], None], *kept: int) -> int:
    """A fork of this process that serves, and does nothing else.

    Args:
        serve: what it does; then it ends.
        kept: descriptors: its end of the connection to this process, and what else it uses. It closes all
            others.

    Returns:
        Its id.

    Raises:
        OSError: no further process can be started.
    """
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python warns of forks where other threads may hold a lock. The fork takes none of theirs: it
        # computes, and reads and writes its socket.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    try:
        _end_with(parent)
        # A terminal's Ctrl-C and a service manager's SIGTERM go to all; this process ends with its parent.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        # Collecting would write to what is shared with the parent, and so have it copied.
        gc.disable()
        _let_go_of_what_is_free()
        stay_in_memory()
        # Whoever waits for the parent's end of a connection must not wait for this process.
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - names alone
            if descriptor > 2 and descriptor not in kept:
                with suppress(OSError):  # The directory's own.
                    os.close(descriptor)
        serve()
    finally:
        os._exit(0)


def _end_with(parent: int) -> None:
    """Have the kernel end this process with its parent: one that hangs in a library reads no socket."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It has ended already.
        os._exit(0)


def _let_go_of_what_is_free() -> None:
    """Give the system back what the C library keeps for later. Only glibc keeps any, and can."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def end(process: int, connection: socket.socket) -> None:
    """End a fork, whatever it is at.

    Args:
        process: its id.
        connection: to it.
    """
    connection.close()
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(process, 0)
