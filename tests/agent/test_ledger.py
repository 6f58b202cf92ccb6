"""The ledger: append-only, chained, priced, and in one transaction with what it pays for."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import PATIENCE_S, wait_until
from fleets import make_plan, records, terms
from ledgers import BUDGET, DATASET, charge_for, open_state, tamper

from agent.accounts import InconsistentChargeError, JobAccounts, fresh_account, grid_of, price_after
from agent.charges import Budget, BudgetChange, Charge
from agent.ledger import GENESIS, Ledger, link, open_ledger, verify
from agent.spool import SpooledFragment
from agent.state import AgentState
from dpagent.errors import DpagentError, LedgerError, StateInUseError, StorageError
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.events import GaussianEvent, poisson_sampled

DATA = records(20)


def fragments(tag: int, count: int = 3) -> list[SpooledFragment]:
    return [SpooledFragment(bytes([tag, index]) * 8, b"m" * 100, 0.0) for index in range(count)]


def charge_rounds(state: AgentState, *rounds: int, job: bytes = b"j" * 16) -> None:
    for number in rounds:
        plan = make_plan(round=number, job=job)
        state.charge_and_spool(charge_for(plan, DATA, state.ledger), fragments(number + 16 * job[0] % 200))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def state(path: Path) -> Iterator[AgentState]:
    state = open_state(path)
    yield state
    state.close()


@pytest.fixture
def database(path: Path) -> Path:
    """A closed ledger: one budget and three charges."""
    state = open_state(path)
    charge_rounds(state, 1, 2, 3)
    state.close()
    return path / "ledger.db"


def entries(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in connection.execute("SELECT * FROM entries ORDER BY number")]


def refused(path: Path) -> str:
    """What both the auditor's command and the agent say of a ledger."""
    with pytest.raises(LedgerError) as caught:
        verify(path)
    with pytest.raises(LedgerError) as at_start:
        open_state(path)
    assert str(at_start.value) == str(caught.value)
    return str(caught.value)


# --- append-only --------------------------------------------------------------------------------


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


def test_a_round_is_charged_once_whatever_asks_for_it(state: AgentState) -> None:
    charge = charge_for(make_plan(round=1), DATA, state.ledger)
    state.charge_and_spool(charge, fragments(250))
    before = entries(state.connection)
    with pytest.raises(StorageError):
        state.charge_and_spool(charge, fragments(251))
    assert entries(state.connection) == before
    assert bytes([251, 0]) * 8 not in state.spool.pending()
    charge_rounds(state, 2)
    assert verify_in_place(state) == 3


def verify_in_place(state: AgentState) -> int:
    """Entries of an open ledger that verifies."""
    return len(entries(Ledger(state.connection, state._head_file)._connection))


