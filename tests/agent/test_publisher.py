"""The publisher on a clock of the test's: windows on the slot grid, random times, rate, resends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import Broker, wait_for, wait_until
from clocks import MovableClock
from fleets import make_plan, records
from ledgers import charge_and_spool, charge_for, open_state
from observers import Observer
from scipy import stats

from agent.publisher import Publisher
from agent.spool import UNSCHEDULED, SpooledFragment
from agent.state import AgentState
from dpagent.protocol.topics import Topics
from dpagent.transport.session import Acknowledged, Connected, MqttSession

SLOT_S, JITTER_S = 40.0, 100.0
PLAN = make_plan(compute_slot_s=SLOT_S, jitter_window_s=JITTER_S)
RATE = 2.0
BURST = 10
_numbers = itertools.count()


def fragments(count: int) -> list[SpooledFragment]:
    return [
        SpooledFragment(number.to_bytes(16, "big"), b"message %d" % number, UNSCHEDULED)
        for number in range(count)
    ]


@pytest.fixture
def fleet() -> str:
    return f"publishers-{next(_numbers)}"


@pytest.fixture
def state(tmp_path: Path) -> Iterator[AgentState]:
    state = open_state(tmp_path / "state")
    yield state
    state.close()


@pytest.fixture
def session(mosquitto: Broker, fleet: str) -> Iterator[MqttSession]:
    with mosquitto.session(f"device-of-{fleet}") as session:
        wait_for(session, Connected)
        yield session


@pytest.fixture
def observer(mosquitto: Broker, fleet: str) -> Iterator[Observer]:
    with Observer(mosquitto, fleet) as observer:
        yield observer


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def publisher(state: AgentState, session: MqttSession, fleet: str, clock: MovableClock) -> Publisher:
    return Publisher(
        state,
        session,
        Topics(fleet).fragments,
        messages_per_second=RATE,
        period_s=PLAN.compute_slot_s,
        clock=clock,
    )


def spool(state: AgentState, count: int) -> None:
    charge_and_spool(state, charge_for(PLAN, records(20), state.ledger), fragments(count))


def due_times(state: AgentState) -> list[float]:
    rows = state.connection.execute("SELECT due_at FROM fragments WHERE message IS NOT NULL ORDER BY due_at")
    return [row[0] for row in rows]


def sent(state: AgentState) -> int:
    return int(state.connection.execute("SELECT count(*) FROM fragments WHERE state = 'sent'").fetchone()[0])


# --- times --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elapsed", "slots"),
    [(0.0, 1), (0.3, 1), (0.74, 1), (0.76, 2), (0.99, 2), (1.0, 2), (1.74, 2), (1.76, 3), (7.5, 8), (7.8, 9)],
)
def test_the_window_opens_on_a_grid_of_slots_whatever_training_took(
    state: AgentState, publisher: Publisher, clock: MovableClock, elapsed: float, slots: int
) -> None:
    """So times tell nothing of a private lot; a window about to open is let pass."""
    arrived_at = clock.monotonic()
    publisher.open_window(PLAN, arrived_at)
    spool(state, 30)
    clock.advance(elapsed * SLOT_S)
    publisher.draw_times()
    opens_at = arrived_at + slots * SLOT_S
    times = due_times(state)
    assert len(times) == 30
    assert opens_at <= times[0] <= times[-1] <= opens_at + JITTER_S
    assert times[-1] - times[0] > JITTER_S / 2


def test_times_are_uniform_in_the_window_and_say_nothing_of_the_order(
    state: AgentState, publisher: Publisher, clock: MovableClock
) -> None:
    spool(state, 2_000)
    publisher.open_window(PLAN, clock.monotonic())
    publisher.draw_times()
    rows = state.connection.execute("SELECT digest, due_at FROM fragments ORDER BY digest").fetchall()
    times = [(row["due_at"] - clock.monotonic() - SLOT_S) / JITTER_S for row in rows]
    assert stats.kstest(times, "uniform").pvalue > 1e-6
    assert stats.spearmanr(range(len(times)), times).pvalue > 1e-6


def test_without_jitter_all_leave_when_the_window_opens(
    state: AgentState, publisher: Publisher, clock: MovableClock
) -> None:
    spool(state, 3)
    publisher.open_window(PLAN.model_copy(update={"jitter_window_s": 0.0}), clock.monotonic())
    publisher.draw_times()
    assert due_times(state) == [clock.monotonic() + SLOT_S] * 3


def test_times_are_drawn_anew_after_an_interruption(
    state: AgentState, publisher: Publisher, clock: MovableClock
) -> None:
    """At their old times, all that are overdue would leave at once."""
    arrived_at = clock.monotonic()
    publisher.open_window(PLAN, arrived_at)
    spool(state, 40)
    publisher.draw_times()
    clock.advance(10 * SLOT_S + 1.0)  # away in the meantime
    publisher.draw_times()
    opens_at = arrived_at + 11 * SLOT_S
    times = due_times(state)
    assert opens_at <= times[0] <= times[-1] <= opens_at + JITTER_S
    publisher.publish_due()
    assert sent(state) == 0


def test_nothing_has_a_time_before_a_plan_has_come(
    state: AgentState, publisher: Publisher, clock: MovableClock
) -> None:
    """What was pending at the last start has times of another boot's clock."""
    spool(state, 3)
    state.reschedule([(clock.monotonic() - 5.0, digest) for digest in state.spool.pending()])
    publisher.draw_times()
    publisher.publish_due()
    assert sent(state) == 0
    assert publisher.due_in_s() == math.inf, "or the loop would turn for nothing"


