"""Whether a board may train: by its clock, its sensors and its owner's command, and by nothing else."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from boards import BoardTree
from brokers import wait_until
from clocks import MovableClock
from devices import KEY
from fleets import write_agent
from hypothesis import given
from hypothesis import strategies as st

from agent import governor as governor_module
from agent import sensors as sensors_module
from agent.daemon import Agent
from agent.diagnosis import governed
from agent.governor import Governor, require_public_room
from agent.governor_settings import GovernorSettings, is_in
from agent.profile import load_profile
from agent.sensors import Sensors
from agent.settings import load_agent_settings, on_board
from dpagent.errors import ConfigurationError

WINDOW = "22:00-06:00"
NOON = datetime(2026, 11, 25, 12, 0).timestamp()


class Board:
    """A governor on a board that a test writes, and a clock that it moves."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.tree, self.clock = BoardTree(root), MovableClock(unix=NOON)
        self.governor = Governor(GovernorSettings(**settings), root, Sensors(root), self.clock)

    def why_not(self, *, begins: bool = True, after_s: float = 1.0) -> str | None:
        self.clock.advance(after_s)
        return self.governor.why_not(begins=begins)


def test_without_settings_a_board_trains_whatever_its_sensors_say(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.tree.heat(119.0)
    board.tree.plug(False)
    board.tree.charge(1)
    board.tree.leave_memory(1)
    assert board.why_not() is None


# --- hours ------------------------------------------------------------------------------------------


@given(st.integers(0, 1_439), st.integers(0, 1_439), st.integers(0, 1_439))
def test_a_window_holds_the_minutes_from_its_beginning_to_its_end(begin: int, end: int, minute: int) -> None:
    window = f"{begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}"
    if begin == end:
        with pytest.raises(ValueError, match="two different times"):
            GovernorSettings(hours=(window,))
        return
    inside = begin <= minute < end if begin < end else minute >= begin or minute < end
    assert GovernorSettings(hours=(window,)).hours == (window,)
    assert is_in(window, minute) is inside


def test_it_trains_in_its_hours_alone(tmp_path: Path) -> None:
    board = Board(tmp_path, hours=("22:00-06:00", "12:30-13:00"))
    reason = board.why_not()
    assert reason is not None
    assert "12:00" in reason
    assert "22:00-06:00" in reason
    expected = {12.5: True, 13.0: False, 21.99: False, 22.0: True, 24.0 + 5.99: True, 24.0 + 6.0: False}
    at = 12.0
    for hour, trains in expected.items():
        board.clock.advance(3_600.0 * (hour - at) - 1.0)
        at = hour
        assert (board.why_not() is None) is trains, hour


# --- sensors ----------------------------------------------------------------------------------------


def test_it_waits_until_the_processor_has_cooled_down(tmp_path: Path) -> None:
    board = Board(tmp_path, highest_temperature_c=70.0, temperature_drop_c=8.0)
    for celsius, trains in (
        (70.0, True),
        (70.5, False),
        (63.0, False),
        (62.5, False),
        (62.0, True),
        (69.0, True),
    ):
        board.tree.heat(celsius)
        assert (board.why_not() is None) is trains, celsius


def test_the_zones_of_the_processor_count_or_those_that_are_named(tmp_path: Path) -> None:
    board = Board(tmp_path)
    sensors = Sensors(tmp_path)
    assert sensors.temperature_c() == 45.0
    assert sensors.temperature_c(["PMIC-Die"]) == 100.0
    assert sensors.temperature_c(["gpu"]) is None
    board.tree.write("sys/class/thermal/thermal_zone1/type", "acpitz")
    assert sensors.temperature_c() == 100.0, "no zone is named like a processor's, so all count"


def test_a_sensor_that_answers_no_more_holds_training_back(tmp_path: Path) -> None:
    board = Board(tmp_path, highest_temperature_c=70.0, thermal_zones=("cpu-thermal",))
    assert board.why_not() is None
    board.tree.remove("sys/class/thermal/thermal_zone1/temp")
    reason = board.why_not()
    assert reason is not None
    assert "temperature" in reason
    board.tree.heat(50.0)
    assert board.why_not() is None


def test_what_is_asked_for_and_absent_is_said_once_and_holds_nothing_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = GovernorSettings(
        highest_temperature_c=70.0, mains_power=True, least_battery_percent=50, highest_load=0.5,
        least_free_memory_mib=100, unmetered_link=True,
    )  # fmt: skip
    clock = MovableClock()
    governor = Governor(settings, tmp_path, Sensors(tmp_path / "bare"), clock)
    for _ in range(3):
        assert governor.why_not(begins=True) is None
        clock.advance(5.0)
    said = [record.message for record in caplog.records]
    words = (
        "highest_temperature_c", "mains", "least_battery_percent", "highest_load", "least_free_memory_mib",
        "NetworkManager",
    )  # fmt: skip
    assert len(said) == len(words)
    assert all(word in text for word, text in zip(words, said, strict=True))


def test_it_trains_on_mains_power_alone(tmp_path: Path) -> None:
    board = Board(tmp_path, mains_power=True)
    assert board.why_not() is None
    board.tree.plug(False)
    assert board.why_not() is not None
    board.tree.remove("sys/class/power_supply/usb/online")
    assert board.why_not() is not None, "a battery that discharges has no charger"
    board.tree.write("sys/class/power_supply/BAT0/status", "Full")
    assert board.why_not() is None


def test_a_battery_gets_some_charge_before_training_goes_on(tmp_path: Path) -> None:
    board = Board(tmp_path, least_battery_percent=40)
    for percent, trains in ((40, True), (39, False), (44, False), (45, True), (40, True)):
        board.tree.charge(percent)
        assert (board.why_not() is None) is trains, percent


def test_other_programs_come_first(tmp_path: Path) -> None:
    """A share of all cores over the last ten seconds, of which the agent's own processes are no part."""
    board = Board(tmp_path, highest_load=0.5)
    assert "measured" in (board.why_not() or "")
    own, child, stranger = os.getpid(), 40_000, 40_001

    def pass_time(share: float, own_share: float, seconds: int) -> str | None:
        reason: str | None = ""
        for _ in range(seconds):
            board.tree.compute(share + own_share, 1.0)
            ticks[0] += round(200 * own_share)
            board.tree.run(own, 1, 7)
            board.tree.run(child, own, ticks[0], name="a) b (c")
            board.tree.run(stranger, 1, 123_456)
            reason = board.why_not(begins=False)
        return reason

    ticks = [0]
    assert pass_time(0.1, 0.8, 12) is None
    assert "take 60% of the cores" in (pass_time(0.6, 0.1, 12) or "")
    assert "take 45%" in (pass_time(0.45, 0.0, 12) or ""), "it is still too busy to begin again"
    assert pass_time(0.35, 0.0, 12) is None


def test_a_child_that_computes_counts_as_the_agents_own_on_a_real_kernel() -> None:
    sensors, spends = (
        Sensors(),
        "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()",
    )
    before = sensors.own_of(os.getpid())[0]
    with subprocess.Popen(
        [sys.executable, "-c", spends], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert sensors.own_of(os.getpid())[0] >= before + 0.4 * os.sysconf("SC_CLK_TCK") - 2
        child.kill()
    ticks = sensors.ticks()
    assert ticks is not None
    assert 0 < ticks.busy < ticks.total


def test_memory_and_room_are_asked_for_before_a_round_alone(tmp_path: Path) -> None:
    board = Board(tmp_path, least_free_memory_mib=200)
    board.tree.leave_memory(199)
    assert "199 MiB of memory" in (board.why_not() or "")
    assert board.why_not(begins=False) is None
    board.tree.leave_memory(200)
    assert board.why_not() is None
    full = Board(tmp_path, least_free_disk_mib=1 << 40)
    assert full.why_not(begins=False) is None
    assert full.why_not(begins=True, after_s=0.0) is not None, "though the sensors were read just now"


def test_memory_that_training_has_taken_is_none_that_others_took(tmp_path: Path) -> None:
    """It has more for some plans than for others, and a look for some records: a round would wait for it."""
    board = Board(tmp_path, least_free_memory_mib=200)
    board.tree.run(40_000, os.getpid(), 5)
    board.tree.hold(40_000, 60)
    board.tree.leave_memory(140)
    assert board.why_not() is None
    board.tree.leave_memory(139)
    assert "199 MiB of memory are free" in (board.why_not() or "")


def test_memory_that_training_has_already_counts_as_free() -> None:
    holds = "held = b'1' * (64 << 20)\nprint(flush=True)\ninput()"
    before = Sensors().memory_below_mib(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert Sensors().memory_below_mib(os.getpid()) >= before + 64
        child.kill()


# --- the link ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "is_mobile"),
    [({"uevent": "DEVTYPE=wwan\nINTERFACE=wwan0", "type": 65_534}, True), ({"type": 512}, True),
     ({"uevent": "DEVTYPE=wlan", "type": 1}, False), ({}, False)],
)  # fmt: skip
def test_a_modem_is_a_metered_link(tmp_path: Path, facts: dict[str, Any], is_mobile: bool) -> None:
    board = Board(tmp_path, unmetered_link=True)
    assert board.why_not() is None, "no route at all"
    board.tree.leave_by("link0", **facts)
    assert (board.why_not() == "the link is metered") is is_mobile


def test_a_modem_that_only_ipv6_leaves_by_is_metered_too(tmp_path: Path) -> None:
    board, zero = Board(tmp_path, unmetered_link=True), "0" * 32
    own = f"fe800000{'0' * 24} 40 {zero} 00 {zero} 00000100 00000001 00000000 00000001 eth0"
    refused = f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200 lo"
    board.tree.write("proc/net/ipv6_route", f"{own}\n{refused}")
    board.tree.write("sys/class/net/wwan0/uevent", "DEVTYPE=wwan")
    assert board.why_not() is None, "no route at all"
    route = f"{zero} 00 {zero} 00 {'fe80'.ljust(32, '1')} 00000400 00000003 00000000 00000003 wwan0"
    board.tree.write("proc/net/ipv6_route", f"{own}\n{refused}\n{route}")
    assert board.why_not() == "the link is metered"


BUSCTL = """#!/bin/sh
test "$*" = "--system get-property org.freedesktop.NetworkManager /org/freedesktop/NetworkManager \\
org.freedesktop.NetworkManager Metered" && cat {}
"""


@pytest.mark.parametrize(
    ("says", "trains"), [("u 1", False), ("u 3", False), ("u 4", True), ("u 2", True), ("u 0", True)]
)
def test_network_manager_is_asked_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, trains: bool
) -> None:
    """A program of the name of busctl answers as NetworkManager's documentation has it."""
    (tmp_path / "answer").write_text(f"{says}\n")
    busctl = tmp_path / "bin/busctl"
    busctl.parent.mkdir()
    busctl.write_text(BUSCTL.format(tmp_path / "answer").replace("\\\n", ""))
    busctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(busctl.parent), prepend=os.pathsep)
    (tmp_path / "board/run/NetworkManager").mkdir(parents=True)
    board = Board(tmp_path / "board", unmetered_link=True)
    assert board.why_not() == "NetworkManager has not answered yet"
    wait_until(
        lambda: board.why_not(after_s=0.5) == (None if trains else "the link is metered"), "its answer"
    )


