"""What a job has spent, in columns: by the job as it began, and the devices that counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleets import write_fleet
from stores import BLANK_MODEL, begin_job

from coordinator.columns import ENDS_THERE, spent_columns, spent_in
from coordinator.dead_ends import Halt
from coordinator.planning import new_job
from coordinator.reader import StoreReader
from coordinator.settings import load_fleet_settings
from dpagent.privacy.statement import Adjacency, Trust, Unit

REPORTS = {"method": "ldp-fl", "epsilon": 4.0, "two_point": {"coordinates": 4}}


def test_reports_hide_among_those_that_counted(tmp_path: Path) -> None:
    file = write_fleet(tmp_path, None, privacy=REPORTS, cap={"kind": "none"}, devices=500)
    job = new_job(load_fleet_settings(file))
    own, alone, bit = spent_columns(job, rounds=2, epsilon=4.0, devices=1)
    among = spent_columns(job, rounds=2, epsilon=4.0, devices=500)[1]
    assert [(each.unit, each.trust) for each in (own, alone, bit)] == [
        (Unit.DEVICE, Trust.NONE), (Unit.DEVICE, Trust.SHUFFLER), (Unit.COORDINATE, Trust.NONE),
    ]  # fmt: skip
    assert among.epsilon < 1.0 < alone.epsilon == own.epsilon == 4.0
    assert "at least 500 devices" in among.assumptions[0]


def test_sums_have_one_column(tmp_path: Path) -> None:
    job = new_job(load_fleet_settings(write_fleet(tmp_path, None)))
    (own,) = spent_columns(job, rounds=1, epsilon=2.0, devices=2)
    assert (own.unit, own.trust, own.epsilon, own.delta) == (Unit.RECORD, Trust.NONE, 2.0, 1e-4)


def test_noise_of_devices_has_a_column_that_trusts_nobody(tmp_path: Path) -> None:
    privacy = {"method": "central", "epsilon": 4.0, "device_noise": {"epsilon": 60.0}}
    file = write_fleet(tmp_path, None, privacy=privacy, cap={"kind": "none"})
    job = new_job(load_fleet_settings(file))
    for rounds, expected in ((1, job.device and job.device.epsilon_by_round[0]), (2, 60.0)):
        own, alone = spent_columns(job, rounds=rounds, epsilon=3.0, devices=2)
        assert (own.unit, own.adjacency, own.trust) == (Unit.DEVICE, Adjacency.ZERO_OUT, Trust.COORDINATOR)
        assert (alone.unit, alone.adjacency, alone.trust) == (
            Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.NONE,
        )  # fmt: skip
        assert own.epsilon == 3.0
        assert alone.epsilon == pytest.approx(expected, rel=1e-3)


def test_fragments_that_tokens_link_do_not_hide_among_others(tmp_path: Path) -> None:
    for linkability, scopes in (("fragment", 3), ("round", 2), ("none", 3)):
        file = write_fleet(
            tmp_path / linkability, None, privacy=REPORTS, cap={"kind": "none"}, linkability=linkability
        )
        columns = spent_columns(new_job(load_fleet_settings(file)), rounds=2, epsilon=4.0, devices=500)
        assert len(columns) == scopes
        assert (Trust.SHUFFLER in {each.trust for each in columns}) is (linkability != "round")


def test_a_job_that_ends_early_is_a_bound_if_that_was_settled_before(tmp_path: Path) -> None:
    """But for one whose rounds are added up."""
    caps: list[dict[str, Any]] = [{"kind": "none"}, {"kind": "bounded"}]
    for number, cap in enumerate(caps):
        privacy = {"method": "incrementing", "noise": "laplace"}
        file = write_fleet(tmp_path / str(number), None, privacy=privacy, cap=cap)
        job = new_job(load_fleet_settings(file))
        (early,), (whole,) = (
            spent_columns(job, rounds=rounds, epsilon=job.epsilon_by_round[rounds - 1], devices=2)
            for rounds in (1, job.rounds)
        )
        assert (ENDS_THERE in early.assumptions) is (cap["kind"] == "none")
        assert ENDS_THERE not in whole.assumptions


def test_a_job_whose_last_rounds_were_passed_over_has_not_come_to_its_end(tmp_path: Path) -> None:
    """Boards declined them: it ended there in the light of what came before."""
    settings = load_fleet_settings(write_fleet(tmp_path, None, rounds=4))
    job = new_job(settings)
    store = begin_job(settings, BLANK_MODEL)
    store.start_round(1, 10.0, 20.0)
    spent = job.epsilon_by_round[0]
    store.give_up_round(
        1, noise_multiplier=1.0, epsilon=spent, least=1, given_up_at=20.0, halt=Halt("too few", range(2, 5))
    )
    store.database.close()
    reader = StoreReader(settings.store_place)
    rounds = reader.rounds()
    reader.close()
    assert [each.number for each in rounds if each.is_over] == [1, 2, 3, 4]
    (column,) = spent_in(job, rounds)
    assert column.epsilon == spent < job.epsilon_by_round[-1]
    assert ENDS_THERE in column.assumptions
