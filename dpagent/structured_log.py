"""One vocabulary for the logs of all programs: a line of JSON each, with the same keys for the same things.

A log call says what its line is about beside its text::

    log.info("round %d of %d: %s", number, rounds, shown, extra=about(event=Event.ROUND_CLOSED, round=number))

As text (the default) a line has time, level and message. With ``--log-format json`` it is an object of one
line, whose keys are those of :data:`COMMON` and :class:`Fields`; docs/operating.md has the table, and a test
compares it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TypeAlias, TypedDict, Unpack

COMMON: Final = {
    "at": "time, UTC, in seconds",
    "level": "`debug`, `info`, `warning`, `error`",
    "program": "`agent`, `coordinator`, `worker`, `page`, `enrolment`, `mixer`, `answers`, `home-assistant`",
    "module": "of the code that says it",
    "message": "the sentence that stands in the text log",
    "private": "of an agent: `true` where the line is for the board's owner alone",
    "trace": "where an internal error came from",
}
"""Keys of every line (the last two where they apply), and what they are."""


class Event(StrEnum):
    """What a line tells of, for whoever counts or waits for it."""

    STARTED = "started"
    """The program serves."""
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    """From its broker."""
    REJECTED = "rejected"
    """Messages do not count, or cannot be read; ``reason`` says why, and ``count`` how many."""
    JOB_BEGUN = "job begun"
    JOB_CONTINUED = "job continued"
    """After a restart, or a pause."""
    JOB_OVER = "job over"
    """Finished, cancelled, or told to be over."""
    JOB_PAUSED = "job paused"
    """By the coordinator itself, for ``reason``."""
    JOB_FAILED = "job failed"
    ROUND_COUNTED = "round counted"
    """A worker counts fragments of it from now on."""
    ROUND_EXTENDED = "round extended"
    """It stays open for another deadline."""
    ROUND_CLOSED = "round closed"
    ROUND_GIVEN_UP = "round given up"
    ROUND_DECLINED = "round declined"
    """By a board, for ``reason``."""
    ROUND_CHARGED = "round charged"
    ROUND_SPOOLED = "round spooled"
    """A board has what it publishes for it on its disk."""
    DEVICE_ENROLLED = "device enrolled"
    CERTIFICATE_RENEWED = "certificate renewed"
    WORKER_GONE = "worker gone"
    NO_WORKER = "no worker"


class Fields(TypedDict, total=False):
    """What a line may be about."""

    event: Event
    """see the events"""
    fleet: str
    """the fleet's name"""
    broker: str
    """the broker's URL"""
    job: str
    """a job's id, in hexadecimal"""
    job_name: str
    """its name in the coordinator's queue"""
    round: int
    """a round's number, from 1"""
    rounds: int
    """rounds of the job"""
    device: str
    """a board's id; never of a fragment, which has none"""
    worker: str
    """a worker's name"""
    reason: str
    """why"""
    count: int
    """how many messages"""
    accuracy: float
    """on test data, from 0 to 1"""
    epsilon: float
    """spent so far; missing where nothing is guaranteed"""


_ATTRIBUTE: Final = "fields"

IsPrivate: TypeAlias = Callable[[logging.LogRecord], bool]
"""Of a record of the log, whether its line is for the board's owner alone."""


def about(**fields: Unpack[Fields]) -> dict[str, Any]:
    """As ``extra`` of a log call: what its line is about.

    >>> about(round=3)
    {'fields': {'round': 3}}
    """
    return {_ATTRIBUTE: fields}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a line is about, by the keys of :class:`Fields`."""
    found: dict[str, Any] = getattr(record, _ATTRIBUTE, {})
    return found


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record.

    Args:
        program: that logs.
        is_private: of a record, whether its line is for the board's owner alone.
    """

    def __init__(self, program: str, is_private: IsPrivate | None = None) -> None:
        super().__init__()
        self._program, self._is_private = program, is_private

    def format(self, record: logging.LogRecord) -> str:
        """As of :class:`logging.Formatter`."""
        values: dict[str, Any] = {
            "at": f"{datetime.fromtimestamp(int(record.created), UTC):%Y-%m-%dT%H:%M:%SZ}",
            "level": record.levelname.lower(),
            "program": self._program,
            "module": record.name,
            "message": record.getMessage(),
        }
        if self._is_private is not None and self._is_private(record):
            values["private"] = True
        values |= fields_of(record)
        if record.exc_info:
            values["trace"] = self.formatException(record.exc_info)
        return json.dumps(values)  # In ASCII: no text from outside has a character that ends a line.
