"""Databases on disk: durable SQLite, its schema brought up to date.

A committed transaction survives a power cut (``synchronous=FULL``). An error of the disk, or of SQLite,
becomes a :class:`StorageError` with a sentence, and the interrupted transaction is rolled back.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from dpagent.errors import DamagedDatabaseError, StorageError
from dpagent.storage import disk_errors, replace_durably, whose

MOST_LOG_BYTES: Final = 1 << 20
"""Of a write-ahead log, once all of it is in the database: one large commit makes it longer for a while."""

BUSY_S: Final = 10.0
"""So long another program that uses a database is waited for."""

Migration = Callable[[sqlite3.Connection], None]

_TABLES: Final = "SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND sql IS NOT NULL"


@contextlib.contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the file system about ``path`` into :class:`StorageError`."""
    with disk_errors(path):
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith("SQLITE_FULL"):
                raise StorageError(
                    f"{path}: the disk is full. Nothing was lost; free some space and try again."
                ) from error
            # SQLITE_ERROR: a schema or values that our statements do not fit, as in a damaged file. No name:
            # of a text that is not UTF-8.
            damage = ("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_ERROR")
            if name.startswith(damage) or (not name and isinstance(error, sqlite3.OperationalError)):
                raise damaged(path, error) from error
            if name.startswith("SQLITE_BUSY"):
                raise StorageError(
                    f"{path} is locked by another program ({error}). Stop that program first."
                ) from error
            hint = f" {whose(path)}" if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")) else ""
            raise StorageError(f"{path}: the database cannot be used ({error}).{hint}") from error
        except UnicodeDecodeError as error:  # of SQLite's own message, which quotes what is damaged
            raise damaged(path, error) from error


def open_database(
    path: Path,
    migrations: Sequence[Migration],
    *,
    page_bytes: int = 4096,
    most_log_bytes: int = MOST_LOG_BYTES,
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
    with database_errors(path):
        if not path.exists():
            _create_database(path, migrations, page_bytes)
        connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
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
        connection.execute("PRAGMA journal_mode=MEMORY")  # Of a crash, nothing is left of it.
        with transaction(connection):
            _apply(migrations, connection)
    replace_durably(path, new)


def _migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration]) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(migrations):
        raise StorageError(
            f"{path} has schema {version}; this program supports up to {len(migrations)}. "
            "It was written by a newer dpagent; install that version."
        )
    if version:
        _require_tables(connection, path, migrations[:version])
    # One transaction per step, so that the next start can continue after a crash.
    for number, migrate in enumerate(migrations[version:], start=version + 1):
        with transaction(connection):
            migrate(connection)
            connection.execute(f"PRAGMA user_version={number}")


def _require_tables(connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration]) -> None:
    """See that tables are as these steps make them: a program that finds another one when it writes has by
    then charged a budget, or counted half.

    Raises:
        DamagedDatabaseError: One is not, or is missing.
    """
    found: dict[str, str] = dict(connection.execute(_TABLES))
    for name, sql in _tables_of(tuple(migrations)).items():
        if found.get(name) != sql:
            raise DamagedDatabaseError(
                f"{path} is damaged, or of another build of dpagent: its {name!r} is not what schema "
                f"{len(migrations)} of this one has. Nothing was changed. Go on with the build that made "
                "it, or restore it from a backup."
            )


@functools.lru_cache(maxsize=8)
def _tables_of(migrations: tuple[Migration, ...]) -> dict[str, str]:
    """The statement of each table after these steps. To find them takes longer than to open a database."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        made.row_factory = sqlite3.Row
        _apply(migrations, made)
        return dict(made.execute(_TABLES))


def _apply(migrations: Sequence[Migration], connection: sqlite3.Connection) -> None:
    """Make the schema of these steps in an empty database, and note how many they are."""
    for migrate in migrations:
        migrate(connection)
    connection.execute(f"PRAGMA user_version={len(migrations)}")


def require_whole(connection: sqlite3.Connection, path: Path) -> None:
    """Read all of a database, to find a page that was not written, or not whole, before it is relied on.

    Raises:
        DamagedDatabaseError: There is one, or a value that its table does not allow, or one that refers to a
            row that is not there.
        StorageError: The database cannot be read.
    """
    with database_errors(path):
        problem = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        # An own question: the other one does not ask it.
        orphan = connection.execute("PRAGMA foreign_key_check").fetchone()
    if problem != "ok":
        raise damaged(path, problem)
    if orphan is not None:
        table, _, parent, _ = orphan
        raise damaged(path, f"a row of {table} refers to one of {parent} that is not there")


def damaged(path: Path, problem: object) -> DamagedDatabaseError:
    """An error for a database that cannot be relied on."""
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
    with database_errors(path):
        try:
            return _opened_as(path, "mode=ro")
        except sqlite3.Error as error:
            log = Path(f"{path}-wal")
            cannot_be_made = ("SQLITE_CANTOPEN", "SQLITE_FULL", "SQLITE_IOERR_SHM")
            if not error.sqlite_errorname.startswith(cannot_be_made) or (log.exists() and log.stat().st_size):
                raise
            # Where nothing can be written, or the disk is full, the files that readers share with a writer
            # cannot be made. There is no writer then, and all is in this file.
            return _opened_as(path, "immutable=1")


def _opened_as(path: Path, how: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, timeout=BUSY_S)
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
