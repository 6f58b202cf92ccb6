"""Threads that are there before they are needed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait


def started_pool(threads: int) -> ThreadPoolExecutor | None:
    """A pool whose threads have all begun; None for one thread, which needs no other.

    A pool of the standard library starts a thread when work comes and the others are busy. On a board where
    no thread can be started any more, whether that happens would depend on how long the work takes.

    Raises:
        RuntimeError: no more threads can be started.
    """
    if threads == 1:
        return None
    pool, all_there = ThreadPoolExecutor(threads), threading.Barrier(threads)
    try:
        wait([pool.submit(all_there.wait) for _ in range(threads)])
    except RuntimeError:
        all_there.abort()
        pool.shutdown(wait=False)
        raise
    return pool
