"""The log of orders: who has added, paused, resumed, cancelled or changed which job, and when.

An order and what it changes are one transaction. Nothing is ever removed from the log.
"""

from __future__ import annotations

import os
import pwd
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from coordinator.database.interface import Database, Reader

MOST_CHARACTERS: Final = 200
"""Of who gave an order: a proxy may say anything."""


class Kind(StrEnum):
    """What was ordered."""

    ADD = "add"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    DEADLINE = "deadline"
    MINIMUM = "minimum"


@dataclass(frozen=True, slots=True)
class Order:
    """One order.

    Attributes:
        number: in the log, from 1.
        at: Unix time.
        by: who gave it.
        kind: what was ordered.
        job: the name of the job.
        detail: what else belongs to it, in words; empty if nothing does.
    """

    number: int
    at: float
    by: str
    kind: Kind
    job: str
    detail: str


COORDINATOR: Final = "coordinator"
"""Who gave an order that nobody gave: the daemon itself, such as a pause of a job that cannot run."""


def command_line_user() -> str:
    """Who runs this program, for the log."""
    user = os.getuid()
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = str(user)
    return f"{name}, by a command"


def note_order(database: Database, by: str, kind: Kind, job: str, detail: str = "") -> None:
    """Keep an order; inside the transaction that carries it out."""
    database.execute(
        "INSERT INTO orders (at, giver, kind, job, detail) VALUES (?, ?, ?, ?, ?)",
        (time.time(), by[:MOST_CHARACTERS], str(kind), job, detail),
    )


def orders_in(database: Reader, most: int) -> list[Order]:
    """The last orders, the latest first."""
    rows = database.execute(
        "SELECT number, at, giver, kind, job, detail FROM orders ORDER BY number DESC LIMIT ?", (most,)
    )
    return [Order(row[0], row[1], row[2], Kind(row[3]), row[4], row[5]) for row in rows]
