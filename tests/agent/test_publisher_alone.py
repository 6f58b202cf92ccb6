"""The publisher without a broker: edges of its times and of its rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import MovableClock
from fleets import make_plan
from ledgers import open_state

from agent.publisher import Publisher
from agent.spool import SpooledFragment
from agent.state import AgentState

SLOT_S, WINDOW_S = 8.0, 4.0
PLAN = make_plan(compute_slot_s=SLOT_S, jitter_window_s=WINDOW_S)


class Line:
    """A session that takes as many messages, and has room for as many, as it is told."""

    def __init__(self) -> None:
        self.room = 1_000
        self.accepts = 1_000
        self.sent: list[bytes] = []

    @property
    def has_room(self) -> bool:
        return len(self.sent) < self.room

    def publish(self, topic: str, payload: bytes) -> int | None:
        assert topic == "fragments"
        if len(self.sent) >= self.accepts:
            return None
        self.sent.append(payload)
        return len(self.sent)


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(unix=5_000.0)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[AgentState]:
    state = open_state(tmp_path / "state")
    yield state
    state.close()


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def publisher(state: AgentState, line: Line, clock: MovableClock) -> Publisher:
    session: Any = line
    return Publisher(state, session, "fragments", messages_per_second=2.0, period_s=SLOT_S, clock=clock)


def spool(state: AgentState, count: int, due_at: float) -> None:
    fragments = [SpooledFragment(b"%05d" % index, b"m%d" % index, due_at) for index in range(count)]
    state.spool.put("job", 1, fragments)


def due_times(state: AgentState) -> list[float]:
    return [row[0] for row in state.connection.execute("SELECT due_at FROM fragments ORDER BY due_at")]


def test_nothing_leaves_without_a_window_or_before_its_time(
    publisher: Publisher, state: AgentState, line: Line, clock: MovableClock
) -> None:
    spool(state, 1, clock.monotonic() + 3.0)
    clock.advance(3.0)
    publisher.publish_due()
    assert publisher.due_in_s() == math.inf
    assert line.sent == []
    publisher.open_window(PLAN, clock.monotonic())
    state.reschedule([(clock.monotonic() + 3.0, b"00000")])
    clock.advance(2.5)
    publisher.publish_due()
    assert publisher.due_in_s() == 0.5
    assert line.sent == []
    clock.advance(0.5)
    publisher.publish_due()
    assert line.sent == [b"m0"]


@pytest.mark.parametrize(
    ("elapsed", "slots"),
    [(0.0, 1), (0.5, 1), (0.74, 1), (0.75, 2), (1.0, 2), (1.74, 2), (1.75, 3), (20.9, 22)],
)
def test_times_are_in_the_window_that_opens_after_whole_slots(
    publisher: Publisher, state: AgentState, clock: MovableClock, elapsed: float, slots: int
) -> None:
    """When a device was ready shows in nothing but the number of slots, a quarter of a slot ahead."""
    arrived_at = clock.monotonic()
    spool(state, 200, 0.0)
    clock.advance(elapsed * SLOT_S)
    publisher.open_window(PLAN, arrived_at)
    publisher.draw_times()
    opens_at = arrived_at + slots * SLOT_S
    times = due_times(state)
    assert opens_at <= times[0] < opens_at + WINDOW_S / 2 < times[-1] <= opens_at + WINDOW_S
    assert len(set(times)) == 200
    publisher.draw_times()
    assert set(times).isdisjoint(due_times(state)), "drawn anew"


def test_a_burst_of_ten_and_then_the_rate(
    publisher: Publisher, state: AgentState, line: Line, clock: MovableClock
) -> None:
    spool(state, 60, clock.monotonic())
    publisher.open_window(PLAN, clock.monotonic())
    clock.advance(3.0)
    sent = []
    for seconds in (0.0, 0.0, 0.25, 0.25, 1.0, 1_000.0, 0.0):
        clock.advance(seconds)
        publisher.publish_due()
        sent.append(len(line.sent))
    assert sent == [10, 10, 10, 11, 13, 23, 23]
    assert publisher.due_in_s() == 0.5, "until there is an allowance for one"


def test_what_is_sent_goes_again_after_five_to_ten_seconds(
    publisher: Publisher, state: AgentState, line: Line, clock: MovableClock
) -> None:
    spool(state, 10, clock.monotonic())
    publisher.open_window(PLAN, clock.monotonic())
    publisher.publish_due()
    times = due_times(state)
    assert clock.monotonic() + 5.0 <= times[0] < times[-1] <= clock.monotonic() + 10.0
    assert len(set(times)) == 10, "not all at once"
    first_sent = state.connection.execute("SELECT DISTINCT first_sent_at FROM fragments").fetchall()
    assert [tuple(row) for row in first_sent] == [(5_000.0,)]
    clock.advance(10.0)
    publisher.publish_due()
    assert sorted(line.sent) == sorted([b"m%d" % index for index in range(10)] * 2)


def test_what_the_session_does_not_take_stays_due(
    publisher: Publisher, state: AgentState, line: Line, clock: MovableClock
) -> None:
    spool(state, 12, clock.monotonic())
    publisher.open_window(PLAN, clock.monotonic())
    line.accepts = 0
    publisher.publish_due()
    assert due_times(state) == [clock.monotonic()] * 12
    line.accepts, line.room = 1_000, 4
    publisher.publish_due()
    assert len(line.sent) == 4
    assert publisher.due_in_s() == math.inf, "room is an event of its own"
    publisher.publish_due()
    assert len(line.sent) == 4
    line.room = 1_000
    publisher.publish_due()
    assert len(line.sent) == 10, "the allowance was used by what was sent alone"
    assert len(set(line.sent)) == 10, "what had left before the room ended was noted"


def test_what_had_left_before_the_session_took_no_more_is_noted(
    publisher: Publisher, state: AgentState, line: Line, clock: MovableClock
) -> None:
    spool(state, 8, clock.monotonic())
    publisher.open_window(PLAN, clock.monotonic())
    line.accepts = 3
    publisher.publish_due()
    assert len(line.sent) == 3
    assert len(state.spool.due(clock.monotonic(), 10)) == 5


def test_how_long_there_is_nothing_to_do(
    publisher: Publisher, state: AgentState, line: Line, clock: MovableClock
) -> None:
    publisher.open_window(PLAN, clock.monotonic())
    assert publisher.due_in_s() == math.inf
    spool(state, 1, clock.monotonic() + 2.0)
    assert publisher.due_in_s() == 2.0
    clock.advance(5.0)
    assert 0.0 < publisher.due_in_s() <= 0.01, "at once, but not in a loop that is busy"
