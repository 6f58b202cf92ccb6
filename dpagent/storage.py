"""State on disk: one directory, one owner, files that are durable and whole.

Daemons keep their state inside a *state directory* that one process owns at a time, most of it in a database
(:mod:`dpagent.database_file`). An error of the disk becomes a :class:`StorageError` with a sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from dpagent import faults
from dpagent.errors import StateInUseError, StorageError
from dpagent.faults import FaultPoint

SPACE_LEFT: Final = 256 << 20
"""Bytes of a disk that stay free for the ledger when room is taken for something else."""

_HERE: Final = -100
_EXCHANGED: Final = 2
"""AT_FDCWD and RENAME_EXCHANGE of renameat2(2)."""
_WRITABLE: Final = "Check that the path exists and is writable."


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system about ``path``, and damage of its text, into :class:`StorageError`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise StorageError(
            f"{path} is no text in UTF-8 ({error.reason}). Restore it from a backup."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            more = "" if error.errno == errno.ENOSPC else " for this user, by its quota"
            raise StorageError(
                f"{path}: the disk is full{more}. Nothing was lost; free some space and try again."
            ) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise StorageError(
                f"{path}: {error.strerror}. End what holds them, raise the limit (`ulimit -n`), and restart."
            ) from error
        hint = whose(path) if error.errno in (errno.EACCES, errno.EPERM) else _WRITABLE
        raise StorageError(f"{path}: {error.strerror or error}. {hint}") from error


def whose(path: Path) -> str:
    """What to do where this program may not write: what there is of the path may be another user's."""
    path = path.absolute()
    # Of a directory that may not be entered, the parts are not seen: it is the one that counts.
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    owner, user = there.lstat().st_uid, os.geteuid()
    if user in (owner, 0):
        return _WRITABLE
    return (
        f"{there} belongs to user {owner}, and this program runs as user {user}. Choose a place of that "
        f"user's. Where it is a directory that a container is given, `chown -R {user}` it outside."
    )


def open_private(path: Path, mode: str) -> IO[str]:
    """Open a text file that, if it is made, is for its owner alone: also in a directory that others may look
    into, and whatever the umask is."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


class StateDirectory:
    """A state directory, created private (mode 0700) and held exclusively while open.

    One that was there before keeps its mode: it may be the root of a disk. So each file in it that holds
    anything private has the mode 0600.

    Args:
        path: The directory; parents are created as needed.
        instead: What not to do where another process holds it, as a sentence.

    Raises:
        StateInUseError: Another process holds it.
        StorageError: It cannot be created or written.
    """

    def __init__(self, path: Path, instead: str = "") -> None:
        self.path, self._instead = path, instead
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open_private(path / "lock", "a+")
        with disk_errors(path / "lock"):
            try:
                self._take()
            except BaseException:
                self._lock.close()
                raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            raise StateInUseError(
                f"{self.path} is in use by process {holder}. Stop that process first: two programs must not "
                f"share a state directory. {self._instead}".strip()
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()

    def close(self) -> None:
        """Release the directory. The end of the process, however it ends, also releases the lock."""
        self._lock.close()

    def __enter__(self) -> StateDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def real_path(path: Path) -> Path:
    """A path without links, as far as there are files. One that is a link to itself stays as it is, for the
    system to refuse, where ``Path.resolve`` of Python before 3.13 raises a RuntimeError."""
    return Path(os.path.realpath(path))


def place_of_file(path: Path) -> Path:
    """Where a file is to be written anew, or replaced: a link remains, and its target is replaced.

    Raises:
        StorageError: A pipe, a device or a directory is there, or nobody may look.
    """
    with disk_errors(path):
        place = real_path(path)
        if place.exists() and not place.is_file():
            raise StorageError(f"{path} is not a regular file; give the name of a file to write.")
    return place


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data``: a reader sees the old file or the new one, never a partial one.

    A link remains, and its target is replaced. A target that is not a regular file (a pipe, a device) is
    never replaced.

    Raises:
        StorageError: The disk is full, the file cannot be written, or the target is not a regular file.
    """
    with disk_errors(path):
        path = place_of_file(path)
        temporary = path.with_name(f".{path.name}.new")
        # A file or link from a crash or another user: do not write through it.
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                # os.open applies the umask: set the mode explicitly.
                if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                    os.fchmod(stream.fileno(), mode)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)  # A full disk is wanted for what is in use.
            raise
        _take_place(path, temporary)


def write_over_spare(path: Path, data: bytes, *, size: int = 0, mode: int = 0o644) -> None:
    """As :func:`write_atomically`, for a small file that has to be replaced on a full disk too.

    The new content is written over a spare file, which then changes places with the old one: from the second
    time on, or after :func:`take_room_for`, it needs no room that was not there before. Where a file system
    lets two files not change places, and has no hard links (older FAT), the next spare is a new file.

    Args:
        path: the file.
        data: its new content.
        size: that the content is filled up to with line ends, where its length may vary.
        mode: of the file.

    Raises:
        StorageError: It cannot be written, or the target is not a regular file.
    """
    data = data.ljust(size, b"\n")
    with disk_errors(path):
        path = place_of_file(path)
        spare, old = beside(path, "spare"), beside(path, "old")
        old.unlink(missing_ok=True)  # Of a crash.
        with contextlib.suppress(FileNotFoundError):
            found = spare.lstat()
            # Of another user, or of a crash, and one with the file itself: do not write through it.
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
                spare.unlink()
        descriptor = os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            os.fchmod(descriptor, mode)
            overwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _take_place(path, spare, second_name=old)


