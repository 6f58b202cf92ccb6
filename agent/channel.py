"""Messages between the agent and the programs that it starts: any object that can be pickled, over a socket.

Only to and from programs of this package, which trust each other. The standard library has the same in
``multiprocessing.connection``, whose import takes 1.5 MiB of a board's memory in each of them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from types import TracebackType
from typing import Any, Final

_LENGTH: Final = struct.Struct("=Q")
"""Of the message, in bytes, before it."""
_SKIPPED_BYTES: Final = 1 << 12
"""At a time."""


class Channel:
    """One end. As a context manager, it is closed in the end. One thread may send while another receives.

    Args:
        descriptor: of a connected socket, which is this object's from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def hang_up(self) -> None:
        """Have whoever sends or receives here, or at the other end, learn that there is no more."""
        import socket  # which the programs that the agent starts do not need

        end = socket.socket(fileno=self._descriptor)  # No other descriptor: there may be none to be had.
        try:
            with contextlib.suppress(OSError):  # The other end has.
                end.shutdown(socket.SHUT_RDWR)
        finally:
            end.detach()

    def close(self) -> None:
        """Give the descriptor back. No other thread may be sending or receiving."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def send(self, message: object) -> None:
        """Send a message in whole; waits until the other end has taken it in, or the system has.

        Raises:
            OSError: the other end has hung up.
            Exception: it cannot be pickled; nothing is sent then.
        """
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for part in (_LENGTH.pack(len(pickled)), pickled):
            with memoryview(part) as rest:
                done = 0
                while done < len(part):
                    done += os.write(self._descriptor, rest[done:])

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            EOFError, OSError: the other end has hung up.
            Exception: it cannot be understood.
        """
        header = bytearray(_LENGTH.size)
        self._fill(header)
        (length,) = _LENGTH.unpack(header)
        try:
            message = bytearray(length)
        except MemoryError:
            self._skip(length)  # What comes next is a message again.
            raise
        self._fill(message)
        return pickle.loads(message)

    def _fill(self, part: bytearray) -> None:
        with memoryview(part) as rest:
            done = 0
            while done < len(part):
                if (more := os.readv(self._descriptor, [rest[done:]])) == 0:
                    raise EOFError
                done += more

    def _skip(self, count: int) -> None:
        while count:
            if not (skipped := os.read(self._descriptor, min(count, _SKIPPED_BYTES))):
                raise EOFError
            count -= len(skipped)
