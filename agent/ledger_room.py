"""Room on the disk for the books, taken when the agent starts: no round asks the disk for more.

Records may lie on the same disk. If a charge, or an update, needed blocks that are free at that moment, a
coordinator who chooses how long an update is would learn by the agent's silence how full the disk is, to a
block, and so whether a record is there: for no more than the ε of a round with any noise.

So the largest database that the device's limits allow is taken at the first start, as free pages of it, and
its write-ahead log, and the index of that. A database never shrinks; log and index go when the program stops,
and whoever refuses its connection makes it stop. So each has a second name, under which its blocks stay until
the next start. A disk that has not so much keeps the agent from its first start.

What it does not cover: a file system that writes each block anew elsewhere (btrfs, ZFS, an overlay over
another), or that stores zeros in no room, keeps no such promise. Nor does XFS where a copy of the directory
shares its blocks (``cp`` makes one), until the next look or start (:mod:`dpagent.shared_blocks`). On one
without hard links (FAT), log and index need their room at each start. Nor does it cover a reader of the
database that goes on for many rounds, which keeps the log from beginning anew, or over a stop, which keeps
what stands in it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from agent.limit_settings import LimitSettings
from agent.spool import SETTLED_KEPT
from dpagent.database_file import transaction
from dpagent.errors import StorageError
from dpagent.protocol.dummies import MAX_DUMMIES
from dpagent.storage import bytes_on_disk, overwrite, sync_directory, take_blocks

_DUMMY_BYTES: Final = 320
_DUMMY_WITH_TOKEN_BYTES: Final = 1_500
_CHARGE_BYTES: Final = 1_536
"""Of a charge, and of what is remembered of its job."""
_SETTLED_BYTES: Final = 320
_FIXED_BYTES: Final = 3 << 20
"""Of the last rounds, each with the longest reason, and the counters."""
_TOKEN_BYTES: Final = 10 << 20
"""Of the requests for tokens that are kept, 64 of at most 224, and of lists of keys."""
_PACKED: Final = 1.25
"""Pages that rows are spread over have so much more than the rows."""
_LOG_BYTES: Final = 4 << 20
"""Of the log besides the largest transaction: it begins anew when it has six thousand pages, 3 MiB."""
_AT_ONCE: Final = 8 << 20
_FEW_PAGES: Final = 64
_FRAME_BYTES: Final = 24
_INDEXED: Final = 4_000
"""Pages of the log, and a few more, that a part of its index tells of."""
_INDEX_BYTES: Final = 32 << 10
_PARTS_MORE: Final = 4
_LOCKED_FROM: Final = 120
_LOCKED_BYTES: Final = 9
"""Of an index, which each connection locks one of, at least (walformat.html, os_unix.c of SQLite)."""
_ERASED_AT_ONCE: Final = 1 << 16
_HEADER_BYTES: Final = 136
"""Of the index, of which the log has 32."""


class LedgerRoom(NamedTuple):
    """What the books may need.

    Attributes:
        database_bytes: of the database.
        log_bytes: of its write-ahead log.
    """

    database_bytes: int
    log_bytes: int

    @classmethod
    def of(cls, limits: LimitSettings, *, has_tokens: bool) -> LedgerRoom:
        """By the device's own limits, which plans are held to before anything is kept of them.

        Args:
            limits: of the device.
            has_tokens: whether the device may ask for tokens.
        """
        # Dummies ask for a receipt beside an update that has none.
        dummies = MAX_DUMMIES * (_DUMMY_WITH_TOKEN_BYTES if has_tokens else _DUMMY_BYTES)
        sent = (limits.maximum_update_mib << 20) + dummies
        rows = sent + _CHARGE_BYTES * limits.maximum_charges + _SETTLED_BYTES * SETTLED_KEPT
        rows += _FIXED_BYTES + has_tokens * _TOKEN_BYTES
        return cls(int(_PACKED * rows), int(_PACKED * sent) + _LOG_BYTES)

    def missing_bytes(self, file: Path) -> int:
        """What a database has not taken of it yet.

        Args:
            file: the database, which need not be there.
        """
        log = Path(f"{file}-wal")
        has_log = max(map(_size_of, (log, _kept_of(log))))
        return max(0, self.database_bytes - _size_of(file)) + max(0, self.log_bytes - has_log)


class KeptRoom(NamedTuple):
    """What the last stop has left of log and index of a database.

    Attributes:
        log_bytes: of the log.
        index_bytes: of its index, of which SQLite gives up all but a part when it is opened.
    """

    log_bytes: int
    index_bytes: int


def put_log_back(file: Path) -> KeptRoom:
    """Let log and index of a database be the files that the last stop left of them, which tell nothing any
    more. Call it before the database is opened, with the state directory locked.

    Args:
        file: the database, which need not be there.

    Raises:
        sqlite3.Error: the database cannot be read.
        OSError: the disk fails.
    """
    log, index = Path(f"{file}-wal"), Path(f"{file}-shm")
    kept = KeptRoom(_size_of(_kept_of(log)), _size_of(_kept_of(index)))
    if kept.log_bytes and log.exists() and not _size_of(log):
        _remove_empty_log(file)
    if not log.exists() and _is_read(_kept_of(index)):
        for each in (log, index):
            _kept_of(each).unlink(missing_ok=True)
    # The log comes last: where nothing can be written, no reader opens one that has no index.
    for each in (index, log):
        # One that is there counts: a power cut left it.
        if file.exists() and not each.exists() and _is_alone(_kept_of(each)):
            _put_back(each)
    return kept


def _remove_empty_log(file: Path) -> None:
    """Remove the log without an entry that a reader has left, and its index: a reader may make files but not
    remove them. Where one goes on, they stay."""
    with contextlib.closing(sqlite3.connect(file, timeout=0)) as connection:
        # Then SQLite keeps the index in memory: a full disk may have no room for one.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        try:
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname.startswith("SQLITE_BUSY"):
                return
            raise
        Path(f"{file}-shm").unlink(missing_ok=True)


def _is_read(index: Path) -> bool:
    """Whether another process goes on with the index, and so with its log, of a database that was taken from
    it, as by a restore: the log of the next database would be read as of that one."""
    try:
        with index.open("rb+") as stream:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB, _LOCKED_BYTES, _LOCKED_FROM)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _is_alone(kept: Path) -> bool:
    """Whether the last stop has left a file, to which no other name leads: what makes one file of those with
    the same content (``hardlink``, ``jdupes``) makes one of two boards' logs. Then it is given up."""
    try:
        found = kept.lstat()
    except FileNotFoundError:
        return False
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return True
    kept.unlink()
    return False


