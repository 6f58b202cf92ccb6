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


def start_logging(level: LogLevel, formatter: logging.Formatter | None = None) -> None:
    """Log to standard error, for systemd and the demo.

    Args:
        level: the least one that is logged.
        formatter: of the lines, if the daemon has its own.
    """
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    if formatter is not None:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(formatter)


class StopSignals:
    """Ends a daemon on SIGTERM or SIGINT: at once while it starts, and by an event once it serves."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._serves = False
        self._signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self._signal = number
        if not self._serves:
            raise SystemExit(self.exit_code)
        self._stop.set()

    def serving(self) -> threading.Event:
        """What a signal sets from here on."""
        self._serves = True
        return self._stop

    @property
    def exit_code(self) -> ExitCode:
        """The exit code: Ctrl-C has its own."""
        return ExitCode.INTERRUPTED if self._signal == signal.SIGINT else ExitCode.OK
