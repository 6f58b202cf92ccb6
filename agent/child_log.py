"""The log of the programs that the agent starts: they have no log of their own, and say their lines to it."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import Any

from agent.channel import Channel
from agent.marked_log import is_private


@dataclass(frozen=True, slots=True)
class Said:
    """A line of a program's log."""

    logger: str
    level: int
    text: str
    is_private: bool

    def log(self) -> None:
        """Write it to the agent's log, as that program's."""
        logging.getLogger(self.logger).log(self.level, "%s", self.text, extra={"is_private": self.is_private})


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
            self.send(Said(record.name, record.levelno, self.format(record), is_private(record)))
        except OSError:
            os._exit(0)  # The agent has hung up.
