"""The publisher on a clock of the test's: windows on the slot grid, random times, rate, resends."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from brokers import Broker, wait_for, wait_until
from clocks import MovableClock
from devices import at_once
from fleets import make_plan
from lines import Line
from observers import Observer
from scipy import stats

from agent.publisher import Publisher
from agent.spool import SpooledFragment
from agent.state import AgentState
from dpagent.database_file import transaction
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.topics import Topics
from dpagent.transport.events import Acknowledged, Connected

SLOT_S, JITTER_S = 40.0, 100.0
PLAN = make_plan(compute_slot_s=SLOT_S, jitter_window_s=JITTER_S)
RATE = 2.0
BURST = 20
_numbers = itertools.count()


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(unix=5_000.0)


@pytest.fixture
def line() -> Line:
    return Line()


def unsealed(fragment: bytes, plan: Plan) -> bytes:
    """So that a test can tell which fragment left."""
    return fragment


@pytest.fixture
def publisher(state: AgentState, line: Line, clock: MovableClock) -> Publisher:
    session: Any = line
    publisher = Publisher(
        state,
        session,
        Topics("testers"),
        messages_per_second=RATE,
        period_s=PLAN.compute_slot_s,
        clock=clock,
        seal=unsealed,
    )
    at_once(publisher)
    return publisher


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def message(number: int) -> bytes:
    return b"message %d" % number


def spool(state: AgentState, count: int, due_at: float | None = None) -> None:
    fragments = [SpooledFragment(digest(number), message(number), due_at) for number in range(count)]
    with transaction(state.connection):
        state.spool.put(PLAN.job.hex(), PLAN.round, fragments)


def due_times(state: AgentState) -> list[float]:
    rows = state.connection.execute("SELECT due_at FROM times JOIN fragments USING (digest) ORDER BY due_at")
    return [row[0] for row in rows]


# --- times --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elapsed", "slots"),
    [(0.0, 1), (0.5, 1), (0.87, 1), (0.88, 2), (1.0, 2), (1.87, 2), (1.88, 3), (7.9, 9), (20.9, 22)],
)
def test_the_window_opens_on_a_grid_of_slots_whatever_training_took(
    state: AgentState, publisher: Publisher, clock: MovableClock, elapsed: float, slots: int
) -> None:
    """So times tell nothing of a private lot; a window about to open is let pass."""
    arrived_at = clock.monotonic()
    publisher.open_window(PLAN, arrived_at)
    spool(state, 200)
    clock.advance(elapsed * SLOT_S)
    publisher.draw_times()
    opens_at = arrived_at + slots * SLOT_S
    times = due_times(state)
    assert opens_at <= times[0] < opens_at + JITTER_S / 2 < times[-1] <= opens_at + JITTER_S
    assert len(set(times)) == 200
    publisher.draw_times()
    assert set(times).isdisjoint(due_times(state)), "drawn anew"


def test_times_are_uniform_in_the_window_and_say_nothing_of_the_order(
    state: AgentState, publisher: Publisher, clock: MovableClock
) -> None:
    spool(state, 2_000)
    publisher.open_window(PLAN, clock.monotonic())
    publisher.draw_times()
    rows = state.connection.execute("SELECT digest, due_at FROM times ORDER BY digest").fetchall()
    times = [(row["due_at"] - clock.monotonic() - SLOT_S) / JITTER_S for row in rows]
    assert stats.kstest(times, "uniform").pvalue > 1e-6
    assert stats.spearmanr(range(len(times)), times).pvalue > 1e-6


def test_without_jitter_all_leave_when_the_window_opens(
    state: AgentState, publisher: Publisher, clock: MovableClock
) -> None:
    spool(state, 3)
    publisher.open_window(PLAN.with_values({"jitter_window_s": 0.0}), clock.monotonic())
    publisher.draw_times()
    assert due_times(state) == [clock.monotonic() + SLOT_S] * 3


def test_times_are_drawn_anew_after_an_interruption_and_not_on_the_grid(
    state: AgentState, publisher: Publisher, line: Line, clock: MovableClock
) -> None:
    """At their old times, all that are overdue would leave at once."""
    arrived_at = clock.monotonic()
    publisher.open_window(PLAN, arrived_at)
    spool(state, 40)
    publisher.draw_times()
    clock.advance(SLOT_S / 2)
    publisher.draw_times_again()
    times = due_times(state)
    assert arrived_at + SLOT_S <= times[0] <= times[-1] <= arrived_at + SLOT_S + JITTER_S, (
        "it is to open later"
    )
    clock.advance(10 * SLOT_S)  # away in the meantime
    publisher.draw_times_again()
    times, now = due_times(state), clock.monotonic()
    assert now <= times[0] < now + SLOT_S / 2, "before the next point of the grid"
    assert times[-1] <= now + JITTER_S
    publisher.publish_due()
    assert line.sent == []


def test_nothing_leaves_before_a_plan_has_come(
    state: AgentState, publisher: Publisher, line: Line, clock: MovableClock
) -> None:
    """What was pending at the last start has times of another boot's clock."""
    spool(state, 3, clock.monotonic() - 5.0)
    publisher.draw_times()
    publisher.publish_due()
    assert line.sent == []
    assert publisher.due_in_s() == math.inf, "or the loop would turn for nothing"


