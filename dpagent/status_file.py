"""The status of a daemon, in a small file that commands read beside it: where it lies, and who wrote it.

The file is replaced in one step, without a lock and without waiting for the disk. It lies in a directory in
memory, if the service manager or the session gives one, and ``status.json`` in the state directory is a link
to it; otherwise it lies there itself. It outlives a daemon that is killed: so it says which process wrote it.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from dpagent.storage import beside, disk_errors, overwrite, real_path

_NAME: Final = "status.json"
_MEMORY_DIRECTORIES: Final = ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR")
"""Variables that name a directory in memory: systemd.exec(5), or the XDG Base Directory Specification."""
_SIZE: Final = 4_096
"""Bytes of the file, whatever it says: a block of most disks."""
_MOST_BYTES: Final = 65_536
_PROC: Final = Path("/proc")


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


class Presence(StrEnum):
    """Whether the daemon that wrote a status is there."""

    RUNS = "runs"
    ENDED = "ended"
    """It stopped, in good order or with an error."""
    KILLED = "killed"
    """It ended without a word: it was killed, or the machine lost power."""
    ELSEWHERE = "elsewhere"
    """In another container, whose processes are not seen from here."""


class StatusPlace:
    """Where a daemon's status lies.

    Args:
        state_dir: of the daemon, its own.
        environment: of the daemon.

    Attributes:
        is_in_memory: whether writing it wears no disk.
    """

    def __init__(self, state_dir: Path, environment: Mapping[str, str] = os.environ) -> None:
        self._link = state_dir / _NAME
        memory = _memory_directory(environment)
        # Several daemons of one user have one directory.
        own = hashlib.sha256(os.fsencode(real_path(state_dir))).hexdigest()[:16]
        self._file = self._link if memory is None else memory / f"dpagent-{own}.json"
        self.is_in_memory = memory is not None

    def write(self, data: bytes) -> None:
        """Replace the status.

        Raises:
            OSError: It cannot be written.
        """
        self._point_there()
        _replace(self._file, data)

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
    """Replace a file in one step. What a power cut took was of no use after it.

    The new content is written over a spare file, which then changes places with the old one: once both are
    there, no room of the disk is needed that was not there before. Whether the file is kept up to date must
    not tell how full the disk is.
    """
    spare, old = beside(file, "new"), beside(file, "old")
    data = data.ljust(_SIZE, b"\n")
    old.unlink(missing_ok=True)  # Of a crash.
    _write_spare(spare, data)
    with suppress(OSError):  # The first time; or the file system has no links.
        os.link(file, old, follow_symlinks=False)
    spare.replace(file)
    if os.path.lexists(old):
        old.replace(spare)
    else:
        _write_spare(spare, data)


def _write_spare(spare: Path, data: bytes) -> None:
    with suppress(FileNotFoundError):
        found = spare.lstat()
        # In a shared directory it may be another's, or lead elsewhere: it is not written through.
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
            spare.unlink()
    descriptor = os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        overwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def _memory_directory(environment: Mapping[str, str]) -> Path | None:
    for name in _MEMORY_DIRECTORIES:
        first = environment.get(name, "").partition(":")[0]
        if first.startswith("/") and os.access(first, os.W_OK | os.X_OK):
            return Path(first)
    return None


# The reader's side.


def read_status_file(state_dir: Path) -> bytes | None:
    """The last status in a state directory; None if there is none, or it may be another user's.

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
            return stream.read(_MOST_BYTES)


def presence_of(program: Program | None) -> Presence:
    """Whether a daemon that has not said that it ended is there. Looks at processes, and takes no lock."""
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


def _started(pid: int) -> int | None:
    """When a process was started, in ticks.

    None: it is hidden from this user; -1: it has ended, and nobody has waited for it.
    """
    try:
        # The name, in brackets, may hold anything.
        text = (_PROC / f"{pid}/stat").read_text("utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return -1 if fields[0] == "Z" else int(fields[19])
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