def _put_back(file: Path) -> None:
    """Give a file that SQLite has removed its name again."""
    kept = _kept_of(file)
    descriptor = os.open(kept, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Without its header nothing in it counts: the database has moved on since.
        overwrite(descriptor, bytes(_HEADER_BYTES), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(kept, file)
    except FileExistsError:  # A reader has just made one.
        pass
    except OSError:  # The directory was copied to a file system without hard links.
        kept.unlink()


def _kept_of(file: Path) -> Path:
    """The second name of a file that SQLite removes."""
    return file.with_name(f".{file.name}.room")


def _forget_other(file: Path) -> None:
    """Give up what the last stop left of a file, if another has taken its place."""
    kept = _kept_of(file)
    if not (file.exists() and kept.exists() and kept.samefile(file)):
        kept.unlink(missing_ok=True)


def _name_twice(file: Path) -> None:
    """Have a file keep its blocks when SQLite removes it, where the file system has hard links."""
    with contextlib.suppress(OSError):
        os.link(file, _kept_of(file))


def _erase(file: Path) -> None:
    """Overwrite with zeros, durably, what was written to a log that SQLite has removed: fragments as they are
    before they are sealed.

    That it is removed has to be durable first. A power cut would else bring it back without its end: then the
    pages in the beginning, which are older, would count in place of those in the database.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        sync_directory(file)
        for start, end in _written(descriptor):
            for place in range(start, end, _ERASED_AT_ONCE):
                overwrite(descriptor, bytes(min(_ERASED_AT_ONCE, end - place)), place)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written(descriptor: int) -> Iterator[tuple[int, int]]:
    """Where each part of a file that was written begins and ends."""
    size, end = os.fstat(descriptor).st_size, 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # There is no more.
                return
            raise
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end


def _take_parts(descriptor: int, number: int) -> None:
    """Have so many parts of the index on blocks of their own, and some more if they can be had: SQLite gives
    up all but the first at each start, and a file that lies in more pieces than before needs blocks for that.
    """
    # XFS asks for as many free blocks as it is told bytes, also of those that are there.
    for part in range(bytes_on_disk(os.fstat(descriptor)) // _INDEX_BYTES, number + _PARTS_MORE):
        try:
            os.posix_fallocate(descriptor, part * _INDEX_BYTES, _INDEX_BYTES)
        except OSError:
            if part < number:
                raise
            return


def _size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


class TakenRoom:
    """The room of an open database.

    Args:
        file: the database, just opened.
        kept: what there was of it. The index has that again at once.

    Raises:
        OSError: the index cannot be opened.
    """

    def __init__(self, file: Path, kept: KeptRoom) -> None:
        self._log, index = Path(f"{file}-wal"), Path(f"{file}-shm")
        # It stays open: SQLite's locks on it are this process's, and end when any of its descriptors is
        # closed.
        self._index = os.open(index, os.O_RDWR | os.O_CLOEXEC)
        self._index_file = index
        # A reader that goes on has others, which need the room that was kept. :meth:`take` says if it failed.
        with contextlib.suppress(OSError):
            if kept.log_bytes:
                self._take_log(kept.log_bytes)
            if kept.index_bytes:
                self._take_index(kept.index_bytes // _INDEX_BYTES - _PARTS_MORE)

    def take(self, connection: sqlite3.Connection, room: LedgerRoom) -> None:
        """Take what is missing.

        Args:
            connection: to the database, the only one.
            room: that it may need.

        Raises:
            sqlite3.Error, OSError: the disk has no such room.
            StorageError: another program reads the database.
        """
        page_bytes = _number(connection, "page_size")
        _take_pages(connection, room.database_bytes - _number(connection, "page_count") * page_bytes)
        self._take_log(room.log_bytes)
        self._take_index(1 + room.log_bytes // ((page_bytes + _FRAME_BYTES) * _INDEXED))

    def _take_log(self, size: int) -> None:
        _forget_other(self._log)
        log = os.open(self._log, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            take_blocks(log, size)
            os.fsync(log)
        finally:
            os.close(log)
        _name_twice(self._log)

    def _take_index(self, parts: int) -> None:
        _forget_other(self._index_file)
        _take_parts(self._index, parts)
        _name_twice(self._index_file)

    def close(self) -> None:
        """Close what was open beside the database, after it, and erase what was left of its log."""
        os.close(self._index)
        kept = _kept_of(self._log)
        with contextlib.suppress(OSError):  # A stop succeeds where the disk fails, too.
            if not (self._log.exists() and self._log.samefile(kept)):  # A reader may go on with it.
                _erase(kept)


def _take_pages(connection: sqlite3.Connection, missing: int) -> None:
    """Make a database larger by so many bytes of free pages."""
    pages = _number(connection, "cache_size")
    if missing > 0:
        # The agent keeps what memory this takes.
        connection.execute(f"PRAGMA cache_size = {_FEW_PAGES}")
        with transaction(connection):
            connection.execute("CREATE TABLE IF NOT EXISTS room (filler BLOB NOT NULL) STRICT")
        for start in range(0, missing, _AT_ONCE):
            with transaction(connection):
                size = min(_AT_ONCE, missing - start)
                connection.execute("INSERT INTO room VALUES (zeroblob(?))", (size,))
            # What is free is written no more: first all of it has to be in the file.
            is_busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if is_busy:
                file = connection.execute("PRAGMA database_list").fetchone()["file"]
                raise StorageError(f"{file} is read by another program. Stop that program first.")
    if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'room'").fetchone():
        with transaction(connection):
            connection.execute("DROP TABLE room")
    connection.execute(f"PRAGMA cache_size = {pages}")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])
