"""A board that has written what its disk bears in a day begins no round, and no record has a part in that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from boards import BoardTree
from brokers import wait_until
from clocks import CreepingClock, MovableClock
from daemons import Running, calm_settings
from ledgers import open_state
from lone_agents import charges, plan_for, rows
from observers import Announcer

from agent.daemon import Agent
from agent.disk_writes import DiskWrites
from agent.governor import Governor
from agent.governor_settings import GovernorSettings
from agent.profile import load_profile, profile_names
from agent.sensors import Sensors

DAY_S = 86_400.0
MIB = 1 << 20


def write(tree: BoardTree, bytes_so_far: int) -> None:
    """What the kernel says that this thread has written."""
    tree.write(
        "proc/thread-self/io", f"rchar: 7\nwchar: 9\nwrite_bytes: {bytes_so_far}\ncancelled_write_bytes: 0"
    )


def test_no_round_begins_beyond_what_the_disk_bears_in_a_day_and_one_that_has_begun_goes_on(
    tmp_path: Path,
) -> None:
    tree, clock = BoardTree(tmp_path), MovableClock()
    write(tree, 0)
    governor = Governor(GovernorSettings(most_written_mib_per_day=3), tmp_path, Sensors(tmp_path), clock)
    for written, begins in ((0, True), (3 * MIB - 1, True), (3 * MIB, False), (90 * MIB, False)):
        write(tree, written)
        clock.advance(1.0)
        reason = governor.why_not(begins=True)
        assert (reason is None) is begins, written
        assert reason is None or f"of {3} MiB" in reason
        clock.advance(1.0)
        assert governor.why_not(begins=False) is None
    tree.remove("proc/thread-self/io")
    clock.advance(1.0)
    assert governor.why_not(begins=True) is None
    assert any("most_written_mib_per_day" in absent for absent in governor.absent())


def test_the_count_is_of_a_day_and_outlives_a_restart(tmp_path: Path) -> None:
    tree, clock = BoardTree(tmp_path / "board"), MovableClock(unix=10 * DAY_S + 60)
    state = open_state(tmp_path / "state")
    write(tree, 700)
    writes = DiskWrites(Sensors(tree.root), state, clock)
    assert writes.today() == 0, "what was written before does not count"
    write(tree, 1_700)
    assert writes.today() == 1_000
    writes.keep()
    write(tree, 20)  # Another process.
    again = DiskWrites(Sensors(tree.root), state, clock)
    write(tree, 320)
    assert again.today() == 1_300
    again.keep()
    clock.advance(DAY_S)
    assert again.today() == 0
    write(tree, 420)
    assert again.today() == 100
    assert DiskWrites(Sensors(tree.root), state, clock).today() == 0, "of yesterday nothing counts"
    state.close()


def test_only_what_this_thread_writes_counts(disk: Path) -> None:
    """What training and decoding write follows from the records. The process's own count takes it in."""
    sensors, size = Sensors(), 4 * MIB
    program = (
        "import os, sys\n"
        "with open(sys.argv[1], 'wb') as f:\n"
        f"    f.write(bytes({size})); f.flush(); os.fsync(f.fileno())"
    )
    before = sensors.written_bytes()
    assert before is not None
    subprocess.run([sys.executable, "-c", program, str(disk / "theirs")], check=True)
    theirs = sensors.written_bytes()
    with (disk / "ours").open("wb") as file:
        file.write(bytes(size))
        file.flush()
        os.fsync(file.fileno())
    ours = sensors.written_bytes()
    assert theirs is not None
    assert ours is not None
    if ours - theirs < size:
        pytest.skip("the directory is on no disk whose writes the kernel counts")
    assert theirs - before < size


@pytest.mark.usefixtures("attentive")
def test_an_agent_whose_disk_has_had_enough_waits_for_the_next_day_also_after_a_restart(
    announcer: Announcer, file: Path, fleet: str, tmp_path: Path
) -> None:
    tree, clock = BoardTree(tmp_path / "board"), MovableClock()
    settings = calm_settings(file).with_values(
        {"governor": GovernorSettings(most_written_mib_per_day=2), "engine": "numpy"}
    )

    def agent() -> Running:
        return Running(
            lambda clock: Agent(settings, clock=CreepingClock(clock), sensors=Sensors(tree.root)), clock
        )

    write(tree, 0)
    with agent():
        announcer.announce(plan_for(fleet))
        wait_until(lambda: charges(file), "the first round")
        write(tree, 2 * MIB)
    with agent():
        # Of another job, since no receipt has come for the first round of this one.
        announcer.announce(plan_for(fleet, job=b"k" * 16, deadline=clock.unix() + 30 * DAY_S))
        offer = f"SELECT 1 FROM rounds WHERE job = '{(b'k' * 16).hex()}'"
        wait_until(lambda: rows(file, offer), "the second round's offer")
        for _ in range(20):
            clock.advance(5.0)
        assert len(charges(file)) == 1
        clock.advance(DAY_S)
        wait_until(lambda: len(charges(file)) == 2, "the second round, a day later")


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_of_a_board_states_what_its_storage_bears_and_its_times(name: str) -> None:
    profile = load_profile(name)
    is_pc = profile.board.architecture == "x86_64"
    assert (profile.governor.most_written_mib_per_day is None) is is_pc
    assert {"minimum_compute_slot_s", "minimum_jitter_window_s", "messages_per_second"} <= (
        profile.limits.given
    )
