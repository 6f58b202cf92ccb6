"""The coordinator's cycle on a clock of the test's: what becomes of a round, and when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clocks import MovableClock
from daemons import running_job
from fleets import honest_update, write_fleet, write_job

from coordinator.cycle import Cycle
from coordinator.daemon import Coordinator
from coordinator.database.sqlite import SqliteDatabase
from coordinator.queue import Queue
from coordinator.reader import StoreReader
from coordinator.round_end import Progress, Verdict
from coordinator.running_job import RunningJob, add_job
from coordinator.seats import OpenedFragment
from coordinator.settings import load_fleet_settings, load_job_settings
from coordinator.store import Store
from dpagent.privacy.mechanisms.wire import MAX_WIRE_VALUE
from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import cut
from dpagent.protocol.sealing import seal
from dpagent.protocol.task import RoundTask

DEVICES, LEAST, BLOCKS, DEADLINE_S = 3, 2, 5, 60.0
START = 1_800_000_000.0
GRID_S = 0.125
HONEST_S = 1.0 + 1.25 * GRID_S
"""A period of the devices' grid, slot and jitter of the test's fleet."""
_identities = itertools.count()
UPDATES: dict[str, Any] = {"privacy": {"method": "central", "clip_norm": 0.5}, "cap": {"kind": "none"}}


class Rounds:
    """A coordinator without a broker, whose fragments are put into its store."""

    def __init__(self, directory: Path, clock: MovableClock, **changes: Any) -> None:
        wanted = {"deadline_s": DEADLINE_S, "minimum_devices": LEAST, "device_grid_s": GRID_S}
        base: dict[str, Any] = {"devices": DEVICES, "fragments_per_update": BLOCKS, "round": wanted}
        settings = load_fleet_settings(write_fleet(directory, None, **base | changes))
        self.clock, self.state_dir = clock, settings.state_dir
        self.coordinator = Coordinator(settings, clock=clock)

    @property
    def running(self) -> RunningJob:
        return running_job(self.coordinator)

    @property
    def cycle(self) -> Cycle:
        return self.running.cycle

    @property
    def store(self) -> Store:
        return self.running.store

    @property
    def task(self) -> RoundTask:
        task = self.cycle._task
        assert task is not None
        return task

    def count(self, *numbers: int, keeps_values: bool = True) -> None:
        """Fragments of each block, as many as the numbers say."""
        number, values = self.task.plan.round, np.ones(self.task.plan.wire.block, np.int64)
        fragments = [
            OpenedFragment(next(_identities).to_bytes(16, "big"), number, position, values, 0.0)
            for position, many in enumerate(numbers)
            for _ in range(many)
        ]
        counted = self.store.count(
            fragments, number, seats=DEVICES if keeps_values else None, keeps_values=keeps_values
        )
        assert len(counted.fresh) == len(fragments)

    def announced(self) -> None:
        """Open a round whose plan the broker has, as after a restart."""
        self.cycle.open()
        self.store.mark_announced(self.task.plan.round, self.clock.unix())
        self.cycle.open()

    def counters(self) -> dict[str, int]:
        reader = StoreReader(self.state_dir)
        try:
            return reader.counters()
        finally:
            reader.close()


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(unix=START)


@pytest.fixture
def rounds(tmp_path: Path, clock: MovableClock) -> Iterator[Rounds]:
    rounds = Rounds(tmp_path, clock)
    yield rounds
    rounds.coordinator.close()


@pytest.mark.parametrize(
    ("changes", "erases"),
    [({}, False), (UPDATES, True)],
    ids=["sums", "updates"],
)
def test_what_is_deleted_is_erased_where_no_noise_hides_it(
    tmp_path: Path, clock: MovableClock, changes: dict[str, Any], erases: bool
) -> None:
    rounds = Rounds(tmp_path, clock, **changes)
    database = rounds.store.database
    assert isinstance(database, SqliteDatabase)
    assert database._erases is erases
    rounds.coordinator.close()


def test_a_job_of_updates_that_comes_while_the_coordinator_runs_erases_too(
    tmp_path: Path, clock: MovableClock
) -> None:
    rounds = Rounds(tmp_path, clock)
    database, shared = rounds.store.database, rounds.coordinator._settings
    assert isinstance(database, SqliteDatabase)
    queue = Queue(database)
    own = load_job_settings(write_job(tmp_path / "updates.yaml", **UPDATES))
    add_job(shared, own, "updates", "updates.yaml", queue, clock.unix())
    assert not database._erases, "what is deleted has noise so far"
    queue.end(1, clock.unix())
    rounds.coordinator._look_at_queue()
    assert rounds.running.queued.name == "updates"
    assert database._erases
    rounds.coordinator.close()


def test_what_a_crash_left_of_a_job_of_updates_that_is_over_is_erased_at_the_next_start(
    tmp_path: Path, clock: MovableClock
) -> None:
    """Nobody takes that job up any more."""
    rounds = Rounds(tmp_path, clock, **UPDATES)
    Queue(rounds.store.database).end(1, clock.unix())
    rounds.coordinator.close()
    coordinator = Coordinator(load_fleet_settings(tmp_path / "fleet.yaml"), clock=clock)
    assert coordinator.running is None
    assert isinstance(coordinator._database, SqliteDatabase)
    assert coordinator._database._erases
    coordinator.close()


# --- what is to become of a round ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "after_jitter", "at_deadline"),
    [
        ((0, 0, 0, 0, 0), Verdict.COLLECT, Verdict.EXTEND),
        ((1, 1, 1, 1, 1), Verdict.COLLECT, Verdict.EXTEND),
        # One block's fragments are nobody's update, however many they are.
        ((3, 3, 3, 3, 0), Verdict.COLLECT, Verdict.EXTEND),
        ((3, 3, 3, 3, 1), Verdict.COLLECT, Verdict.EXTEND),
        ((2, 2, 2, 2, 2), Verdict.COLLECT, Verdict.CLOSE),
        ((3, 2, 3, 3, 2), Verdict.COLLECT, Verdict.CLOSE),
        ((3, 3, 3, 3, 3), Verdict.CLOSE, Verdict.CLOSE),
    ],
)
def test_a_round_is_over_when_all_is_in_after_the_jitter_or_at_its_deadline_when_enough_is(
    rounds: Rounds, counts: tuple[int, ...], after_jitter: Verdict, at_deadline: Verdict
) -> None:
    rounds.announced()
    rounds.count(*counts)
    rest = (sum(counts), DEVICES * BLOCKS, min(counts))
    for elapsed, verdict in (
        (0.0, Verdict.COLLECT),
        (HONEST_S - 1e-3, Verdict.COLLECT),
        (HONEST_S + 1e-3, after_jitter),
        (DEADLINE_S - 1e-3, after_jitter),
        (DEADLINE_S + 1e-3, at_deadline),
    ):
        rounds.clock.advance(elapsed - (rounds.clock.unix() - START))
        assert rounds.cycle.progress() == Progress(*rest, verdict)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("seconds", [-3_600.0, 3_600.0])
def test_a_clock_that_is_set_neither_ends_a_round_nor_keeps_it_open(
    rounds: Rounds, seconds: float, restarts: bool
) -> None:
    """Before, a clock set back by an hour kept a round open for an hour, with all fragments in."""
    rounds.announced()
    rounds.count(DEVICES, DEVICES, DEVICES, DEVICES, DEVICES)
    rounds.clock.set_by(seconds)
    if restarts:
        rounds.cycle.open()
    if not (restarts and seconds > 0):  # After that, nobody knows how long ago it was announced.
        assert rounds.cycle.progress().verdict is Verdict.COLLECT
    rounds.clock.advance(HONEST_S + 1e-3)
    assert rounds.cycle.progress().verdict is Verdict.CLOSE


def test_a_round_that_no_broker_has_heard_of_is_not_closed_before_its_deadline(rounds: Rounds) -> None:
    """Messages that waited at the broker come with the connection, before any board has seen the plan."""
    rounds.cycle.open()
    rounds.count(*[DEVICES] * BLOCKS)
    rounds.clock.advance(DEADLINE_S - 1e-3)
    assert rounds.cycle.progress().verdict is Verdict.COLLECT
    rounds.clock.advance(1e-3)
    assert rounds.cycle.progress().verdict is Verdict.CLOSE


def dump(store: Store) -> list[str]:
    """All that is in the database."""
    assert isinstance(store.database, SqliteDatabase)
    return list(store.database.connection.iterdump())


@pytest.mark.parametrize("counts", [(0, 0, 0, 0, 0), (2, 2, 2, 2, 2), (3, 3, 3, 3, 3)])
@pytest.mark.parametrize("elapsed", [0.0, DEADLINE_S, 10 * DEADLINE_S])
def test_asking_how_far_a_round_is_changes_nothing(
    rounds: Rounds, counts: tuple[int, ...], elapsed: float, caplog: pytest.LogCaptureFixture
) -> None:
    rounds.cycle.open()
    rounds.count(*counts)
    rounds.clock.advance(elapsed)
    before = (dump(rounds.store), rounds.task, len(caplog.records))
    assert len({rounds.cycle.progress() for _ in range(3)}) == 1
    assert (dump(rounds.store), rounds.task, len(caplog.records)) == before


# --- and what becomes of it ---------------------------------------------------------------------


def test_a_round_that_is_being_collected_is_left_alone(rounds: Rounds) -> None:
    rounds.cycle.advance()
    task = rounds.task
    assert (task.plan.round, task.plan.deadline) == (1, rounds.clock.unix() + DEADLINE_S)
    rounds.count(2, 2, 2, 2, 2)
    rounds.clock.advance(DEADLINE_S - 1.0)
    rounds.cycle.advance()
    assert rounds.task is task


def test_a_round_with_too_little_is_extended_with_what_it_has(
    rounds: Rounds, caplog: pytest.LogCaptureFixture
) -> None:
    rounds.cycle.advance()
    first = rounds.task.plan
    rounds.count(3, 3, 3, 3, 1)
    for number in (1, 2):
        rounds.clock.advance(DEADLINE_S)
        rounds.cycle.advance()
        assert rounds.task.plan == first.with_values({"deadline": first.deadline + number * DEADLINE_S})
        current = rounds.store.open_round()
        assert current is not None
        assert (current.number, current.opened_at) == (1, first.deadline - DEADLINE_S)
        assert current.deadline == rounds.task.plan.deadline
    assert "only 1 of one block, fewer than the 2 needed" in caplog.text
    rounds.count(0, 0, 0, 0, 2)
    rounds.clock.advance(DEADLINE_S)
    rounds.cycle.advance()
    assert rounds.task.plan.round == 2


def test_a_round_with_enough_is_closed_at_its_deadline_and_the_next_one_opened(
    rounds: Rounds, caplog: pytest.LogCaptureFixture
) -> None:
    rounds.cycle.advance()
    first = rounds.task.plan
    rounds.count(2, 2, 3, 2, 2)
    rounds.clock.advance(DEADLINE_S)
    rounds.cycle.advance()
    assert f"closes at its deadline with 11 of {DEVICES * BLOCKS} fragments, at least 2" in caplog.text
    assert rounds.store.over_rounds() == 1
    reader = StoreReader(rounds.state_dir)
    record = reader.rounds()[0]
    reader.close()
    assert (record.closed_at, record.fragments) == (rounds.clock.unix(), 11)
    assert record.noise_multiplier == first.release.mechanism.noise_multipliers[0]
    second = rounds.task.plan
    assert (second.round, second.job, second.release) == (2, first.job, first.release)
    assert second.model.digest != first.model.digest
    assert second.deadline == rounds.clock.unix() + DEADLINE_S


def test_a_job_is_over_after_its_last_round(rounds: Rounds, caplog: pytest.LogCaptureFixture) -> None:
    for number in (1, 2):
        assert not rounds.cycle.is_over
        rounds.cycle.advance()
        assert rounds.task.plan.round == number
        rounds.announced()
        rounds.count(*[DEVICES] * BLOCKS)
        rounds.clock.advance(HONEST_S)
    rounds.cycle.advance()
    assert rounds.cycle.is_over
    rounds.cycle.advance()
    assert rounds.cycle._task is None
    assert rounds.store.open_round() is None
    assert "closes at its deadline" not in caplog.text, "all was in"


def test_an_open_round_is_taken_up_after_a_restart(tmp_path: Path, clock: MovableClock) -> None:
    first = Rounds(tmp_path, clock)
    first.cycle.advance()
    plan = first.task.plan
    first.count(1, 2, 0, 3, 1)
    first.coordinator.close()
    clock.advance(20.0)
    again = Rounds(tmp_path, clock)
    again.cycle.advance()
    assert again.task.plan == plan.with_values({"deadline": plan.deadline + 20.0})
    assert again.cycle.progress() == Progress(7, DEVICES * BLOCKS, 0, Verdict.COLLECT)
    again.coordinator.close()


# --- fragments ----------------------------------------------------------------------------------


def sealed(task: RoundTask, **changes: Any) -> list[bytes]:
    """One device's update."""
    plan = task.plan
    return [seal(encode(replace(piece, **changes)), plan) for piece in cut(honest_update(task), plan)]