def take_room_for(path: Path, size: int, *, mode: int = 0o644) -> None:
    """Have the room in which a file is replaced by :func:`write_over_spare` with this size. What it holds
    stays; if it is not there, it is made of line ends alone.

    Raises:
        StorageError: The disk has no such room, or the file cannot be read or written.
    """
    with disk_errors(path):
        place = real_path(path)
        both = (place, beside(place, "spare"))
        if all(each.is_file() and each.stat().st_size >= size for each in both):
            return
        data = place.read_bytes() if place.exists() else b""
    for _ in both:  # They change places.
        write_over_spare(path, data, size=size, mode=mode)


@functools.lru_cache(maxsize=64)
def beside(path: Path, ending: str) -> Path:
    """A file beside another, by its name, hidden, and an ending.

    It is kept: a name that comes and goes takes a new place in Python's table of names each time, and once
    those are used up the table is made anew, maybe twice as large. So a program took 1 MiB more after hours.
    """
    return path.with_name(f".{path.name}.{ending}")


def _take_place(path: Path, new: Path, *, second_name: Path | None = None) -> None:
    """Let ``new`` take the place of ``path``; with a ``second_name``, ``new`` is then what was there."""
    faults.reached(FaultPoint.FILE_WRITTEN)
    if second_name is None:
        replace_durably(path, new)
    elif path.exists() and _change_places(path, new):
        sync_directory(path)
    else:
        with contextlib.suppress(OSError):  # The first time; or the file system has no hard links.
            os.link(path, second_name)
        replace_durably(path, new)
        if second_name.exists():
            second_name.replace(new)


def _change_places(one: Path, other: Path) -> bool:
    """Let two files change places in one step, and make no name, for which their directory may need a block
    more; False: the system cannot."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    if exchange is None:
        return False
    return bool(exchange(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGED) == 0)


def replace_durably(path: Path, new: Path) -> None:
    """Let ``new``, whose content is durable, take the place of ``path``, beside it.

    Raises:
        OSError: It cannot.
    """
    new.replace(path)
    sync_directory(path)


def sync_directory(path: Path) -> None:
    """Make durable which files are in the directory of ``path``, and what their names are.

    Raises:
        OSError: It cannot.
    """
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def overwrite(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` into an open file, from a byte on.

    Raises:
        OSError: It cannot be written.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def require_room(path: Path, size: int, holds: str, remedy: str) -> None:
    """Refuse a file for which the disk has no room. It need not exist, nor its directory.

    Args:
        path: the file; what it has on the disk counts.
        size: bytes that it is to have.
        holds: what the file is for, and
        remedy: what to do without room, for the text of the error.

    Raises:
        StorageError: 256 MiB of the disk would not stay free, or the file cannot be looked at.
    """
    place = path.parent
    with disk_errors(path):
        try:
            missing = size - bytes_on_disk(path.stat())
        except FileNotFoundError:
            missing = size
        while not os.path.exists(place) and place != place.parent:  # noqa: PTH110 - where it may not look
            place = place.parent
        space = os.statvfs(place)
    free = space.f_bavail * space.f_frsize
    if missing > 0 and free < missing + SPACE_LEFT:
        raise StorageError(
            f"{path}: {holds} take {missing:,} bytes more, and the disk has {free:,}; expected"
            f" {SPACE_LEFT >> 20} MiB to stay free. {remedy}"
        )


def bytes_on_disk(state: os.stat_result) -> int:
    """Bytes of a file that have their blocks."""
    return min(state.st_size, state.st_blocks * 512)


def take_blocks(descriptor: int, size: int) -> bool:
    """Have a file's first bytes on blocks of the disk that are its own.

    Nothing is asked for where it has them: on a full disk XFS refuses them even then.

    Args:
        descriptor: of the file, open for writing.
        size: so many bytes.

    Returns:
        Whether any was missing.

    Raises:
        OSError: they cannot be had.
    """
    if bytes_on_disk(os.fstat(descriptor)) >= size:
        return False
    os.posix_fallocate(descriptor, 0, size)
    return True


def take_room(path: Path, size: int, holds: str, remedy: str) -> bool:
    """Make a file at least so large, with blocks of the disk that are its own: later writes find room.

    Args:
        path: the file; made with mode 0600.
        size: bytes.
        holds: what the file is for, and
        remedy: what to do without room, for the text of the error.

    Returns:
        Whether all of it was there before.

    Raises:
        StorageError: 256 MiB of the disk would not stay free, or the file cannot be written.
    """
    require_room(path, size, holds, remedy)
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                missing = size - bytes_on_disk(os.fstat(descriptor))
                if not take_blocks(descriptor, size):
                    return True
            except OSError as error:
                raise StorageError(
                    f"{path}: {holds} take {missing:,} bytes more, which cannot be had ({error.strerror})."
                    f" {remedy}"
                ) from error
            os.fsync(descriptor)
            return False
        finally:
            os.close(descriptor)