# --- the owner's command ----------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Board]:
    script = f"test -e {tmp_path / 'yes'} || {{ echo; echo it rains; exit 1; }}"
    board = Board(tmp_path, command=("/bin/sh", "-c", script), command_period_s=1.0)
    yield board
    board.governor.stop()


def test_a_command_of_the_owners_decides(asked: Board, tmp_path: Path) -> None:
    assert "has not answered yet" in (asked.why_not() or "")
    wait_until(lambda: asked.why_not(after_s=0.5) == "sh says no: it rains", "its no")
    (tmp_path / "yes").touch()
    wait_until(lambda: asked.why_not(after_s=0.5) is None, "its yes")
    (tmp_path / "yes").unlink()
    wait_until(lambda: asked.why_not(after_s=0.5) is not None, "its no")


def test_an_answer_of_long_ago_is_none(asked: Board, tmp_path: Path) -> None:
    (tmp_path / "yes").touch()
    wait_until(lambda: asked.why_not(after_s=0.5) is None, "its yes")
    assert "has not answered yet" in (asked.why_not(after_s=3_600.0) or "")


@pytest.mark.parametrize(
    ("command", "says"), [(("/no/such",), "cannot be run"), (("sleep", "60"), "has not ended")]
)
def test_a_command_that_does_not_answer_says_no(tmp_path: Path, command: tuple[str, ...], says: str) -> None:
    board = Board(tmp_path, command=command)
    try:
        wait_until(lambda: says in (board.why_not(after_s=4.0) or ""), "that it is said")
    finally:
        board.governor.stop()


