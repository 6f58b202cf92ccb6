"""A fleet keeps its promises whatever is killed; ``checker.py`` lists them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.fleet_under_fire import (
    COORDINATOR,
    DEVICES,
    METHODS,
    MIXER,
    PROGRAMS,
    SHARED_PROGRAMS,
    STANDBY,
    WORKERS,
    Fault,
    FleetUnderFire,
    Launcher,
    RandomKills,
    launcher,
)
from postgresql import Postgresql

from dpagent import faults
from dpagent.faults import FaultPoint

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def programs() -> Iterator[Launcher]:
    with launcher() as made:
        yield made


def of(kind: str) -> list[FaultPoint]:
    return [point for point in FaultPoint if point.startswith(kind)]


def test_every_fault_point_is_survived(tmp_path: Path, programs: Launcher) -> None:
    # A device comes to some points once a round, after its charge: two devices share them.
    agent = [*of("agent"), FaultPoint.FILE_WRITTEN]
    waiting = {
        COORDINATOR: [*of(COORDINATOR), FaultPoint.FILE_WRITTEN],
        DEVICES[0]: agent[::2],
        DEVICES[1]: agent[1::2],
    }

    def next_fault(name: str) -> Fault | None:
        # What was published leaves by another thread.
        return Fault(waiting[name].pop(0), delay_s=0.01) if waiting.get(name) else None

    with FleetUnderFire(tmp_path, programs) as fleet:
        outcome = fleet.run(next_fault)
    assert outcome.broken == []
    # Those of the queue: test_queue_kills.py.
    assert set(outcome.kills) == {*FaultPoint} - {*of(MIXER), *of("queue"), *of("tokens")}


@pytest.mark.slow
def test_every_fault_point_of_a_mixer_is_survived_and_nothing_leaves_it_twice(
    tmp_path: Path, programs: Launcher
) -> None:
    # In the midst of a batch, too: of what is published a part.
    waiting = [*map(Fault, of(MIXER)), Fault(FaultPoint.MIXER_PUBLISHED, times=3)]

    def next_fault(name: str) -> Fault | None:
        return waiting.pop() if name == MIXER and waiting else None

    with FleetUnderFire(tmp_path, programs, is_mixed=True) as fleet:
        outcome = fleet.run(next_fault)
    assert outcome.broken == []
    assert set(outcome.kills) == {*of(MIXER)}
    assert outcome.replayed > 0


def test_with_receipts_on_topics_of_their_own_a_job_is_done_whatever_is_killed_at_random(
    tmp_path: Path, programs: Launcher
) -> None:
    kills = RandomKills(seed=18, most=6)
    with FleetUnderFire(tmp_path, programs, own_receipts=True) as fleet:
        outcome = fleet.run(kills.fault, kills.strike)
    assert outcome.broken == []
    assert outcome.kills.total() >= 3
    assert len(fleet.checker.capture.own_receipts) >= len(fleet.checker.capture.fragments)
    assert not fleet.checker.capture.receipted


@pytest.mark.slow
def test_with_receipts_of_workers_a_job_is_done_whatever_is_killed_at_random(
    tmp_path: Path, programs: Launcher, postgresql: Postgresql
) -> None:
    kills = RandomKills(seed=19, most=12, programs=SHARED_PROGRAMS)
    with FleetUnderFire(tmp_path, programs, postgresql=postgresql, own_receipts=True) as fleet:
        outcome = fleet.run(kills.fault, kills.strike)
    assert outcome.broken == []
    assert outcome.kills.total() >= 5
    assert not fleet.checker.capture.receipted


@pytest.mark.slow
def test_a_job_through_a_mixer_is_done_whatever_is_killed_at_random(
    tmp_path: Path, programs: Launcher
) -> None:
    kills = RandomKills(seed=15, most=10, programs=(*PROGRAMS, MIXER))
    with FleetUnderFire(tmp_path, programs, is_mixed=True) as fleet:
        outcome = fleet.run(kills.fault, kills.strike)
    assert outcome.broken == []
    assert outcome.kills.total() >= 5


def test_a_job_is_done_whatever_is_killed_at_random(tmp_path: Path, programs: Launcher) -> None:
    kills = RandomKills(seed=13, most=6)
    with FleetUnderFire(tmp_path, programs) as fleet:
        outcome = fleet.run(kills.fault, kills.strike)
    assert outcome.broken == []
    assert outcome.kills.total() >= 3


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in METHODS if method != "dp-sgd"])
def test_a_job_of_each_method_is_done_whatever_is_killed_at_random(
    tmp_path: Path, programs: Launcher, method: str
) -> None:
    kills = RandomKills(seed=16, most=10)
    with FleetUnderFire(tmp_path, programs, method=method) as fleet:
        outcome = fleet.run(kills.fault, kills.strike)
    assert outcome.broken == []
    assert outcome.kills.total() >= 5


@pytest.mark.slow
def test_rounds_that_end_too_early_for_some_fragments_break_no_promise(
    tmp_path: Path, programs: Launcher
) -> None:
    kills = RandomKills(seed=14, most=10)
    with FleetUnderFire(tmp_path, programs, deadline_s=0.8) as fleet:
        outcome = fleet.run(kills.fault, kills.strike)
    assert outcome.broken == []
    assert outcome.kills.total() > 0


def test_every_fault_point_of_a_shared_coordinator_is_survived(
    tmp_path: Path, programs: Launcher, postgresql: Postgresql
) -> None:
    """By workers and by the two of which one runs rounds."""
    counting = [
        FaultPoint.COORDINATOR_FRAGMENTS_OPENED,
        FaultPoint.COORDINATOR_COUNT_WRITTEN,
        FaultPoint.COORDINATOR_COUNTED,
    ]
    # Not at the beginning of the job, to which one of the two comes alone.
    beginning = (FaultPoint.COORDINATOR_JOB_WRITTEN, FaultPoint.COORDINATOR_JOB_BEGUN)
    leading = [point for point in of(COORDINATOR) if point not in (*counting, *beginning)]
    waiting = {WORKERS[0]: counting[::2], WORKERS[1]: counting[1::2], COORDINATOR: [*leading]}

    def next_fault(name: str) -> Fault | None:
        name = COORDINATOR if name == STANDBY else name
        return Fault(waiting[name].pop(0), delay_s=0.01) if waiting.get(name) else None

    with FleetUnderFire(tmp_path, programs, postgresql=postgresql) as fleet:
        outcome = fleet.run(next_fault)
    assert outcome.broken == []
    # The one that stands by when the job ends has a point to which it never came.
    assert len({*counting, *leading} - set(outcome.kills)) <= 2


@pytest.mark.slow
def test_a_job_of_a_shared_coordinator_is_done_whatever_is_killed_at_random(
    tmp_path: Path, programs: Launcher, postgresql: Postgresql
) -> None:
    kills = RandomKills(seed=17, most=12, programs=SHARED_PROGRAMS)
    with FleetUnderFire(tmp_path, programs, postgresql=postgresql) as fleet:
        outcome = fleet.run(kills.fault, kills.strike)
    assert outcome.broken == []
    assert outcome.kills.total() >= 5


def sources() -> dict[Path, str]:
    """The programs' files, but for the one that defines the points."""
    root = Path(__file__).parents[2]
    files = [
        file
        for package in ("dpagent", "agent", "coordinator", "mixer", "simulation", "cli")
        for file in (root / package).rglob("*.py")
    ]
    return {file: file.read_text(encoding="utf-8") for file in files if file != Path(str(faults.__file__))}


def test_no_program_replaces_the_hook() -> None:
    assert faults.reached is faults._go_on
    used = re.compile(r"from dpagent import faults|from dpagent.faults import FaultPoint")
    used_or_called = re.compile(used.pattern + r"| +faults\.reached\(FaultPoint\.\w+\)")
    for file, text in sources().items():
        if used.search(text):
            for line in text.splitlines():
                if re.search(r"\b(faults|FaultPoint)\b", line):
                    assert used_or_called.fullmatch(line), f"{file}: {line}"
        else:
            assert "dpagent.faults" not in text, file


def test_every_fault_point_stands_in_one_place() -> None:
    text = "".join(sources().values())
    for point in FaultPoint:
        assert text.count(f"faults.reached(FaultPoint.{point.name})") == 1, point
