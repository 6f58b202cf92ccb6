"""Rounds that the fleet has passed, and this coordinator has not: an older copy of its database was put back.

Boards take part in no round that they have passed. The broker keeps the last plan, which only a coordinator
with this one's key can have signed.
"""

from __future__ import annotations

import sqlite3


def create_passed_rounds(connection: sqlite3.Connection) -> None:
    """A step of the schema: the latest such round of each job."""
    connection.execute(
        "CREATE TABLE passed_rounds (job INTEGER PRIMARY KEY REFERENCES jobs, number INTEGER NOT NULL) STRICT"
    )


def note_passed_round(connection: sqlite3.Connection, job: int, number: int) -> None:
    """Keep that a round was announced; inside a transaction."""
    connection.execute(
        "INSERT INTO passed_rounds VALUES (?, ?) "
        "ON CONFLICT (job) DO UPDATE SET number = max(number, excluded.number)",
        (job, number),
    )


def passed_round(connection: sqlite3.Connection, job: int) -> int:
    """The latest round of a job that was announced without being in the database; 0: none."""
    row = connection.execute("SELECT number FROM passed_rounds WHERE job = ?", (job,)).fetchone()
    return 0 if row is None else int(row[0])


def in_words(number: int) -> str:
    """What that means, and what to do."""
    return (
        f"The fleet was given round {number} of this job: the database is an older copy that was put back."
        " Boards take part in no round that they have passed, so this one waits for ever. Put the newest copy"
        " of state_dir back; without one, cancel the job and add it anew."
    )
