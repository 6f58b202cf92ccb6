"""The coordinator's state in SQLite: a file in its state directory, which one program holds, and two in its
members directory.

Commands write beside it, to the queue (:mod:`coordinator.queue`) and to the members alone, in short
transactions of their own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coordinator.database import schema
from coordinator.database.interface import Database, Reader, Result, Row
from coordinator.database.schema import Part, Schema, Step
from dpagent.database_file import Migration, database_errors, open_database, open_readonly, transaction
from dpagent.errors import NotReadyError, StateInUseError, StorageError
from dpagent.storage import StateDirectory

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 5.0
_LOOK_AGAIN_S: Final = 0.05
_CACHE_KIB: Final = 512
"""Of pages that SQLite keeps in memory, all of which are in the system's, too. By default each round has it
keep 1.6 KiB more, up to 2 MiB."""
_WRITTEN_EARLY: Final = 483
"""Pages of a transaction from which on some are written before its end, and maybe twice: as by default."""
_AT_ONCE: Final = 500
"""Rows in one statement; SQLite takes 32,766 values or more."""


def database_file(state_dir: Path) -> Path:
    """Where the database of a state directory is."""
    return state_dir / Part.ROUNDS


class _SqliteSchema(Schema):
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def create(self, table: str, columns: str) -> None:
        columns = re.sub(r"\bSERIAL\b", "INTEGER PRIMARY KEY AUTOINCREMENT", columns)
        self._connection.execute(f"CREATE TABLE {table} ({columns}) STRICT")

    def add_column(self, table: str, column: str) -> None:
        self._connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")

    def execute(self, statement: str, values: Sequence[object] = ()) -> object:
        return self._connection.execute(statement, values)


@functools.cache
def _migration(step: Step) -> Migration:
    return lambda connection: step(_SqliteSchema(connection))


class _Session(Reader):
    """An open file."""

    file: Path
    connection: sqlite3.Connection

    def execute(self, statement: str, values: Sequence[object] = ()) -> Result:
        """See :class:`Reader`."""
        return self.connection.execute(statement, values)

    def now(self) -> float:
        """See :class:`Reader`."""
        return time.time()

    def mark(self) -> str:
        """See :class:`Reader`."""
        return str(self.connection.execute("PRAGMA data_version").fetchone()[0])

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """See :class:`Reader`."""
        return database_errors(self.file)

    def close(self) -> None:
        """See :class:`Reader`."""
        self.connection.close()


class SqliteReader(_Session):
    """A database for reading; also while others write to it.

    Args:
        directory: That it is in.
        part: Which.

    Raises:
        NotReadyError: Its tables are of an earlier version: the coordinator brings them up to date.
        StorageError: There is no such database, or it is of a later version.
    """

    def __init__(self, directory: Path, part: Part = Part.ROUNDS) -> None:
        self.file = directory / part
        self.name = str(self.file)
        self.connection = open_readonly(self.file)
        try:
            self._require_current(len(schema.steps_of(part)))
        except BaseException:
            self.close()
            raise

    def _require_current(self, known: int) -> None:
        with self.errors():
            version = int(self.connection.execute("PRAGMA user_version").fetchone()[0])
        if version > known:
            raise StorageError(
                f"{self.name} has schema {version}; this program supports up to {known}. It was written by a "
                "newer dpagent; install that version."
            )
        if 0 < version < known:
            raise NotReadyError(
                f"{self.name} has schema {version}, and this program has {known}. Start the coordinator of "
                "this version first: it brings the tables up to date."
            )


class SqliteDatabase(_Session, Database):
    """A database, made or brought up to date if need be.

    Args:
        directory: That it is in; exists.
        part: Which.

    Raises:
        StorageError: The database cannot be used.
    """

    def __init__(self, directory: Path, part: Part = Part.ROUNDS) -> None:
        self.file = directory / part
        self.name = str(self.file)
        self.connection = open_database(self.file, [_migration(step) for step in schema.steps_of(part)])
        self.connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self.connection.execute(f"PRAGMA cache_spill = {_WRITTEN_EARLY}")
        self._erases = False

    @classmethod
    def beside_the_daemon(cls, state_dir: Path) -> SqliteDatabase:
        """The database for a command, whether a daemon runs or not; made if there is none yet.

        Raises:
            StateInUseError: Another program holds the directory, and makes no database there, or has one
                of an older version.
            StorageError: It cannot be used.
        """
        until = time.monotonic() + _PATIENCE_S
        while not _is_up_to_date(database_file(state_dir)):
            # Two that make it at once would each lose what the other wrote, and none changes the tables under
            # a daemon that runs: the holder of the directory does both.
            try:
                with StateDirectory(state_dir):
                    cls(state_dir).close()
            except StateInUseError:
                if time.monotonic() > until:
                    raise
                time.sleep(_LOOK_AGAIN_S)
        return cls(state_dir)

    def execute_many(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        """See :class:`Database`."""
        self.connection.executemany(statement, rows)

    def stream(self, statement: str, values: Sequence[object] = ()) -> Iterator[Row]:
        """See :class:`Database`."""
        return iter(self.connection.execute(statement, values))

    def add_absent(
        self, table: str, columns: Mapping[str, str], rows: Sequence[Sequence[object]]
    ) -> set[Any]:
        """See :class:`Database`."""
        key = next(iter(columns))
        keys: list[Any] = [row[0] for row in rows]
        there: set[Any] = set()
        for start in range(0, len(keys), _AT_ONCE):
            some = keys[start : start + _AT_ONCE]
            marks = ", ".join("?" * len(some))
            found = self.connection.execute(f"SELECT {key} FROM {table} WHERE {key} IN ({marks})", some)
            there.update(row[0] for row in found)
        self.connection.executemany(
            f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            [row for row in rows if row[0] not in there],
        )
        return set(keys) - there

    @contextlib.contextmanager
    def transaction(self, *, shared: bool = False) -> Iterator[None]:
        """See :class:`Database`; here none is shared."""
        with database_errors(self.file), transaction(self.connection):
            yield

    def version(self) -> int:
        """See :class:`Database`."""
        return int(self.connection.execute("PRAGMA data_version").fetchone()[0])

    def erase_what_is_deleted(self) -> None:
        """See :class:`Database`: no byte of it stays in the files.

        A crash just after a round closed may have left some in the log: they go now.
        """
        self.connection.execute("PRAGMA secure_delete = ON")
        self._erases = True
        self.fold_log()

    def fold_log(self) -> None:
        """Fold the log, which has deleted values too, into the database, if they are to be erased."""
        if not self._erases:
            return
        with database_errors(self.file):
            is_busy, *_ = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            log.warning(
                "%s-wal: another program reads the database, so values of the closed round stay in its log "
                "until the next round closes, or the coordinator starts again", self.file,
            )  # fmt: skip


def _is_up_to_date(file: Path) -> bool:
    """Whether there is a database, with all tables of this version or of a later one."""
    if not file.exists():
        return False
    with contextlib.closing(open_readonly(file)) as connection, database_errors(file):
        return int(connection.execute("PRAGMA user_version").fetchone()[0]) >= len(
            schema.steps_of(Part.ROUNDS)
        )
