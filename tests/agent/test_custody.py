"""What the owner does with a ledger: begin it, raise its budget, back it up."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import pytest
from fleets import make_plan, records, terms
from ledgers import (
    BUDGET,
    DATASET,
    charge_and_spool,
    charge_for,
    charge_rounds,
    files_of,
    open_state,
    put_copy_back,
    restore,
)
from storms import beside

from agent.audit import audit, verify
from agent.charges import Budget
from agent.custody import back_up, begin_ledger, put_back, raise_budget
from agent.heads import read_head
from agent.replay import replay
from agent.state import AgentState
from dpagent.errors import ExitCode, LedgerError, StateInUseError, StorageError, UsageError

# --- beginning ----------------------------------------------------------------------------------


def test_a_ledger_is_begun_once(path: Path) -> None:
    files = files_of(path)
    begin_ledger(files, {DATASET: BUDGET})
    assert (verify(path).entries, verify(path).charges) == (1, 0)
    for dataset in (DATASET, "other"):
        with pytest.raises(LedgerError, match=r"knows a ledger .* `dpagent budget show` has it") as caught:
            begin_ledger(files, {dataset: Budget(99.0, 0.5)})
        assert caught.value.exit_code == ExitCode.LEDGER
    assert verify(path).entries == 1


def test_no_ledger_is_begun_over_one_that_has_spent(path: Path, older: Path) -> None:
    """Its second head is gone; that alone gives no new budget."""
    files_of(path).second_head.unlink()
    with pytest.raises(LedgerError, match=r"second head.* is missing.*--write-off-all"):
        begin_ledger(files_of(path), {DATASET: BUDGET})
    assert verify(path).charges == 4


def test_no_ledger_is_begun_over_a_shortened_one(path: Path, older: Path) -> None:
    """Its database is gone, and its second head; its own head is left."""
    files = files_of(path)
    files.second_head.unlink()
    files.database.unlink()
    with pytest.raises(LedgerError, match="the ledger had 5 and has 0"):
        begin_ledger(files, {DATASET: BUDGET})


@pytest.mark.parametrize("has_second_head", [True, False])
def test_an_agent_without_a_ledger_begins_none(path: Path, has_second_head: bool) -> None:
    files = files_of(path)
    if has_second_head:
        open_state(path).close()
        shutil.rmtree(path)
    with pytest.raises(LedgerError, match="holds no ledger") as caught:
        AgentState(files, {DATASET: BUDGET}, check=replay)
    assert ("budget init" in str(caught.value)) is not has_second_head
    assert "budget restored" in str(caught.value)
    assert not path.exists()


# --- budgets ------------------------------------------------------------------------------------


def test_a_raise_is_an_entry_and_needs_to_be_one(path: Path) -> None:
    open_state(path).close()
    files = files_of(path)
    assert raise_budget(files, {DATASET: Budget(60.0, BUDGET.delta)}) == {DATASET: BUDGET}
    assert raise_budget(files, {"other": Budget(1.0, 1e-6)}) == {"other": None}
    assert [asdict(entry.record)["epsilon"] for entry in audit(path).entries] == [50.0, 60.0, 1.0]
    for budget in (Budget(60.0, BUDGET.delta), Budget(10.0, BUDGET.delta)):
        with pytest.raises(LedgerError, match="nothing to raise"):
            raise_budget(files, {DATASET: budget})
    assert verify(path).entries == 3
    AgentState(files, {DATASET: Budget(60.0, BUDGET.delta)}, check=replay).close()


def test_no_budget_is_raised_in_an_older_copy_or_without_a_ledger(path: Path, older: Path) -> None:
    put_copy_back(older, path)
    with pytest.raises(LedgerError, match="had 5 and has 2"):
        raise_budget(files_of(path), {DATASET: Budget(60.0, BUDGET.delta)})
    shutil.rmtree(path)
    with pytest.raises(LedgerError, match="holds no ledger"):
        raise_budget(files_of(path), {DATASET: Budget(60.0, BUDGET.delta)})
    assert not path.exists()


def test_nothing_of_it_happens_beside_an_agent(path: Path, tmp_path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1)
    files = files_of(path)
    back_up(path, tmp_path / "copy.db")
    for action in (
        lambda: raise_budget(files, {DATASET: Budget(60.0, 1e-3)}),
        lambda: restore(path),
        lambda: put_back(tmp_path / "copy.db", files),
    ):
        with pytest.raises(StateInUseError):
            action()
    state.close()
    assert verify(path).entries == 2


# --- backups ------------------------------------------------------------------------------------


def test_a_backup_is_a_ledger_with_its_head(path: Path, tmp_path: Path) -> None:
    state = open_state(path)
    charge_rounds(state, 1, 2)
    target = tmp_path / "backups"
    target.mkdir()
    copy = target / "ledger.db"
    assert len(back_up(path, copy).entries) == 3
    charge_rounds(state, 3)
    assert len(back_up(path, copy).entries) == 4
    state.close()
    assert sorted(file.name for file in target.iterdir()) == ["ledger.db", "ledger.db.head"]
    head = read_head(target / "ledger.db.head")
    assert head is not None
    assert (head.entries, head.hash) == (4, verify(path).head)
    assert copy.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["ledger.db", "copy.db", "below/copy.db"])
def test_a_backup_in_the_state_directory_is_refused(path: Path, name: str) -> None:
    open_state(path).close()
    path.with_name("link").symlink_to(path)
    for directory in (path, path.with_name("link")):
        with pytest.raises(UsageError) as caught:
            back_up(path, directory / name)
        assert caught.value.exit_code == ExitCode.USAGE
    assert verify(path).entries == 1


def test_a_backup_takes_the_place_of_no_device_and_follows_a_link(path: Path, tmp_path: Path) -> None:
    """Before, one that root made took the place of /dev/null, say, for all programs."""
    begin_ledger(files_of(path), {DATASET: BUDGET})
    place, link = tmp_path / "place", tmp_path / "link"
    os.mkfifo(place)
    link.symlink_to(place)
    for file in (place, link):
        with pytest.raises(StorageError, match="not a regular file"):
            back_up(path, file)
    assert place.is_fifo()
    assert not (tmp_path / "place.head").exists()
    place.unlink()
    back_up(path, link)
    assert link.is_symlink()
    assert verify(path).entries == 1
    assert read_head(tmp_path / "link.head") is not None


def test_a_backup_that_fails_leaves_nothing_behind(path: Path, tmp_path: Path) -> None:
    """Before, what it had copied stayed there, with what waited to be sent."""
    begin_ledger(files_of(path), {DATASET: BUDGET})
    back_up(path, tmp_path / "backup")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if "backup" in file.name}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(StorageError):
            back_up(path, tmp_path / "backup")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if "backup" in file.name} == before


def test_there_is_no_backup_of_no_ledger(path: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.db does not exist"):
        back_up(path, tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()


@pytest.mark.heavy
def test_backups_beside_a_busy_agent_are_whole(path: Path, tmp_path: Path) -> None:
    def charge_on(ready: Callable[[], object]) -> NoReturn:
        state, data = open_state(path, Budget(1e9, 1.0)), records(20)
        ready()
        while True:
            plan = make_plan(job=os.urandom(16), **terms(delta=1e-9))
            charge_and_spool(state, charge_for(plan, data, state.ledger), [])

    with beside(charge_on):
        lengths: list[int] = []
        until = time.monotonic() + 60
        while (len(lengths) < 5 or lengths[-1] < 10) and time.monotonic() < until:
            lengths.append(len(back_up(path, tmp_path / "copy.db").entries))
    assert lengths == sorted(lengths)
    assert lengths[-1] >= 10
    shutil.rmtree(path)
    put_back(tmp_path / "copy.db", files_of(path))
    assert verify(path).entries == lengths[-1]


def test_a_backup_that_is_none_is_not_put_back(path: Path, older: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    back_up(path, copy)
    shorter = tmp_path / "shorter.db"
    shutil.copy(older / "ledger.db", shorter)
    shutil.copy(tmp_path / "copy.db.head", tmp_path / "shorter.db.head")
    nonsense = tmp_path / "nonsense.db"
    nonsense.write_bytes(b"not a database" * 1_000)
    for backup, problem in ((shorter, "had 5 and has 2"), (nonsense, "not a readable database")):
        with pytest.raises(LedgerError, match=problem):
            put_back(backup, files_of(path))
    assert verify(path).entries == 5
    (path / "ledger.db").write_bytes(b"torn" * 1_000)
    put_back(copy, files_of(path))
    assert verify(path).entries == 5
    open_state(path).close()


def test_the_newest_ledger_is_not_replaced(path: Path, older: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    back_up(older, copy)
    with pytest.raises(LedgerError, match="is not replaced"):
        put_back(copy, files_of(path))
    assert verify(path).entries == 5
    put_copy_back(older, path)
    put_back(copy, files_of(path))
    assert verify(path).entries == 2
