"""Rounds that will not close, and what becomes of the job: a coordinator and a registry, without a broker."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from clocks import MovableClock
from daemons import running_job
from fleets import write_fleet
from members import enrolled, new_authority

from coordinator.authority import load_authorities
from coordinator.daemon import Coordinator
from coordinator.database.opening import open_beside
from coordinator.dead_ends import DeadEnds
from coordinator.devices import Devices
from coordinator.participation import Participation, participation_of
from coordinator.queue import Queue
from coordinator.queued_job import QueuedJob
from coordinator.reader import StoreReader
from coordinator.registry import Entry, Registry
from coordinator.seats import OpenedFragment
from coordinator.settings import FleetSettings, load_fleet_settings
from dpagent import faults
from dpagent.errors import PlanError, UsageError
from dpagent.faults import FaultPoint
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


@pytest.fixture
def third(settings: FleetSettings, boards: list[str]) -> str:
    """One more member."""
    with Devices(settings.members_dir) as devices:
        return enrolled(load_authorities(settings.members_dir, now=datetime.now(UTC)).anchor, devices)[
            0
        ].device_id


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
    ask(settings, board, Wish.LIMITS, Verdict.NOTED, *rounds)


def ask(settings: FleetSettings, board: str, wish: Wish, verdict: Verdict, *rounds: int) -> None:
    """A board's requests, as they stand in the registry."""
    job = queued(settings).job.id
    registry = Registry(settings.members_place)
    with registry.transaction():
        for number in rounds:
            statement = Statement(
                bytes.fromhex(board), job, number, wish, bytes(32), 1, bytes(32), bytes(32), bytes(32)
            )
            registry.put(Entry(board, job, number, wish, verdict, 0.0, statement, bytes(64)))
    registry.close()


def send(settings: FleetSettings, coordinator: Coordinator, board: str) -> None:
    """A board has its tokens of the first round, and all of its fragments are counted."""
    ask(settings, board, Wish.TAKES_PART, Verdict.GRANTED, 1)
    running = running_job(coordinator)
    task = running.cycle._task
    assert task is not None
    values = np.ones(task.plan.wire.block, np.int64)
    fragments = [
        OpenedFragment(os.urandom(16), 1, position, values, 0.0) for position in range(task.release.blocks)
    ]
    assert len(running.store.count(fragments, 1, seats=None, keeps_values=False).fresh) == len(fragments)


def revoke(settings: FleetSettings, board: str, clock: MovableClock) -> None:
    with Devices(settings.members_dir) as devices, devices.transaction():
        devices.revoke(board, at=clock.unix())


def resume(settings: FleetSettings) -> None:
    with ordering(settings) as queue:
        queue.resume("first")


def queued(settings: FleetSettings) -> QueuedJob:
    with contextlib.closing(StoreReader(settings.store_place)) as reader:
        found = reader.queued()
    assert found is not None
    return found


def rounds(settings: FleetSettings) -> list[tuple[int, str, int | None]]:
    """Of each round its number, what became of it, and the fragments in its scarcest block."""
    with contextlib.closing(StoreReader(settings.store_place)) as reader:
        return [
            (
                each.number,
                "given up" if each.given_up_at else "closed" if each.closed_at else "open",
                each.least_counted,
            )
            for each in reader.rounds()
        ]


def taking_part(settings: FleetSettings) -> Participation:
    """As the page and ``status`` have it."""
    with contextlib.closing(StoreReader(settings.store_place)) as reader:
        (opened,) = reader.rounds()
    found = participation_of(settings, queued(settings).job.id, opened.number, opened.opened_at)
    assert found is not None
    return found


def members(settings: FleetSettings) -> list[str]:
    with Devices(settings.members_dir) as devices:
        return [each.id for each in devices.all() if each.is_member]


@contextlib.contextmanager
def ordering(settings: FleetSettings) -> Iterator[Queue]:
    """The queue as a command has it, beside the coordinator."""
    with contextlib.closing(open_beside(settings.store_place)) as database:
        yield Queue(database)


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


