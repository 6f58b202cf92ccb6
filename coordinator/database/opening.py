"""Opens the coordinator's database, whichever it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.database.interface import Database, Reader
from coordinator.database.schema import Part
from coordinator.database.settings import PostgresqlAddress, StorePlace
from coordinator.database.sqlite import SqliteDatabase, SqliteReader
from dpagent.extras import extra_needed

if TYPE_CHECKING:
    from coordinator.database.postgresql import PostgresqlDatabase

_PURPOSE = "PostgreSQL as the coordinator's store"


def open_postgresql(address: PostgresqlAddress, purpose: str, part: Part = Part.ROUNDS) -> PostgresqlDatabase:
    """A connection to PostgreSQL; see :class:`PostgresqlDatabase`.

    Raises:
        ConfigurationError: The library is not installed, or the address is wrong.
        StorageError, DatabaseAwayError: It cannot be used.
    """
    with extra_needed("postgresql", _PURPOSE):
        from coordinator.database.postgresql import PostgresqlDatabase

    return PostgresqlDatabase(address, purpose, part)


def open_database(place: StorePlace) -> Database:
    """The database, for the program that alone brings it up to date: who holds the state directory.

    Raises:
        StorageError, DatabaseAwayError, ConfigurationError: It cannot be used.
    """
    return SqliteDatabase(place) if isinstance(place, Path) else _created(place, "coordinator")


def open_beside(place: StorePlace) -> Database:
    """The database for a command, whether a coordinator runs or not; made if there is none yet.

    Raises:
        StateInUseError, StorageError, DatabaseAwayError, ConfigurationError: It cannot be used.
    """
    if isinstance(place, Path):
        return SqliteDatabase.beside_the_daemon(place)
    return _created(place, "command")


def open_members(place: StorePlace, part: Part) -> Database:
    """The members' database or the registry, made if there is none yet.

    Args:
        place: the members directory, which exists, or PostgreSQL.
        part: which.

    Raises:
        StorageError, DatabaseAwayError, ConfigurationError: It cannot be used.
    """
    if isinstance(place, Path):
        return SqliteDatabase(place, part)
    return _created(place, part.removesuffix(".db"), part)


def bring_up_to_date(members_dir: Path) -> None:
    """Bring the members' database and the registry up to date, as far as they are there: commands that read
    them do not.

    Raises:
        StorageError: One of them cannot be used.
    """
    for part in (Part.MEMBERS, Part.REGISTRY):
        if (members_dir / part).exists():
            SqliteDatabase(members_dir, part).close()


def _created(address: PostgresqlAddress, purpose: str, part: Part = Part.ROUNDS) -> PostgresqlDatabase:
    database = open_postgresql(address, purpose, part)
    try:
        database.create()
    except BaseException:
        database.close()
        raise
    return database


def open_reader(place: StorePlace, part: Part = Part.ROUNDS) -> Reader:
    """A database for reading, which is there.

    Args:
        place: the directory that it is in, or PostgreSQL.
        part: which.

    Raises:
        StorageError, DatabaseAwayError, ConfigurationError: It is not, or cannot be used.
    """
    if isinstance(place, Path):
        return SqliteReader(place, part)
    with extra_needed("postgresql", _PURPOSE):
        from coordinator.database.postgresql import PostgresqlReader

    return PostgresqlReader(place)


def finds(place: StorePlace, part: Part, query: str) -> bool:
    """Whether a query finds a row; not where there are no tables yet.

    Args:
        place: the directory that the tables are in, or PostgreSQL.
        part: which.
        query: in SQL, without parameters.

    Raises:
        StorageError, DatabaseAwayError, ConfigurationError: That cannot be told.
    """
    if not is_there(place, part):
        return False
    with open_reader(place, part) as reader, reader.errors():
        return reader.execute(query).fetchone() is not None


def is_there(place: StorePlace, part: Part = Part.ROUNDS) -> bool:
    """Whether there are tables already.

    Args:
        place: the directory that they are in, or PostgreSQL.
        part: which.

    Raises:
        StorageError, DatabaseAwayError, ConfigurationError: That cannot be told.
    """
    if isinstance(place, Path):
        return (place / part).exists()
    database = open_postgresql(place, "command")
    try:
        return database.require_known() > 0
    finally:
        database.close()