# --- publishing ---------------------------------------------------------------------------------


def test_each_fragment_leaves_at_its_time_and_not_before(
    state: AgentState, publisher: Publisher, line: Line, clock: MovableClock
) -> None:
    # A window so short that nothing is sent again in it.
    publisher.open_window(PLAN.with_values({"jitter_window_s": 4.0}), clock.monotonic())
    spool(state, 5)
    publisher.draw_times()
    for number, time in enumerate(due_times(state)):
        before = time - 1e-6 - clock.monotonic()
        if before > 0:
            clock.advance(before)
            publisher.publish_due()
            assert len(line.sent) == number
            assert 0 < publisher.due_in_s() <= 1e-3
        clock.advance(time - clock.monotonic())
        publisher.publish_due()
        assert len(line.sent) == number + 1
    assert set(line.sent) == {message(number) for number in range(5)}
    row = state.connection.execute("SELECT max(first_sent_at) FROM fragments").fetchone()
    assert row[0] == clock.unix()


def test_each_waits_for_its_turn_and_what_could_have_left_before_is_caught_up_with(
    state: AgentState, publisher: Publisher, line: Line, clock: MovableClock
) -> None:
    publisher._departures._random.expovariate = lambda rate: 1 / rate  # type: ignore[method-assign]
    clock.advance(86_400.0)  # a time without any earns nothing
    spool(state, 60, clock.monotonic())
    publisher.open_window(PLAN, clock.monotonic())
    sent = []
    for seconds in (0.0, 0.0, 0.25, 0.25, 1.0, 1_000.0, 0.0):
        clock.advance(seconds)
        publisher.publish_due()
        sent.append(len(line.sent))
    assert sent == [0, 0, 0, 1, 3, 4 + BURST, 4 + BURST]
    assert publisher.due_in_s() == 1 / RATE, "until it is the turn of the next one"


def test_turns_come_at_no_beat_and_as_often_as_the_rate_says(
    state: AgentState, line: Line, clock: MovableClock
) -> None:
    session: Any = line
    publisher = Publisher(
        state, session, Topics("testers"), messages_per_second=RATE, period_s=PLAN.compute_slot_s,
        clock=clock, seal=unsealed,
    )  # fmt: skip
    spool(state, 250, clock.monotonic())
    publisher.open_window(PLAN, clock.monotonic())
    times: list[float] = []
    while len(times) < 250:
        clock.advance(publisher.due_in_s())
        publisher.publish_due()
        if len(line.sent) > len(times):
            state.mark_counted([digest(int(text.split()[1])) for text in line.sent[len(times) :]], 0.0)
            times += [clock.monotonic()] * (len(line.sent) - len(times))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert stats.kstest(gaps, stats.expon(scale=1 / RATE).cdf).pvalue > 1e-6


def test_what_no_receipt_names_goes_again_and_what_one_names_does_not(
    state: AgentState, publisher: Publisher, line: Line, clock: MovableClock
) -> None:
    spool(state, 6, clock.monotonic())
    publisher.open_window(PLAN, clock.monotonic())
    publisher.publish_due()
    now, times = clock.monotonic(), due_times(state)
    assert now + 5.0 <= times[0] < times[-1] <= now + 10.0
    assert len(set(times)) == 6, "each at a random time of its own"
    first_sent = state.connection.execute("SELECT DISTINCT first_sent_at FROM fragments").fetchall()
    assert [tuple(row) for row in first_sent] == [(5_000.0,)]
    state.mark_counted([digest(0), digest(1)], 0.0)
    clock.advance(4.999)
    publisher.publish_due()
    assert len(line.sent) == 6
    clock.advance(5.001)
    publisher.publish_due()
    assert sorted(line.sent[6:]) == [message(number) for number in range(2, 6)]
    state.mark_counted([digest(number) for number in range(6)], 0.0)
    assert publisher.due_in_s() == math.inf


