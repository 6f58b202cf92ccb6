"""Processes whose parent is killed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def adopted() -> Iterator[None]:
    """Orphans become children of this process, which is of their session: as in a container, whose first
    process is no system's. So no kernel ends a group of orphans that stand still."""
    set_child_subreaper, on, off = 36, 1, 0  # of prctl(2)
    kernel = ctypes.CDLL(None)
    assert kernel.prctl(set_child_subreaper, on) == 0
    yield
    assert kernel.prctl(set_child_subreaper, off) == 0


def is_reaped(orphan: int) -> bool:
    """Whether an orphan that has ended is waited for; it is adopted a moment after its parent's end."""
    try:
        return os.waitpid(orphan, 0)[0] == orphan
    except ChildProcessError:
        return False