def test_fragments_are_counted_once_and_the_others_by_their_reason(rounds: Rounds) -> None:
    rounds.announced()
    first = rounds.task
    update = sealed(first)
    other_job = sealed(replace(first, plan=first.plan.with_values({"job": b"x" * 16})))
    wrong = [
        *other_job[:1], *sealed(first, round=2)[:1],
        *sealed(first, position=BLOCKS)[:1], *sealed(first, payload=b"")[:2],
        *sealed(first, payload=bytes(first.plan.wire.bytes))[:3], b"", b"rubbish",
    ]  # fmt: skip
    rounds.cycle.take_fragments([*update, *wrong, update[0]])
    rounds.cycle.take_fragments(update)
    assert rounds.cycle.progress().counted == BLOCKS
    assert rounds.counters() == {
        "duplicates": 1 + BLOCKS, "rejected: cannot open": 1, "rejected: wrong round": 1,
        "rejected: bad position": 1, "rejected: wrong size": 2, "rejected: bad values": 3,
        "rejected: malformed": 1, "rejected: unsupported version": 1,
    }  # fmt: skip
    rounds.count(*[2] * BLOCKS)
    late = sealed(first)
    rounds.clock.advance(HONEST_S)
    rounds.cycle.advance()
    assert rounds.task.plan.round == 2
    rounds.cycle.take_fragments([*late, *update])
    assert rounds.cycle.progress().counted == 0
    assert rounds.counters()["late"] == 2 * BLOCKS
    assert rounds.counters()["duplicates"] == 1 + BLOCKS


