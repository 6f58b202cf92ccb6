"""What a job has spent, in columns: by the job as it began, and the devices that counted."""

from __future__ import annotations

from pathlib import Path

from fleets import write_fleet

from coordinator.columns import spent_columns
from coordinator.planning import new_job
from coordinator.settings import load_fleet_settings
from dpagent.privacy.statement import Trust, Unit

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
