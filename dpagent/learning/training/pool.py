"""Threads that are there, with the memory of a product of matrices, before they are needed."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

_PRODUCT_SIZES: Final = (512, *[1024] * 16)
"""Of square matrices, one try after another."""
_TOGETHER: Final = 0.5
"""Share of the time from the first's beginning to the last's end for which all were under way."""


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


def multiply_together(pool: ThreadPoolExecutor, threads: int) -> None:
    """Have all threads of a pool multiply matrices at one time.

    A BLAS takes memory for as many products as were ever under way at once (OpenBLAS: 32 MiB each), and does
    not give it back. Whether that many are, for the first time, in a round that reads records, is chance, and
    likelier with many of them. So it is to happen before.
    """
    for size in _PRODUCT_SIZES:
        factor, all_there = np.zeros((size, size), np.float32), threading.Barrier(threads)
        spans = wait([pool.submit(_span_of_product, factor, all_there) for _ in range(threads)]).done
        begins, ends = zip(*(span.result() for span in spans), strict=True)
        if min(ends) - max(begins) >= _TOGETHER * (max(ends) - min(begins)):
            return
    log.debug("%d threads did not multiply matrices at one time", threads)


def _span_of_product(factor: NDArray[np.float32], all_there: threading.Barrier) -> tuple[float, float]:
    """When a product began and ended."""
    product = np.zeros_like(factor)
    all_there.wait()
    began = time.perf_counter()
    np.dot(factor, factor, out=product)
    return began, time.perf_counter()
