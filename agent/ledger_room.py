"""Room on the disk for the books, taken when the agent starts: no round asks the disk for more.

Records may lie on the same disk. If a charge, or an update, needed blocks that are free at that moment, a
coordinator who chooses how long an update is would learn by the agent's silence how full the disk is, to a
block, and so whether a record is there: for no more than the ε of a round with any noise.

So the largest database that the device's limits allow is taken at the first start, as free pages of it, and
its write-ahead log, and the index of that. A database never shrinks; log and index go when the program stops,
and whoever refuses its connection makes it stop. So each has a second name, under which its blocks stay until
the next start. A disk that has not so much keeps the agent from its first start.

What it does not cover: a file system that writes each block anew elsewhere (btrfs, ZFS, an overlay over
another), or that stores zeros in no room, keeps no such promise. Nor does XFS, as long as a copy of the
directory shares its blocks (``cp`` makes one). On one without hard links (FAT), log and index need their room
at each start. Nor does it cover a reader of the database that goes on for many rounds, which keeps the log
from beginning anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from pathlib import Path
from typing import Final, NamedTuple

from agent.limit_settings import LimitSettings
from agent.spool import SETTLED_KEPT
from dpagent.database_file import transaction
from dpagent.errors import StorageError
from dpagent.protocol.dummies import MAX_DUMMIES
from dpagent.storage import overwrite, take_blocks

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


def put_log_back(file: Path) -> None:
    """Let log and index of a database be the files that the last stop left of them, which tell nothing any
    more. Call it before the database is opened.

    Args:
        file: the database, which need not be there.

    Raises:
        OSError: the disk fails.
    """
    if not file.exists():
        return
    for each in (Path(f"{file}-wal"), Path(f"{file}-shm")):
        if each.exists():
            # What a power cut left counts. What a reader has made needs the room now.
            _forget_other(each)
            continue
        try:
            descriptor = os.open(_kept_of(each), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            # Without its header nothing in it counts: the database has moved on since.
            overwrite(descriptor, bytes(_HEADER_BYTES), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with contextlib.suppress(FileExistsError):  # A reader has just made one.
            os.link(_kept_of(each), each)


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
    """Overwrite with zeros what was written to a file: fragments as they are before they are sealed."""
    descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size, place = os.fstat(descriptor).st_size, 0
        while place < size:
            try:
                place = os.lseek(descriptor, place, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # There is no more.
                    return
                raise
            end = os.lseek(descriptor, place, os.SEEK_HOLE)
            while place < end:
                length = min(_ERASED_AT_ONCE, end - place)
                overwrite(descriptor, bytes(length), place)
                place += length
    finally:
        os.close(descriptor)


def _take_parts(descriptor: int, number: int) -> None:
    """Have so many parts of the index on blocks of their own, and some more if they can be had: SQLite gives
    up all but the first at each start, and a file that lies in more pieces than before needs blocks for that.
    """
    for part in range(number + _PARTS_MORE):
        try:
            # XFS asks for as many free blocks as it is told bytes, also of those that are there.
            os.posix_fallocate(descriptor, part * _INDEX_BYTES, _INDEX_BYTES)
        except OSError:
            if part < number:
                raise
            return


def _size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


class TakenRoom:
    """The room of an open database, taken.

    Args:
        file: the database.
        connection: to it, the only one.
        room: that it may need.

    Raises:
        sqlite3.Error, OSError: the disk has no such room.
        StorageError: another program reads the database.
    """

    def __init__(self, file: Path, connection: sqlite3.Connection, room: LedgerRoom) -> None:
        self._file, self._connection = file, connection
        page_bytes = self._number("page_size")
        self._take_pages(room.database_bytes - self._number("page_count") * page_bytes)
        path = Path(f"{file}-wal")
        _forget_other(path)
        log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            take_blocks(log, room.log_bytes)
            os.fsync(log)
        finally:
            os.close(log)
        _name_twice(path)
        # The index of the log stays open: SQLite's locks on it are this process's, and end when any of its
        # descriptors is closed. It is made anew at each start.
        path = Path(f"{file}-shm")
        _forget_other(path)
        parts = 1 + room.log_bytes // ((page_bytes + _FRAME_BYTES) * _INDEXED)
        self._index = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _take_parts(self._index, parts)
        except BaseException:
            self.close()
            raise
        _name_twice(path)

    def _take_pages(self, missing: int) -> None:
        """Make the database larger by so many bytes of free pages."""
        connection, pages = self._connection, self._number("cache_size")
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
                    raise StorageError(f"{self._file} is read by another program. Stop that program first.")
        if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'room'").fetchone():
            with transaction(connection):
                connection.execute("DROP TABLE room")
        connection.execute(f"PRAGMA cache_size = {pages}")

    def _number(self, pragma: str) -> int:
        return int(self._connection.execute(f"PRAGMA {pragma}").fetchone()[0])

    def close(self) -> None:
        """Close what was open beside the database, after it, and erase what was left of its log."""
        os.close(self._index)
        log = Path(f"{self._file}-wal")
        if not log.exists():  # A reader may go on.
            with contextlib.suppress(OSError):  # A stop succeeds where the disk fails, too.
                _erase(_kept_of(log))