def test_the_same_round_of_another_job_or_dataset_is_another_charge(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    charge_rounds(state, 1, job=b"k" * 16)
    state.close()
    state = open_state(path, dataset="other")
    state.charge_and_spool(charge_for(make_plan(), DATA, state.ledger, "other"), fragments(77))
    state.close()
    assert verify(path).charges == 3


# --- restarts -----------------------------------------------------------------------------------


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
    assert state.ledger.is_charged(DATASET, (b"j" * 16).hex(), 2)
    assert not state.ledger.is_charged(DATASET, (b"j" * 16).hex(), 3)
    assert not state.ledger.is_charged("other", (b"j" * 16).hex(), 2)
    state.close()


def test_a_reservation_beyond_the_budget_is_found(path: Path, database: Path) -> None:
    """An agent that ignored its budget must not pass as verified."""
    budget = json.loads(next(row[2] for row in _rows(database) if row[1] == "budget"))
    rows = _rows(database)
    previous, statements = GENESIS, []
    for number, kind, body, _ in rows:
        text = json.dumps(budget | {"epsilon": 1e-3}) if number == 1 else body
        previous = link(previous, number, kind, text)
        statements.append(
            ("UPDATE entries SET body = ?, digest = ? WHERE number = ?", (text, previous, number))
        )
    tamper(database, *statements)
    (path / "ledger.head").unlink()
    with pytest.raises(LedgerError, match=r"Entry 2 brings the reserved ε to .* lifetime budget is 0\.001"):
        verify(path)


def _rows(database: Path) -> list[tuple[int, str, str, bytes]]:
    connection = sqlite3.connect(database)
    try:
        return entries(connection)
    finally:
        connection.close()


def test_what_is_stated_is_what_an_independent_accountant_says(path: Path, database: Path) -> None:
    connection, _ = open_ledger(path)
    bodies = [json.loads(row[2]) for row in entries(connection) if row[1] == "charge"]
    connection.close()
    accountant = PldAccountant()
    plan = make_plan()
    for body, noise in zip(bodies, plan.mechanism.noise_multipliers, strict=True):
        assert body["noise_multiplier"] == noise
        accountant.compose(poisson_sampled(GaussianEvent(noise), 0.25, 1))
        assert body["cumulative_epsilon"] == pytest.approx(accountant.epsilon(1e-5), rel=1e-3)
        assert body["cumulative_delta"] == 1e-5
    assert bodies[0]["job_epsilon"] == pytest.approx(bodies[-1]["cumulative_epsilon"], rel=1e-3)


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


def test_a_new_ledger_verifies_and_a_missing_one_is_named(path: Path) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.db does not exist.*--state-dir"):
        verify(path)
    open_state(path).close()
    proof = verify(path)
    assert (proof.entries, proof.charges) == (1, 0)


def test_two_agents_cannot_share_a_ledger(path: Path, state: AgentState) -> None:
    with pytest.raises(StateInUseError, match=str(os.getpid())):
        open_state(path)


def test_a_state_that_could_not_be_opened_is_not_held(path: Path, database: Path) -> None:
    head = (path / "ledger.head").read_text()
    (path / "ledger.head").write_text("nonsense")
    with pytest.raises(LedgerError):
        open_state(path)
    (path / "ledger.head").write_text(head)
    open_state(path).close()


def test_the_auditor_can_read_beside_the_agent(path: Path, state: AgentState) -> None:
    charge_rounds(state, 1)
    assert verify(path).charges == 1
    charge_rounds(state, 2)
    proof = verify(path)
    assert proof.charges == 2
    assert proof.head == entries(state.connection)[-1][3].hex()


# --- tampering ----------------------------------------------------------------------------------


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
    assert "replaced by an older copy" in refused(path)


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


def rechain(database: Path, number: int, body: str) -> None:
    """Replace a body and every hash after it, as the owner of the device can."""
    connection = sqlite3.connect(database)
    rows = [list(row) for row in entries(connection)]
    connection.close()
    rows[number - 1][2] = body
    previous = rows[number - 2][3]
    statements: list[Any] = []
    for row in rows[number - 1 :]:
        previous = link(previous, row[0], row[1], row[2])
        statements.append(
            ("UPDATE entries SET body = ?, digest = ? WHERE number = ?", (row[2], previous, row[0]))
        )
    tamper(database, *statements)
    (database.parent / "ledger.head").unlink(missing_ok=True)


def body_of(database: Path, number: int) -> dict[str, Any]:
    connection = sqlite3.connect(database)
    try:
        return dict(json.loads(entries(connection)[number - 1][2]))
    finally:
        connection.close()


def test_a_ledger_priced_by_renyi_divergence_verifies_and_goes_on(path: Path) -> None:
    """As a job of thousands of rounds that all differ is priced: without a grid."""
    with closing(open_state(path)) as state:
        charge_rounds(state, 1, 2)
    database, accountant = path / "ledger.db", RdpAccountant()
    reserved = accountant.epsilon_after(
        [poisson_sampled(GaussianEvent(noise), 0.25, 1) for noise in make_plan().mechanism.noise_multipliers],
        1e-5,
    )
    for number in (2, 3):
        body = body_of(database, number)
        accountant.compose(poisson_sampled(GaussianEvent(body["noise_multiplier"]), 0.25, 1))
        assert (body["accountant"], body["loss_grid"] > 0) == ("pld", True)
        body |= {
            "job_epsilon": reserved, "cumulative_epsilon": accountant.epsilon(1e-5),
            "accountant": "rdp", "loss_grid": None,
        }  # fmt: skip
        rechain(database, number, json.dumps(body))
    assert verify(path).charges == 2
    with closing(open_state(path)) as state:
        charge_rounds(state, 3)
    body = body_of(database, 4)
    assert body["loss_grid"] is None
    assert body["job_epsilon"] == reserved
    assert body["cumulative_epsilon"] == pytest.approx(reserved, rel=1e-6)
    assert verify(path).charges == 3


def charges_of(delta: float, rounds: int, sigma: float = 20.0) -> list[Charge | BudgetChange]:
    """A job of so many rounds, charged as a device charges it.

    After the first fifty that is so in every tenth round; what stands between is close enough.
    """
    events = [poisson_sampled(GaussianEvent(sigma), 0.1, 1)] * rounds
    account = fresh_account(events, delta)
    reserved = price_after(account, events, delta)
    numbers = sorted({*range(1, min(rounds, 50) + 1), *range(60, rounds, 10), rounds})
    priced = [price_after(account, events[:number], delta) for number in numbers]
    epsilons = np.interp(range(1, rounds + 1), numbers, priced).tolist()
    first = rebuilt(
        Charge(
            dataset=DATASET, job="j", round=1, mechanism="discrete-gaussian",
            noise_multiplier=sigma, parameters={"resolution": 65_536}, clip_norm=1.0,
            accumulation_slack=0.001, dimension=10, sampling_rate=0.1, steps=1, granularity=0.0,
            statistical_distance=0.0, schedule="s", job_epsilon=reserved, delta=delta,
            cumulative_epsilon=0.0, cumulative_delta=delta, charged_at="",
            accountant=account.name, loss_grid=grid_of(account),
        )
    )  # fmt: skip
    charges = [
        replace(first, round=number, cumulative_epsilon=epsilon)
        for number, epsilon in enumerate(epsilons, start=1)
    ]
    return [BudgetChange(DATASET, 1000.0, 0.9), *charges]


def rebuilt(charge: Charge, **changes: Any) -> Charge:
    """The charge with ``changes``, and with what follows from them as the mechanism has it."""
    changed = replace(charge, **changes)
    mechanism = changed.rebuilt()
    return replace(
        changed, granularity=mechanism.granularity, statistical_distance=mechanism.statistical_distance
    )


@pytest.mark.heavy
@pytest.mark.parametrize(("delta", "rounds"), [(1e-5, 2_100), (1e-18, 10), (1e-25, 10)])
def test_long_jobs_and_tiny_deltas_verify(delta: float, rounds: int) -> None:
    records = charges_of(delta, rounds)
    JobAccounts().check_and_add(records)
    for number, factor in ((1, 0.98), (1, 1.02), (rounds // 2, 0.98), (rounds // 2, 1.02), (rounds, 0.98)):
        charge = records[number]
        assert isinstance(charge, Charge)
        wrong = replace(charge, cumulative_epsilon=charge.cumulative_epsilon * factor + (factor - 1) / 5)
        with pytest.raises(InconsistentChargeError, match="cumulative ε") as caught:
            JobAccounts().check_and_add([*records[:number], wrong])
        assert caught.value.index == number


def refused_charge(charge: Charge, records: list[Charge | BudgetChange]) -> str:
    """What is said of a job whose second charge is another one."""
    with pytest.raises(InconsistentChargeError) as caught:
        JobAccounts().check_and_add([*records[:2], charge, records[3]])
    assert caught.value.index == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "offender"),
    [
        ({"mechanism": "laplace"}, "mechanism is 'laplace'"),
        ({"parameters": {}}, "are none"),
        ({"parameters": {"bound": 3}}, "are bound"),
        ({"parameters": {"bound": 3, "resolution": 65_536}}, "are bound, resolution"),
        ({"parameters": {"resolution": 255}}, "resolution is 255"),
        ({"parameters": {"resolution": 65_536.0}}, "resolution is 65536.0"),
        ({"noise_multiplier": 0.049}, "noise multiplier is 0.049"),
        ({"noise_multiplier": 10_001.0}, "noise multiplier is 10001.0"),
        ({"noise_multiplier": math.nan}, "noise multiplier is nan"),
        ({"granularity": 2.0**-15}, "granularity is 3.0517578125e-05"),
        ({"granularity": 0.0}, "granularity is 0.0"),
        ({"granularity": math.nan}, "granularity is nan"),
        ({"statistical_distance": -1.0}, "statistical distance is -1.0"),
        ({"statistical_distance": 0.0}, "statistical distance is 0.0"),
        ({"accumulation_slack": 0.02}, "accumulation slack is 0.02"),
        ({"clip_norm": 0.0}, "clip norm is 0.0"),
        ({"dimension": 0}, "dimension is 0"),
        ({"steps": 10**400}, "is an integer of 1,329 bits"),
        ({"loss_grid": math.nan}, "grid is nan"),
        ({"loss_grid": None}, "loss grid is None with accountant pld"),
        ({"accountant": "rdp"}, "with accountant rdp"),
    ],
)
def test_what_a_price_rests_on_is_checked(changes: dict[str, Any], offender: str) -> None:
    records = charges_of(1e-5, 3)
    charge = records[2]
    assert isinstance(charge, Charge)
    assert offender in refused_charge(replace(charge, **changes), records)


@pytest.mark.parametrize(
    ("changes", "offender"),
    [
        ({"noise_multiplier": 8.0, "parameters": {"resolution": 256}}, "its price holds from 2,122"),
        ({"dimension": 2**28, "delta": 1e-40}, "would add"),
    ],
)
def test_noise_that_is_not_as_priced_is_found_though_all_figures_fit(
    changes: dict[str, Any], offender: str
) -> None:
    records = charges_of(1e-5, 3)
    charge = records[2]
    assert isinstance(charge, Charge)
    assert offender in refused_charge(rebuilt(charge, **changes), records)


def test_charges_of_more_runs_than_can_be_counted_are_refused() -> None:
    """At a rate so low that they cost nothing, though no figure of theirs is off."""
    budget, first, *_ = charges_of(1e-5, 1)
    assert isinstance(first, Charge)
    free = rebuilt(
        first,
        noise_multiplier=4.0,
        sampling_rate=1e-300,
        steps=2**53,
        job_epsilon=0.0,
        cumulative_epsilon=0.0,
    )
    JobAccounts().check_and_add([budget, free])
    with pytest.raises(InconsistentChargeError, match="count is 18014398509481984"):
        JobAccounts().check_and_add([budget, free, replace(free, round=2)])


@pytest.mark.parametrize(("epsilon", "delta"), [(-4.0, 1e-5), (1.0, -1e-5), (1.0, 1.5), (0.0, 1e-5)])
def test_a_budget_that_is_none_is_named(epsilon: float, delta: float) -> None:
    with pytest.raises(InconsistentChargeError, match="invalid budget"):
        JobAccounts().check_and_add([BudgetChange(DATASET, epsilon, delta)])


@pytest.mark.parametrize("head", ['{"entries":1e400,"hash":""}', '{"entries":-9,"hash":""}', "[" * 100_000,
                                  '{"entries":0,"hash":"00"}'])  # fmt: skip
def test_an_odd_head_is_a_sentence(path: Path, database: Path, head: str) -> None:
    (path / "ledger.head").write_text(head)
    assert "ledger.head" in refused(path)


@pytest.mark.parametrize("grid", [-1.0, 0.0, 1e-12, 7.0])
def test_a_charge_on_an_impossible_grid_is_named(path: Path, database: Path, grid: float) -> None:
    rechain(database, 2, json.dumps(body_of(database, 2) | {"loss_grid": grid}))
    assert f"grid is {grid}" in refused(path)


def test_a_changed_grid_is_found(path: Path, database: Path) -> None:
    body = body_of(database, 3)
    for changes in ({"loss_grid": 2 * body["loss_grid"]}, {"accountant": "rdp", "loss_grid": None}):
        rechain(database, 3, json.dumps(body | changes))
        assert "Entry 3 changes the schedule, δ, accountant, grid" in refused(path)


@pytest.mark.parametrize("factor", [0.5, 0.995, 1.005, 2.0])
def test_a_wrong_cumulative_epsilon_is_found_though_the_hashes_fit(
    path: Path, database: Path, factor: float
) -> None:
    body = body_of(database, 3)
    body["cumulative_epsilon"] *= factor
    rechain(database, 3, json.dumps(body, sort_keys=True, separators=(",", ":")))
    assert "Entry 3 states a cumulative ε" in refused(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_undefined_cumulative_epsilon_is_found(path: Path, database: Path, value: float) -> None:
    rechain(database, 3, json.dumps(body_of(database, 3) | {"cumulative_epsilon": value}))
    assert "ntry 3" in refused(path)


def test_a_wrong_cumulative_delta_is_found(path: Path, database: Path) -> None:
    rechain(database, 3, json.dumps(body_of(database, 3) | {"cumulative_delta": 1e-9}))
    assert "ntry 3" in refused(path)


def test_a_reservation_smaller_than_what_was_spent_is_found(path: Path, database: Path) -> None:
    rechain(database, 2, json.dumps(body_of(database, 2) | {"job_epsilon": 1e-3}))
    assert "ntry" in refused(path)


def test_less_noise_than_stated_before_is_found(path: Path, database: Path) -> None:
    charge = Charge(**body_of(database, 3))
    changed = rebuilt(charge, noise_multiplier=200.0)
    rechain(database, 3, json.dumps(asdict(changed)))
    assert "Entry 3 states a cumulative ε" in refused(path)


def test_a_changed_schedule_is_found(path: Path, database: Path) -> None:
    rechain(database, 3, json.dumps(body_of(database, 3) | {"schedule": "0" * 64}))
    assert "Entry 3 changes the schedule" in refused(path)


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "5", "null", "{}", '{"dataset":"x"}', "not json"],
)
@pytest.mark.parametrize("number", [1, 3])
def test_an_entry_that_is_none_is_named_though_the_hashes_fit(
    path: Path, database: Path, body: str, number: int
) -> None:
    if number == 1:
        # The first entry has no predecessor: chain it by hand.
        connection = sqlite3.connect(database)
        rows = entries(connection)
        connection.close()
        previous, statements = GENESIS, []
        for row in rows:
            text = body if row[0] == 1 else row[2]
            previous = link(previous, row[0], row[1], text)
            statements.append(
                ("UPDATE entries SET body = ?, digest = ? WHERE number = ?", (text, previous, row[0]))
            )
        tamper(database, *statements)
        (path / "ledger.head").unlink()
    else:
        rechain(database, number, body)
    with pytest.raises(LedgerError, match=f"ntry {number}"):
        verify(path)
    with pytest.raises(LedgerError, match=f"ntry {number}"):
        open_state(path)


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


