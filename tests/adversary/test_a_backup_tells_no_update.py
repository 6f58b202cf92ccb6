"""A thief reads a backup of the ledger, made while an update without noise waits to be sent.

Claim: `dpagent budget backup` copies what was spent, and nothing of what a device sends: neither fragments
    that wait nor, in pages that are free by now, those that were counted. Nor what came of the work on
    records otherwise.
Parameters: the `digits` model, a round of a job that trusts the coordinator at ε = 2; backups while all
    of its fragments wait, after half of them were counted, and after all were; looked for in pieces of 24
    bytes.

Before, a backup was a copy of the whole database. The spool holds fragments as they are before they are
sealed: of a noisy sum, what has noise already, but of an update to which the coordinator adds the noise, the
update itself. The thief is not the coordinator, and had the update exactly, where the ledger had charged for
a sum with noise of three times its norm in each coordinate.

Power: no randomness; on the code of before the thief has every value of the update.
Outcome: no fragment, and no piece of one. A device that goes on with the copy gives up the round.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from devices import KEY, started_trainer
from fleets import DIGITS, update_plan, write_agent

from agent.admission import admit
from agent.custody import back_up
from agent.energy import Energy
from agent.priced_charges import charge_of
from agent.replay import replay
from agent.rounds import RoundState
from agent.settings import AgentSettings, load_agent_settings
from agent.spool import SpooledFragment
from agent.state import AgentState
from dpagent.protocol.fragments import cut
from dpagent.protocol.task import RoundTask

PLAN = update_plan()
PIECE = 24


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    """Of a device that trusts the coordinator."""
    return load_agent_settings(
        write_agent(
            tmp_path, None, KEY, engine="numpy",
            limits={"methods": ["central"], "trust": ["none", "coordinator"]},
            budget={"coordinator": {"epsilon": 8.0, "delta": 1e-4}},
        )
    )  # fmt: skip


def spooled_update(
    settings: AgentSettings, state: AgentState, failure: str | None = None
) -> tuple[list[SpooledFragment], list[bytes]]:
    """The fragments of a round, and their payloads."""
    trainer, task = started_trainer(settings), RoundTask.of(PLAN)
    name, job = settings.data.name, PLAN.job.hex()
    (price,) = admit(task, trainer.records.dataset, state.ledger.books, name, settings.limits, now=0.0)
    state.offer(job, PLAN.round, bytes(32), 0.0)
    state.charge([charge_of(task, price, charged_at="2026-11-20T00:00:00+00:00")], 0.0)
    values = trainer.noisy_update(trainer.prepare(task, {}, DIGITS.initial_weights(0))).values
    assert np.count_nonzero(values) > len(values) / 2
    fragments = list(cut(values, PLAN))
    spooled = [SpooledFragment.of(fragment) for fragment in fragments]
    state.spool_round(job, PLAN.round, spooled, 0.0, failure)
    return spooled, [fragment.payload for fragment in fragments]


def pieces_in(file: Path, payloads: list[bytes]) -> int:
    """How many pieces of payloads a file holds."""
    found = file.read_bytes()
    return sum(
        payload[start : start + PIECE] in found
        for payload in payloads
        for start in range(0, len(payload) - PIECE, PIECE)
    )


def test_a_backup_holds_nothing_of_what_a_device_sends(settings: AgentSettings, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with closing(AgentState(settings.ledger_files, settings.lifetime_budgets, check=replay)) as state:
        spooled, payloads = spooled_update(settings, state)
        digests = [fragment.digest for fragment in spooled]
        half = len(digests) // 2
        for counted in ([], digests[:half], digests[half:]):
            state.mark_counted(counted, 1.0)
            state.write_notes()
            state.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            assert len(back_up(settings.state_dir, copy).entries) == 3
            assert pieces_in(copy, payloads) == 0
            with closing(sqlite3.connect(copy)) as stolen:
                assert stolen.execute("SELECT count(*) FROM fragments").fetchone() == (0,)
        assert sorted(file.name for file in tmp_path.glob("*copy.db*")) == ["copy.db", "copy.db.head"]


def test_a_backup_tells_nothing_of_the_work_on_records(settings: AgentSettings, tmp_path: Path) -> None:
    """Before, it told how many joules each round had taken, and why one held noise alone."""
    copy, reason = tmp_path / "copy.db", "row 17 is damaged"
    with closing(AgentState(settings.ledger_files, settings.lifetime_budgets, check=replay)) as state:
        spooled_update(settings, state, reason)
        state.note_energy(PLAN.job.hex(), PLAN.round, Energy(12.5, "a sensor"))
        state.write_notes()
        back_up(settings.state_dir, copy)
    with closing(sqlite3.connect(copy)) as stolen:
        told = stolen.execute("SELECT reason, energy_j, energy_source FROM rounds").fetchall()
    assert told == [(None, None, None)]
    assert reason.encode() not in copy.read_bytes()


def test_a_device_that_goes_on_with_a_backup_gives_up_what_was_spooled(
    settings: AgentSettings, tmp_path: Path
) -> None:
    with closing(AgentState(settings.ledger_files, settings.lifetime_budgets, check=replay)) as state:
        spooled_update(settings, state)
        back_up(settings.state_dir, tmp_path / "copy.db")
    settings.ledger_files.database.write_bytes((tmp_path / "copy.db").read_bytes())
    with closing(AgentState(settings.ledger_files, settings.lifetime_budgets, check=replay)) as state:
        known = state.round(PLAN.job.hex(), PLAN.round)
        assert known is not None
        assert known.state is RoundState.EXPIRED
        assert state.ledger.trusts_of(settings.data.name, PLAN.job.hex(), PLAN.round)
        assert state.spool.pending() == {}
