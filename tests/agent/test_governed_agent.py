"""A real agent, as a process, with a real broker, on a board whose heat the test sets: it waits, pauses, goes
on and ends."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import boards
import pytest
from boards import BoardTree
from brokers import Broker, wait_until
from children import PATIENCE_S, Child
from fleets import write_agent
from launching.starts import Popen
from lone_agents import BLOCKS, charges, ids, plan_for, rows, state_of
from observers import Announcer
from test_brake import members, states, ticks

from agent.audit import verify
from dpagent.errors import ExitCode
from dpagent.protocol.messages import Plan

COOL, HOT = 40.0, 90.0
MOST = 2_500
_numbers = itertools.count()


PROGRAM = """
import sys
from pathlib import Path
from cli.main import main
sys.path.append(sys.argv.pop(1))
from boards import stand_on
stand_on(Path(sys.argv.pop(1)))
main()
"""


class Governed(Child):
    """An agent whose board is a directory.

    Args:
        file: its ``agent.yaml``.
        tree: the board.
        is_executed: whether it and its training are parent and child, as forks are not: the kernel lets a
            group that stands still go on when its parent ends.
    """

    def __init__(self, file: Path, tree: BoardTree, *, is_executed: bool = False) -> None:
        self._directory, arguments = file.parent.resolve(), ["run", "--config", file]
        start = partial(Popen, cwd=self._directory)
        if is_executed:
            tests = Path(boards.__file__).parent
            words = ["-c", PROGRAM, tests, tree.root, *arguments]
        else:
            start.keywords["first"] = partial(boards.stand_on, tree.root)
            words = ["-m", "cli.main", *arguments]
        super().__init__([sys.executable, "-P", *words], file.with_suffix(".log"), start)

    @property
    def training(self) -> int:
        """The training process: the one in the agent's directory."""
        (found,) = [place for place in Path("/proc").glob("[0-9]*") if self._is_training(place)]
        return int(found.name)

    def _is_training(self, place: Path) -> bool:
        try:
            is_program = b"agent.worker_program" in (place / "cmdline").read_bytes()
            return is_program and (place / "cwd").readlink() == self._directory
        except OSError:
            return False


@pytest.fixture
def tree(tmp_path: Path) -> BoardTree:
    return BoardTree(tmp_path / "board")


@pytest.fixture
def file(tmp_path: Path, mosquitto: Broker, announcer: Announcer, fleet: str) -> Path:
    return write_agent(
        tmp_path / "device", mosquitto, announcer.signer.public_key, fleet=fleet, engine="numpy",
        governor={"highest_temperature_c": 70.0}, data={"max_records": MOST},
        budget={"epsilon": 100.0, "delta": 1e-2},
    )  # fmt: skip


def long_plan(fleet: str) -> Plan:
    """A plan that trains for some seconds, since lots are filled up to the largest of ``MOST`` records."""
    return plan_for(fleet, sampling={"local_steps": 64}, compute_slot_s=0.5, jitter_window_s=0.5)


def until_it_trains(agent: Governed, file: Path) -> int:
    """The training process, once its round is charged and it computes."""
    wait_until(lambda: charges(file), "the charge")
    group = agent.training
    spent = ticks(group)
    wait_until(lambda: ticks(group) > spent, "it to compute")
    return group


def test_an_agent_waits_pauses_goes_on_and_finishes(
    announcer: Announcer, file: Path, tree: BoardTree, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(file.with_name("notify")))
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    tree.heat(HOT)
    announcer.announce(long_plan(fleet))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, Governed(file, tree) as agent:
        manager.bind(str(file.with_name("notify")))
        wait_until(lambda: "training waits: the processor has 90 °C" in agent.said(), "that it waits")
        assert charges(file) == []
        tree.heat(COOL)
        group = until_it_trains(agent, file)
        assert "training goes on" in agent.said()
        tree.heat(HOT)
        wait_until(lambda: states(group) == {"T"}, "training to stop")
        assert "training pauses" in agent.said()
        spent = ticks(group)
        manager.setblocking(False)
        while _said(manager):
            pass
        manager.settimeout(PATIENCE_S)
        heard = [_said(manager) for _ in range(10)]
        assert b"WATCHDOG=1" in heard, "the agent goes on, and its watchdog is fed"
        assert (states(group), ticks(group)) == ({"T"}, spent)
        assert rows(file, "SELECT state FROM rounds") == [("charged",)]
        tree.heat(COOL)
        wait_until(lambda: len(ids(announcer, fleet)) == BLOCKS, "all fragments")
        assert agent.stop() == ExitCode.OK
    assert len(charges(file)) == 1
    assert verify(state_of(file)).charges == 1
    assert rows(file, "SELECT state FROM rounds") == [("published",)]
    assert agent.said().count("training goes on") == 2


def _said(manager: socket.socket) -> bytes:
    try:
        return manager.recv(4_096)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_agent_that_ends_in_a_pause_leaves_nothing_behind_and_goes_on_from_its_charge(
    announcer: Announcer, file: Path, tree: BoardTree, fleet: str, number: signal.Signals
) -> None:
    announcer.announce(long_plan(fleet))
    with Governed(file, tree, is_executed=number is signal.SIGKILL) as agent:
        group = until_it_trains(agent, file)
        tree.heat(HOT)
        wait_until(lambda: states(group) == {"T"}, "training to stop")
        os.kill(agent.process.pid, number)
        if number is signal.SIGTERM:
            assert agent.wait() == ExitCode.OK
        else:
            agent.kill()
        wait_until(lambda: members(group) == {}, "the end of training")
    assert rows(file, "SELECT state FROM rounds") == [("charged",)]
    tree.heat(COOL)
    with Governed(file, tree) as agent:
        wait_until(lambda: len(ids(announcer, fleet)) == BLOCKS, "all fragments")
        assert agent.stop() == ExitCode.OK
    assert len(charges(file)) == 1
    assert verify(state_of(file)).charges == 1
