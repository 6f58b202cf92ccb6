"""Somebody who writes to a file and hides it: with its times set back, or its name given to another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path


class Hidden(Enum):
    """How a write is hidden."""

    NOT = "plainly"
    TIME = "its time set back"
    NAME = "its time set back, its name another's"


@contextmanager
def hide(file: Path, how: Hidden) -> Iterator[Callable[[Callable[[], None]], None]]:
    """What does a write and hides it. The file has stood still for long before."""
    os.utime(file, ns=(10**18, 10**18))
    known = file.stat()

    def write(work: Callable[[], None]) -> None:
        time.sleep(0.02)  # Some kernels give files times of a few milliseconds.
        work()
        if how is Hidden.NOT:
            return
        os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
        if how is Hidden.NAME:
            other = file.with_suffix(".other")
            other.write_bytes(file.read_bytes())
            os.utime(other, ns=(known.st_atime_ns, known.st_mtime_ns))
            other.replace(file)

    yield write