class PowerCut(BaseException):
    pass


@pytest.mark.parametrize("by", ["its deadline", "an order"])
def test_a_crash_as_a_round_is_given_up_leaves_no_secret_of_its_key(
    settings: FleetSettings, boards: list[str], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The job is paused by then, and not taken up at the next start: before, the secret stayed."""

    def cut(reached: FaultPoint) -> None:
        if reached is FaultPoint.QUEUE_ROUND_GIVEN_UP:
            raise PowerCut

    clock = MovableClock()
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        with monkeypatch.context() as patch:
            if by == "an order":
                patch.setattr(running_job(coordinator).announcer, "end_round", lambda plan: True)
                with ordering(settings) as queue:
                    queue.give_up("first", settings)
            else:
                decline(settings, boards[0], 1)
                clock.advance(settings.round.deadline_s)
            patch.setattr(faults, "reached", cut)
            with pytest.raises(PowerCut):
                advance(coordinator)
    with contextlib.closing(Registry(settings.members_place)) as registry:
        key = registry.key(queued(settings).job.id, 1)
    assert key is not None
    assert key.secret is None, "without another start, too"
    with coordinator_of(settings, clock) as coordinator:
        assert coordinator.running is None
        assert rounds(settings) == [(1, "given up", 0)]


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


def open_first_round(coordinator: Coordinator, clock: MovableClock) -> None:
    """As where its plan has gone out."""
    running = running_job(coordinator)
    running.store.mark_announced(1, clock.unix())
    running.cycle.open()


def test_what_a_revoked_board_has_sent_counts_beside_what_others_may_still_send(
    settings: FleetSettings, boards: list[str], third: str
) -> None:
    clock = MovableClock()
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        send(settings, coordinator, boards[0])
        decline(settings, boards[1], 1)
        clock.advance(1.0)
        revoke(settings, boards[0], clock)
        clock.advance(settings.round.deadline_s)
        advance(coordinator)
        assert rounds(settings) == [(1, "open", None)], "the third board may still send"
        assert not queued(settings).is_paused
        assert taking_part(settings).dead_end(1, 2, least=1) is None
        send(settings, coordinator, third)
        clock.advance(settings.round.deadline_s)
        advance(coordinator)
    assert rounds(settings)[0] == (1, "closed", 2)


def test_a_revoked_board_that_sent_nothing_keeps_no_round_open(
    settings: FleetSettings, boards: list[str], third: str
) -> None:
    clock = MovableClock()
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        ask(settings, third, Wish.TAKES_PART, Verdict.GRANTED, 1)
        decline(settings, boards[1], 1)
        revoke(settings, third, clock)
        assert taking_part(settings).dead_end(1, 2, least=0) is not None
        clock.advance(settings.round.deadline_s)
        advance(coordinator)
    assert rounds(settings)[0] == (1, "given up", 0)


def test_what_a_revoked_board_has_sent_is_said_of_a_round_that_is_given_up(
    settings: FleetSettings, boards: list[str], third: str
) -> None:
    needy = settings.with_values({"round": settings.round.with_values({"minimum_devices": 3})})
    with Devices(needy.members_dir) as devices:
        for _ in range(2):
            enrolled(load_authorities(needy.members_dir, now=datetime.now(UTC)).anchor, devices)
    clock = MovableClock()
    with coordinator_of(needy, clock) as coordinator:
        advance(coordinator)
        send(needy, coordinator, third)
        everyone = members(needy)
        revoke(needy, third, clock)
        for each in everyone:
            if each not in (third, boards[0]):
                decline(needy, each, 1)
        clock.advance(needy.round.deadline_s)
        advance(coordinator)
        trouble = queued(needy).trouble_now
    assert trouble is not None
    assert trouble.startswith(
        "Round 1 cannot close: 1 member may still send for it, 1 board that has left the fleet may have, and "
        "it needs 3."
    )


def test_what_a_revoked_board_has_sent_stands_for_no_member(
    settings: FleetSettings, boards: list[str], third: str
) -> None:
    """Two of three are counted, one of which is revoked: the round waits for the third member."""
    clock = MovableClock()
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        open_first_round(coordinator, clock)
        for board in boards:
            send(settings, coordinator, board)
        clock.advance(settings.round.honest_s)
        revoke(settings, boards[0], clock)
        advance(coordinator)
        assert rounds(settings) == [(1, "open", None)]
        send(settings, coordinator, third)
        advance(coordinator)
    assert rounds(settings)[0] == (1, "closed", 3)


def test_a_round_closes_with_no_fewer_than_it_needs_though_nobody_is_left_that_may_send(
    settings: FleetSettings, boards: list[str], third: str
) -> None:
    """A sum of one board's would be that board's."""
    clock = MovableClock()
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        open_first_round(coordinator, clock)
        for board in (boards[1], third):
            decline(settings, board, 1)
        send(settings, coordinator, boards[0])
        clock.advance(settings.round.honest_s)
        advance(coordinator)
        assert rounds(settings) == [(1, "open", None)], "somebody may still enrol"
        clock.advance(settings.round.deadline_s)
        advance(coordinator)
    assert rounds(settings)[0] == (1, "given up", 1)


def test_a_board_that_was_revoked_before_a_round_keeps_nobody_waiting(
    settings: FleetSettings, boards: list[str], third: str
) -> None:
    """It has tokens ahead, and no way to send."""
    clock = MovableClock()
    revoke(settings, third, clock)
    clock.advance(1.0)
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        ask(settings, third, Wish.TAKES_PART, Verdict.GRANTED, 1)
        open_first_round(coordinator, clock)
        for board in boards:
            send(settings, coordinator, board)
        clock.advance(settings.round.honest_s)
        advance(coordinator)
    assert rounds(settings)[0] == (1, "closed", 2)


def test_a_round_that_lacks_boards_closes_with_the_fewer_that_its_operator_allows(
    settings: FleetSettings, boards: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovableClock()
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        send(settings, coordinator, boards[0])
        clock.advance(settings.round.deadline_s)
        advance(coordinator)
        assert rounds(settings) == [(1, "open", None)]
        assert "`dpagent coordinator job minimum first BOARDS` lets it close with fewer" in caplog.text
        with ordering(settings) as queue:
            queue.set_minimum("first", 1, lambda known: known.settings_in(settings).with_minimum(1, "first"))
        advance(coordinator)
        assert rounds(settings) == [(1, "open", None)], "until its deadline"
    with coordinator_of(settings, clock) as coordinator:
        clock.advance(settings.round.deadline_s)
        advance(coordinator)
        clock.advance(settings.round.deadline_s)
        advance(coordinator)
    assert rounds(settings)[0] == (1, "closed", 1)


def test_an_order_to_give_up_waits_for_the_broker(settings: FleetSettings, boards: list[str]) -> None:
    """Boards that have not begun would begin, and be charged, if they were not told first."""
    clock = MovableClock()
    with coordinator_of(settings, clock) as coordinator:
        advance(coordinator)
        with ordering(settings) as queue:
            assert queue.give_up("first", settings).gives_up == 1
            with pytest.raises(UsageError, match="Round 1 of job 'first' is given up already"):
                queue.give_up("first", settings)
        advance(coordinator)
        assert rounds(settings) == [(1, "open", None)]
        assert queued(settings).is_paused
        assert queued(settings).state_in_words() == "running, to pause with its open round given up"


class _Nobody:
    def members(self) -> int:
        return 5

    def expected(self, number: int) -> int:
        return 0 if number == 1 else 5

    def gone(self, number: int, since: float) -> int:
        return 0


def test_a_round_that_all_others_need_is_not_passed_over() -> None:
    """The one that finds the directions of a projection."""
    found = DeadEnds(_Nobody(), "first", rounds=4, minimum=2, first_round=2)
    with pytest.raises(PlanError, match=r"Round 1 cannot close.*so the job cannot go on"):
        found.halt(1, is_open=True)
    assert DeadEnds(None, "first", rounds=4, minimum=2, first_round=1).why(1) is None
