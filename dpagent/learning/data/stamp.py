"""What tells whether a file has changed, without reading it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from dpagent.errors import DataError
from dpagent.learning.data.stored import reading

GRACE_S: Final = 2.0
"""Somebody may still be writing to a file that was written to within this."""


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

    def is_young(self) -> bool:
        """Whether somebody may be writing to it. A time that is to come is no sign of that: the clock was set
        back."""
        return abs(time.time_ns() - self.changed) < GRACE_S * 1e9


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file.

    Raises:
        DataError: It cannot be looked at.
    """
    with reading(path):
        return Stamp.of(path.stat())


def glance_at(files: Iterable[Path]) -> str | None:
    """A text that changes with the names, sizes and times of files; None if one is young, or cannot be
    looked at: it may have gone since its folder was listed."""
    stamps = hashlib.sha256()
    for file in files:
        try:
            stamp = stamp_of(file)
        except DataError:
            return None
        if stamp.is_young():
            return None
        stamps.update(repr((str(file), *stamp)).encode())
    return stamps.hexdigest()
