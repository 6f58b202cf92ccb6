"""The databases of a fleet, read beside the programs that write to them."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from crash.capture import Promises


@dataclass
class Device:
    """The contents of a device's database."""

    charges: dict[int, list[str]] = field(default_factory=dict)
    """Accounts that were charged by round, one for each entry."""
    charged_for: dict[int, set[str]] = field(default_factory=dict)
    """The plans that the charges name, by round, in hexadecimal."""
    rounds: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    """State and the plan's digest by round."""
    fragments: dict[bytes, tuple[int, str, bytes | None]] = field(default_factory=dict)
    """Round, state and message by the digest of an id."""

    def states(self, number: int) -> list[str]:
        return [state for at, state, _ in self.fragments.values() if at == number]


def _open_readonly(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=10)


@contextmanager
def view_shared(address: str | None, file: Path, promises: Promises) -> Iterator[Any]:
    """One consistent view of the coordinator's database, or None if it has no tables yet.

    Args:
        address: of PostgreSQL, with the password; None for SQLite.
        file: SQLite's.
        promises: to be kept.
    """
    if address is None:
        with view(file, promises) as connection:
            yield connection
        return
    import psycopg

    with psycopg.connect(address) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        row = connection.execute("SELECT to_regclass('schema_version')").fetchone()
        yield None if row is None or row[0] is None else connection


@contextmanager
def view(file: Path, promises: Promises) -> Iterator[sqlite3.Connection | None]:
    """One consistent view of a database, or None if it has no tables yet."""
    if not file.exists():
        yield None
        return
    with ExitStack() as opened:
        connection = opened.enter_context(closing(_open_readonly(file)))
        try:
            connection.execute("BEGIN")
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_READONLY_ROLLBACK":
                raise
            # Killed while the file was made, and its owner has not undone that yet.
            copy = Path(opened.enter_context(TemporaryDirectory())) / file.name
            for part in file.parent.glob(f"{file.name}*"):
                shutil.copy(part, copy.parent / part.name)
            connection = opened.enter_context(closing(sqlite3.connect(copy)))
        # Tables come one migration at a time, the counters' last.
        there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'counters'").fetchone()
        (intact,) = connection.execute("PRAGMA integrity_check").fetchone()
        promises.expect(intact == "ok", f"{file}: {intact}")
        yield None if there is None else connection
