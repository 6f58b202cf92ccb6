"""What is written off of a ledger that was restored from a backup, or given up, and its replay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fleets import make_plan, records
from ledgers import (
    AT,
    BUDGET,
    DATA,
    DATASET,
    body_of,
    charge_and_spool,
    charge_for,
    charge_rounds,
    copied,
    files_of,
    fragments,
    open_state,
    put_copy_back,
    rechain,
    refused,
    reserved,
    restore,
)

from agent.accounts import JobAccounts
from agent.audit import audit, verify
from agent.charges import Budget
from agent.custody import back_up, begin_ledger, put_back, raise_budget
from agent.declined import Declined
from agent.heads import read_head, read_second_head
from agent.replay import replay
from agent.state import AgentState
from dpagent.errors import ExitCode, LedgerError

OTHER_JOB = b"k" * 16


def accounts(path: Path) -> JobAccounts:
    return audit(path).accounts


def test_what_the_second_head_knows_is_written_off_to_the_last_bit(path: Path, older: Path) -> None:
    true, before = reserved(path), reserved(older)
    put_copy_back(older, path)
    (lost,) = restore(path)
    assert lost.dataset == DATASET
    assert lost.is_exact
    assert lost.written_at == AT.isoformat()
    assert lost.epsilon == pytest.approx(true.epsilon - before.epsilon, rel=1e-9)
    now = reserved(path)
    assert now == Budget(lost.cumulative_epsilon, lost.cumulative_delta)
    assert true.epsilon <= now.epsilon <= true.epsilon * (1 + 1e-12)
    assert true.delta <= now.delta <= true.delta * (1 + 1e-12)
    assert accounts(path).epsilon_spent(DATASET) == now.epsilon
    assert accounts(path).written_off(DATASET) == Budget(lost.epsilon, lost.delta)
    assert audit(path).write_offs == (lost,)
    assert restore(path) == (), "nothing is missing any more"


def test_no_round_of_a_job_that_had_begun_is_taken_again(path: Path, older: Path) -> None:
    """Not even where the missing entries reserved nothing: rounds 2 and 3 were paid at the first charge."""
    state = open_state(path)
    known = {number: state.round((b"j" * 16).hex(), number) for number in (1, 2, 3)}
    assert all(known.values())
    state.close()
    put_copy_back(older, path)
    assert restore(path)
    state = open_state(path)
    assert state.spool.pending() == {}
    for number in (1, 2, 3):
        with pytest.raises(Declined, match=r"ended|arrived after"):
            charge_for(make_plan(round=number), DATA, state.ledger)
    with pytest.raises(Declined, match="restored from a backup"):
        charge_for(make_plan(round=2), DATA, state.ledger)
    # A job that the copy does not know is a new one, and pays again.
    before = reserved(path)
    charge_rounds(state, 1, job=OTHER_JOB)
    charge_rounds(state, 2, job=OTHER_JOB)
    state.close()
    assert reserved(path).epsilon > before.epsilon
    assert verify(path).charges == 3


def test_missing_rounds_that_reserved_nothing_still_end_their_job(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    state.close()
    older = copied(path, "older")
    state = open_state(path)
    charge_rounds(state, 2)
    state.close()
    put_copy_back(older, path)
    (lost,) = restore(path)
    assert (lost.epsilon, lost.delta) == (0.0, 0.0)
    assert accounts(path).running_job(DATASET) is None


def test_without_a_copy_everything_reserved_is_written_off(path: Path, older: Path) -> None:
    true = reserved(path)
    shutil.rmtree(path)
    (lost,) = restore(path)
    assert lost.epsilon == pytest.approx(true.epsilon, rel=1e-9)
    assert lost.epsilon >= true.epsilon
    assert verify(path).entries == 2
    state = open_state(path)
    charge_rounds(state, 1, job=b"l" * 16)
    state.close()
    assert verify(path).charges == 1


def test_every_dataset_is_written_off(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    state.close()
    older = copied(path, "older")
    state = open_state(path, Budget(20.0, 1e-4), "other")
    charge_and_spool(state, charge_for(make_plan(job=OTHER_JOB), DATA, state.ledger, "other"), fragments(77))
    state.close()
    true = {name: reserved(path, name) for name in (DATASET, "other")}
    put_copy_back(older, path)
    assert {lost.dataset for lost in restore(path, dataset="other")} == {DATASET, "other"}
    for name, each in true.items():
        assert reserved(path, name).epsilon == pytest.approx(each.epsilon, rel=1e-9)
    AgentState(files_of(path), {"other": Budget(20.0, 1e-4)}, check=replay).close()


def test_a_budget_that_changed_since_is_the_second_heads(path: Path) -> None:
    for budget in (Budget(30.0, BUDGET.delta), Budget(70.0, BUDGET.delta)):
        open_state(path).close()
        older = copied(path, f"older-{budget.epsilon:g}")
        open_state(path, budget).close()
        put_copy_back(older, path)
        restore(path)
        state = AgentState(files_of(path), {DATASET: budget}, check=replay)
        assert state.ledger.budget(DATASET) == budget
        state.close()


def test_without_the_second_head_nothing_is_done_unless_the_owner_gives_up_the_rest(
    path: Path, older: Path
) -> None:
    put_copy_back(older, path)
    files_of(path).second_head.unlink()
    with pytest.raises(LedgerError, match="--write-off-all") as caught:
        restore(path)
    assert caught.value.exit_code == ExitCode.LEDGER
    assert not files_of(path).second_head.exists()
    (lost,) = restore(path, write_off_all=True)
    assert not lost.is_exact
    now = reserved(path)
    assert BUDGET.epsilon <= now.epsilon <= BUDGET.epsilon * (1 + 1e-12)
    assert BUDGET.delta <= now.delta <= BUDGET.delta * (1 + 1e-12)
    state = open_state(path)
    with pytest.raises(Declined, match="is reserved"):
        charge_for(make_plan(job=b"l" * 16), DATA, state.ledger)
    state.close()


def test_the_rest_is_that_of_the_largest_budget_anything_knows(path: Path) -> None:
    """It may have been raised and spent since the copy was made; the configuration tells of it."""
    open_state(path).close()
    raised = Budget(80.0, 2 * BUDGET.delta)
    files_of(path).second_head.unlink()
    restore(path, write_off_all=True, budget=raised)
    assert reserved(path).epsilon >= raised.epsilon
    assert reserved(path).delta >= raised.delta
    raise_budget(files_of(path), {DATASET: raised})
    state = AgentState(files_of(path), {DATASET: raised}, check=replay)
    with pytest.raises(Declined):
        charge_for(make_plan(), DATA, state.ledger)
    state.close()


def test_what_was_reserved_is_written_off_where_every_budget_is_lower_than_that(path: Path) -> None:
    """The second head knows it still, though the owner does not trust it to be the newest."""
    files = files_of(path)
    begin_ledger(files, {DATASET: Budget(0.1, 1e-6)})
    before = copied(path, "before")
    state = open_state(path)
    charge_rounds(state, 1)
    state.close()
    spent = reserved(path)
    lower = Budget(spent.epsilon / 2, spent.delta / 2)
    AgentState(files, {DATASET: lower}, check=replay).close()
    put_copy_back(before, path)
    restore(path, write_off_all=True, budget=lower)
    after = reserved(path)
    assert after.epsilon >= spent.epsilon > 0.1
    assert after.delta >= spent.delta > 1e-6


def test_a_second_head_that_was_put_back_too_needs_the_owners_word(path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    state.close()
    assert restore(path) == (), "it shows nothing missing"
    assert verify(path).entries == 2
    restore(path, write_off_all=True)
    assert reserved(path).epsilon >= BUDGET.epsilon


def put_back_both(path: Path, older: Path) -> None:
    """The database and the second head of before; ``ledger.head`` stays the newest."""
    shutil.copy(older / "ledger.db", path)
    for ending in ("-wal", "-shm"):
        (path / f"ledger.db{ending}").unlink(missing_ok=True)
    shutil.copy(files_of(older).second_head, files_of(path).second_head)


@pytest.fixture
def both_older(path: Path) -> Path:
    """A copy of a state directory and of its second head; two jobs were charged since."""
    state = open_state(path)
    charge_rounds(state, 1)
    state.close()
    older = copied(path, "both-older")
    shutil.copy(files_of(path).second_head, files_of(older).second_head)
    state = open_state(path)
    charge_rounds(state, 1, job=OTHER_JOB)
    charge_rounds(state, 1, job=b"l" * 16)
    state.close()
    return older


def test_a_database_and_a_second_head_that_were_put_back_refund_nothing(path: Path, both_older: Path) -> None:
    """``ledger.head`` shows it, and no command may write over it."""
    put_back_both(path, both_older)
    head = files_of(path).head.read_bytes()
    with pytest.raises(LedgerError, match="had 4 and has 2"):
        open_state(path)
    with pytest.raises(LedgerError, match="had 4 and has 2"):
        raise_budget(files_of(path), {DATASET: Budget(60.0, BUDGET.delta)})
    with pytest.raises(LedgerError, match=r"was put back too.*--write-off-all") as caught:
        restore(path)
    assert caught.value.exit_code == ExitCode.LEDGER
    assert files_of(path).head.read_bytes() == head
    (lost,) = restore(path, write_off_all=True)
    assert lost.cumulative_epsilon >= BUDGET.epsilon
    open_state(path).close()


def test_a_second_head_that_was_put_back_less_far_than_the_database_bounds_no_write_off(
    path: Path, both_older: Path
) -> None:
    put_back_both(path, both_older)
    (path / "ledger.db").unlink()
    with pytest.raises(LedgerError, match=r"was put back too.*--write-off-all"):
        restore(path)


def test_a_newer_database_may_be_put_over_one_that_was_put_back_with_its_second_head(
    path: Path, both_older: Path, tmp_path: Path
) -> None:
    true, copy = reserved(path), tmp_path / "copy.db"
    back_up(path, copy)
    put_back_both(path, both_older)
    put_back(copy, files_of(path))
    assert restore(path) == ()
    assert reserved(path) == true
    open_state(path).close()


@pytest.mark.parametrize("action", ["restored", "raise"])
def test_a_second_head_that_a_power_cut_left_behind_goes_on(path: Path, action: str) -> None:
    """By one transaction, in which nothing left: the chain has the entry of ``ledger.head``."""
    state = open_state(path)
    charge_rounds(state, 1)
    before = files_of(path).second_head.read_bytes()
    charge = charge_for(make_plan(job=OTHER_JOB), DATA, state.ledger)
    state.offer(charge.job, charge.round, bytes(32), 0.0)
    state.charge([charge], 0.0)
    state.close()
    files_of(path).second_head.write_bytes(before)
    if action == "restored":
        assert restore(path) == ()
    else:
        raise_budget(files_of(path), {DATASET: Budget(60.0, BUDGET.delta)})
    assert verify(path, files_of(path).second_head).charges == 2


def test_no_ledger_at_all_can_be_given_up(path: Path) -> None:
    """Everything is lost: the owner knows that these data were used."""
    (lost,) = restore(path, write_off_all=True)
    assert lost.cumulative_epsilon >= BUDGET.epsilon
    state = open_state(path)
    with pytest.raises(Declined):
        charge_for(make_plan(), records(20), state.ledger)
    state.close()


def test_a_second_head_of_another_ledger_is_refused(path: Path, older: Path, tmp_path: Path) -> None:
    put_copy_back(older, path)
    other = open_state(tmp_path / "other")
    other.close()
    shutil.copy(files_of(tmp_path / "other").second_head, files_of(path).second_head)
    open_state(path).close()  # It is the beginning of this chain, too.
    open_state(tmp_path / "third", Budget(49.0, BUDGET.delta)).close()
    shutil.copy(files_of(tmp_path / "third").second_head, files_of(path).second_head)
    with pytest.raises(LedgerError, match="is not the one recorded"):
        AgentState(files_of(path), {DATASET: BUDGET}, check=replay)
    with pytest.raises(LedgerError, match="not of one ledger"):
        restore(path)
    assert restore(path, write_off_all=True)


# --- the replay ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"epsilon": -1.0}, {"delta": -1e-6}, {"cumulative_epsilon": 1e-3}, {"cumulative_delta": 1e-9},
     {"epsilon": 1e-9}, {"dataset": "other"}, {"epsilon": None}, {"is_exact": 1}, {"more": 1}],
    ids=repr,
)  # fmt: skip
def test_a_write_off_with_odd_values_is_named(path: Path, older: Path, changes: dict[str, Any]) -> None:
    put_copy_back(older, path)
    restore(path)
    database = path / "ledger.db"
    rechain(database, 3, json.dumps(body_of(database, 3) | changes))
    assert "ntry 3" in refused(path)


def test_a_write_off_counts_for_jobs_after_it(path: Path, older: Path) -> None:
    put_copy_back(older, path)
    restore(path)
    state = open_state(path)
    charge_rounds(state, 1, job=b"l" * 16)
    state.close()
    database = path / "ledger.db"
    body = body_of(database, 4)
    assert body["cumulative_epsilon"] > body_of(database, 3)["cumulative_epsilon"]
    less = body["cumulative_epsilon"] - body_of(database, 3)["epsilon"]
    rechain(database, 4, json.dumps(body | {"cumulative_epsilon": less}))
    assert "Entry 4 states a cumulative ε" in refused(path)


def test_a_copy_whose_own_head_is_lost_goes_on(path: Path, older: Path) -> None:
    put_copy_back(older, path)
    files_of(path).head.write_text("nonsense")
    with pytest.raises(LedgerError, match=r"Remove it, and run `dpagent budget restored`"):
        restore(path)
    files_of(path).head.unlink()
    restore(path)
    second, first = read_second_head(files_of(path).second_head), read_head(files_of(path).head)
    assert second is not None
    assert first is not None
    assert first.hash == second.hash
    open_state(path).close()
