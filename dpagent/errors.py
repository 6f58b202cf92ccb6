"""Error types, each with a sentence for a person and an exit code for a script.

Every error that the programs expect derives from :class:`DpagentError`. Its text says what
happened, what was expected and what to do; its ``exit_code`` is the exit code of the ``dpagent``
command. ``docs/exit-codes.md`` lists the codes; a test compares the list with this module.
"""

from __future__ import annotations

import enum
import math
from typing import Final


class ExitCode(enum.IntEnum):
    """The exit codes of the ``dpagent`` command. Codes are added, never changed."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    CONFIGURATION = 3
    DATA = 4
    LEDGER = 5
    BROKER = 6
    STATE_IN_USE = 7
    STORAGE = 8
    PLAN = 9
    CHILD = 10
    CLUSTER = 11
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """The meaning of the code, in one or two sentences."""
        return _MEANINGS[self]


_MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "Success, or a stop on request (SIGTERM) without loss.",
    ExitCode.INTERNAL: "An internal error; the log file named in the message has the details.",
    ExitCode.USAGE: (
        "The command line is invalid: an unknown option, a value that it does not take, or options that do "
        "not go together."
    ),
    ExitCode.CONFIGURATION: (
        "A configuration file or a chosen name is missing, malformed or unknown; also a number out of range "
        "in a file, a `DPAGENT_` variable or `--set`."
    ),
    ExitCode.DATA: "Training or test data are missing, unreadable or do not fit the model.",
    ExitCode.LEDGER: (
        "A ledger is missing or unreadable, its hash chain is broken, it is older than its second head, or "
        "the configuration has a larger budget than it; also an export of budgets that does not verify."
    ),
    ExitCode.BROKER: "The MQTT broker cannot be started or reached, or it refuses the credentials.",
    ExitCode.STATE_IN_USE: "Another process uses the same state directory.",
    ExitCode.STORAGE: (
        "The disk is full, a file cannot be read or written, or the system refuses something else, such as "
        "one more open file."
    ),
    ExitCode.PLAN: "The number of an option is out of range, or no noise can meet the privacy parameters.",
    ExitCode.CHILD: (
        "A program that this one started ended, or that the demo started failed repeatedly; the message "
        "names it, or its log."
    ),
    ExitCode.CLUSTER: "Ray cannot be started or joined, or its workers end again and again.",
    ExitCode.INTERRUPTED: "Stopped with Ctrl-C; for demo, simulation and sweep also with SIGTERM.",
}


class DpagentError(Exception):
    """Base of all expected errors."""

    exit_code: ExitCode = ExitCode.INTERNAL


class UsageError(DpagentError):
    """The value of an option cannot be read, or options do not go together."""

    exit_code = ExitCode.USAGE


class ConfigurationError(DpagentError):
    """A configuration file, or a value in it, cannot be used."""

    exit_code = ExitCode.CONFIGURATION


class DataError(DpagentError):
    """Data are missing, unreadable, or do not fit the model."""

    exit_code = ExitCode.DATA


class LedgerError(DpagentError):
    """The ledger cannot be read, or does not verify."""

    exit_code = ExitCode.LEDGER


class BrokerError(DpagentError):
    """The MQTT broker cannot be reached or refuses the connection."""

    exit_code = ExitCode.BROKER


class StateInUseError(DpagentError):
    """Another process holds the state directory."""

    exit_code = ExitCode.STATE_IN_USE


class FleetLedError(StateInUseError):
    """Another program runs the rounds of the fleet."""


class StorageError(DpagentError):
    """A file or database could not be read or written."""

    exit_code = ExitCode.STORAGE


class DamagedDatabaseError(StorageError):
    """A file exists but is not a database, or is damaged."""


class DatabaseAwayError(StorageError):
    """The server of a database is not there; what was committed is kept."""


class NotReadyError(StorageError):
    """What another program has to prepare first is not there yet."""


class TransactionConflictError(StorageError):
    """A transaction was undone because of another one, and may be tried again."""


class PlanError(DpagentError):
    """Privacy parameters are out of range or cannot meet the target."""

    exit_code = ExitCode.PLAN


class ChildProcessError(DpagentError):
    """A process that this program started failed.

    Args:
        text: The sentence.
        exit_code: The process's own code, if it explains the failure.
    """

    exit_code = ExitCode.CHILD

    def __init__(self, text: str, exit_code: ExitCode = ExitCode.CHILD) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class ClusterError(DpagentError):
    """Ray cannot be started, joined or used."""

    exit_code = ExitCode.CLUSTER


class ParameterError(PlanError, ValueError):
    """A numeric parameter is out of range; the text names it, its value and the range."""


_MOST_BITS_SHOWN: Final = 256


def said(error: Exception) -> str:
    """An error in words, for a person."""
    if isinstance(error, DpagentError) and str(error):
        return str(error)
    return f"an internal error ({type(error).__name__}: {error})"


def require_finite(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise :class:`ParameterError` unless it is finite."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
    except OverflowError:  # an integer beyond floating point
        number = math.inf
    if not math.isfinite(number):
        raise ParameterError(f"{name} is {_shown(value)}; expected a finite number.")
    return number


def require_positive(name: str, value: float, *, maximum: float = math.inf) -> float:
    """Return ``value`` as a float, or raise unless ``0 < value <= maximum``."""
    number = require_finite(name, value)
    if not 0 < number <= maximum:
        limit = "" if math.isinf(maximum) else f" and at most {maximum:g}"
        raise ParameterError(f"{name} is {value!r}; expected a number above 0{limit}.")
    return number


def require_between(
    name: str, value: float, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> float:
    """Return ``value`` as a float, or raise unless it lies in the given interval."""
    number = require_finite(name, value)
    if number < low or number > high or (low_open and number == low) or (high_open and number == high):
        left, right = "(["[not low_open], ")]"[not high_open]
        raise ParameterError(f"{name} is {value!r}; expected a number in {left}{low:g}, {high:g}{right}.")
    return number


def require_count(name: str, value: int, *, minimum: int = 1, maximum: int | None = None) -> int:
    """Return ``value``, or raise unless it is an integer in ``[minimum, maximum]``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name} is {value!r}; expected a whole number.")
    if value < minimum or (maximum is not None and value > maximum):
        limit = "" if maximum is None else f" and at most {maximum}"
        shown = _shown(value)
        raise ParameterError(f"{name} is {shown}; expected a whole number of at least {minimum}{limit}.")
    return value


def _shown(value: object) -> str:
    """A value for an error message, in one short line."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS_SHOWN:
        return f"an integer of {value.bit_length():,} bits"
    return repr(value)
