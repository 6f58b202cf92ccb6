"""The governor: the ceiling on processor time, how soon training stands still, and what a look costs.

A process that adds up clipped gradients of `digits` without an end (numpy engine, microbatches of 32) runs
under the agent's brake. *Processor time* is that of the process, of the time that has passed, over 10 s for
each share that `governor.processor_share` may have; with all of the time, the same process takes what
stands beside it. *Until it stands still* is the time from the call until the kernel says that each of two
processes, one a fork of the other, is stopped; the median of 50. To that, the agent adds the time until it
reads the sensor again, 0.4 s, and until its loop turns, 0.5 s at most. *A look* reads every sensor of this
machine that the governor knows; the median of 50.

Limits: a machine on which nothing else runs; else the process has less than its share. Few sensors are
here: on a board, some are read over a slow bus.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from agent.brake import Brake
from agent.governor import Governor
from agent.governor_settings import GovernorSettings
from agent.sensors import Sensors
from benchmarks.figures import Figure
from benchmarks.frameworks import ours
from benchmarks.programs import python
from dpagent.clock import SystemClock
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.parallel_engine import ParallelEngine

_SHARES: Final = (0.25, 0.5, 0.75)
_MEASURED_S: Final = 10.0
_REPEATS: Final = 50
_LOT: Final = 256
_MICROBATCH: Final = 32


def run() -> list[Figure]:
    """Measure, in children."""
    with _training(1) as group:
        whole = _share_of(group)
    figures = []
    for share in _SHARES:
        with _training(1) as group:
            brake = Brake(group, share)
            found = _share_of(group)
            brake.let_go()
        what = f"processor time with `processor_share` {share:g}"
        figures.append(Figure(what, 100 * found, "% of the time", f"with 1: {100 * whole:.1f} %"))
    with _training(2) as group:
        stopped_s = _seconds_to_stop(group)
    figures.append(Figure("until two processes stand still", 1e3 * stopped_s, "ms"))
    figures.append(Figure("a look at all sensors", 1e3 * _seconds_of_look(), "ms"))
    return figures


@contextmanager
def _training(processes: int) -> Iterator[int]:
    """A group of processes that compute without an end; its id."""
    command = python("-m", "benchmarks.governor", str(processes))
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _share_of(process: int) -> float:
    """Processor time of a process, of the time that passes."""
    before, began = _fields(process), time.perf_counter()
    time.sleep(_MEASURED_S)
    after, took = _fields(process), time.perf_counter() - began
    spent = sum(int(after[place]) - int(before[place]) for place in (11, 12))
    return spent / os.sysconf("SC_CLK_TCK") / took


def _seconds_to_stop(group: int) -> float:
    brake, members = Brake(group), _members(group)
    found = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        brake.hold()
        while any(_fields(member)[0] != "T" for member in members):
            pass
        found.append(time.perf_counter() - began)
        brake.release()
        time.sleep(0.02)
    return statistics.median(found)


def _seconds_of_look() -> float:
    settings = GovernorSettings(
        hours=("00:00-12:00", "12:00-00:00"), mains_power=True, least_battery_percent=1, highest_load=1.0,
        highest_temperature_c=120.0, unmetered_link=True, least_free_memory_mib=1,
    )  # fmt: skip
    found = []
    for _ in range(_REPEATS):
        governor = Governor(settings, Path("/tmp"), Sensors(), SystemClock())
        began = time.perf_counter()
        governor.why_not(begins=True)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _members(group: int) -> list[int]:
    numbers = (int(place.name) for place in Path("/proc").iterdir() if place.name.isdigit())
    return [number for number in numbers if int(_fields(number)[2]) == group]


def _fields(process: int) -> list[str]:
    """Of proc_pid_stat(5), from the state on."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0", "-1"]


def main(processes: int) -> None:
    """Compute, in a child, until somebody ends it."""
    spec = built_in("digits")
    engine = ours.made("numpy", spec, _MICROBATCH)
    side = engine if processes == 1 else ParallelEngine(engine, processes)
    generator = np.random.default_rng(0)
    inputs = generator.random((_LOT, *spec.input_shape), np.float32)
    labels, weights = generator.integers(0, spec.classes, _LOT), spec.initial_weights(0)
    print("ready", flush=True)
    while True:
        side.clipped_sum(weights, inputs, labels, [ours.CLIP_NORM])


if __name__ == "__main__":
    main(int(sys.argv[1]))
