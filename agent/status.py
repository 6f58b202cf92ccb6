"""The agent's status: what it does now, in a small file for its owner, who reads it by ``dpagent status``.

Whoever helps the owner may see it. So it holds what the broker and the agent's configuration could tell
already: connection, plan, phase, why the governor holds training back. Nothing in it depends on a record: a
phase ends when its slots do, whatever was computed in them (:mod:`agent.cycle`).

The file is replaced in one step when something has changed, without a lock and without waiting for the disk.
It lies in a directory in memory, if the service manager or the session gives one, and ``status.json`` in the
state directory is a link to it; otherwise it lies there itself, and is written more seldom, to spare the
flash. It outlives an agent that is killed: so it says which process wrote it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dpagent.clock import Clock
from dpagent.storage import disk_errors, real_path

log = logging.getLogger(__name__)

_NAME: Final = "status.json"
_MEMORY_DIRECTORIES: Final = ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR")
"""Variables that name a directory in memory: systemd.exec(5), or the XDG Base Directory Specification."""
_PERIOD_S: Final = 1.0
"""The file is written once in so long on average, in memory, and"""
_PERIOD_ON_DISK_S: Final = 30.0
"""on the disk of the state directory, of less than 4 KiB each; and"""
_BURST: Final = 8
"""so often at once, where little has changed before: a start, and a round, have several phases."""
_MOST_BYTES: Final = 65_536
_PROC: Final = Path("/proc")


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
class Program:
    """A process, such that no later one is taken for it.

    Attributes:
        pid: its number.
        started: when, in ticks since the machine was started (proc_pid_stat(5)).
        boot: of the machine, by the kernel's random id.
        namespace: of process numbers, as in a container.
    """

    pid: int
    started: int
    boot: str
    namespace: str

    @classmethod
    def this(cls) -> Program:
        """The one that runs this."""
        return cls(os.getpid(), _started(os.getpid()) or 0, _boot(), _namespace())


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

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)

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


_STATUS: TypeAdapter[Status] = TypeAdapter(Status)


class StatusFile:
    """The status of this program, on disk or in memory. Nothing that fails here ends anything.

    Args:
        state_dir: the agent's state directory, which is its own.
        clock: the program's.
        environment: of the program.
    """

    def __init__(self, state_dir: Path, clock: Clock, environment: Mapping[str, str] = os.environ) -> None:
        self._link, self._clock = state_dir / _NAME, clock
        memory = _memory_directory(environment)
        # Several agents of one user have one directory.
        own = hashlib.sha256(os.fsencode(real_path(state_dir))).hexdigest()[:16]
        self._file = self._link if memory is None else memory / f"dpagent-{own}.json"
        self._period_s = _PERIOD_ON_DISK_S if memory is None else _PERIOD_S
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
            self._point_there()
            _replace(self._file, _STATUS.dump_json(whole))
        except OSError as error:
            if not self._has_failed:
                log.warning("`dpagent status` does not see what this agent does: %s", error)
            self._has_failed = True

    def _point_there(self) -> None:
        """Let the name in the state directory lead to the file."""
        if self._file == self._link:
            return
        with suppress(OSError):
            if self._link.readlink() == self._file:
                return
        new = self._link.with_name(f".{_NAME}.new")
        new.unlink(missing_ok=True)
        new.symlink_to(self._file)
        new.replace(self._link)


def _replace(file: Path, data: bytes) -> None:
    """Replace a file in one step. What a power cut takes was of no use after it."""
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)  # Not written through: in a shared directory it may be another's.
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
    new.replace(file)


def _memory_directory(environment: Mapping[str, str]) -> Path | None:
    for name in _MEMORY_DIRECTORIES:
        first = environment.get(name, "").partition(":")[0]
        if first.startswith("/") and os.access(first, os.W_OK | os.X_OK):
            return Path(first)
    return None


# The reader's side.


class Presence(StrEnum):
    """Whether the agent that wrote a status is there."""

    RUNS = "runs"
    ENDED = "ended"
    """It stopped, in good order or with an error."""
    KILLED = "killed"
    """It ended without a word: it was killed, or the machine lost power."""
    ELSEWHERE = "elsewhere"
    """In another container, whose processes are not seen from here."""


def read_status(state_dir: Path) -> Status | None:
    """The last status in a state directory; None if there is none, or none that is whole.

    Raises:
        StorageError: it cannot be read, as by another user.
    """
    file = state_dir / _NAME
    with disk_errors(file):
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with os.fdopen(descriptor, "rb") as stream:
            found = os.fstat(stream.fileno())
            # In a directory that others write to, it may be another's.
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, state_dir.stat().st_uid):
                return None
            data = stream.read(_MOST_BYTES)
    try:
        return _STATUS.validate_json(data)
    except ValidationError:
        return None  # Torn by a power cut, or of another version.


def presence_of(status: Status) -> Presence:
    """Whether the agent that wrote a status is there. Looks at processes, and takes no lock."""
    if status.link is Link.STOPPED:
        return Presence.ENDED
    program = status.program
    if program is None or program.boot != _boot():
        return Presence.KILLED
    if program.namespace != _namespace():
        return Presence.ELSEWHERE
    try:
        os.kill(program.pid, 0)
    except PermissionError:
        pass  # It is another user's.
    except OSError:
        return Presence.KILLED
    return Presence.RUNS if _started(program.pid) in (None, program.started) else Presence.KILLED


def as_values(status: Status) -> dict[str, Any]:
    """A status as JSON has it."""
    values: dict[str, Any] = _STATUS.dump_python(status, mode="json")
    return values


def _started(pid: int) -> int | None:
    """When a process was started, in ticks; None if it is hidden from this user."""
    try:
        # The name, in brackets, may hold anything.
        return int(
            (_PROC / f"{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
    except (OSError, IndexError, ValueError):
        return None


def _boot() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return ""