OWN = PLAN.with_values({"receipts": "fragment"})


def spool_fragments(state: AgentState, count: int, due_at: float) -> list[SpooledFragment]:
    """Fragments whose receipts have topics of their own, all due at one time."""
    fragments = [
        replace(SpooledFragment.of(Fragment(1, number, os.urandom(16), b"payload")), due_at=due_at)
        for number in range(count)
    ]
    with transaction(state.connection):
        state.spool.put(PLAN.job.hex(), PLAN.round, fragments)
    return fragments


def test_a_fragment_leaves_once_its_receipt_is_heard_and_that_ends_when_it_would_leave_again(
    state: AgentState, line: Line, publisher: Publisher, clock: MovableClock
) -> None:
    topics, began_at = Topics("testers"), clock.monotonic()
    first, second = spool_fragments(state, 2, began_at)
    publisher.open_window(OWN, began_at)
    publisher.publish_due()
    own = [topics.receipt(each.receipt_place) for each in (first, second)]
    assert sorted(line.heard) == sorted(own)
    assert [step for step, _ in line.steps] == ["hear", "publish"] * 2
    times = dict(state.connection.execute("SELECT digest, due_at FROM times").fetchall())
    ends_at = [times[each.digest] for each in (first, second)]
    clock.advance(0.1)
    state.mark_counted([first.digest], 0.0)
    publisher.publish_due()
    assert len(line.steps) == 4, "a receipt changes nothing that can be seen"
    while clock.monotonic() < began_at + 10.0:
        now = clock.monotonic()
        # It never says less than a millisecond.
        assert publisher.due_in_s() <= max(0.001, min((at - now for at in ends_at if at > now), default=10.0))
        clock.advance(0.01)
        publisher.publish_due()
        assert (own[0] in line.heard) is (clock.monotonic() < ends_at[0])
        assert own[1] in line.heard, "sent again without a receipt, it is heard on"
    assert line.steps.count(("hear", own[1])) == 1
    assert sum(step == "publish" for step, _ in line.steps) == 3


def test_a_subscription_ends_also_where_nothing_may_leave(
    state: AgentState, line: Line, publisher: Publisher, clock: MovableClock
) -> None:
    """The round is over, or the broker takes nothing: the end tells neither."""
    spool_fragments(state, 1, clock.monotonic())
    publisher.open_window(OWN, clock.monotonic())
    publisher.publish_due()
    publisher.close_window()
    line.room = 0
    assert 5.0 <= publisher.due_in_s() <= 10.0
    clock.advance(10.0)
    publisher.publish_due()
    assert line.heard == set()
    assert publisher.due_in_s() == math.inf


def test_where_receipts_go_to_all_nothing_is_heard_besides(
    state: AgentState, line: Line, publisher: Publisher, clock: MovableClock
) -> None:
    spool_fragments(state, 3, clock.monotonic())
    publisher.open_window(PLAN, clock.monotonic())
    publisher.publish_due()
    assert {step for step, _ in line.steps} == {"publish"}


def test_through_a_mixer_nothing_goes_again_before_the_window_is_over(
    state: AgentState, line: Line, publisher: Publisher, clock: MovableClock
) -> None:
    """A mixer that waits for a batch would be filled with copies, and who sends them would be known."""
    mixed = PLAN.with_values({"mixer": bytes(range(32))})
    spool(state, 8)
    began_at = clock.monotonic()
    publisher.open_window(mixed, began_at)
    publisher.draw_times()
    ends_at = began_at + SLOT_S + JITTER_S
    while clock.monotonic() < ends_at + 4.9:
        publisher.publish_due()
        clock.advance(0.1)
    first = [*line.sent]
    assert sorted(first) == [message(number) for number in range(8)]
    while clock.monotonic() < ends_at + 11.0:
        publisher.publish_due()
        clock.advance(0.1)
    assert {*line.sent[8:]} == {*first}


