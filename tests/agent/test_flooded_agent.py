"""An agent under more messages than it can read: in a process of its own, at a real Mosquitto."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from brokers import wait_until
from fleets import run_agent, write_agent
from floods import PATIENCE_S, publish_all, resident_kib, stopped

from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.topics import Topics

pytestmark = pytest.mark.usefixtures("executed")

MESSAGES, BYTES = 3_000, 50_000
MOST_GROWTH_KIB = 50 * 1024
"""The flood has 143 MiB; a window of it has 12."""
_numbers = itertools.count()


def rejected(file: Path) -> int:
    """Messages that the agent has noted as rejected."""
    with contextlib.closing(sqlite3.connect(file.parent / "state" / "ledger.db")) as connection:
        row = connection.execute("SELECT value FROM counters WHERE name = 'rejected'").fetchone()
    return 0 if row is None else int(row[0])


@pytest.mark.parametrize("protocol", ["5", pytest.param("3.1.1", marks=pytest.mark.slow)])
def test_an_agent_under_a_flood_holds_a_window_and_reads_it_all(
    tmp_path: Path, new_broker: Any, protocol: str
) -> None:
    """Another device sends what no coordinator has signed, while the board is busy with something else."""
    broker = new_broker("mosquitto", protocol).start()
    name = f"flooded-{next(_numbers)}"
    file = write_agent(tmp_path, broker, Signer(new_signing_secret(), name).public_key, fleet=name)
    with run_agent(file) as agent:
        wait_until(lambda: "connected to" in agent.said(), "the connection", PATIENCE_S)
        publish_all(broker, Topics(name).receipts, [b"first"])
        before = resident_kib(agent)
        with stopped(agent):
            rubbish = [number.to_bytes(4, "big") * (BYTES // 4) for number in range(MESSAGES)]
            publish_all(broker, Topics(name).receipts, rubbish)
        wait_until(lambda: rejected(file) >= MESSAGES, "all messages", PATIENCE_S)
        growth = resident_kib(agent) - before
        print(f"resident memory: {before} KiB, and {growth} KiB more under {MESSAGES} messages")
        assert growth < MOST_GROWTH_KIB
        assert agent.stop() == 0
