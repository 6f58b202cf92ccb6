"""What tells whether a file has changed, without reading it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

from dpagent.learning.data.stored import RawFile, reading

GRACE_S: Final = 4.0
"""Somebody may still be writing to a file that was written to within half of this. FAT cuts times down to two
seconds: there, what was written to a moment ago looks as old as that."""
REST_S: Final = GRACE_S
"""For so long a file of a glance that looks young is watched."""


class Stamp(NamedTuple):
    """What tells whether a file has changed; times in nanoseconds."""

    inode: int
    size: int
    changed: int
    """When its bytes were written to, as who wrote wants it."""
    touched: int
    """When that, or anything else of it, was changed: nobody sets it."""

    @classmethod
    def of(cls, known: os.stat_result) -> Stamp:
        """By what the system says of a file."""
        return cls(known.st_ino, known.st_size, known.st_mtime_ns, known.st_ctime_ns)

    def is_young(self, at_ns: int | None = None) -> bool:
        """Whether somebody may be writing to it, or was at that time. A change that is to come is no sign of
        it: the clock was set back."""
        return abs((time.time_ns() if at_ns is None else at_ns) - self.changed) < GRACE_S * 1e9


def watch_since(seen_at: float) -> None:
    """Wait until files that were seen at that time (monotonic) have been watched for long enough."""
    time.sleep(max(0.0, seen_at + REST_S - time.monotonic()))


def is_at_rest(file: RawFile, *, is_young: bool) -> bool:
    """Whether nobody writes to a file: it is what it was when it was opened.

    One that looks young is watched until some seconds have passed since the glance at it, by a clock that
    nobody sets. Who sets the board's clock can have any file look young, at each look; what waits for its end
    would wait until another record is written behind it, and come in with that.

    Args:
        file: as it was opened; of no glance, one that looks young is not at rest.
        is_young: whether it was written to a moment before, by the board's clock.
    """
    if is_young:
        if file.seen_at is None:
            return False
        watch_since(file.seen_at)
    return Stamp.of(os.fstat(file.descriptor)) == Stamp.of(file.known)


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file.

    Raises:
        DataError: It cannot be looked at.
    """
    with reading(path):
        return Stamp.of(path.stat())
