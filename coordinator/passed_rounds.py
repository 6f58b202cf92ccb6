"""Rounds that the fleet has passed, and this coordinator has not: an older copy of its database was put back.

Boards take part in no round that they have passed. The broker keeps the last plan, which only a coordinator
with this one's key can have signed.
"""

from __future__ import annotations

from coordinator.database.interface import Database, Reader


def note_passed_round(database: Database, job: int, number: int) -> None:
    """Keep that a round was announced; inside a transaction."""
    database.execute(
        "INSERT INTO passed_rounds VALUES (?, ?) "
        "ON CONFLICT (job) DO UPDATE SET number = excluded.number "
        "WHERE excluded.number > passed_rounds.number",
        (job, number),
    )


def passed_round(database: Reader, job: int) -> int:
    """The latest round of a job that was announced without being in the database; 0: none."""
    row = database.execute("SELECT number FROM passed_rounds WHERE job = ?", (job,)).fetchone()
    return 0 if row is None else int(row[0])


def in_words(number: int) -> str:
    """What that means, and what to do."""
    return (
        f"The fleet was given round {number} of this job: the database is an older copy that was put back."
        " Boards take part in no round that they have passed, so this one waits for ever. Put the newest copy"
        " of state_dir back; without one, cancel the job and add it anew."
    )
