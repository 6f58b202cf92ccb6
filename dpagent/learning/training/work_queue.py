"""A queue from which the processes of an engine take their work.

A pipe that all of them read: the system hands each byte to one reader, whoever comes first. So a process
that computes slowly, on a core that others use as well, takes less, and the others wait for its last piece
at most.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Final

LONGEST: Final = 256
"""Numbers that it may hold: they are bytes."""


class WorkQueue:
    """Numbers of pieces of work, of which each is taken once.

    Forks of the process that has made it take from it as well, if they keep :attr:`descriptor` open.

    Attributes:
        descriptor: that is read.

    Raises:
        OSError: there are too many open files.
    """

    def __init__(self) -> None:
        self.descriptor, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for descriptor in (self.descriptor, self._writing):
            weakref.finalize(self, os.close, descriptor)

    def fill(self, numbers: range) -> None:
        """Have it hold these numbers, below :data:`LONGEST`, and nothing of before."""
        for _ in self.taken():
            pass
        if numbers:
            os.write(self._writing, bytes(numbers))

    def taken(self) -> Iterator[int]:
        """Take numbers, one when it is asked for, until there is none."""
        while True:
            try:
                number = os.read(self.descriptor, 1)
            except BlockingIOError:
                return
            if not number:  # Whoever fills it has ended.
                return
            yield number[0]
