"""A daemon's log in systemd's journal: each message is one entry, with fields to select by.

The journal's `native protocol <https://systemd.io/JOURNAL_NATIVE_PROTOCOL/>`_: a datagram of lines
``FIELD=value``; a value of several lines stands behind its length. ``journalctl -p warning`` and ``journalctl
DPAGENT_EVENT="round closed"`` select by them; ``MESSAGE`` is the line as it is written to standard error
elsewhere. The fields are the keys of :mod:`dpagent.structured_log`, in capitals and behind ``DPAGENT_``.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import Final

from dpagent.structured_log import IsPrivate, fields_of

SOCKET: Final = "/run/systemd/journal/socket"
_PRIORITIES: Final = (
    (logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6),
)  # fmt: skip
"""Of syslog(3), by the least level that has them."""
_DEBUG: Final = 7


def writes_to_journal(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether standard error is the journal's, and nobody has led it elsewhere since (systemd.exec(5))."""
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class JournalHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Sends to the journal; what it does not take goes to standard error, which is its as well.

    Args:
        program: that logs.
        is_private: of a record, whether its line is for the board's owner alone.
        address: the journal's socket.
    """

    def __init__(self, program: str, is_private: IsPrivate | None = None, address: str = SOCKET) -> None:
        super().__init__()
        self._program, self._is_private, self._address = program, is_private, address

    def emit(self, record: logging.LogRecord) -> None:
        """As of :class:`logging.Handler`."""
        try:
            entry = self._entry(record)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
                link.setblocking(False)  # No message waits for the journal.
                link.sendto(entry, self._address)
        except OSError:  # It is not there, is busy, or the message is too long for a datagram.
            super().emit(record)
        except Exception:  # noqa: BLE001 - as the library's handlers: no line of the log ends a program
            self.handleError(record)

    def _entry(self, record: logging.LogRecord) -> bytes:
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), _DEBUG)
        about: dict[str, object] = {"program": self._program, "module": record.name}
        if self._is_private is not None:
            about["private"] = str(self._is_private(record)).lower()
        fields = {
            "MESSAGE": self.format(record),
            "PRIORITY": str(priority),
            "SYSLOG_IDENTIFIER": "dpagent",
            **{f"DPAGENT_{key.upper()}": str(value) for key, value in (about | fields_of(record)).items()},
        }
        return b"".join(_field(name, value) for name, value in fields.items())


def _field(name: str, value: str) -> bytes:
    data = value.encode(errors="backslashreplace")
    if b"\n" not in data:
        return name.encode() + b"=" + data + b"\n"
    return name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"
