"""The fleet's page: its size, its first paint, how soon an event is shown, and what ten viewers cost.

The page is served by its own program. An event is a write to the coordinator's database, at random moments;
it is shown when a viewer's stream has it, and the time is taken from its commit. First paint is Chromium's
own first-contentful-paint of a fleet with a job, on this machine, the median of five visits with an empty
cache; it is left out where Chromium or Playwright are missing. The coordinator's rate is that of `counting`,
8,000 fragments of 500 devices in batches of 256, with ten viewers whose streams another program reads, and
without; the sides take turns. A round takes longer than several looks of the page, so that it has the share
of looks that hours would have.

Interpretation: one look at the database serves all viewers, and rests thirty times as long as it took. The
page stands behind the coordinator for the processor.

Limits: two cores, which coordinator, page and viewers share; on a machine with one, the page takes from the
coordinator what its readings cost. A viewer here reads, and draws nothing.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

import coordinator.page
from benchmarks.counting import FilledRound
from benchmarks.figures import BenchmarkError, Figure
from benchmarks.seal import RECORDS, fleet_values
from coordinator.database.opening import open_database
from coordinator.model_state import ModelState
from coordinator.planning import new_job
from coordinator.queue import Queue
from coordinator.settings import FIRST_JOB, load_fleet_settings
from coordinator.store import Store
from dpagent.learning.models.built_ins import built_in

_VIEWERS: Final = 10
_EVENTS: Final = 40
_DEVICES: Final = 500
_REPEATS: Final = 5
_VISITS: Final = 5
_PATIENCE_S: Final = 60.0
_READER: Final = """
import asyncio, sys