def test_through_a_mixer_a_probe_goes_again_when_all_windows_are_over_whatever_the_grid_is(
    state: AgentState, publisher: Publisher, clock: MovableClock
) -> None:
    """Before, 5 s or more after the end of the board's own window: who withheld the receipt of a probe, which
    is known by name, knew when that was, and so its grid, and how long training took."""
    for chance in (publisher._random, publisher._departures._random):
        chance.uniform = lambda low, high: low  # type: ignore[method-assign]
    again_after: list[float] = []
    for number, epoch in enumerate((0.1, 0.2, 0.7), 1):
        mixed, began_at = PLAN.with_values({"mixer": bytes(range(32)), "round": number}), clock.monotonic()
        publisher._epoch = began_at + epoch * SLOT_S
        slots = publisher.slots(began_at, 2)
        state.keep_probes(mixed.job.hex(), number, [SpooledFragment(digest(number), b"probe", None)])
        publisher.open_window(mixed, slots.begins_at, slots)
        publisher.draw_times()
        publisher.draw_probe_times(began_at)
        clock.advance(2 * SLOT_S)
        publisher.publish_due()
        next_at = state.probes.next_due_at()
        assert next_at is not None
        again_after.append(next_at - began_at)
    over_after = 0.25 * SLOT_S + SLOT_S + 2 * SLOT_S + JITTER_S
    assert again_after == pytest.approx([over_after + 5.0] * 3), "copies fill no batch of fragments"
    # A device that waits for a receipt has no slots: its copies too fill none, whatever the round before had.
    publisher.open_window(mixed, slots.begins_at, slots._replace(number=9))
    waits, began_at = mixed.with_values({"round": 4}), clock.monotonic()
    state.keep_probes(waits.job.hex(), 4, [SpooledFragment(digest(4), b"probe", None)])
    publisher.open_window(waits, publisher.grid_time(began_at))
    publisher.draw_probe_times(began_at)
    clock.advance(2 * SLOT_S)
    publisher.publish_due()
    next_at = state.probes.next_due_at()
    assert next_at is not None
    assert next_at - began_at == pytest.approx(0.25 * SLOT_S + SLOT_S + SLOT_S + JITTER_S + 5.0)


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
    assert len(line.sent) == 12
    assert len(set(line.sent)) == 12, "what had left before the room ended was noted"


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


# --- at a broker --------------------------------------------------------------------------------


@pytest.fixture
def fleet() -> str:
    return f"publishers-{next(_numbers)}"


@pytest.fixture
def observer(mosquitto: Broker, fleet: str) -> Iterator[Observer]:
    with Observer(mosquitto, fleet) as observer:
        yield observer


def test_nothing_is_marked_as_sent_without_a_connection(
    state: AgentState, mosquitto: Broker, fleet: str, clock: MovableClock
) -> None:
    session = mosquitto.session("device")  # never started
    publisher = Publisher(
        state,
        session,
        Topics(fleet),
        messages_per_second=RATE,
        period_s=PLAN.compute_slot_s,
        clock=clock,
        seal=unsealed,
    )
    spool(state, 3, clock.monotonic())
    publisher.open_window(PLAN, clock.monotonic())
    publisher.publish_due()
    assert due_times(state) == [clock.monotonic()] * 3
    assert publisher.due_in_s() == math.inf, "a connection is an event of its own"


def test_no_more_is_handed_to_the_session_than_leaves_at_once(
    state: AgentState, mosquitto: Broker, fleet: str, clock: MovableClock, observer: Observer
) -> None:
    """What the session held back it would send later, in one burst."""

    def sent() -> int:
        query = "SELECT count(*) FROM fragments WHERE state = 'sent'"
        return int(state.connection.execute(query).fetchone()[0])

    with mosquitto.session(f"device-of-{fleet}") as session:
        wait_for(session, Connected)
        publisher = Publisher(
            state,
            session,
            Topics(fleet),
            messages_per_second=1e6,
            period_s=PLAN.compute_slot_s,
            clock=clock,
            seal=unsealed,
        )
        spool(state, 200, clock.monotonic())
        publisher.open_window(PLAN, clock.monotonic())
        assert session._connection is not None
        waiting = session._connection._client._out_messages
        while sent() < 200:
            while session.has_room and sent() < 200:
                clock.advance(1e-3)
                publisher.publish_due()
                assert len(waiting) <= 20
            wait_for(session, Acknowledged)
        wait_until(lambda: len(observer.fragments) == 200, "their arrival")
    assert set(observer.fragments) == {message(number) for number in range(200)}