# --- publishing ---------------------------------------------------------------------------------


def at_its_time(state: AgentState, publisher: Publisher, clock: MovableClock, count: int) -> None:
    """``count`` fragments, all of them due."""
    spool(state, count)
    publisher.open_window(PLAN, clock.monotonic())
    publisher.draw_times()
    clock.advance(SLOT_S + JITTER_S)


def test_each_fragment_leaves_at_its_time_and_not_before(
    state: AgentState, publisher: Publisher, clock: MovableClock, observer: Observer
) -> None:
    # A window so short that nothing is sent again in it.
    publisher.open_window(PLAN.model_copy(update={"jitter_window_s": 4.0}), clock.monotonic())
    spool(state, 5)
    publisher.draw_times()
    times = due_times(state)
    for number, time in enumerate(times):
        before = time - 1e-6 - clock.monotonic()
        if before > 0:
            clock.advance(before)
            publisher.publish_due()
            assert sent(state) == number
            assert 0 < publisher.due_in_s() <= 1e-3
        clock.advance(time - clock.monotonic())
        publisher.publish_due()
        assert sent(state) == number + 1
    wait_until(lambda: len(observer.fragments) == 5, "the fragments")
    assert set(observer.fragments) == {fragment.message for fragment in fragments(5)}
    row = state.connection.execute("SELECT max(first_sent_at) FROM fragments").fetchone()
    assert row[0] == clock.unix()


def test_no_more_than_a_burst_leaves_at_once_and_then_at_the_rate(
    state: AgentState, publisher: Publisher, clock: MovableClock, observer: Observer
) -> None:
    at_its_time(state, publisher, clock, 30)
    publisher.publish_due()
    assert sent(state) == BURST
    publisher.publish_due()
    assert sent(state) == BURST
    assert publisher.due_in_s() == pytest.approx(1 / RATE)
    clock.advance(publisher.due_in_s())
    publisher.publish_due()
    assert sent(state) == BURST + 1
    clock.advance(3.0)
    publisher.publish_due()
    assert sent(state) == BURST + 1 + int(3.0 * RATE)
    wait_until(lambda: len(observer.fragments) == sent(state), "what was sent")


def test_an_allowance_that_is_not_used_grows_to_a_burst_and_no_further(
    state: AgentState, publisher: Publisher, clock: MovableClock
) -> None:
    clock.advance(86_400.0)
    at_its_time(state, publisher, clock, 3 * BURST)
    publisher.publish_due()
    assert sent(state) == BURST


def test_what_no_receipt_names_goes_again_and_what_one_names_does_not(
    state: AgentState, publisher: Publisher, clock: MovableClock, observer: Observer
) -> None:
    at_its_time(state, publisher, clock, 6)
    publisher.publish_due()
    now = clock.monotonic()
    assert all(now + 5.0 <= time <= now + 10.0 for time in due_times(state))
    assert len(set(due_times(state))) == 6, "each at a random time of its own"
    counted = [fragment.digest for fragment in fragments(2)]
    state.mark_counted(counted, 0.0)
    clock.advance(4.999)
    publisher.publish_due()
    wait_until(lambda: len(observer.fragments) == 6, "the first time")
    clock.advance(5.001)
    publisher.publish_due()
    wait_until(lambda: len(observer.fragments) == 10, "the second time")
    again = sorted(observer.fragments[6:])
    assert again == sorted(fragment.message for fragment in fragments(6)[2:])
    state.mark_counted([fragment.digest for fragment in fragments(6)], 0.0)
    assert publisher.due_in_s() == math.inf


def test_nothing_is_marked_as_sent_without_a_connection(
    state: AgentState, mosquitto: Broker, fleet: str, clock: MovableClock
) -> None:
    session = mosquitto.session("device")  # never started
    publisher = Publisher(
        state,
        session,
        Topics(fleet).fragments,
        messages_per_second=RATE,
        period_s=PLAN.compute_slot_s,
        clock=clock,
    )
    at_its_time(state, publisher, clock, 3)
    publisher.publish_due()
    assert sent(state) == 0
    assert publisher.due_in_s() == math.inf, "a connection is an event of its own"


def test_no_more_is_handed_to_the_session_than_leaves_at_once(
    state: AgentState, session: MqttSession, fleet: str, clock: MovableClock, observer: Observer
) -> None:
    """What the session held back it would send later, in one burst."""
    publisher = Publisher(
        state,
        session,
        Topics(fleet).fragments,
        messages_per_second=1e6,
        period_s=PLAN.compute_slot_s,
        clock=clock,
    )
    at_its_time(state, publisher, clock, 200)
    acknowledged = 0
    while sent(state) < 200:
        while session.has_room and sent(state) < 200:
            clock.advance(1e-3)
            publisher.publish_due()
        assert sent(state) - acknowledged <= 20
        wait_for(session, Acknowledged)
        acknowledged += 1
    wait_until(lambda: len(observer.fragments) == 200, "their arrival")
