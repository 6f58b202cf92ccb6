"""The broker that ``broker-config --run`` started: which process it is, and how it is told to read its files.

The process that becomes the broker holds a lock on its file ``pid`` for as long as it lives (``flock``, which
passes to the program that takes its place): so the number in it is never that of a process that came later.
Who may write to the directory may write another number there, and a container has numbers of its own: the
kernel says whether that process has the lock (``/proc/locks``, proc(5)).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from signal import Signals
from typing import Final

from dpagent.errors import BrokerError
from dpagent.storage import disk_errors

_PID: Final = "running.pid"
_LOCKS: Final = Path("/proc/locks")
_READINGS: Final = 10
"""The kernel hands the list over in pieces: a lock that goes between two of them moves another one out of
sight. On a machine with hundreds of locks that come and go, one reading of 170 missed one that was held."""
_BEGINS_S: Final = 3.0
"""So long a broker that begins may have read its files, and not listen for signals yet."""


def claim(directory: Path) -> None:
    """Let this process be the broker of a directory, until it ends, whatever program it becomes.

    Raises:
        BrokerError: Another one runs there.
        StorageError: The file cannot be written.
    """
    file = directory / _PID
    with disk_errors(file):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not _locked(descriptor):
            number = os.read(descriptor, 32).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise BrokerError(f"A broker runs on {directory} already, process {number}. End that one first.")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        os.set_inheritable(descriptor, True)


def note_start(directory: Path) -> None:
    """The broker begins now in this process, which has claimed its directory.

    Raises:
        StorageError: The file is gone.
    """
    with disk_errors(directory / _PID):
        os.utime(directory / _PID)


def send(directory: Path, signal: Signals) -> bool:
    """Send a signal to the broker of a directory; return whether one runs there.

    Raises:
        BrokerError: It is another user's, or not the process that the file says.
        StorageError: The file cannot be read.
    """
    file = directory / _PID
    if not file.exists():
        return False
    with disk_errors(file):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _locked(descriptor):  # Nobody holds it.
                return False
            said, status = os.read(descriptor, 32), os.fstat(descriptor)
        finally:
            os.close(descriptor)
    if not said:  # It is about to write it, and reads its files later.
        return False
    if not _holds(said.decode("ascii", "replace").strip(), status.st_ino):
        raise BrokerError(
            f"{file} does not name the process that holds it: the broker runs in another container, or the "
            f"file was changed. It was not told to read its files: send it {signal.name} where it runs."
        )
    number, age_s = int(said), time.time() - status.st_mtime
    time.sleep(min(_BEGINS_S, max(0.0, _BEGINS_S - age_s)))
    try:
        os.kill(number, signal)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise BrokerError(
            f"The broker of {directory}, process {number}, is another user's: it was not told to read its "
            f"files. As its user: kill -{signal.name.removeprefix('SIG')} {number}"
        ) from error
    return True


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _holds(number: str, inode: int) -> bool:
    """Whether a process has the lock on a file, as far as the system tells."""
    if not _LOCKS.exists():  # It is not Linux.
        return number.isascii() and number.isdecimal() and int(number) > 0
    return any(_lists(number, inode) for _ in range(_READINGS))


def _lists(number: str, inode: int) -> bool:
    locks = [line.split() for line in _LOCKS.read_text(encoding="ascii").splitlines()]
    # Devices have other numbers there than stat(2) gives, on some file systems.
    return any(lock[1] == "FLOCK" and lock[4] == number and lock[5].endswith(f":{inode}") for lock in locks)