# --- charge and spool ---------------------------------------------------------------------------


def test_charge_and_fragments_are_there_together(state: AgentState) -> None:
    charge_rounds(state, 1)
    assert len(state.spool.pending()) == 3
    assert state.ledger.epsilon_spent(DATASET) > 0


def failing_fragments(error: BaseException) -> Iterator[SpooledFragment]:
    yield from fragments(50)
    raise error


@pytest.mark.parametrize("error", [RuntimeError("seal"), KeyboardInterrupt(), OSError(28, "No space left")])
def test_an_error_while_charging_leaves_neither_charge_nor_fragments(
    path: Path, state: AgentState, error: BaseException
) -> None:
    charge_rounds(state, 1)
    before, spent = entries(state.connection), state.ledger.epsilon_spent(DATASET)
    charge = charge_for(make_plan(round=2), DATA, state.ledger)
    with pytest.raises((type(error), StorageError)):
        state.charge_and_spool(charge, failing_fragments(error))
    assert entries(state.connection) == before
    assert len(state.spool.pending()) == 3
    assert state.ledger.epsilon_spent(DATASET) == spent
    assert not state.ledger.is_charged(DATASET, charge.job, 2)
    charge_rounds(state, 2)
    assert verify(path).charges == 2


def test_a_full_disk_leaves_neither_charge_nor_fragments(path: Path, state: AgentState) -> None:
    charge_rounds(state, 1)
    before, spent = entries(state.connection), state.ledger.epsilon_spent(DATASET)
    pages = state.connection.execute("PRAGMA page_count").fetchone()[0]
    state.connection.execute(f"PRAGMA max_page_count={pages + 3}")
    charge = charge_for(make_plan(round=2), DATA, state.ledger)
    large = [SpooledFragment(os.urandom(16), b"m" * 10_000, 0.0) for _ in range(20)]
    with pytest.raises(StorageError, match="disk is full"):
        state.charge_and_spool(charge, large)
    assert entries(state.connection) == before
    assert len(state.spool.pending()) == 3
    assert state.ledger.epsilon_spent(DATASET) == spent
    state.connection.execute("PRAGMA max_page_count=1000000")
    state.charge_and_spool(charge, large)
    assert verify(path).charges == 2
    assert len(state.spool.pending()) == 23