# --- what it is made of -----------------------------------------------------------------------------


def test_what_is_read_and_decided_leads_to_no_record() -> None:
    """None imports anything that knows of records, and the question has no argument that could hold one."""
    allowed = {
        "agent.bounded_reads", "agent.governor_settings", "agent.questions", "agent.sensors", "dpagent.clock",
        "dpagent.errors", "dpagent.wording", "dpagent.configuration",
    }  # fmt: skip
    for module in (governor_module, sensors_module):
        ours = {
            line.split()[1] for line in inspect.getsource(module).splitlines()
            if line.startswith(("from agent", "from dpagent", "import agent", "import dpagent"))
        }  # fmt: skip
        assert ours <= allowed, module
    assert set(inspect.signature(Governor.why_not).parameters) == {"self", "begins"}


def test_it_opens_nothing_but_what_the_kernel_says(tmp_path: Path) -> None:
    """Python tells of all that is opened, listed and looked at, in C too, before it is."""
    board = Board(
        tmp_path / "board", hours=(WINDOW,), mains_power=True, least_battery_percent=10, highest_load=0.5,
        highest_temperature_c=70.0, unmetered_link=True, least_free_memory_mib=10, least_free_disk_mib=1,
    )  # fmt: skip
    board.tree.leave_by("eth0", type=1)
    board.tree.run(os.getpid(), 1, 5)
    seen: list[Path] = []
    watches = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watches and event in ("open", "os.listdir", "os.scandir", "socket.connect", "sqlite3.connect"):
            seen.append(Path(str(arguments[0])))

    sys.addaudithook(watch)  # For as long as this process lives.
    for _ in range(3):
        board.why_not(after_s=5.0)
    watches = False
    assert len({*seen}) > 10
    kernels = [tmp_path / "board" / name for name in ("proc", "sys")]
    assert [path for path in seen if not any(path.is_relative_to(place) for place in kernels)] == []


