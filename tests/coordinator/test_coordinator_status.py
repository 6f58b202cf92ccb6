"""The coordinator's status file: what a page reads of a daemon that runs, that ended, and that was killed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from clocks import MovableClock

from coordinator.status import HEARTBEAT_S, Link, StatusFile, read_status
from dpagent.status_file import Presence


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(1_000.0)


def test_what_is_noted_is_read(tmp_path: Path, clock: MovableClock) -> None:
    assert read_status(tmp_path) is None
    status = StatusFile(tmp_path, "mqtt://here", clock)
    status.link(Link.DISCONNECTED, "the broker went away")
    status.note("round 2 of 3 is open", received=10, published=20)
    found = read_status(tmp_path)
    assert found is not None
    assert (found.link, found.broker, found.reason) == (
        Link.DISCONNECTED, "mqtt://here", "the broker went away",
    )  # fmt: skip
    assert (found.activity, found.received, found.published) == ("round 2 of 3 is open", 10, 20)
    assert found.presence() is Presence.RUNS
    assert not found.is_late(clock.unix())
    assert found.is_late(clock.unix() + 100 * HEARTBEAT_S)


def test_it_is_written_when_something_is_new_and_as_a_sign_of_life(
    tmp_path: Path, clock: MovableClock
) -> None:
    status = StatusFile(tmp_path, "mqtt://here", clock)
    written = []
    for _ in range(24):
        status.note("between rounds", received=0, published=0)
        found = read_status(tmp_path)
        assert found is not None
        written.append(found.written_at)
        clock.advance(0.25)
    assert len(set(written)) == 2, "at first, and after a heartbeat"
    status.note("round 1 of 3 is open", received=0, published=0)
    found = read_status(tmp_path)
    assert found is not None
    assert found.activity == "round 1 of 3 is open"


def test_one_that_ended_or_was_killed_is_told_from_one_that_runs(tmp_path: Path, clock: MovableClock) -> None:
    status = StatusFile(tmp_path, "mqtt://here", clock)
    status.link(Link.STOPPED)
    status.note("no job goes on", received=0, published=0, is_last=True)
    found = read_status(tmp_path)
    assert found is not None
    assert found.presence() is Presence.ENDED
    code = (
        "import os, pathlib, sys\n"
        "from coordinator.status import StatusFile\n"
        "from dpagent.clock import SystemClock\n"
        "status = StatusFile(pathlib.Path(sys.argv[1]), 'mqtt://here', SystemClock())\n"
        "status.note('', received=0, published=0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    found = read_status(tmp_path)
    assert found is not None
    assert found.presence() is Presence.KILLED
    assert replace(found, program=None).presence() is Presence.KILLED


def test_a_torn_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"link": "conn')
    assert read_status(tmp_path) is None
