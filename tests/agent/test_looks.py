"""Looks at the data while an agent runs: when one begins, stands still, counts, and ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import wait_until
from hostile_files import slow_jpeg
from neighbours import decode_here, is_looking
from orphans import adopted
from pictures import folder_of, write

from agent.data_settings import DataSettings
from agent.look_messages import LookOrder, LookResult
from agent.looks import Look, Looks
from agent.records import Records
from dpagent.errors import ChildProcessError, ExitCode

PICTURE: dict[str, Any] = {"width": 8, "height": 8, "channels": 1}
COUNT = 4


@pytest.fixture
def settings(tmp_path: Path) -> DataSettings:
    folder_of(tmp_path / "photos", *(f"{number % 2}/{number}.png" for number in range(COUNT)), **PICTURE)
    values = {"name": "mine", "path": tmp_path / "photos", "kind": "images", "classes": 2, "max_records": 20}
    values |= {"decoding": {"seconds": 1.5}, "images": {"size": [8, 8], "mode": "grey", "folder": "."}}
    return DataSettings.checked(values)


@pytest.fixture
def looks(settings: DataSettings, tmp_path: Path) -> Iterator[Looks]:
    decode_here(settings, tmp_path)
    looks = Looks(settings, tmp_path, niceness=0)
    yield looks
    looks.end()


def processes_of(looks: Looks) -> tuple[int, int]:
    """A look that decodes, and its fork."""
    process = looks.process
    assert process is not None
    children = Path(f"/proc/{process}/task/{process}/children")
    return process, int(wait_until(lambda: children.read_text().strip(), "a look that decodes"))


def counted(settings: DataSettings, state: Path, found: LookResult) -> int:
    """How many records a round has that takes in what a look found."""
    records = Records(settings, state)
    records.adopt(found)
    return len(records.dataset)


def test_what_a_look_found_counts_after_a_time_that_no_record_changes(
    looks: Looks, settings: DataSettings, tmp_path: Path
) -> None:
    """A record that is slow to decode would keep all that come with it out of the next round."""
    folder_of(settings.path, "0/more.png", **PICTURE)
    looks.begin()
    wait_until(lambda: not is_looking(looks), "a look")
    assert not looks.is_due, "it is done, and does not count yet"
    assert len(Records(settings, tmp_path).dataset) == COUNT
    looks.begin()
    assert not is_looking(looks), "the next begins when a round has taken it in"
    looks.counts_after_s = 0.0
    assert looks.is_due
    found = looks.result()
    assert found == looks.result() == LookResult()
    looks.begin()
    assert not is_looking(looks)
    assert counted(settings, tmp_path, found) == COUNT + 1
    looks.taken()
    assert not looks.is_due
    looks.begin()
    assert is_looking(looks)


def test_one_that_goes_on_when_it_counts_waits_for_a_later_round(
    looks: Looks, settings: DataSettings, tmp_path: Path
) -> None:
    folder_of(settings.path, "0/more.png", **PICTURE)
    write(settings.path / "0" / "slow.jpg", slow_jpeg())
    looks.begin()
    looks.hold()
    looks.counts_after_s = looks._lasts_s()
    assert looks.is_due
    assert looks.result() == LookResult(goes_on=True)
    assert counted(settings, tmp_path, looks.result()) == COUNT
    looks.taken()
    looks.go_on()
    wait_until(lambda: not is_looking(looks), "its end")
    looks.counts_after_s = 0.0
    assert counted(settings, tmp_path, looks.result()) == COUNT + 1


def test_the_time_for_which_it_stands_still_does_not_count(looks: Looks) -> None:
    looks.begin()
    looks.counts_after_s = looks._lasts_s() + 0.2
    looks.hold()
    time.sleep(0.3)
    assert not looks.is_due
    looks.go_on()
    wait_until(lambda: looks.is_due, "the rest of its time")


@pytest.mark.parametrize("follows", ["nothing", "a round"])
def test_the_time_for_which_the_whole_agent_stands_still_does_not_count(
    looks: Looks, settings: DataSettings, monkeypatch: pytest.MonkeyPatch, follows: str
) -> None:
    """As in a container that is paused. Before, one record that is slow to decode kept all that had come with
    it out of the round that followed, for which the others alone had been done before the pause."""
    monkeypatch.setattr("agent.looks._STILL_S", 0.3)
    folder_of(settings.path, "0/more.png", **PICTURE)
    write(settings.path / "0" / "slow.jpg", slow_jpeg())
    looks.begin()
    group, _ = processes_of(looks)
    looks.counts_after_s = looks._lasts_s() + 0.2
    looks.tend()
    os.killpg(group, signal.SIGSTOP)
    time.sleep(0.5)
    os.killpg(group, signal.SIGCONT)
    if follows == "a round":  # Which waited meanwhile, and is decided on at once.
        looks.hold()
        assert not looks.is_due
        looks.go_on()
    looks.tend()
    assert not looks.is_due
    looks.tend()
    wait_until(lambda: looks.is_due, "the rest of its time")


def test_the_time_for_which_it_is_held_is_taken_off_once(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the agent stood still with it."""
    monkeypatch.setattr("agent.looks._STILL_S", 0.3)
    looks.begin()
    before_s = looks._lasts_s()
    looks.hold()
    time.sleep(0.5)
    looks.go_on()
    looks.tend()
    assert looks._lasts_s() >= before_s