def test_waiting_and_going_on_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    board = Board(tmp_path, highest_temperature_c=70.0)
    for celsius in (80.0, 81.0, 79.0, 60.0, 61.0):
        board.tree.heat(celsius)
        board.why_not(begins=False)
    assert [record.message for record in caplog.records] == [
        "training pauses: the processor has 80 °C, and is to have at most 70 °C",
        "training goes on, after 3 seconds",
    ]


# --- configuration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ("{hours: ['25:00-06:00']}", "25:00-06:00"), ("{hours: ['6-22']}", "6-22"),
        ("{highest_load: 1.5}", "1.5"), ("{highest_temperature_c: 7}", "7"),
        ("{least_battery_percent: 101}", "101"), ("{processor_share: 0}", "0"), ("{command: ls}", "'ls'"),
        ("{least_free_disk: 3}", "least_free_disk"),
    ],
)  # fmt: skip
def test_an_error_names_line_key_and_value(tmp_path: Path, section: str, named: str) -> None:
    file = write_agent(tmp_path, None, KEY)
    file.write_text(f"{file.read_text()}governor: {section}\n")
    with pytest.raises(ConfigurationError) as caught:
        load_agent_settings(file)
    number = len(file.read_text().splitlines())
    assert f"{file}:{number}: governor" in str(caught.value)
    assert named in str(caught.value)


