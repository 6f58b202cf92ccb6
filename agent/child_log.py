"""The log of the programs that the agent starts: they have no log of their own, and say their lines to it."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import Any, Final

from agent.channel import Channel
from agent.marked_log import is_private

SAID_ONCE: Final = {"is_said_once": True}
"""As ``extra`` of a log call of a program that is started for each round: what it finds each time, and the
agent's log has once."""
_MOST: Final = 1_000
"""That are known to be said; with more, some may be said again."""


@dataclass(frozen=True, slots=True)
class Said:
    """A line of a program's log."""

    logger: str
    level: int
    text: str
    is_private: bool
    is_said_once: bool = False

    def log(self) -> None:
        """Write it to the agent's log, as that program's."""
        logging.getLogger(self.logger).log(self.level, "%s", self.text, extra={"is_private": self.is_private})


class ChildLog:
    """What programs say that are started again and again, in the agent's log."""

    def __init__(self) -> None:
        self._said: set[int] = set()

    def write(self, line: Said) -> None:
        """Write a line, unless it is one of :data:`SAID_ONCE` and was written before."""
        if line.is_said_once:
            if (known := hash(line)) in self._said:
                return
            if len(self._said) == _MOST:
                self._said.clear()
            self._said.add(known)
        line.log()


class SaidOver(logging.Handler):
    """The way to the agent, for answers and for log lines: it has one log for all programs.

    Args:
        channel: to the agent. If it has hung up, a line ends the program.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def send(self, message: Any) -> None:
        """Send an answer; in whole, whatever another thread logs."""
        with self.lock or threading.RLock():
            self._channel.send(message)

    def emit(self, record: logging.LogRecord) -> None:
        """As of :class:`logging.Handler`."""
        try:
            is_said_once = bool(getattr(record, "is_said_once", False))
            text = self.format(record)
            self.send(Said(record.name, record.levelno, text, is_private(record), is_said_once))
        except OSError:
            os._exit(0)  # The agent has hung up.