def test_one_that_begins_while_looks_are_held_stands_still(looks: Looks) -> None:
    looks.hold()
    looks.begin()
    assert looks._look is not None
    stat = Path(f"/proc/{looks._look.group}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "a look that stands still")
    assert looks._lasts_s() == 0
    looks.go_on()
    wait_until(lambda: not is_looking(looks), "its end")


def test_where_memory_runs_out_a_look_ends_before_any_other_process(
    looks: Looks, settings: DataSettings
) -> None:
    """A picture that takes much memory would else end the training process, and so a round."""
    write(settings.path / "0" / "slow.jpg", slow_jpeg())
    looks.begin()
    assert looks._look is not None
    adjusted = Path(f"/proc/{looks._look.group}/oom_score_adj")
    wait_until(lambda: adjusted.read_text().strip() == "1000", "a look that has begun")


def test_it_gives_way_to_training(looks: Looks, settings: DataSettings, tmp_path: Path) -> None:
    nicest = Looks(settings, tmp_path, niceness=9)
    write(settings.path / "0" / "slow.jpg", slow_jpeg())
    nicest.begin()
    assert nicest._look is not None
    group = nicest._look.group
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, group) == 13, "its niceness")
    nicest.end()


def test_one_that_never_ends_is_given_up_and_the_next_one_begins(
    looks: Looks, settings: DataSettings, tmp_path: Path
) -> None:
    """It kept all that was new out until the agent's next start."""
    folder_of(settings.path, "0/more.png", **PICTURE)
    looks.begin()
    look = looks._look  # whose end would end the process
    assert look is not None
    looks.hold()
    looks.counts_after_s = looks._lasts_s() / 2
    assert looks.result() == LookResult(goes_on=True)
    looks.taken()
    looks.begin()
    assert not looks.is_due
    looks.counts_after_s /= 4
    found = looks.result()
    assert found == looks.result() == LookResult(goes_on=True, why_not="it did not end, and was given up")
    looks.counts_after_s = 0.0
    assert looks.is_due, "should the round be tried again"
    assert look._process.poll() == -signal.SIGKILL, "two looks would write the same rows"
    assert counted(settings, tmp_path, found) == COUNT
    looks.go_on()
    looks.taken()
    looks.counts_after_s = 0.0
    looks.begin()
    wait_until(lambda: not is_looking(looks), "the next look")
    assert counted(settings, tmp_path, looks.result()) == COUNT + 1


