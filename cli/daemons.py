"""The shared parts of the daemons: signals, and logging."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final, TypeVar

from cli.journal import JournalHandler, writes_to_journal
from cli.log_thread import LogThread
from cli.stop_event import StopEvent
from dpagent.errors import DatabaseAwayError, ExitCode, FleetLedError, NotReadyError
from dpagent.service_manager import ServiceManager
from dpagent.structured_log import IsPrivate, JsonFormatter

log = logging.getLogger(__name__)

_LEAST_PAUSE_S: Final = 1.0
_MOST_PAUSE_S: Final = 15.0


class LogLevel(StrEnum):
    """Log levels of a daemon."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"


class LogFormat(StrEnum):
    """How a line of the log looks."""

    TEXT = "text"
    JSON = "json"


def start_logging(
    level: LogLevel, shape: LogFormat, program: str,
    formatter: logging.Formatter | None = None, is_private: IsPrivate | None = None, *, waits: bool = True,
) -> None:  # fmt: skip
    """Log to standard error, for whoever started the daemon; where that is the journal, with fields.

    Args:
        level: the least one that is logged.
        shape: of the lines.
        program: that logs, in the words of :mod:`dpagent.structured_log`.
        formatter: of lines of text, if the daemon has its own.
        is_private: of a record, whether its line is for the board's owner alone.
        waits: whether the daemon waits until a line is taken.
    """
    handler = JournalHandler(program, is_private) if writes_to_journal() else logging.StreamHandler()
    if shape is LogFormat.JSON:
        handler.setFormatter(JsonFormatter(program, is_private))
    else:
        handler.setFormatter(
            formatter or logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S")
        )
    logging.basicConfig(level=level.upper(), handlers=[handler if waits else LogThread(handler)])


class StopSignals:
    """Ends a daemon on SIGTERM or SIGINT: at once while it starts, and by an event once it serves."""

    def __init__(self) -> None:
        self._stop = StopEvent()
        self._serves = False
        self._signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self._signal = number
        self._stop.set()  # In any case: Python drops an exception in a finalizer, such as one of an import.
        if not self._serves:
            raise SystemExit(self.exit_code)

    def serving(self) -> threading.Event:
        """What a signal sets from here on, or has set without an end to the start."""
        self._serves = True
        return self._stop

    def starting(self) -> None:
        """A signal ends the daemon at once again."""
        self._serves = False
        if self._stop.is_set():
            raise SystemExit(self.exit_code)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code: Ctrl-C has its own."""
        return ExitCode.INTERRUPTED if self._signal == signal.SIGINT else ExitCode.OK


ResultT = TypeVar("ResultT")


def kept_up(serve: Callable[[], ResultT], stop: StopSignals) -> ResultT:
    """What a daemon that shares a database comes to. While the database is away, or another program has its
    place, it waits and tries again; each reason is logged once.

    Args:
        serve: starts the daemon and serves.
        stop: ends the wait.

    Raises:
        DpagentError: Whatever else ends the daemon.
    """
    manager, said, pause_s = ServiceManager(), "", _LEAST_PAUSE_S
    while True:
        stop.starting()
        began = time.monotonic()
        try:
            return serve()
        except FleetLedError as error:
            reason, pause_s = f"{error} Standing by to take its place.", _LEAST_PAUSE_S
            log_level = logging.INFO
        except (DatabaseAwayError, NotReadyError) as error:
            if time.monotonic() > began + _MOST_PAUSE_S:
                said, pause_s = "", _LEAST_PAUSE_S
            reason, log_level = f"{error} Trying again.", logging.WARNING
        if reason != said:
            log.log(log_level, "%s", reason)
            said = reason
        stop.starting()
        manager.ready()
        manager.status(reason)
        until = time.monotonic() + pause_s
        while time.monotonic() < until:
            manager.alive()
            time.sleep(_LEAST_PAUSE_S / 4)
        pause_s = min(_MOST_PAUSE_S, 1.5 * pause_s)
