"""A daemon's log, written by a thread of its own: nothing waits until whoever reads it takes a line.

Standard error may be a pipe that nobody reads, a terminal that takes a line in tenths of a second, or the log
of containers on a disk that is full. An agent that waited there would fall silent sooner or later, by how
many lines it has said of its records.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from typing import Any, Final

from dpagent.wording import counted

log = logging.getLogger(__name__)

_MOST: Final = 1_024
"""Lines that wait. Of more, the newest are lost."""
_ENDING_S: Final = 2.0


class LogThread(logging.Handler):
    """Hands lines to another handler, in a thread of its own.

    Args:
        handler: writes them to standard error, and may wait there for as long as it likes.
    """

    def __init__(self, handler: logging.StreamHandler[Any]) -> None:
        super().__init__()
        handler.setStream(_StandardError())
        self._handler = handler
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(_MOST)
        self._lost = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """As of :class:`logging.Handler`."""
        try:
            record.msg, record.args = record.getMessage(), None  # As it is now.
            self._tell_of_lost()
            self._lines.put_nowait(record)
        except queue.Full:
            self._lost += 1
        except Exception:  # noqa: BLE001 - as the library's handlers: no line of the log ends a program
            self.handleError(record)

    def flush(self) -> None:
        """Wait until the lines are written, if they are soon: the program ends."""
        with contextlib.suppress(queue.Full):
            self._tell_of_lost()
        until = time.monotonic() + _ENDING_S
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and (left_s := until - time.monotonic()) > 0:
                self._lines.all_tasks_done.wait(left_s)

    def _write(self) -> None:
        while True:
            record = self._lines.get()
            # Not by `handle`, which has its lock meanwhile: the end of the program waits for that.
            self._handler.emit(record)
            self._lines.task_done()

    def _tell_of_lost(self) -> None:
        """Where they would stand: after what was written before, once there is room.

        Raises:
            queue.Full: there is none.
        """
        if self._lost and log.isEnabledFor(logging.WARNING):
            text = f"{counted(self._lost, 'line')} lost: nobody took what was written before"
            self._lines.put_nowait(log.makeRecord(log.name, logging.WARNING, __file__, 0, text, (), None))
        self._lost = 0


class _StandardError:
    """Without a buffer or a lock, for which the end of the program waits, too."""

    def write(self, text: str) -> None:
        left = memoryview(text.encode(errors="backslashreplace"))
        while left:
            left = left[os.write(2, left) :]