def test_one_that_is_killed_is_said_and_the_records_stay(
    looks: Looks, settings: DataSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_of(settings.path, "0/more.png", **PICTURE)
    looks.begin()
    assert looks._look is not None
    os.kill(looks._look.group, signal.SIGKILL)
    wait_until(lambda: not is_looking(looks), "its end")
    looks.counts_after_s = 0.0
    assert counted(settings, tmp_path, looks.result()) == COUNT
    assert "what is new waits: Decoding the records was ended by signal 9 (Killed)" in caplog.text
    looks.taken()
    looks.begin()
    wait_until(lambda: not is_looking(looks), "the next look")
    assert counted(settings, tmp_path, looks.result()) == COUNT + 1


def test_at_a_start_the_system_that_ends_it_is_no_fault_of_the_data(
    settings: DataSettings, tmp_path: Path
) -> None:
    """So a service starts again, and goes on with what is not decoded."""
    folder_of(settings.path, "0/large.png", width=1_500, height=1_500)
    for number in range(200):  # Seconds of work.
        os.link(settings.path / "0/large.png", settings.path / f"0/more-{number}.png")
    (tmp_path / "anew").mkdir()
    many = settings.with_values({"max_records": 300})
    look = Look(LookOrder(many, tmp_path / "anew", at_once=True))
    os.kill(look.group, signal.SIGKILL)
    with pytest.raises(ChildProcessError, match="ended by signal 9") as ended:
        look.wait()
    assert ended.value.exit_code is ExitCode.CHILD


def test_one_that_cannot_be_started_is_said_and_tried_again(
    looks: Looks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    looks.begin()
    assert "the data cannot be looked at again: " in caplog.text
    assert not looks.is_due
    monkeypatch.undo()
    looks.begin()
    assert is_looking(looks)


@pytest.mark.usefixtures("executed")
def test_none_stays_on_the_systems_list_in_a_container(looks: Looks, settings: DataSettings) -> None:
    """Its fork is an orphan once it is killed, and the agent is the first process there."""
    write(settings.path / "0" / "slow.jpg", slow_jpeg())
    with adopted():
        looks.begin()
        _, fork = processes_of(looks)
        looks.end()
        stat = Path(f"/proc/{fork}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "its end")
        looks.begin()
        assert not stat.exists()


def test_when_the_next_one_counts_tells_nobody_whether_the_last_had_ended(
    looks: Looks, settings: DataSettings, tmp_path: Path
) -> None:
    """A round has features of new records computed where they count, whether there are any, and so takes more
    slots. Where a look went on when it counted, those that followed had them, too."""
    write(settings.path / "0" / "slow.jpg", slow_jpeg())
    for is_done in (False, True):
        looks.begin()
        if is_done:
            wait_until(lambda: not is_looking(looks), "its end")
        looks.hold()
        looks.counts_after_s = looks._lasts_s() / 2
        assert looks.is_due
        assert looks.result().goes_on is not is_done
        looks.taken()
        looks.begin()
        assert looks.process is not None
        assert not looks.is_due
        looks.go_on()


@pytest.mark.usefixtures("executed")
def test_what_is_left_of_one_that_the_system_has_ended_ends_before_a_round_is_prepared(
    looks: Looks, settings: DataSettings
) -> None:
    """Its fork, which has not ended for want of memory, would compute beside the round."""
    write(settings.path / "0" / "slow.jpg", slow_jpeg())
    with adopted():
        looks.begin()
        group, fork = processes_of(looks)
        os.kill(fork, signal.SIGSTOP)  # So that it does not end by itself.
        os.kill(group, signal.SIGKILL)
        wait_until(lambda: not is_looking_at(group), "its end")
        looks.hold()
        stat = Path(f"/proc/{fork}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "the end of its fork")
        os.waitpid(fork, 0)


def is_looking_at(process: int) -> bool:
    """Whether a process has not ended, for whom nobody may have waited yet."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


PRINTS = """
import os
from agent import bounded_decoding, decoding
work = bounded_decoding._work
def prints(*what, **how):
    os.write(1, bytes(1 << 20))
    return work(*what, **how)
bounded_decoding._work = prints
decoding.main()
"""


def test_what_a_decoder_prints_stops_no_look(
    looks: Looks, settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads its pipe before the end, and a full one has who writes to it wait."""
    (tmp_path / "prints.py").write_text(PRINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("agent.looks._PROGRAM", "prints")
    folder_of(settings.path, "0/more.png", **PICTURE)
    looks.begin()
    wait_until(lambda: not is_looking(looks), "its end")
    looks.counts_after_s = 0.0
    assert counted(settings, tmp_path, looks.result()) == COUNT + 1
