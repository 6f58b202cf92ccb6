"""Rounds that will not close, and what becomes of the job: a coordinator and a registry, without a broker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from clocks import MovableClock
from fleets import write_fleet
from members import enrolled, new_authority

from coordinator.daemon import Coordinator
from coordinator.database.opening import open_beside
from coordinator.dead_ends import DeadEnds
from coordinator.devices import Devices
from coordinator.queue import Queue, QueuedJob
from coordinator.reader import StoreReader
from coordinator.registry import Entry, Registry
from coordinator.settings import FleetSettings, load_fleet_settings
from dpagent.errors import PlanError
from dpagent.protocol.issuing import Statement, Verdict, Wish

ROUNDS = 6


@pytest.fixture
def settings(tmp_path: Path) -> FleetSettings:
    """A fleet whose rounds need two boards."""
    file = write_fleet(
        tmp_path, None, linkability="fragment", rounds=ROUNDS, cap={"kind": "none"}, devices=3,
        round={"minimum_devices": 2},
    )  # fmt: skip
    return load_fleet_settings(file)


@pytest.fixture
def boards(settings: FleetSettings) -> list[str]:
    """Two members."""
    authority = new_authority(settings.members_dir, settings.fleet)
    with Devices(settings.members_dir) as devices:
        return [enrolled(authority, devices)[0].device_id for _ in range(2)]


@contextlib.contextmanager
def coordinator_of(settings: FleetSettings, clock: MovableClock) -> Iterator[Coordinator]:
    coordinator = Coordinator(settings, clock=clock)
    try:
        yield coordinator
    finally:
        coordinator.close()


def advance(coordinator: Coordinator) -> None:
    """One step of the daemon's loop, without a broker."""
    coordinator._look_at_queue()
    if coordinator.running is not None:
        with coordinator._failing_alone(coordinator.running):
            coordinator.running.advance()
        coordinator._look_at_queue()


def decline(settings: FleetSettings, board: str, *rounds: int) -> None:
    """A board declines rounds of the job, all of them together, as it does with those ahead."""
    job = queued(settings).job.id
    registry = Registry(settings.members_place)
    with registry.transaction():
        for number in rounds:
            statement = Statement(
                bytes.fromhex(board), job, number, Wish.LIMITS, bytes(32), 1, bytes(32), bytes(32), bytes(32)
            )
            registry.put(Entry(board, job, number, Wish.LIMITS, Verdict.NOTED, 0.0, statement, bytes(64)))
    registry.close()


def resume(settings: FleetSettings) -> None:
    """As a command does, beside the coordinator."""
    with contextlib.closing(open_beside(settings.store_place)) as database:
        Queue(database).resume("first")


def queued(settings: FleetSettings) -> QueuedJob:
    with contextlib.closing(StoreReader(settings.store_place)) as reader:
        found = reader.queued()
    assert found is not None
    return found


def rounds(settings: FleetSettings) -> list[tuple[int, str, int | None]]:
    """Of each round its number, what became of it, and the fragments in its scarcest block."""
    with contextlib.closing(StoreReader(settings.store_place)) as reader:
        return [
            (each.number, "given up" if each.given_up_at else "open", each.least_counted)
            for each in reader.rounds()
        ]


def test_a_dead_end_waits_for_its_deadline_and_takes_those_ahead_along(
    settings: FleetSettings, boards: list[str]
) -> None:
    clock = MovableClock()
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        decline(settings, boards[0], 1, 2, 3)
        clock.advance(settings.round.deadline_s - 1.0)
        advance(coordinator)
        assert rounds(settings) == [(1, "open", None)], "somebody may still enrol"
        clock.advance(1.0)
        advance(coordinator)
        assert coordinator.running is None
        assert rounds(settings) == [(1, "given up", 0), (2, "given up", None), (3, "given up", None)]
        trouble = queued(settings).trouble_now
        assert trouble is not None
        assert "the same holds for the next 2 rounds, which will not be opened" in trouble
        assert "`dpagent coordinator job resume first` opens round 4" in trouble
        registry = Registry(settings.members_place)
        key = registry.key(queued(settings).job.id, 1)
        assert key is not None
        assert key.secret is None, "nobody makes a token of it any more"
        registry.close()
        resume(settings)
        advance(coordinator)
        assert rounds(settings)[3:] == [(4, "open", None)]


def test_a_round_that_is_known_not_to_close_is_not_opened(settings: FleetSettings, boards: list[str]) -> None:
    clock = MovableClock()
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        decline(settings, boards[0], 2)
        task = coordinator.running
        assert task is not None
        # The first round closes as if both had sent.
        store = task.store
        store.give_up_round(1, noise_multiplier=1.0, epsilon=0.5, least=2, given_up_at=clock.unix())
        task.cycle._task = None
        advance(coordinator)
        assert coordinator.running is None
        assert rounds(settings) == [(1, "given up", 2), (2, "given up", None)]
        trouble = queued(settings).trouble_now
        assert trouble is not None
        assert "Round 2 cannot close" in trouble
        assert "It was not opened, so nobody pays for it. `dpagent budget show`" in trouble
        assert store.epsilon_spent() == 0.5
        assert store.epsilon_of_model() == 0.0


def test_a_dead_end_survives_a_restart_and_the_last_one_ends_the_job(
    settings: FleetSettings, boards: list[str]
) -> None:
    clock = MovableClock()
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        decline(settings, boards[0], *range(1, ROUNDS + 1))
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        clock.advance(settings.round.deadline_s)
        advance(coordinator)
        trouble = queued(settings).trouble_now
        assert trouble is not None
        assert trouble.endswith("`dpagent coordinator job resume first` ends the job.")
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        assert coordinator.running is None, "it stays paused"
        resume(settings)
        coordinator._look_at_queue()
        assert coordinator.running is not None
        assert coordinator.running.cycle.is_over
        assert not coordinator.running.cycle._export(), "no round made a model"


def test_a_fleet_with_too_few_members_waits_for_more(settings: FleetSettings, boards: list[str]) -> None:
    with Devices(settings.members_dir) as devices, devices.transaction():
        devices.revoke(boards[1], at=1.0)
    clock = MovableClock()
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        decline(settings, boards[0], 1)
        clock.advance(2 * settings.round.deadline_s)
        advance(coordinator)
        assert rounds(settings) == [(1, "open", None)]
        assert not queued(settings).is_paused


class _Nobody:
    def members(self) -> int:
        return 5

    def expected(self, number: int) -> int:
        return 0 if number == 1 else 5


def test_a_round_that_all_others_need_is_not_passed_over() -> None:
    """The one that finds the directions of a projection."""
    found = DeadEnds(_Nobody(), "first", rounds=4, minimum=2, first_round=2)
    with pytest.raises(PlanError, match=r"Round 1 cannot close.*so the job cannot go on"):
        found.halt(1, is_open=True)
    assert DeadEnds(None, "first", rounds=4, minimum=2, first_round=1).why(1) is None