async def read(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /api/events HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    while await reader.read(65536):
        pass

async def all_of_them(port, number):
    print("reading", flush=True)
    await asyncio.gather(*(read(port) for _ in range(number)))

asyncio.run(all_of_them(int(sys.argv[1]), int(sys.argv[2])))
"""


def run() -> list[Figure]:
    """Measure the page."""
    static = Path(coordinator.page.__file__).parent / "static"
    size = sum(each.stat().st_size for each in static.iterdir())
    figures = [Figure("all files of the page", size / 1_000, "kB")]
    with tempfile.TemporaryDirectory() as directory:
        delays, paints = _watched(Path(directory))
        figures += [
            Figure("from commit to viewer, median", 1_000 * statistics.median(delays), "ms"),
            Figure("from commit to viewer, longest", 1_000 * max(delays), "ms"),
        ]
        if paints:
            figures.append(Figure("first contentful paint, median", statistics.median(paints), "ms"))
    with tempfile.TemporaryDirectory() as directory:
        without, viewed, fragments = _rates(Path(directory))
        own = without.processor_s, viewed.processor_s
    return [
        *figures,
        Figure(
            f"fragments counted with {_VIEWERS} viewers",
            fragments / viewed.wall_s,
            "a second",
            f"without, {fragments / without.wall_s:.0f} a second",
            without.wall_s / viewed.wall_s,
        ),
        Figure(
            f"the coordinator's own processor time of a fragment with {_VIEWERS} viewers",
            1e6 * own[1] / fragments,
            "µs",
            f"without, {1e6 * own[0] / fragments:.0f} µs",
            own[1] / own[0],
        ),
    ]


def _watched(directory: Path) -> tuple[list[float], list[float]]:
    """Seconds from commits to a viewer, and milliseconds to first paints."""
    values = {
        "fleet": "meadow", "devices": 2, "records_per_device": 50, "rounds": 2, "state_dir": "state",
        "privacy": {"epsilon": 4.0, "delta": 1e-4, "sampling_rate": 0.5}, "model": {"name": "digits"},
    }  # fmt: skip
    file = directory / "fleet.yaml"
    file.write_text(yaml.safe_dump(values))
    settings = load_fleet_settings(file)
    settings.state_dir.mkdir()
    dimension = built_in("digits").parameter_count
    with closing(open_database(settings.state_dir)) as database:
        queue = Queue(database)
        queued = queue.add(FIRST_JOB, new_job(settings), settings.job().stored(), 1.0)
        queue.begin(
            queued.number, ModelState(np.zeros(dimension, np.float32), np.zeros((1, dimension)), 1.0, ()), 1.0
        )
        store = Store(database, queued.number)
        store.start_round(1, time.time(), time.time() + 600)
        with _served(file) as port:
            return _delays(port, store), _paints(port)


def _delays(port: int, store: Store) -> list[float]:
    draw, found = random.Random(5), []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    connection.request("GET", "/api/events")
    answer = connection.getresponse()
    for number in range(1, _EVENTS + 1):
        time.sleep(draw.uniform(0.3, 1.2))
        store.reject("malformed", 1)
        committed = time.perf_counter()
        while _rejected(answer) < number:
            pass
        found.append(time.perf_counter() - committed)
    connection.close()
    return found


def _rejected(answer: http.client.HTTPResponse) -> int:
    """How many rejected messages the next state has."""
    while not (line := answer.readline()).startswith(b"data: "):
        if not line:
            raise BenchmarkError("The page has ended its stream of events.")
    current: dict[str, Any] = json.loads(line[6:])["open"]
    return sum(each["count"] for each in current["counters"]["rejected"])


def _paints(port: int) -> list[float]:
    program = shutil.which("chromium")
    if program is None or importlib.util.find_spec("playwright") is None:
        return []
    from playwright.sync_api import sync_playwright

    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
    found = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(_VISITS):
            page = browser.new_context().new_page()
            page.goto(f"http://127.0.0.1:{port}/")
            page.get_by_role("heading", name="first").wait_for()
            found.append(float(page.wait_for_function(paint).json_value()))
            page.close()
        browser.close()
    return found


@dataclass(frozen=True)
class _Time:
    """Of a round, in seconds: on the wall, and of this program's processor."""

    wall_s: float
    processor_s: float


def _rates(directory: Path) -> tuple[_Time, _Time, int]:
    """Medians without viewers and with them, and a round's fragments."""
    taken: dict[str, list[_Time]] = {"plain": [], "watched": []}
    values = fleet_values("mnist", RECORDS["mnist"]) | {"devices": _DEVICES}
    fragments = 0
    for number in range(_REPEATS):
        rounds = {side: FilledRound(directory / f"{number}-{side}", values) for side in taken}
        file = directory / f"{number}.yaml"
        shared = {"fleet": values["fleet"], "devices": _DEVICES}
        shared["state_dir"] = str(directory / f"{number}-watched" / "state")
        file.write_text(yaml.safe_dump(shared))
        with _served(file) as port, _read_by(port):
            for side in sorted(rounds, reverse=bool(number % 2)):
                began = time.perf_counter(), time.process_time()
                rounds[side].count()
                taken[side].append(_Time(time.perf_counter() - began[0], time.process_time() - began[1]))
        fragments = len(rounds["plain"].messages)
        for each in rounds.values():
            each.close()
    plain, watched = (_median(times) for times in taken.values())
    return plain, watched, fragments


def _median(times: list[_Time]) -> _Time:
    return _Time(
        statistics.median(each.wall_s for each in times),
        statistics.median(each.processor_s for each in times),
    )


@contextmanager
def _served(file: Path) -> Iterator[int]:
    """The page of a fleet, by its own program, at a free port."""
    log = file.with_suffix(".log")
    command = [
        sys.executable,
        "-m",
        "cli.main",
        "coordinator",
        "serve",
        "--config",
        str(file),
        "--set",
        "page.port=0",
    ]
    with log.open("wb") as stream, subprocess.Popen(command, stderr=stream) as program:
        try:
            until = time.monotonic() + _PATIENCE_S
            while "is at http" not in log.read_text():
                if program.poll() is not None or time.monotonic() > until:
                    raise BenchmarkError(f"The page does not begin: {log.read_text()}")
                time.sleep(0.05)
            yield int(log.read_text().rstrip().rstrip("/").rpartition(":")[2])
        finally:
            program.terminate()


@contextmanager
def _read_by(port: int) -> Iterator[None]:
    """Ten viewers, in another program."""
    command = [sys.executable, "-c", _READER, str(port), str(_VIEWERS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        time.sleep(1.0)
        try:
            yield
        finally:
            reader.kill()
