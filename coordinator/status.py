"""The coordinator's status: its connection and what it does, for ``coordinator serve`` and `status --watch`.

All of it is the operator's. See :mod:`dpagent.status_file`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from dpagent.clock import Clock
from dpagent.schema.base import read_json
from dpagent.schema.json_values import json_of
from dpagent.schema.problems import SchemaError
from dpagent.status_file import Presence, Program, StatusPlace, presence_of, read_status_file

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 5.0
"""The file is written at least so often while the daemon's loop runs, and"""
_PERIOD_S: Final = 0.5
"""at most so often."""
_LATE_S: Final = 12 * HEARTBEAT_S
"""A daemon that has not written for so long is stuck, or closes a round of a large model."""


class Link(StrEnum):
    """The coordinator's connection to its broker."""

    STARTING = "starting"
    """It has not been asked for yet, or the first answer is awaited."""
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    STOPPED = "stopped"
    """The coordinator has ended, in good order or with an error that its log names."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a coordinator does.

    Attributes:
        link: its connection.
        broker: the broker's URL.
        since: when the connection began or broke (Unix time).
        reason: why it broke; empty while it is there.
        activity: what the daemon does, in a line.
        blocks: of an update in the open round; 0 without one.
        received, published: bytes since its start.
        written_at: Unix time.
        program: the coordinator.
    """

    link: Link
    broker: str
    since: float
    reason: str = ""
    activity: str = ""
    blocks: int = 0
    received: int = 0
    published: int = 0
    written_at: float = 0.0
    program: Program | None = None

    def presence(self) -> Presence:
        """Whether the coordinator that wrote this is there."""
        return Presence.ENDED if self.link is Link.STOPPED else presence_of(self.program)

    def is_late(self, now: float) -> bool:
        """Whether its last sign of life is long ago.

        Args:
            now: Unix time.
        """
        return now > self.written_at + _LATE_S


class StatusFile:
    """The status of this program. Nothing that fails here ends anything.

    Args:
        state_dir: the coordinator's, which is its own.
        broker: its URL.
        clock: the program's.
    """

    def __init__(self, state_dir: Path, broker: str, clock: Clock) -> None:
        self._place, self._clock = StatusPlace(state_dir), clock
        self._program = Program.this()
        self._status = Status(Link.STARTING, broker, clock.unix())
        self._written_at = -float("inf")
        self._has_failed = False
        self._is_new = True

    def link(self, link: Link, reason: str = "") -> None:
        """Note that the connection began or broke."""
        self._status = replace(self._status, link=link, since=self._clock.unix(), reason=reason)
        self._is_new = True

    def note(
        self, activity: str, *, blocks: int = 0, received: int = 0, published: int = 0, is_last: bool = False
    ) -> None:
        """Note what the daemon does; call it in its loop as often as you like.

        Args:
            activity: in a line.
            blocks: of an update in the open round.
            received: bytes since the start.
            published: bytes since the start.
            is_last: whether it is written in any case.
        """
        self._is_new |= activity != self._status.activity
        now = self._clock.monotonic()
        passed_s = now - self._written_at
        if not is_last and (passed_s < _PERIOD_S or (passed_s < HEARTBEAT_S and not self._is_new)):
            return
        self._written_at, self._is_new = now, False
        self._status = replace(
            self._status, activity=activity, blocks=blocks, received=received, published=published,
            written_at=self._clock.unix(), program=self._program,
        )  # fmt: skip
        try:
            self._place.write(json_of(self._status))
        except OSError as error:
            if not self._has_failed:
                log.warning("the page and `coordinator status` do not see what this program does: %s", error)
            self._has_failed = True


def read_status(state_dir: Path) -> Status | None:
    """The last status in a state directory; None if there is none, or none that is whole.

    Raises:
        StorageError: it cannot be read, as by another user.
    """
    data = read_status_file(state_dir)
    try:
        return None if data is None else read_json(Status, data)
    except SchemaError:
        return None  # Torn by a power cut, or of another version.
