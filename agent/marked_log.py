"""The agent's log: lines that may tell of a record are marked, so that a pack for support has none of them.

Only those modules speak unmarked that are listed here: they see no record, and what they say follows from
plans, configuration, ledger, clock and network. Everything else is marked: whatever a library says, and what
modules say that read records, decode them or train. A listed module marks with :data:`PRIVATE` what it was
told of records, what tells how full the disk is that they may lie on, and what it says before they are read:
the time of that, and a later one, would tell how long reading took.

A message of several lines has one that begins with the time; those that follow are indented. So no text from
outside makes a line of its own, and what a program writes to standard error itself is no line of the log.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Final

PRIVATE: Final = {"is_private": True}
"""As ``extra`` of a log call: this line is for the device's owner alone."""

PUBLIC_LOGGERS: Final = frozenset(
    {
        "agent.announcements",
        "agent.board_engine",
        "agent.cycle",
        "agent.daemon",
        "agent.governor",
        "agent.sitting_out",
        "agent.spooling",
        "dpagent.transport.session",
    }
)
"""Of modules that see no record."""

_MARK: Final = "(private)"
_TIME: Final = "%Y-%m-%dT%H:%M:%S"
_LINE: Final = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d (?:DEBUG|INFO|WARNING|ERROR|CRITICAL) +(?P<text>.*)"
)


class MarkedFormatter(logging.Formatter):
    """Time, level and text of a record, with a mark where it may tell of a record of the data."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", _TIME)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """As of :class:`logging.Formatter`."""
        if _tells_of_records(record):
            record.message = f"{_MARK} {record.message}"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """As of :class:`logging.Formatter`."""
        return "\n  ".join(super().format(record).splitlines())


def is_private(record: logging.LogRecord) -> bool:
    """Whether a message is for the owner alone, with all that belongs to it: a traceback is, which stands in
    text on lines that nobody else is shown."""
    return _tells_of_records(record) or bool(record.exc_info)


def _tells_of_records(record: logging.LogRecord) -> bool:
    return getattr(record, "is_private", False) or record.name not in PUBLIC_LOGGERS


def public_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a log that may be shown to others, of whatever stands in a journal or a file.

    >>> log = ["2026-11-26T01:02:03 INFO    round 1 of 2: spooled", "RuntimeWarning: overflow", "  more"]
    >>> log += ["2026-11-26T01:02:03 INFO    (private) 17 records"]
    >>> list(public_lines(log))
    ['2026-11-26T01:02:03 INFO    round 1 of 2: spooled']

    Lines of JSON are marked by a key, and a listed module speaks in those that are not:

    >>> list(public_lines(['{"module": "agent.cycle", "message": "spooled"}', '{"message": "17 records"}']))
    ['{"module": "agent.cycle", "message": "spooled"}']
    """
    for line in lines:
        text = line.rstrip("\r\n")
        if text.startswith("{"):
            if _is_public_json(text):
                yield text
        elif (found := _LINE.fullmatch(text)) is not None and not found["text"].startswith(_MARK):
            yield text


def _is_public_json(text: str) -> bool:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(values, dict) or values.get("private", False) is not False:
        return False
    return str(values.get("module")) in PUBLIC_LOGGERS and "trace" not in values
