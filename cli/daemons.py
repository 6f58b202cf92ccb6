"""What the two daemon commands share: signals, logging, the log level option."""

from __future__ import annotations

import logging
import signal
import threading
from enum import StrEnum
from typing import Annotated

import typer

from dpagent.errors import ExitCode


class LogLevel(StrEnum):
    """How much a daemon says."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"


LogLevelOption = Annotated[LogLevel, typer.Option(help="How much to log, to standard error.")]


def start_logging(level: LogLevel) -> None:
    """Log lines to standard error, where systemd and the demo pick them up."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )


class StopSignals:
    """Turns SIGTERM and SIGINT into an event that the daemon's loop looks at.

    Attributes:
        event: Set once a signal has come.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self._signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self._signal = number
        self.event.set()

    @property
    def exit_code(self) -> ExitCode:
        """What to end with: Ctrl-C has a code of its own."""
        return ExitCode.INTERRUPTED if self._signal == signal.SIGINT else ExitCode.OK
