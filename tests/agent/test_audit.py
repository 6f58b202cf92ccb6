"""The audit of a ledger: whatever was changed is found, and named, by the auditor and by the agent."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from ledgers import (
    DATASET,
    body_of,
    charge_rounds,
    entries,
    open_state,
    rechain,
    refused,
    tamper,
)

from agent.audit import verify
from agent.charges import Budget
from agent.state import AgentState
from dpagent.errors import DpagentError, LedgerError


def test_a_new_ledger_verifies_and_a_missing_one_is_named(path: Path) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.db does not exist.*--state-dir"):
        verify(path)
    open_state(path).close()
    proof = verify(path)
    assert (proof.entries, proof.charges) == (1, 0)


def test_the_auditor_can_read_beside_the_agent(path: Path, state: AgentState) -> None:
    charge_rounds(state, 1)
    assert verify(path).charges == 1
    charge_rounds(state, 2)
    proof = verify(path)
    assert proof.charges == 2
    assert proof.head == entries(state.connection)[-1][3].hex()


# --- tampering ---------------------------------------------------------------------------------


def test_an_altered_body_is_found_at_its_entry(path: Path, database: Path) -> None:
    tamper(database, "UPDATE entries SET body = replace(body, '\"steps\":1', '\"steps\":2') WHERE number = 3")
    assert "broken at entry 3" in refused(path)


def test_an_altered_budget_is_found(path: Path, database: Path) -> None:
    tamper(database, "UPDATE entries SET body = replace(body, '50.0', '5000.0') WHERE number = 1")
    assert "broken at entry 1" in refused(path)


def test_an_altered_kind_is_found(path: Path, database: Path) -> None:
    tamper(database, "UPDATE entries SET kind = 'budget' WHERE number = 2")
    assert "broken at entry 2" in refused(path)


def test_an_altered_hash_is_found(path: Path, database: Path) -> None:
    tamper(database, ("UPDATE entries SET digest = ? WHERE number = 3", (bytes(32),)))
    assert "broken at entry 3" in refused(path)


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_an_entry_removed_from_the_middle_is_found(path: Path, database: Path, gone: int) -> None:
    tamper(database, f"DELETE FROM entries WHERE number = {gone}")
    assert f"entry {gone} is missing" in refused(path)


def test_an_entry_removed_and_the_rest_renumbered_is_found(path: Path, database: Path) -> None:
    tamper(
        database,
        "DELETE FROM entries WHERE number = 2",
        "UPDATE entries SET number = number - 1 WHERE number > 2",
    )
    assert "broken at entry 2" in refused(path)


def test_swapped_entries_are_found(path: Path, database: Path) -> None:
    tamper(
        database, "UPDATE entries SET number = 99 WHERE number = 2",
        "UPDATE entries SET number = 2 WHERE number = 3", "UPDATE entries SET number = 3 WHERE number = 99",
    )  # fmt: skip
    assert "broken at entry 2" in refused(path)


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "5", "null", "{}", '{"dataset":"x"}', "not json"],
)
@pytest.mark.parametrize("number", [1, 3])
def test_an_entry_that_is_none_is_named_though_the_hashes_fit(
    path: Path, database: Path, body: str, number: int
) -> None:
    rechain(database, number, body)
    assert f"ntry {number}" in refused(path)


@pytest.mark.parametrize(
    "changes",
    [{"cumulative_epsilon": "1"}, {"cumulative_epsilon": None}, {"steps": 0},
     {"parameters": None}, {"parameters": []}, {"noise_multiplier": "3"},
     {"parameters": {"resolution": True}}, {"mechanism": 1}, {"accountant": "gdp"},
     {"steps": 1.5}, {"sampling_rate": 2}, {"delta": 0}, {"extra": 1}, {"dataset": ["x"]}, {"job": {}}],
    ids=repr,
)  # fmt: skip
def test_a_charge_with_odd_values_is_named(path: Path, database: Path, changes: dict[str, Any]) -> None:
    rechain(database, 3, json.dumps(body_of(database, 3) | changes))
    with pytest.raises(LedgerError, match="ntry 3"):
        verify(path)


@pytest.mark.parametrize("place", [0, 2])
def test_a_damaged_page_is_a_sentence_for_auditor_and_agent(path: Path, place: int) -> None:
    state = open_state(path)
    for number in range(12):
        charge_rounds(state, 1, 2, 3, job=bytes([number + 1]) * 16)
    state.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    state.close()
    content = bytearray((path / "ledger.db").read_bytes())
    assert len(content) > 4 * 4_096
    root = sqlite3.connect(path / "ledger.db")
    page = root.execute("SELECT rootpage FROM sqlite_master WHERE name = 'entries'").fetchone()[0]
    root.close()
    start = 0 if place == 0 else (page - 1) * 4_096
    content[start : start + 512] = b"\xaa" * 512
    (path / "ledger.db").write_bytes(content)
    with pytest.raises(LedgerError):
        verify(path)
    with pytest.raises(DpagentError):
        open_state(path)


# --- the head ----------------------------------------------------------------------------------


def test_a_shortened_ledger_is_found_by_its_head(path: Path, database: Path) -> None:
    tamper(database, "DELETE FROM entries WHERE number = 4")
    assert "the ledger had 4 and has 3" in refused(path)
    tamper(database, "DELETE FROM entries")
    assert "the ledger had 4 and has 0" in refused(path)


def test_an_older_copy_is_found_by_its_head(path: Path, tmp_path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    state.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(path / "ledger.db", tmp_path / "backup.db")
    charge_rounds(state, 2)
    state.close()
    shutil.copy(tmp_path / "backup.db", path / "ledger.db")
    assert "the ledger had 3 and has 2" in refused(path)


def test_a_ledger_of_the_same_length_that_is_another_one_is_found(
    path: Path, database: Path, tmp_path: Path
) -> None:
    state = open_state(tmp_path / "other", Budget(99.0, 1e-3))
    charge_rounds(state, 1, 2, 3)
    state.close()
    shutil.copy(tmp_path / "other" / "ledger.db", database)
    assert "the ledger was replaced" in refused(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"entries": "x", "hash": "00"}',
                                  '{"entries": 1, "hash": "zz"}',
                                  '{"entries": 1, "hash": 5}', "\xff"])  # fmt: skip
def test_an_unreadable_head_is_named(path: Path, database: Path, text: str) -> None:
    (path / "ledger.head").write_bytes(text.encode("latin-1"))
    assert "ledger.head is not readable" in refused(path)


@pytest.mark.parametrize("head", ['{"entries":1e400,"hash":""}', '{"entries":-9,"hash":""}', "[" * 100_000,
                                  '{"entries":0,"hash":"00"}'])  # fmt: skip
def test_an_odd_head_is_a_sentence(path: Path, database: Path, head: str) -> None:
    (path / "ledger.head").write_text(head)
    assert "ledger.head" in refused(path)


def test_a_crash_between_commit_and_head_is_fine(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    head = (path / "ledger.head").read_bytes()
    charge_rounds(state, 2)
    state.close()
    (path / "ledger.head").write_bytes(head)
    assert verify(path).charges == 2
    state = open_state(path)
    assert state.ledger.trusts_of(DATASET, (b"j" * 16).hex(), 2)
    state.close()
    assert json.loads((path / "ledger.head").read_text())["entries"] == 3


def test_an_entry_of_the_wrong_type_is_named(path: Path, database: Path) -> None:
    """Our table takes no such entry; one in its place may, and the agent takes no other table."""
    tamper(
        database,
        "CREATE TABLE lax AS SELECT * FROM entries",
        "DROP TABLE entries",
        "ALTER TABLE lax RENAME TO entries",
        ("UPDATE entries SET body = ? WHERE number = 2", (b"{}",)),
    )
    with pytest.raises(LedgerError, match="Entry 2 is damaged"):
        verify(path)
    with pytest.raises(LedgerError, match="its 'entries' is not what schema"):
        open_state(path)
