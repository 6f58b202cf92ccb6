"""``dpagent coordinator job``: what it says of an empty queue, and of what cannot be."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from pathlib import Path

import pytest
import yaml
from commands import Result, dpagent
from fleets import digits, write_fleet, write_job, write_shared

from dpagent.errors import ExitCode
from dpagent.learning.data.formats.npz import save_npz


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    return write_shared(tmp_path, None)


def job(fleet: Path, *words: str | Path) -> Result:
    return dpagent("coordinator", "job", *words, "--config", fleet)


def refused(fleet: Path, code: ExitCode, *words: str | Path) -> str:
    result = job(fleet, *words)
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def added(fleet: Path, name: str) -> None:
    result = job(fleet, "add", write_job(fleet.parent / f"{name}.yaml"))
    assert result.returncode == 0, result.stderr


def test_an_empty_queue_is_no_error_to_look_at_and_makes_no_file(fleet: Path) -> None:
    listed = job(fleet, "list")
    assert (listed.returncode, listed.stdout) == (
        0, "There is no job yet. `dpagent coordinator job add FILE` adds one.\n",
    )  # fmt: skip
    assert json.loads(job(fleet, "list", "--json", "-").stdout) == {"jobs": [], "together": []}
    for words in (["show", "x"], ["pause", "x"], ["resume", "x"], ["cancel", "x"], ["deadline", "x", "9"]):
        assert "There is no job" in refused(fleet, ExitCode.CONFIGURATION, *words)
    assert not (fleet.parent / "state").exists()
    assert dpagent("coordinator", "status", "--config", fleet).returncode == ExitCode.STORAGE


def test_a_coordinator_without_a_job_says_what_to_do(fleet: Path) -> None:
    result = dpagent("coordinator", "run", "--config", fleet)
    assert result.returncode == ExitCode.CONFIGURATION
    assert "job add FILE" in result.stderr
    # Its database is there now, and empty.
    assert "There is no job yet" in job(fleet, "list").stdout
    assert "There is no job yet" in dpagent("coordinator", "status", "--config", fleet).stdout
    shown = json.loads(dpagent("coordinator", "status", "--json", "--config", fleet).stdout)
    assert (shown["job"], shown["rounds"], shown["finished"]) == (None, [], False)
    assert "`dpagent coordinator job add FILE` adds one" in doctor(fleet)


def doctor(fleet: Path) -> str:
    return dpagent("doctor", "--no-broker", "--config", fleet).stdout


def test_times_that_boards_decline_by_default_are_said_when_a_job_is_added(fleet: Path) -> None:
    slots = {"compute_slot_s": 2.0, "jitter_window_s": 5.0, "deadline_s": 60.0}
    found = job(fleet, "add", write_job(fleet.parent / "quick.yaml", round=slots))
    assert found.returncode == 0, found.stderr
    assert (
        "round.compute_slot_s is 2: boards decline that, unless limits.minimum_compute_slot_s" in found.stdout
    )
    assert "jitter_window_s" not in found.stdout
    slots["compute_slot_s"] = 5.0
    found = job(fleet, "add", write_job(fleet.parent / "fine.yaml", round=slots))
    assert "decline" not in found.stdout


def test_a_job_is_added_listed_shown_paused_resumed_changed_and_cancelled(fleet: Path) -> None:
    result = job(fleet, "add", write_job(fleet.parent / "meters.yaml"), "--set", "rounds=3")
    assert result.stdout.startswith("Job meters is in the queue: 3 rounds, ε = ")
    assert "goes on before it" not in result.stdout
    second = job(fleet, "add", fleet.parent / "meters.yaml", "--name", "again")
    assert "Job meters goes on before it" in second.stdout
    values = json.loads(job(fleet, "list", "--json", "-").stdout)
    assert [(each["name"], each["state"], each["rounds"]) for each in values["jobs"]] == [
        ("meters", "waiting", 3), ("again", "waiting", 2),
    ]  # fmt: skip
    assert values["together"] == [], "none has begun"
    assert job(fleet, "pause", "meters").returncode == 0
    assert "waiting, paused" in job(fleet, "list").stdout
    assert "meters is paused" in doctor(fleet)
    assert job(fleet, "resume", "meters").returncode == 0
    assert job(fleet, "deadline", "meters", "90").returncode == 0
    assert job(fleet, "minimum", "meters", "2").stdout == (
        "Rounds of job meters close with 2 boards or more from now on.\n"
    )
    shown = job(fleet, "show", "meters").stdout
    assert "90 s a round" in shown
    assert "2 a round" in shown
    assert "privacy.epsilon" in shown
    assert "0 files in" in shown
    assert "No device has heard of it" in job(fleet, "cancel", "meters").stdout
    assert json.loads(job(fleet, "show", "meters", "--json", "-").stdout)["state"] == "cancelled"
    assert "2 jobs: 1 cancelled, 1 waiting" in doctor(fleet)
    # Its name stays taken, as its history is kept.
    assert "a job 'meters' already" in refused(
        fleet, ExitCode.CONFIGURATION, "add", fleet.parent / "meters.yaml"
    )


def test_what_cannot_be_is_refused_with_a_sentence(fleet: Path) -> None:
    added(fleet, "meters")
    assert "the queue has meters" in refused(fleet, ExitCode.CONFIGURATION, "show", "meter")
    assert "the queue has meters" in refused(fleet, ExitCode.CONFIGURATION, "cancel", "meter")
    assert "is not paused" in refused(fleet, ExitCode.USAGE, "resume", "meters")
    assert job(fleet, "pause", "meters").returncode == 0
    assert "paused already" in refused(fleet, ExitCode.USAGE, "pause", "meters")
    assert "deadline_s is 0.5; expected more" in refused(
        fleet, ExitCode.CONFIGURATION, "deadline", "meters", "0.5"
    )
    assert "a round is to need 3 boards; expected at most devices = 2" in refused(
        fleet, ExitCode.CONFIGURATION, "minimum", "meters", "3"
    )
    assert "got 0; expected a number of at least 1" in refused(
        fleet, ExitCode.CONFIGURATION, "minimum", "meters", "0"
    )
    assert "has no open round" in refused(fleet, ExitCode.USAGE, "pause", "meters", "--give-up")
    assert job(fleet, "cancel", "meters").returncode == 0
    assert "cancelled already" in refused(fleet, ExitCode.USAGE, "cancel", "meters")
    assert "cancelled already" in refused(fleet, ExitCode.USAGE, "minimum", "meters", "1")
    assert "cancelled already" in refused(fleet, ExitCode.USAGE, "pause", "meters")
    assert (
        "There is no job 'other'"
        in dpagent("coordinator", "status", "--job", "other", "--config", fleet).stderr
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("rounds: [", "not valid YAML"),
        ("rounds: 0\n", "rounds: got 0; expected a number of at least 1"),
        ("colour: red\n", "colour: unknown key"),
        ("rounds: 2\nfleet: others\n", "fleet is a key of the whole fleet"),
        ("rounds: 2\nmqtt: {url: mqtt://b}\n", "mqtt is a key of the whole fleet"),
    ],
)
def test_a_file_that_is_no_job_is_refused_by_line(fleet: Path, text: str | None, words: str) -> None:
    file = fleet.parent / "job.yaml"
    if text is not None:
        file.write_text(text)
    assert words in refused(fleet, ExitCode.CONFIGURATION, "add", file)
    assert str(file) in refused(fleet, ExitCode.CONFIGURATION, "add", file)
    assert not (fleet.parent / "state").exists()


def test_a_job_that_does_not_go_with_the_fleet_is_refused(fleet: Path) -> None:
    file = write_job(fleet.parent / "job.yaml", round={"minimum_devices": 3})
    assert "round.minimum_devices is 3; expected at most devices = 2" in refused(
        fleet, ExitCode.CONFIGURATION, "add", file
    )


def test_a_path_that_is_not_utf_8_is_refused(fleet: Path) -> None:
    directory = fleet.parent / os.fsdecode(b"d\xff")
    file = write_job(directory / "job.yaml", test_data={"kind": "npz", "path": "test.npz"})
    save_npz(directory / "test.npz", digits(0, 10))
    assert "cannot be kept in the queue, which is in UTF-8" in refused(
        fleet, ExitCode.CONFIGURATION, "add", file
    )


def test_a_job_that_no_device_would_accept_is_refused(fleet: Path) -> None:
    file = write_job(fleet.parent / "job.yaml", privacy={"epsilon": 1e-6, "delta": 1e-12})
    refused(fleet, ExitCode.PLAN, "add", file)
    assert "There is no job yet" in job(fleet, "list").stdout


@pytest.mark.parametrize("name", ["", "two words", "../up", "-x", "a" * 64, "ä"])
def test_a_name_that_no_directory_should_have_is_refused(fleet: Path, name: str) -> None:
    file = write_job(fleet.parent / "job.yaml")
    assert "expected 1 to 63 letters" in refused(fleet, ExitCode.USAGE, "add", file, f"--name={name}")


def test_the_job_in_the_fleets_file_is_the_first_and_its_name_is_no_others(fleet: Path) -> None:
    """Also if no coordinator has run yet."""
    whole = write_fleet(fleet.parent / "whole", None)
    file = write_job(fleet.parent / "first.yaml")
    assert "is the name of the job in fleet.yaml" in refused(whole, ExitCode.USAGE, "add", file)
    for name in ("second", "third"):
        said = job(whole, "add", file, "--name", name)
        assert "Job first goes on before it" in said.stdout, said.stderr
    values = json.loads(job(whole, "list", "--json", "-").stdout)
    assert [each["name"] for each in values["jobs"]] == ["first", "second", "third"]


def test_a_job_of_another_version_is_paused_with_a_sentence(fleet: Path) -> None:
    added(fleet, "meters")
    with contextlib.closing(sqlite3.connect(fleet.parent / "state" / "coordinator.db")) as database, database:
        database.execute("UPDATE jobs SET settings = json_set(settings, '$.colour', 'red')")
    assert "was added by another version of dpagent: its colour cannot be read" in paused_reason(fleet)


def test_jobs_that_began_without_a_round_cost_no_board_anything(fleet: Path) -> None:
    added(fleet, "meters")
    added(fleet, "pumps")
    with contextlib.closing(sqlite3.connect(fleet.parent / "state" / "coordinator.db")) as database, database:
        database.execute("UPDATE jobs SET state = 'cancelled', begun_at = 1.0, ended_at = 2.0")
        database.commit()
        assert json.loads(job(fleet, "list", "--json", "-").stdout)["together"] == []
        database.execute(
            "INSERT INTO rounds (job, number, opened_at, deadline) SELECT number, 1, 1, 2 FROM jobs"
        )
        database.commit()
        (sums,) = json.loads(job(fleet, "list", "--json", "-").stdout)["together"]
        assert sums["jobs"] == ["meters", "pumps"]


def test_a_job_of_a_fleet_that_was_renamed_does_not_run(fleet: Path) -> None:
    added(fleet, "meters")
    fleet.write_text(yaml.safe_dump(yaml.safe_load(fleet.read_text()) | {"fleet": "renamed"}))
    reason = "`fleet` was 'testers' and is 'renamed'"
    assert reason in paused_reason(fleet)
    assert reason in job(fleet, "list").stdout
    assert reason in job(fleet, "show", "meters").stdout
    # It is over, and not paused, when it is cancelled.
    assert job(fleet, "cancel", "meters").returncode == 0
    assert reason not in job(fleet, "list").stdout
    assert reason not in job(fleet, "show", "meters").stdout


def paused_reason(fleet: Path) -> str:
    """Why a coordinator without a broker has paused the only job."""
    from coordinator.daemon import Coordinator
    from coordinator.settings import load_coordinator_settings

    Coordinator(load_coordinator_settings(fleet)).close()
    return str(json.loads(job(fleet, "show", "meters", "--json", "-").stdout)["trouble"])


def test_the_kinds_of_file_are_told_apart(fleet: Path) -> None:
    job_file = write_job(fleet.parent / "job.yaml")
    assert "of a job" in dpagent("config", "check", "--config", job_file).stdout
    assert "of a coordinator" in dpagent("config", "check", "--config", fleet).stdout
    whole = write_fleet(fleet.parent / "whole", None)
    assert "of a coordinator" in dpagent("config", "check", "--config", whole).stdout
    shown = json.loads(dpagent("config", "show", "--json", "-", "--config", job_file).stdout)
    assert shown["rounds"] == {"value": 2, "from": "job.yaml:2"}
    schema = json.loads(dpagent("config", "schema", "job").stdout)
    assert "rounds" in schema["required"]
    assert "mqtt" not in schema["properties"]
    schema = json.loads(dpagent("config", "schema", "fleet").stdout)
    assert schema["required"] == ["fleet", "devices"]
    assert "rounds" in schema["properties"]
    assert "is a job's" in dpagent("doctor", "--config", job_file).stdout
