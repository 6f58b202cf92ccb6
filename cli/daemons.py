"""The shared parts of the two daemon commands: signals, logging, the log level option."""

from __future__ import annotations

import logging
import signal
import threading
from enum import StrEnum
from typing import Annotated

import typer

from dpagent.errors import ExitCode


class LogLevel(StrEnum):
    """Log levels of a daemon."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"


LogLevelOption = Annotated[LogLevel, typer.Option(help="Log level, on standard error.")]


def start_logging(level: LogLevel) -> None:
    """Log to standard error, for systemd and the demo."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )


class StopSignals:
    """Turns SIGTERM and SIGINT into an event for the daemon's loop.

    Attributes:
        event: Set by the first signal.
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
        """The exit code: Ctrl-C has its own."""
        return ExitCode.INTERRUPTED if self._signal == signal.SIGINT else ExitCode.OK
