"""The ledger: append-only, chained, and each round charged once."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tracemalloc
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fleets import make_plan
from ledgers import (
    BUDGET,
    DATA,
    DATASET,
    charge_and_spool,
    charge_for,
    charge_rounds,
    entries,
    fragments,
    open_state,
)

from agent.audit import open_ledger, verify
from agent.charges import Budget
from agent.heads import GENESIS
from agent.ledger import Ledger, create_ledger, link
from agent.state import AgentState
from dpagent.database_file import transaction
from dpagent.errors import StorageError

_OPENS = """
import resource, sqlite3, sys
from pathlib import Path
from agent.ledger import Ledger

def taken():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.row_factory = sqlite3.Row
connection.execute("PRAGMA cache_size = -64")
before = taken()
ledger = Ledger(connection, lambda records: None)
print(taken() - before)
"""


@pytest.mark.parametrize(
    "statement",
    ["UPDATE entries SET body = '{}' WHERE number = 1", "UPDATE entries SET number = 9 WHERE number = 1",
     "DELETE FROM entries WHERE number = 2", "DELETE FROM entries",
     "INSERT OR REPLACE INTO entries SELECT 1, kind, body, digest FROM entries WHERE number = 2"],
)  # fmt: skip
def test_entries_cannot_be_changed_or_removed(state: AgentState, statement: str) -> None:
    charge_rounds(state, 1, 2)
    before = entries(state.connection)
    with pytest.raises(sqlite3.IntegrityError):
        state.connection.execute(statement)
    assert entries(state.connection) == before


def test_the_chain_is_the_documented_one(state: AgentState) -> None:
    charge_rounds(state, 1, 2)
    previous = bytes(32)
    assert previous == GENESIS
    for number, kind, body, digest in entries(state.connection):
        assert body == json.dumps(json.loads(body), sort_keys=True, separators=(",", ":"))
        previous = link(previous, number, kind, body)
        assert digest == previous


def test_a_round_is_charged_once_whatever_asks_for_it(path: Path, state: AgentState) -> None:
    charge = charge_for(make_plan(round=1), DATA, state.ledger)
    charge_and_spool(state, charge, fragments(250))
    before = entries(state.connection)
    with pytest.raises(StorageError):
        charge_and_spool(state, charge, fragments(251))
    assert entries(state.connection) == before
    assert bytes([251, 0]) * 8 not in state.spool.pending()
    charge_rounds(state, 2)
    assert verify(path).entries == 3


def test_the_same_round_of_another_job_or_dataset_is_another_charge(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    charge_rounds(state, 1, job=b"k" * 16)
    state.close()
    state = open_state(path, dataset="other")
    with state.entry():
        state.ledger.charge(charge_for(make_plan(), DATA, state.ledger, "other"))
    state.close()
    assert verify(path).charges == 3


def test_a_restart_reproduces_what_was_spent_to_the_last_bit(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1, 2)
    charge_rounds(state, 1, 2, 3, job=b"k" * 16)
    spent = state.ledger.epsilon_spent(DATASET)
    other = state.ledger.accounts.others(DATASET, "")
    again = charge_for(make_plan(job=b"l" * 16), DATA, state.ledger)
    state.close()
    state = open_state(path)
    assert state.ledger.epsilon_spent(DATASET) == spent > 0
    assert state.ledger.accounts.others(DATASET, "") == other
    assert asdict(charge_for(make_plan(job=b"l" * 16), DATA, state.ledger)) == asdict(again)
    assert state.ledger.trusts_of(DATASET, (b"j" * 16).hex(), 2)
    assert not state.ledger.trusts_of(DATASET, (b"j" * 16).hex(), 3)
    assert not state.ledger.trusts_of("other", (b"j" * 16).hex(), 2)
    state.close()


def test_a_charge_stays_in_memory_by_its_hash_alone() -> None:
    """Before, each was kept with its plan, in half a kB, by an agent that runs for years."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        create_ledger(connection)
        ledger = Ledger(connection, lambda records: None)
        ledger.set_budget(DATASET, BUDGET)
        charge = charge_for(make_plan(), DATA, ledger)

        def charge_up_to(last: int) -> None:
            for number in range(ledger.number_of_charges + 1, last + 1):
                ledger.charge(replace(charge, round=number, job=bytes(16).hex(), plan=f"{number:064x}"))

        charge_up_to(100)
        tracemalloc.start()
        try:
            charge_up_to(600)
            kept = tracemalloc.get_traced_memory()[0] / 500
        finally:
            tracemalloc.stop()
        assert kept < 160
        assert ledger.plans_charged(bytes(16).hex(), 17) == {f"{17:064x}"}
        assert ledger.charges_for([(bytes(16).hex(), 17)]) == [18]


def test_a_ledger_that_is_opened_keeps_little_of_what_it_reads(path: Path, state: AgentState) -> None:
    """Before, it kept the memory of nearly all of it: 1.6 kB a charge, besides what it knew of each."""
    number = 3_000
    with closing(sqlite3.connect(path.with_name("many.db"), isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        create_ledger(connection)
        ledger = Ledger(connection, lambda records: None)
        charge = charge_for(make_plan(), DATA, state.ledger)
        with transaction(connection):
            for each in range(1, number + 1):
                ledger.charge(replace(charge, round=each, plan=f"{each:064x}"))
    opened = subprocess.run(
        [sys.executable, "-c", _OPENS, path.with_name("many.db")], capture_output=True, text=True, check=True
    )
    assert int(opened.stdout) < 800 * number


def test_a_budget_is_written_down_only_when_it_changes(path: Path) -> None:
    for _ in range(3):
        open_state(path).close()
    assert verify(path).entries == 1
    open_state(path, Budget(60.0, BUDGET.delta)).close()
    open_state(path, Budget(60.0, BUDGET.delta)).close()
    open_state(path).close()
    connection, _ = open_ledger(path)
    assert [json.loads(row[2])["epsilon"] for row in entries(connection)] == [50.0, 60.0, 50.0]
    connection.close()
