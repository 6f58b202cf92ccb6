"""Holding training back: real processes, stopped, let go, ended and left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from brokers import wait_until

from agent.brake import Brake

COMPUTES = """
import hashlib, os, sys
sys.path.insert(0, "tests")
import numpy as np
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.engine_choice import Bench
from dpagent.learning.training.parallel_engine import ParallelEngine
spec = built_in("digits")
engine = Bench(spec, microbatch=8).make("numpy")
if sys.argv[1:] == ["forks"]:
    engine = ParallelEngine(engine, 2)
rng = np.random.default_rng(1)
inputs, labels = rng.random((640, 8, 8, 1), np.float32), rng.integers(0, 10, 640)
while True:
    found = engine.clipped_sum(spec.initial_weights(0), inputs, labels, [1.0])
    print(hashlib.sha256(found.total.tobytes()).hexdigest(), flush=True)
"""


def stat_of(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def members(group: int) -> dict[int, list[str]]:
    """State, and further fields of proc_pid_stat(5), of the processes of a group that have not ended."""
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                fields = stat_of(int(place.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group and fields[0] not in "ZX":
                found[int(place.name)] = fields
    return found


def states(group: int) -> set[str]:
    return {fields[0] for fields in members(group).values()}


def ticks(group: int) -> int:
    return sum(int(fields[11]) + int(fields[12]) for fields in members(group).values())


def until_more_is_spent(group: int, spent: int) -> None:
    wait_until(lambda: ticks(group) > spent, "the group to go on")


@contextmanager
def computing(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A group that computes, and says what it found."""
    with subprocess.Popen(
        [sys.executable, "-c", COMPUTES, *arguments], stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_forks_stop_with_their_process_and_what_they_compute_is_the_same_afterwards() -> None:
    with computing("forks") as process:
        assert process.stdout is not None
        assert len(members(process.pid)) == 2
        brake, before = Brake(process.pid), process.stdout.readline()
        for _ in range(3):
            brake.hold()
            wait_until(lambda: states(process.pid) == {"T"}, "all of them to stop")
            spent = ticks(process.pid)
            time.sleep(0.1)
            assert (states(process.pid), ticks(process.pid)) == ({"T"}, spent)
            brake.release()
            until_more_is_spent(process.pid, spent)
        assert {process.stdout.readline() for _ in range(20)} == {before}


def test_a_group_that_is_stopped_can_be_ended() -> None:
    with computing("forks") as process:
        brake = Brake(process.pid)
        brake.hold()
        wait_until(lambda: states(process.pid) == {"T"}, "all of them to stop")
        brake.kill()
        wait_until(lambda: members(process.pid) == {}, "the end of all")


def test_one_that_has_been_let_go_gets_no_signal_any_more() -> None:
    with computing() as process:
        brake = Brake(process.pid, share=0.5)
        brake.hold()
        wait_until(lambda: states(process.pid) == {"T"}, "it to stop")
        brake.let_go()
        wait_until(lambda: "T" not in states(process.pid), "it to go on")
        for signal_it in (brake.hold, brake.kill):
            signal_it()
        time.sleep(0.3)
        assert len(states(process.pid) & {"R", "S"}) == len(states(process.pid)) == 1


def test_one_that_may_run_for_a_part_of_the_time_is_held_all_the_same() -> None:
    with computing() as process:
        brake = Brake(process.pid, share=0.5)
        for _ in range(2):
            wait_until(lambda: states(process.pid) == {"T"}, "it to stand still")
            until_more_is_spent(process.pid, ticks(process.pid))
        brake.hold()
        spent = ticks(process.pid)
        time.sleep(0.5)
        assert (states(process.pid), ticks(process.pid)) == ({"T"}, spent)
        brake.release()
        until_more_is_spent(process.pid, spent)
        brake.let_go()


STOPS = f"""
import os, signal, subprocess, sys
command = [sys.executable, "-c", {COMPUTES!r}, "forks"]
child = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
child.stdout.readline()
os.killpg(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_group_whose_starter_ends_does_not_stay_stopped_for_ever(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STOPS], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        group = int(starter.stdout.readline())
        wait_until(lambda: states(group) == {"T"}, "all of them to stop")
        starter.send_signal(number)
        wait_until(lambda: members(group) == {}, "their end")


GIVES_WAY = """
import os, threading, time
from agent.priority import give_way
give_way(14)
thread = threading.Thread(target=lambda: (os.write(1, b"%d\\n" % threading.get_native_id()), time.sleep(60)))
thread.daemon = True
thread.start()
fork = os.fork()
if fork:
    os.write(1, b"%d\\n%d\\n" % (os.getpid(), fork))
time.sleep(60)
"""


def test_threads_and_forks_are_behind_all_other_programs() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GIVES_WAY], stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        numbers = [process.stdout.readline().strip() for _ in range(3)]
        try:
            said = subprocess.run(
                ["ionice", "-p", *numbers], capture_output=True, text=True, check=True
            ).stdout
            assert said.split() == ["idle"] * 3
            assert [os.getpriority(os.PRIO_PROCESS, int(number)) for number in numbers] == [
                max(14, os.getpriority(os.PRIO_PROCESS, 0))
            ] * 3
        finally:
            os.killpg(process.pid, signal.SIGKILL)
