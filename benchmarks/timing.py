"""Fair timing: the sides of a comparison in turn, in one process, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(*sides: Callable[[], object], repeats: int) -> list[float]:
    """Median seconds of each side; they take turns, so that a busy moment strikes all alike.

    Args:
        sides: To be timed; each is called once beforehand, untimed.
        repeats: How often each is timed.
    """
    for side in sides:
        side()
    taken = [[seconds(side) for side in sides] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*taken, strict=True)]
