"""Databases of an earlier version: none reads them, and the coordinator brings them up to date."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
from commands import command_line
from daemons import running_job
from fleets import write_fleet
from members import enrolled, new_authority
from stores import JOB

from coordinator.budget_export import has_devices
from coordinator.daemon import Coordinator
from coordinator.database import schema
from coordinator.database.opening import open_database, open_reader
from coordinator.database.schema import Part
from coordinator.database.settings import StorePlace
from coordinator.devices import Devices
from coordinator.page.view import View
from coordinator.queue import Queue
from coordinator.reader import StoreReader
from coordinator.registry import Registry, RegistryReader
from coordinator.settings import FleetSettings, load_fleet_settings
from dpagent.errors import NotReadyError, StorageError


@pytest.fixture
def settings(tmp_path: Path) -> FleetSettings:
    return load_fleet_settings(write_fleet(tmp_path, None, linkability="fragment"))


def make_older(monkeypatch: pytest.MonkeyPatch, settings: FleetSettings) -> None:
    """A member and a queue, in tables before the last step of each part."""
    with monkeypatch.context() as patch:
        steps = [(part, step) for part in Part for step in schema.steps_of(part)[:-1]]
        patch.setattr(schema, "STEPS", tuple(steps))
        authority = new_authority(settings.members_dir, settings.fleet)
        with Devices(settings.members_dir) as devices:
            enrolled(authority, devices)
        Registry(settings.members_dir).close()
        settings.state_dir.mkdir(mode=0o700)
        open_database(settings.state_dir).close()


@pytest.mark.parametrize("part", list(Part))
def test_what_cannot_be_read_yet_is_no_broken_file(
    settings: FleetSettings, monkeypatch: pytest.MonkeyPatch, part: Part
) -> None:
    """It said that the file is not readable, and is to be restored from a backup."""
    make_older(monkeypatch, settings)
    place = settings.state_dir if part is Part.ROUNDS else settings.members_dir
    with pytest.raises(NotReadyError, match="Start the coordinator of this version first"):
        open_reader(place, part)
    with contextlib.closing(Coordinator(settings)) as coordinator:
        assert running_job(coordinator).queued.minimum_devices is None
    open_reader(place, part).close()
    monkeypatch.setattr(schema, "STEPS", ((part, lambda tables: None),))
    with pytest.raises(StorageError, match="It was written by a newer dpagent; install that version"):
        open_reader(place, part)


def test_who_watches_is_told_to_wait_also_in_a_pipe(
    settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that there is no job yet, and nothing of the database."""
    make_older(monkeypatch, settings)
    file = settings.state_dir.parent / "fleet.yaml"
    command = command_line("coordinator", "status", "--watch", "--config", file)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        line = watching.stdout.readline()
        watching.terminate()
    assert "Start the coordinator of this version first" in line
    assert "There is no job yet" not in line


def test_the_page_says_that_it_waits_for_the_coordinator(
    settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It showed a fleet without any job."""
    make_older(monkeypatch, settings)
    state = View(settings).state()
    assert state["jobs"] == []
    assert "Start the coordinator of this version first" in state["problem"]


def test_a_coordinator_brings_all_tables_up_to_date_also_those_that_its_jobs_do_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_fleet_settings(write_fleet(tmp_path, None))
    make_older(monkeypatch, settings)
    Coordinator(settings).close()
    assert has_devices(settings.members_dir)
    with contextlib.closing(RegistryReader(settings.members_dir)) as reader:
        assert reader.keys() == []


def test_orders_work_on_a_job_of_before(place: StorePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "STEPS", schema.STEPS[:-2])
        with contextlib.closing(open_database(place)) as database:
            database.execute(
                "INSERT INTO jobs (name, id, terms, budget, settings, state, paused, added_at) "
                "VALUES ('old', ?, ?, ?, '{}', 'waiting', 0, 1.0)",
                JOB.stored(),
            )
    if not isinstance(place, Path):
        from coordinator.database.opening import open_postgresql

        with contextlib.closing(open_postgresql(place, "coordinator")) as leader:
            assert leader.lead()
    with contextlib.closing(open_database(place)) as database:
        changed = Queue(database).set_minimum("old", 2, lambda known: None)
        assert (changed.minimum_devices, changed.gives_up) == (2, None)
    with contextlib.closing(StoreReader(place)) as reader:
        assert [each.minimum_devices for each in reader.jobs()] == [2]
