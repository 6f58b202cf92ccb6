"""The agent's status file: where it is, how often it is written, and what comes of faults."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from clocks import MovableClock

from agent.governor_settings import next_change
from agent.status import Doing, Link, RoundStatus, Status, StatusFile, presence_of, read_status
from dpagent.status_file import Presence, Program
from dpagent.status_file import presence_of as presence_in

URL, TOPIC = "mqtt://broker:1883", "dpagent/v1/meadow/plan"
CONNECTED = Status(Link.CONNECTED, URL, TOPIC)
LOST = replace(CONNECTED, link=Link.DISCONNECTED)
TRAINING = replace(
    CONNECTED, round=RoundStatus("ab" * 16, 3, 10, "dp-sgd", Doing.TRAIN, until=90.0, deadline=100.0)
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    place = tmp_path / "state"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    place = tmp_path / "run"
    place.mkdir(mode=0o700)
    return place


def test_it_is_read_as_it_was_written_with_its_time_and_program(state: Path) -> None:
    clock = MovableClock(1_000.0)
    StatusFile(state, clock, {}).note(TRAINING)
    found = read_status(state)
    assert found is not None
    assert found.program is not None
    assert found.program.pid == os.getpid()
    assert found == replace(TRAINING, written_at=1_000.0, program=found.program)
    assert presence_of(found) is Presence.RUNS
    assert (state / "status.json").stat().st_mode & 0o777 == 0o600


def test_a_process_that_ended_and_that_nobody_waited_for_does_not_run() -> None:
    child = subprocess.Popen(["sleep", "600"])
    started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    program = replace(Program.this(), pid=child.pid, started=started)
    assert presence_in(program) is Presence.RUNS
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert presence_in(program) is Presence.KILLED
    child.wait()


def test_with_a_directory_in_memory_nothing_but_a_link_is_on_the_disk(state: Path, memory: Path) -> None:
    file, clock = StatusFile(state, MovableClock(), {"RUNTIME_DIRECTORY": f"{memory}:/other"}), MovableClock()
    file.note(CONNECTED)
    assert [each.name for each in state.iterdir()] == ["status.json"]
    assert (state / "status.json").readlink().parent == memory
    linked_at = (state / "status.json").lstat().st_ino
    assert read_status(state) is not None
    again = StatusFile(state, clock, {"XDG_RUNTIME_DIR": str(memory)})
    again.note(LOST)
    assert (state / "status.json").lstat().st_ino == linked_at, "the link is not made again"
    found = read_status(state)
    assert found is not None
    assert found.link is Link.DISCONNECTED
    # The machine was started again: what was in memory is gone.
    for each in memory.iterdir():
        each.unlink()
    assert read_status(state) is None
    # And the next agent has none.
    StatusFile(state, clock, {}).note(CONNECTED)
    assert not (state / "status.json").is_symlink()
    assert list(memory.iterdir()) == []


def test_agents_of_one_user_do_not_share_a_file(tmp_path: Path, memory: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        StatusFile(tmp_path / name, MovableClock(), {"XDG_RUNTIME_DIR": str(memory)}).note(
            replace(CONNECTED, topic=name)
        )
    topics = [found.topic for name in ("one", "two") if (found := read_status(tmp_path / name))]
    assert topics == ["one", "two"]


@pytest.mark.parametrize("value", ["", "relative", "/nowhere/at/all", ":", "/proc/version"])
def test_a_directory_that_is_none_is_not_used(state: Path, value: str) -> None:
    StatusFile(state, MovableClock(), {"RUNTIME_DIRECTORY": value}).note(CONNECTED)
    assert not (state / "status.json").is_symlink()
    assert read_status(state) is not None


@pytest.mark.parametrize(("in_memory", "period_s"), [(True, 1.0), (False, 30.0)])
def test_changes_are_written_no_more_often_than_the_medium_takes(
    state: Path, memory: Path, in_memory: bool, period_s: float
) -> None:
    clock = MovableClock()
    file = StatusFile(state, clock, {"RUNTIME_DIRECTORY": str(memory)} if in_memory else {})
    written = []
    for number in range(2_000):
        file.note(TRAINING if number % 2 else LOST)
        written.append((state / "status.json").stat().st_ino)
        clock.advance(0.1)
    writes = 1 + sum(one != other for one, other in pairwise(written))
    assert 8 + 150.0 / period_s <= writes <= 8 + 200.0 / period_s
    file.note(replace(CONNECTED, link=Link.STOPPED), is_last=True)
    found = read_status(state)
    assert found is not None
    assert presence_of(found) is Presence.ENDED


def test_what_is_not_new_is_not_written_again(state: Path) -> None:
    clock = MovableClock()
    file = StatusFile(state, clock, {})
    file.note(TRAINING)
    first = (state / "status.json").stat()
    assert TRAINING.round is not None
    clock.advance(100.0)
    file.note(replace(TRAINING, round=replace(TRAINING.round, until=91.0)))
    assert (state / "status.json").stat().st_mtime_ns == first.st_mtime_ns
    assert first.st_size == 4_096, "whatever it says"


def test_a_write_that_fails_is_said_once_and_ends_nothing(
    state: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovableClock()
    file = StatusFile(state, clock, {"RUNTIME_DIRECTORY": str(memory)})
    memory.rmdir()
    with caplog.at_level(logging.WARNING):
        for each in (CONNECTED, LOST, TRAINING):
            file.note(each)
            clock.advance(10.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "`dpagent status` does not see" in caplog.text
    memory.mkdir()
    file.note(LOST)
    assert read_status(state) is not None


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_nothing_is_written_through_anothers_link(
    state: Path, memory: Path, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    """In a directory that others write to."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    StatusFile(state, MovableClock(), {"RUNTIME_DIRECTORY": str(memory)}).note(CONNECTED)
    file = (state / "status.json").readlink()
    for place in (file, file.with_name(f".{file.name}.new")):
        place.unlink(missing_ok=True)
        link(place, victim)
    StatusFile(state, MovableClock(), {"RUNTIME_DIRECTORY": str(memory)}).note(LOST)
    assert victim.read_text() == "mine"
    assert read_status(state) is not None


def test_a_file_of_another_user_is_none_of_the_agents(state: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    StatusFile(state, MovableClock(), {}).note(CONNECTED)
    assert read_status(state) is not None
    os.chown(state / "status.json", 65_534, 65_534)
    assert read_status(state) is None


@pytest.mark.parametrize(
    ("windows", "hour", "minutes"),
    [
        (["22:00-06:00"], 23, 7 * 60), (["22:00-06:00"], 6, 16 * 60), ([], 3, None),
        (["00:00-12:00", "12:00-00:00"], 3, None), (["10:00-11:00", "08:00-09:00"], 7, 60),
    ],
)  # fmt: skip
def test_the_next_change_of_the_hours(windows: list[str], hour: int, minutes: int | None) -> None:
    assert next_change(windows, 60 * hour) == minutes