def test_a_profiles_governor_holds_where_agent_yaml_is_silent(tmp_path: Path) -> None:
    file = write_agent(tmp_path, None, KEY, governor={"temperature_drop_c": 2.0, "hours": [WINDOW]})
    own = tmp_path / "own.yaml"
    own.write_text("extends: generic-x86-64\ngovernor: {highest_temperature_c: 66, hours: ['01:00-02:00']}\n")
    found = on_board(load_agent_settings(file), load_profile(str(own))).governor
    assert (found.highest_temperature_c, found.temperature_drop_c) == (66.0, 2.0)
    assert found.hours == (WINDOW,)


def test_how_full_the_disk_of_the_records_is_decides_nothing(tmp_path: Path) -> None:
    settings = GovernorSettings(least_free_disk_mib=100)
    with pytest.raises(ConfigurationError, match="least_free_disk_mib is 100"):
        require_public_room(settings, tmp_path / "not/yet", tmp_path)
    require_public_room(settings, tmp_path, Path("/proc/self"))
    require_public_room(GovernorSettings(), tmp_path, tmp_path)
    require_public_room(GovernorSettings(), tmp_path, tmp_path, reader="model.command")


def test_how_much_the_owners_command_keeps_of_records_decides_nothing(tmp_path: Path) -> None:
    """On a disk without the records: `dpagent personalise` has features of them all in state_dir while it
    runs, longer where it is ended, and then the board's own model, or none."""
    data, model = {"path": "/proc/self/data.npz"}, {"command": ["/bin/true"]}
    file = write_agent(tmp_path, None, KEY, governor={"least_free_disk_mib": 1}, data=data, model=model)
    settings = load_agent_settings(file)
    with pytest.raises(ConfigurationError, match=r"model\.command may read records"):
        Agent(settings)
    (found,) = governed(settings, Sensors())
    assert "model.command may read records" in found.text


OVERLAY = """
import sys
from pathlib import Path
from agent.governor import require_public_room
from agent.governor_settings import GovernorSettings
root = Path(sys.argv[1])
require_public_room(GovernorSettings(**{sys.argv[2]: 1}), root / "state", root / "records")
"""


@pytest.mark.parametrize("key", ["least_free_disk_mib", "least_free_memory_mib"])
def test_an_overlay_is_no_other_disk_and_may_be_in_memory(tmp_path: Path, key: str) -> None:
    """Before, one record of 5 kB on an overlay decided whether a board trained by the room below it."""
    inside = ["unshare", "--map-root-user", "--user", "--mount"]
    layers = f"lowerdir={tmp_path}/low,upperdir={tmp_path}/up,workdir={tmp_path}/work"
    mounts = (
        f"mount -t tmpfs x {tmp_path} && cd {tmp_path} && mkdir low up work records state"
        f" && mount -t overlay x -o {layers} records"
    )
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "sh", "-c", mounts], check=False).returncode
    ):
        pytest.skip("this system lets nobody mount an overlay")
    command = f'{mounts} && cd / && exec "$0" -P -c "$1" "$2" "$3"'
    found = subprocess.run(
        [*inside, "sh", "-c", command, sys.executable, OVERLAY, tmp_path, key],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"governor.{key} is 1, and the records" in found.stderr


def test_free_memory_decides_nothing_where_records_lie_in_it(tmp_path: Path) -> None:
    memory, settings = Path("/dev/shm"), GovernorSettings(least_free_memory_mib=1)
    if not memory.is_dir():
        pytest.skip("this system has no file system in memory")
    with pytest.raises(ConfigurationError, match=r"least_free_memory_mib is 1.*\(tmpfs\)"):
        require_public_room(settings, tmp_path, memory / "not" / "yet")
    require_public_room(GovernorSettings(least_free_disk_mib=1), Path("/proc/self"), memory)
