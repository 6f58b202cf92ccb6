"""The agent's status: what it does now, in a small file for its owner, who reads it by ``dpagent status``.

Whoever helps the owner may see it. So it holds what the broker and the agent's configuration could tell
already: connection, plan, phase, why the governor holds training back. Nothing in it depends on a record: a
phase ends when its slots do, whatever was computed in them (:mod:`agent.cycle`).

The file (:mod:`dpagent.status_file`) is replaced when something has changed; where it does not lie in memory,
more seldom, to spare the flash.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, cast

from dpagent.clock import Clock
from dpagent.schema.base import checked_as, read_json
from dpagent.schema.json_values import json_of, json_values
from dpagent.schema.problems import SchemaError
from dpagent.status_file import Presence, Program, StatusPlace, read_status_file
from dpagent.status_file import presence_of as presence_of_program

log = logging.getLogger(__name__)

_PERIOD_S: Final = 1.0
"""The file is written once in so long on average, in memory, and"""
_PERIOD_ON_DISK_S: Final = 30.0
"""on the disk of the state directory, of less than 4 KiB each; and"""
_BURST: Final = 8
"""so often at once, where little has changed before: a start, and a round, have several phases."""
OF_ANOTHER_VERSION: Final = (
    "runs, but is of another version than this command, which does not know its status"
)
OTHER_VERSION_REMEDY: Final = "Restart it after an upgrade, or use the command of its installation."
"""What is said of an agent that has left an :class:`OtherStatus`, and what to do."""


class Link(StrEnum):
    """The agent's connection to its broker."""

    STARTING = "starting"
    """The records are read; it has not been asked for yet."""
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    STOPPED = "stopped"
    """The agent has ended, in good order or with an error that its log names."""


class Doing(StrEnum):
    """What an agent is at, in the announced round."""

    MODEL = "model"
    """Its model is arriving."""
    DECIDE = "decide"
    PREPARE = "prepare"
    TRAIN = "train"
    """Or rehearse, where it sits the round out and hides that."""
    SETTLED = "settled"
    """Its part is spooled, or it has none."""
    FINISHED = "finished"
    """The job is over."""


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """The announced round.

    Attributes:
        job: its id, in hexadecimal.
        round: its number, and
        rounds: how many the job has.
        method: of the job.
        doing: what the agent is at.
        until: when that ends, as far as it is known (Unix time).
        deadline: of the plan (Unix time).
    """

    job: str
    round: int
    rounds: int
    method: str
    doing: Doing
    until: float | None
    deadline: float


@dataclass(frozen=True, slots=True)
class Status:
    """What an agent does.

    Attributes:
        link: its connection.
        broker: the broker's URL.
        topic: of the plans that it waits for.
        round: the announced round, if one is known.
        held: why the governor holds training back now.
        last_receipt_at: when the coordinator last confirmed a fragment, since the agent's start (Unix time).
        written_at: Unix time.
        program: the agent.
    """

    link: Link
    broker: str
    topic: str
    round: RoundStatus | None = None
    held: str | None = None
    last_receipt_at: float | None = None
    written_at: float = 0.0
    program: Program | None = None

    def in_words(self) -> str:
        """What the agent does, in a line."""
        match self.link:
            case Link.STARTING | Link.STOPPED:
                return str(self.link)
            case Link.DISCONNECTED:
                return f"not connected to {self.broker}"
            case Link.CONNECTED:
                if (known := self.round) is None:
                    return f"connected; waiting for a plan on {self.topic}"
                if known.doing is Doing.FINISHED:
                    return f"connected; job {known.job[:8]} is finished"
                held = "" if self.held is None else f"; training is held back: {self.held}"
                return f"connected; round {known.round} of job {known.job[:8]}: {known.doing}{held}"

    def says(self) -> Status:
        """What makes it another one: not the times, which are never twice the same."""
        announced = None if self.round is None else replace(self.round, until=None)
        return replace(self, round=announced, written_at=0.0, program=None)


@dataclass(frozen=True, slots=True)
class OtherStatus:
    """What is understood of the status of an agent of another version.

    Attributes:
        program: the agent.
        is_stopped: whether it says that it has ended.
    """

    program: Program
    is_stopped: bool


class StatusFile:
    """The status of this program, on disk or in memory. Nothing that fails here ends anything.

    Args:
        state_dir: the agent's state directory, which is its own.
        clock: the program's.
        environment: of the program.
    """

    def __init__(self, state_dir: Path, clock: Clock, environment: Mapping[str, str] = os.environ) -> None:
        self._place, self._clock = StatusPlace(state_dir, environment), clock
        self._period_s = _PERIOD_S if self._place.is_in_memory else _PERIOD_ON_DISK_S
        self._allowance, self._allowed_at = float(_BURST), clock.monotonic()
        self._program = Program.this()
        self._said: Status | None = None
        self._has_failed = False

    def note(self, status: Status, *, is_last: bool = False) -> None:
        """Write a status that says something new, unless too many were written of late.

        Args:
            status: without its time and program.
            is_last: whether it is written in any case.
        """
        says, now = status.says(), self._clock.monotonic()
        if says == self._said:
            return
        earned = (now - self._allowed_at) / self._period_s
        self._allowance, self._allowed_at = min(_BURST, self._allowance + earned), now
        if self._allowance < 1 and not is_last:
            return
        self._allowance -= 1
        self._said = says
        whole = replace(status, written_at=self._clock.unix(), program=self._program)
        try:
            self._place.write(json_of(whole))
        except OSError as error:
            if not self._has_failed:
                log.warning("`dpagent status` does not see what this agent does: %s", error)
            self._has_failed = True


# The reader's side.


def read_status(state_dir: Path) -> Status | OtherStatus | None:
    """The last status in a state directory; None if there is none, or none that is whole.

    Raises:
        StorageError: it cannot be read, as by another user.
    """
    if (data := read_status_file(state_dir)) is None:
        return None
    try:
        return cast(Status, read_json(Status, data))
    except SchemaError:
        return _other_status(data)


def _other_status(data: bytes) -> OtherStatus | None:
    """What is not a status of this version: None if it is of no other, but torn by a power cut, say."""
    try:
        values = json.loads(data.decode())
        return OtherStatus(checked_as(Program, values["program"]), values.get("link") == Link.STOPPED)
    except (ValueError, RecursionError, TypeError, KeyError, SchemaError):
        return None


def presence_of(status: Status | OtherStatus) -> Presence:
    """Whether the agent that wrote a status is there. Looks at processes, and takes no lock."""
    is_stopped = status.is_stopped if isinstance(status, OtherStatus) else status.link is Link.STOPPED
    return Presence.ENDED if is_stopped else presence_of_program(status.program)


def as_values(status: Status) -> dict[str, Any]:
    """A status as JSON has it."""
    values: dict[str, Any] = json_values(status)
    return values