def test_a_duplicate_digest_in_the_spool_undoes_the_charge(path: Path, state: AgentState) -> None:
    charge_rounds(state, 1)
    taken = state.spool.pending()[0]
    with pytest.raises(StorageError):
        state.charge_and_spool(
            charge_for(make_plan(round=2), DATA, state.ledger), [SpooledFragment(taken, b"", 0.0)]
        )
    assert verify(path).charges == 1


def test_a_head_that_cannot_be_written_does_not_unsettle_the_ledger(path: Path, state: AgentState) -> None:
    """The commit counts: what it charged stays charged in memory as on disk."""
    charge_rounds(state, 1)
    (path / ".ledger.head.new").mkdir()
    with pytest.raises(StorageError):
        charge_rounds(state, 2)
    assert [row[0] for row in entries(state.connection)] == [1, 2, 3]
    assert state.ledger.is_charged(DATASET, (b"j" * 16).hex(), 2)
    (path / ".ledger.head.new").rmdir()
    charge_rounds(state, 3)
    assert verify(path).charges == 3


def test_a_failed_charge_whose_head_cannot_be_written_either_does_not_unsettle_the_ledger(
    path: Path, state: AgentState
) -> None:
    """A disk that is full is full for both files."""
    charge_rounds(state, 1)
    charge = charge_for(make_plan(round=2), DATA, state.ledger)
    (path / ".ledger.head.new").mkdir()
    with pytest.raises((StorageError, RuntimeError)):
        state.charge_and_spool(charge, failing_fragments(RuntimeError("seal")))
    (path / ".ledger.head.new").rmdir()
    assert not state.ledger.is_charged(DATASET, charge.job, 2)
    charge_rounds(state, 2)
    assert verify(path).charges == 2


