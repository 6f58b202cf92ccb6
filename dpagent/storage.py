"""State on disk: one directory, one owner, durable SQLite.

Both daemons keep their durable state in SQLite inside a *state directory* that
one process owns at a time. A committed transaction survives a power cut
(``synchronous=FULL``). A disk error becomes a :class:`StorageError` with a
sentence, and the interrupted transaction is rolled back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from dpagent import faults
from dpagent.errors import DamagedDatabaseError, StateInUseError, StorageError
from dpagent.faults import FaultPoint

SPACE_LEFT: Final = 256 << 20
"""Bytes of a disk that stay free for the ledger when room is taken for something else."""

_MOST_LOG_BYTES: Final = 1 << 20
"""Of a write-ahead log, once all of it is in the database: one large commit makes it longer for a while."""

_WRITABLE: Final = "Check that the path exists and is writable."

Migration = Callable[[sqlite3.Connection], None]


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system and of SQLite about ``path`` into :class:`StorageError`."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith("SQLITE_FULL"):
            raise StorageError(
                f"{path}: the disk is full. Nothing was lost; free some space and try again."
            ) from error
        # SQLITE_ERROR: a schema or values that our statements do not fit, as in a damaged file. No name: of a
        # text that is not UTF-8.
        damage = ("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_ERROR")
        if name.startswith(damage) or (not name and isinstance(error, sqlite3.OperationalError)):
            raise _damaged(path, error) from error
        if name.startswith("SQLITE_BUSY"):
            raise StorageError(
                f"{path} is locked by another program ({error}). Stop that program first."
            ) from error
        hint = f" {_whose(path)}" if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")) else ""
        raise StorageError(f"{path}: the database cannot be used ({error}).{hint}") from error
    except UnicodeDecodeError as error:  # of SQLite's own message, which quotes what is damaged
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StorageError(
                f"{path}: the disk is full. Nothing was lost; free some space and try again."
            ) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise StorageError(
                f"{path}: {error.strerror}. End what holds them, raise the limit (`ulimit -n`), and restart."
            ) from error
        hint = _whose(path) if error.errno in (errno.EACCES, errno.EPERM) else _WRITABLE
        raise StorageError(f"{path}: {error.strerror or error}. {hint}") from error


def _whose(path: Path) -> str:
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

    Raises:
        StateInUseError: Another process holds it.
        StorageError: It cannot be created or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open_private(path / "lock", "a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise StateInUseError(
                f"{path} is in use by process {holder}. Stop that process first: two programs must not share "
                "a state directory, and an agent with a second directory would spend its budget twice."
            ) from None
        with disk_errors(path):
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


def open_database(
    path: Path,
    migrations: Sequence[Migration],
    *,
    page_bytes: int = 4096,
    most_log_bytes: int = _MOST_LOG_BYTES,
) -> sqlite3.Connection:
    """Open or create a durable database and bring its schema up to date.

    A new one takes its place with its whole schema: whoever reads it beside a crash finds all or none of it.
    It is for its owner alone, and so are the log and the index that SQLite keeps beside it.

    Args:
        path: The file. Its directory must exist.
        migrations: The steps from an empty file to the current schema, in order; ``user_version``
            in the file is the number of applied steps.
        page_bytes: Of a new database: a power of two from 512 on. A commit writes every page that it has
            touched; small pages spare a memory card where commits are small.
        most_log_bytes: Of the write-ahead log, once all of it is in the database.

    Returns:
        A connection in autocommit mode: use :func:`transaction` to write.

    Raises:
        StorageError: The file is not a database, the disk is full, or the file was written
            by a newer version of the program.
    """
    with disk_errors(path):
        if not path.exists():
            _create_database(path, migrations, page_bytes)
        connection = sqlite3.connect(path, isolation_level=None, timeout=10)
        connection.row_factory = sqlite3.Row
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA journal_size_limit={most_log_bytes}")
            connection.execute("PRAGMA foreign_keys=ON")
            _migrate(connection, path, migrations)
        except BaseException:
            connection.close()
            raise
    return connection


def _create_database(path: Path, migrations: Sequence[Migration], page_bytes: int) -> None:
    new = path.with_name(f".{path.name}.new")
    # Of a crash while it was made, and of a database that somebody deleted.
    for leftover in (new, Path(f"{new}-journal"), Path(f"{path}-wal"), Path(f"{path}-shm")):
        leftover.unlink(missing_ok=True)
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size={page_bytes}")
        _migrate(connection, path, migrations)
    replace_durably(path, new)


def _migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration]) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(migrations):
        raise StorageError(
            f"{path} has schema {version}; this program supports up to {len(migrations)}. "
            "It was written by a newer dpagent; install that version."
        )
    if version:
        _require_schema(connection, path, migrations[:version])
    # One transaction per step, so that the next start can continue after a crash.
    for number, migrate in enumerate(migrations[version:], start=version + 1):
        with transaction(connection):
            migrate(connection)
            connection.execute(f"PRAGMA user_version={number}")


def _require_schema(connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration]) -> None:
    """See that tables are as these steps make them: a program that finds another one when it writes has by
    then charged a budget, or counted half.

    Raises:
        DamagedDatabaseError: One is not, or is missing.
    """
    statements = "SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND sql IS NOT NULL"
    found: dict[str, str] = dict(connection.execute(statements))
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        made.row_factory = sqlite3.Row
        for migrate in migrations:
            migrate(made)
        for name, sql in made.execute(statements):
            if found.get(name) != sql:
                raise DamagedDatabaseError(
                    f"{path} is damaged, or of another build of dpagent: its {name!r} is not what schema "
                    f"{len(migrations)} of this one has. Nothing was changed. Go on with the build that made "
                    "it, or restore it from a backup."
                )


def require_whole(connection: sqlite3.Connection, path: Path) -> None:
    """Read all of a database, to find a page that was not written, or not whole, before it is relied on.

    Raises:
        DamagedDatabaseError: There is one, or a value that its table does not allow, or one that refers to a
            row that is not there.
        StorageError: The database cannot be read.
    """
    with disk_errors(path):
        problem = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        # An own question: the other one does not ask it.
        orphan = connection.execute("PRAGMA foreign_key_check").fetchone()
    if problem != "ok":
        raise _damaged(path, problem)
    if orphan is not None:
        table, _, parent, _ = orphan
        raise _damaged(path, f"a row of {table} refers to one of {parent} that is not there")


def _damaged(path: Path, problem: object) -> DamagedDatabaseError:
    return DamagedDatabaseError(f"{path} is not a readable database ({problem}). Restore it from a backup.")


def open_readonly(path: Path) -> sqlite3.Connection:
    """Open an existing database for reading, also while a daemon writes to it.

    Raises:
        StorageError: The file is missing or is not a database.
    """
    if not path.is_file():
        raise StorageError(
            f"{path} does not exist. Check the directory, or first start the program that creates it."
        )
    with disk_errors(path):
        try:
            return _opened_as(path, "mode=ro")
        except sqlite3.Error as error:
            log = Path(f"{path}-wal")
            if error.sqlite_errorname != "SQLITE_CANTOPEN" or (log.exists() and log.stat().st_size):
                raise
            # Where nothing can be written, the files that readers share with a writer cannot be made. There
            # is no writer then, and all is in this file.
            return _opened_as(path, "immutable=1")


def _opened_as(path: Path, how: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, timeout=10)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All statements inside take effect and are durable, or none of them does.

    Args:
        connection: From :func:`open_database`.
    """
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def real_path(path: Path) -> Path:
    """A path without links, as far as there are files. One that is a link to itself stays as it is, for the
    system to refuse, where ``Path.resolve`` of Python before 3.13 raises a RuntimeError."""
    return Path(os.path.realpath(path))


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data``: a reader sees the old file or the new one, never a partial one.

    A link remains, and its target is replaced. A target that is not a regular file (a pipe, a device) is
    never replaced.

    Raises:
        StorageError: The disk is full, the file cannot be written, or the target is not a regular file.
    """
    with disk_errors(path):
        path = real_path(path)
        if path.exists() and not path.is_file():
            raise StorageError(f"{path} is not a regular file; give the name of a file to write.")
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
    has no hard links (FAT), the next spare is a new file.

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
        path = real_path(path)
        if path.exists() and not path.is_file():
            raise StorageError(f"{path} is not a regular file; give the name of a file to write.")
        spare, old = _spare_of(path), path.with_name(f".{path.name}.old")
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
        with contextlib.suppress(OSError):  # The first time; or the file system has none.
            os.link(path, old)
        _take_place(path, spare)
        if old.exists():
            old.replace(spare)


def take_room_for(path: Path, size: int, *, mode: int = 0o644) -> None:
    """Have the room in which a file is replaced by :func:`write_over_spare` with this size. What it holds
    stays; if it is not there, it is made of line ends alone.

    Raises:
        StorageError: The disk has no such room, or the file cannot be read or written.
    """
    with disk_errors(path):
        place = real_path(path)
        both = (place, _spare_of(place))
        if all(each.is_file() and each.stat().st_size >= size for each in both):
            return
        data = place.read_bytes() if place.exists() else b""
    for _ in both:  # They change places.
        write_over_spare(path, data, size=size, mode=mode)


def _spare_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.spare")


def _take_place(path: Path, new: Path) -> None:
    faults.reached(FaultPoint.FILE_WRITTEN)
    replace_durably(path, new)


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
            missing = size - _on_disk(path.stat())
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


def _on_disk(state: os.stat_result) -> int:
    """Bytes of a file that have their blocks."""
    return min(state.st_size, state.st_blocks * 512)


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
            missing = size - _on_disk(os.fstat(descriptor))
            if missing <= 0:
                return True
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                raise StorageError(
                    f"{path}: {holds} take {missing:,} bytes more, which cannot be had ({error.strerror})."
                    f" {remedy}"
                ) from error
            os.fsync(descriptor)
            return False
        finally:
            os.close(descriptor)
