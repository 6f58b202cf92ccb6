"""An agent alone with a broker: what a hand-made coordinator announces, and what is left on its disk."""

from __future__ import annotations

import json
import sqlite3
from functools import lru_cache
from pathlib import Path
from typing import Any

from fleets import DIGITS, make_plan
from observers import Announcer, in_an_hour

from dpagent.protocol.messages import Plan
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.sizes import block_count
from dpagent.protocol.weights import weights_to_bytes

WEIGHTS = weights_to_bytes(DIGITS.initial_weights(0), "float32")
OPENER_SECRET = new_sealing_secret()
BLOCKS = block_count(DIGITS.parameter_count, 1_000)
DECLINED = "SELECT job, round, reason, changed_at FROM rounds WHERE state = 'declined'"


def plan_for(fleet: str, **changes: Any) -> Plan:
    opener = Opener(OPENER_SECRET, fleet)
    values: dict[str, Any] = {
        "fleet": fleet, "sealing_key": opener.public_key, "deadline": in_an_hour(),
        "compute_slot_s": 30.0, "jitter_window_s": 60.0,
    }  # fmt: skip
    return make_plan(**(values | changes))


def state_of(file: Path) -> Path:
    return file.parent / "state"


def rows(file: Path, query: str) -> list[tuple[Any, ...]]:
    database = state_of(file) / "ledger.db"
    if not database.exists():
        return []
    connection = sqlite3.connect(database, timeout=10)
    try:
        return connection.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []  # not yet created
    finally:
        connection.close()


def charges(file: Path) -> list[tuple[str, int]]:
    found = rows(file, "SELECT body FROM entries WHERE kind = 'charge' ORDER BY number")
    return [(body["job"], body["round"]) for (text,) in found for body in [json.loads(text)]]


def ids(announcer: Announcer, fleet: str) -> set[bytes]:
    """Of the fragments that have come, which only the coordinator can read."""
    return {_id_of(bytes(message), fleet) for message in announcer.fragments}


@lru_cache(maxsize=4_096)
def _id_of(message: bytes, fleet: str) -> bytes:
    """Kept: tests wait for fragments, and look often."""
    return Opener(OPENER_SECRET, fleet).open(message, b"j" * 16).id


def counter(file: Path, name: str) -> int:
    found = rows(file, f"SELECT value FROM counters WHERE name = '{name}'")
    return found[0][0] if found else 0