def test_a_crash_between_commit_and_head_is_fine(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    head = (path / "ledger.head").read_bytes()
    charge_rounds(state, 2)
    state.close()
    (path / "ledger.head").write_bytes(head)
    assert verify(path).charges == 2
    state = open_state(path)
    assert state.ledger.is_charged(DATASET, (b"j" * 16).hex(), 2)
    state.close()
    assert json.loads((path / "ledger.head").read_text())["entries"] == 3


def test_the_spool_follows_a_fragment_to_its_receipt(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    first, second, third = sorted(state.spool.pending())
    state.reschedule([(100.0, first), (50.0, second), (75.0, third)])
    assert state.spool.next_due_at() == 50.0
    assert [fragment.digest for fragment in state.spool.due(80.0, 10)] == [second, third]
    assert [fragment.digest for fragment in state.spool.due(80.0, 1)] == [second]
    state.mark_sent({second: 500.0}, 60.0)
    assert state.mark_counted([second, b"x" * 16]) == 1
    assert state.mark_counted([second]) == 0
    assert sorted(state.spool.pending()) == [first, third]
    state.close()
    state = open_state(path)
    assert sorted(state.spool.pending()) == [first, third]
    job = (b"j" * 16).hex()
    assert state.expire_other_rounds(job, 1) == 0
    assert state.expire_other_rounds(job, 2) == 2
    assert state.spool.next_due_at() is None
    # A receipt that comes after the round was given up still says the truth about it.
    assert state.mark_counted([first]) == 1
    rows = dict(state.connection.execute("SELECT digest, state FROM fragments").fetchall())
    assert rows == {first: "counted", second: "counted", third: "expired"}
    state.close()


# --- SIGKILL ------------------------------------------------------------------------------------

_CHARGE = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fleets import make_plan, records, terms
from ledgers import charge_for, open_state
from agent.charges import Budget
from agent.spool import SpooledFragment

data = records(20)
state = open_state(Path(sys.argv[2]), Budget(1e9, 1.0))
print("ready", flush=True)
while True:
    job = os.urandom(16)
    for number in (1, 2, 3):
        plan = make_plan(round=number, job=job, **terms(delta=1e-9))
        charge = charge_for(plan, data, state.ledger)
        fragments = [SpooledFragment(os.urandom(16), os.urandom(500), 0.0) for _ in range(20)]
        state.charge_and_spool(charge, fragments)
        time.sleep(float(sys.argv[3]))
"""


def start_charging(path: Path, pause_s: float = 0.0) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _CHARGE, str(Path(__file__).parents[1]), str(path), str(pause_s)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.heavy
def test_no_kill_leaves_a_fragment_without_its_charge(path: Path) -> None:
    generator = random.Random(5)
    charges = 0
    for _ in range(4):
        process = start_charging(path)
        try:
            time.sleep(generator.uniform(0.05, 0.4))
        finally:
            end(process)
        proof = verify(path)
        connection, _ = open_ledger(path)
        rows = connection.execute("SELECT job, round, count(*) FROM fragments GROUP BY job, round").fetchall()
        charged = {
            (body["job"], body["round"])
            for _, kind, text, _ in entries(connection) if kind == "charge" for body in [json.loads(text)]
        }  # fmt: skip
        connection.close()
        assert {tuple(row)[:2] for row in rows} == charged
        assert {tuple(row)[2] for row in rows} <= {20}
        assert len(charged) == proof.charges >= charges
        charges = proof.charges
    assert charges > 0


@pytest.mark.heavy
def test_verifying_beside_a_busy_agent_raises_no_false_alarm(path: Path) -> None:
    process = start_charging(path, 0.1)  # slower than verifying, or the two would race for ever
    try:
        wait_until(lambda: verify(path).charges > 9, "some charges")
        seen = [verify(path).charges for _ in range(20)]
    finally:
        end(process)
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


def test_a_round_that_its_jobs_grid_overprices_does_not_unsettle_the_ledger(tmp_path: Path) -> None:
    """Sixteen rare rounds at a tiny δ: on the grid of the whole, the first alone is priced nine times it."""
    changes = terms(noise_multipliers=[1.0] * 16, rate=1e-4, delta=1e-11, resolution=65_536)
    path = tmp_path / "state"
    for number in (1, 2):
        state = open_state(path)
        charge = charge_for(make_plan(round=number, **changes), DATA, state.ledger)
        assert charge.cumulative_epsilon <= charge.job_epsilon
        state.charge_and_spool(charge, [])
        state.close()
    assert verify(path).charges == 2


def test_an_entry_of_the_wrong_type_is_named(path: Path, database: Path) -> None:
    """Our table takes no such entry; one in its place may."""
    tamper(
        database,
        "CREATE TABLE lax AS SELECT * FROM entries",
        "DROP TABLE entries",
        "ALTER TABLE lax RENAME TO entries",
        ("UPDATE entries SET body = ? WHERE number = 2", (b"{}",)),
    )
    assert "Entry 2 is damaged" in refused(path)