def test_fragments_that_come_while_no_round_is_open_are_rejected(rounds: Rounds) -> None:
    rounds.cycle.advance()
    update = sealed(rounds.task)
    rounds.cycle._intake.end()
    rounds.cycle.take_fragments(update)
    assert rounds.counters() == {"rejected: no open round": BLOCKS}


def test_no_block_counts_more_fragments_than_there_are_devices(rounds: Rounds) -> None:
    rounds.announced()
    for _ in range(DEVICES):
        rounds.cycle.take_fragments(sealed(rounds.task))
    rounds.cycle.take_fragments(sealed(rounds.task) + sealed(rounds.task))
    assert rounds.store.counts(1) == dict.fromkeys(range(BLOCKS), DEVICES)
    assert rounds.counters() == {"rejected: block full": 2 * BLOCKS}


def test_fragments_that_no_honest_device_sends_are_rejected_before_they_are_counted(rounds: Rounds) -> None:
    rounds.announced()
    task = rounds.task
    end = MAX_WIRE_VALUE
    for value in (0, end, -end):
        hostile = cut(np.full(task.release.dimension, value, np.int64), task.plan)
        rounds.cycle.take_fragments([seal(encode(each), task.plan) for each in hostile])
    assert rounds.cycle.progress().counted == 0
    assert rounds.counters() == {"rejected: improbable norm": 3 * BLOCKS}


@pytest.mark.parametrize("kept", [True, False])
def test_an_aggregation_that_was_changed_in_a_round_holds_as_soon_as_it_can(
    tmp_path: Path, clock: MovableClock, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    """Fragments were added up while fleet.yaml asked for their mean; by now it asks for groups."""
    rounds = Rounds(tmp_path, clock, aggregation={"kind": "median-of-means", "groups": DEVICES}, rounds=2)
    try:
        rounds.announced()
        rounds.count(*[DEVICES] * BLOCKS, keeps_values=kept)
        clock.advance(HONEST_S + 1e-3)
        rounds.cycle.advance()
        assert rounds.store.over_rounds() == 1
        assert ("round 1 closes by the mean of its fragments" in caplog.text) is not kept
        rounds.count(*[DEVICES] * BLOCKS)
        assert rounds.store.keeps_values_of(2)
    finally:
        rounds.coordinator.close()
