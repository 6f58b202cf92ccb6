"""The coordinator's database: the queue of jobs, and what each of them keeps.

The daemon holds the state directory and writes rounds. Commands write beside it, to the queue alone
(:mod:`coordinator.queue`), in short transactions of their own.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from pathlib import Path
from typing import Final

from coordinator.passed_rounds import create_passed_rounds
from coordinator.seats import create_seats
from dpagent.errors import StateInUseError
from dpagent.storage import Migration, StateDirectory, disk_errors, open_database, open_readonly

log = logging.getLogger(__name__)

_NAME: Final = "coordinator.db"
_PATIENCE_S: Final = 5.0
_LOOK_AGAIN_S: Final = 0.05


def database_file(state_dir: Path) -> Path:
    """Where the database of a state directory is."""
    return state_dir / _NAME


def _create(connection: sqlite3.Connection) -> None:
    connection.execute(
        """CREATE TABLE jobs (
            number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, id BLOB NOT NULL UNIQUE,
            settings TEXT NOT NULL, terms TEXT NOT NULL, budget TEXT NOT NULL,
            state TEXT NOT NULL
                CHECK (state IN ('waiting', 'running', 'cancelling', 'finished', 'cancelled')),
            paused INTEGER NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)), trouble TEXT,
            sends_model INTEGER NOT NULL DEFAULT 0 CHECK (sends_model IN (0, 1)), deadline_s REAL,
            added_at REAL NOT NULL, begun_at REAL, ended_at REAL
        ) STRICT"""
    )
    connection.execute(
        "CREATE TABLE models (job INTEGER PRIMARY KEY REFERENCES jobs, weights BLOB NOT NULL, "
        "moments BLOB NOT NULL, clip_norm REAL NOT NULL, radii TEXT NOT NULL) STRICT"
    )
    connection.execute(
        """CREATE TABLE rounds (
            job INTEGER NOT NULL REFERENCES jobs, number INTEGER NOT NULL, opened_at REAL NOT NULL,
            deadline REAL NOT NULL, announced_at REAL, closed_at REAL, given_up_at REAL,
            noise_multiplier REAL, epsilon REAL, accuracy REAL, clamped INTEGER, kept REAL,
            fragments INTEGER, least_counted INTEGER, out_of_range TEXT, clip_norm REAL,
            PRIMARY KEY (job, number)
        ) STRICT"""
    )
    create_seats(connection)
    connection.execute(
        "CREATE TABLE counters (job INTEGER NOT NULL REFERENCES jobs, name TEXT NOT NULL, "
        "value INTEGER NOT NULL, PRIMARY KEY (job, name)) STRICT"
    )


def _is_up_to_date(file: Path) -> bool:
    """Whether there is a database, with all tables of this version or of a later one."""
    if not file.exists():
        return False
    with contextlib.closing(open_readonly(file)) as connection, disk_errors(file):
        return int(connection.execute("PRAGMA user_version").fetchone()[0]) >= len(_MIGRATIONS)


_MIGRATIONS: Final[list[Migration]] = [_create, create_passed_rounds]


class Database:
    """The open database of a coordinator.

    Args:
        state_dir: The directory; exists.

    Raises:
        StorageError: The database cannot be used.
    """

    def __init__(self, state_dir: Path) -> None:
        self.file = database_file(state_dir)
        self.connection = open_database(self.file, _MIGRATIONS)
        self._erases = False

    @classmethod
    def beside_the_daemon(cls, state_dir: Path) -> Database:
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

    def close(self) -> None:
        """Close the database."""
        self.connection.close()

    def version(self) -> int:
        """A number that changes whenever another program has written to the database."""
        return int(self.connection.execute("PRAGMA data_version").fetchone()[0])

    def erase_what_is_deleted(self) -> None:
        """From now on leave no byte of a closed round's values in the files: no noise hides them.

        A crash just after a round closed may have left some in the log: they go now.
        """
        self.connection.execute("PRAGMA secure_delete = ON")
        self._erases = True
        self.cut_log()

    def cut_log(self) -> None:
        """Fold the log, which has deleted values too, into the database, if they are to be erased."""
        if not self._erases:
            return
        with disk_errors(self.file):
            is_busy, *_ = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            log.warning(
                "%s-wal: another program reads the database, so values of the closed round stay in its log "
                "until the next round closes, or the coordinator starts again", self.file,
            )  # fmt: skip
