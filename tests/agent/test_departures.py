"""Messages leave at their times, also while the agent's own thread does nothing."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from brokers import wait_until
from clocks import MovableClock
from devices import at_once
from fleets import make_plan
from lines import Line

import agent.departures
from agent.publisher import Publisher
from agent.spool import SpooledFragment
from agent.state import AgentState
from dpagent.clock import Clock, SystemClock
from dpagent.database_file import transaction
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.topics import Topics

PLAN = make_plan(receipts="fragment", compute_slot_s=1.0, jitter_window_s=1.0)
TOPICS = Topics("testers")


def unsealed(fragment: bytes, plan: Plan) -> bytes:
    return fragment


def publisher_of(state: AgentState, line: Any, clock: Clock) -> Publisher:
    publisher = Publisher(
        state, line, TOPICS, messages_per_second=100.0, period_s=1.0, clock=clock, seal=unsealed
    )
    at_once(publisher)
    return publisher


def spooled(state: AgentState, count: int) -> list[SpooledFragment]:
    fragments = [
        SpooledFragment.of(Fragment(PLAN.round, number, os.urandom(16), b"values")) for number in range(count)
    ]
    with transaction(state.connection):
        state.spool.put(PLAN.job.hex(), PLAN.round, fragments)
    return fragments


def test_they_leave_and_their_receipts_are_heard_no_more_while_the_agent_stands_still(
    state: AgentState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prices a plan, say. Before, all left when that was done, and all subscriptions ended."""
    monkeypatch.setattr(agent.departures, "_RESEND_S", 0.3)
    line, clock = Line(), SystemClock()
    publisher = publisher_of(state, line, clock)
    fragments = spooled(state, 4)
    publisher.open_window(PLAN, clock.monotonic())
    began_at = clock.monotonic()
    with publisher.running():
        state.reschedule((began_at + 0.05 * number, each.digest) for number, each in enumerate(fragments))
        publisher.publish_due()
        wait_until(lambda: len(line.sent) == 4, "all of them")
        wait_until(lambda: not line.heard, "the end of their subscriptions")
        assert [step for step, _ in line.steps].count("hear no more") == 4
        assert len(state.spool.due(clock.monotonic(), 9)) == 4, "nothing is noted yet"
        publisher.publish_due()
        wait_until(lambda: len(line.sent) == 8, "each of them once more, without a receipt")


def test_what_was_due_without_a_connection_waits_for_other_times(state: AgentState) -> None:
    line, clock = Line(), MovableClock(unix=5_000.0)
    publisher = publisher_of(state, line, clock)
    fragments = spooled(state, 4)
    publisher.open_window(PLAN, clock.monotonic())
    state.reschedule((clock.monotonic() + 1.0, each.digest) for each in fragments)
    publisher.publish_due()
    publisher.hold()  # The connection is lost;
    clock.advance(5.0)
    for _ in range(3):
        publisher.publish_due()  # the next one is there, and nobody has taken note yet.
    assert line.sent == []
    assert publisher.due_in_s() == float("inf")
    publisher.draw_times()  # A round is spooled meanwhile.
    clock.advance(5.0)
    publisher.publish_due()
    assert line.sent == []
    publisher.go_on()
    publisher.publish_due()
    assert line.sent == []
    clock.advance(3.0)
    publisher.publish_due()
    assert len(line.sent) == 4


def test_what_waits_for_its_turn_is_heard_on(state: AgentState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, its subscription ended when it was due, and began again as it left."""
    line, clock = Line(), MovableClock(unix=5_000.0)
    publisher = publisher_of(state, line, clock)
    monkeypatch.setattr(publisher._departures._random, "expovariate", lambda rate: 0.7)
    (fragment,) = spooled(state, 1)
    publisher.open_window(PLAN, clock.monotonic())
    state.reschedule([(clock.monotonic() + 1.0, fragment.digest)])
    while len(line.sent) < 3:
        clock.advance(0.1)
        publisher.publish_due()
    assert [step for step, _ in line.steps] == ["hear", "publish", "publish", "publish"]
    state.mark_counted([fragment.digest], clock.unix())
    publisher.publish_due()
    assert line.heard, "until it would leave again"
    assert 3.0 < publisher.due_in_s() < 11.0
    clock.advance(publisher.due_in_s())
    publisher.publish_due()
    assert not line.heard
    assert len(line.sent) == 3


def test_they_leave_while_the_disk_is_slow_to_give_the_next_ones(
    state: AgentState, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, clock = Line(), SystemClock()
    publisher = publisher_of(state, line, clock)
    first, second = spooled(state, 2)
    publisher.open_window(PLAN, clock.monotonic())
    read = state.spool.message

    def slow(digest: bytes) -> bytes | None:
        if digest == second.digest:
            wait_until(lambda: len(line.sent) == 1, "the first one")
        return read(digest)

    monkeypatch.setattr(state.spool, "message", slow)
    with publisher.running():
        state.reschedule([(clock.monotonic() + 0.2, first.digest)])
        publisher.publish_due()
        state.reschedule([(clock.monotonic() + 0.3, second.digest)])
        publisher.publish_due()
        wait_until(lambda: len(line.sent) == 2, "both")


def test_what_another_window_replaces_leaves_no_more(state: AgentState) -> None:
    line, clock = Line(), SystemClock()
    publisher = publisher_of(state, line, clock)
    fragments = spooled(state, 4)
    publisher.open_window(PLAN, clock.monotonic())
    with publisher.running():
        state.reschedule((clock.monotonic() + 0.2, each.digest) for each in fragments)
        publisher.publish_due()
        publisher.close_window()
        time.sleep(0.4)
        assert line.sent == []


def test_what_keeps_the_thread_from_sending_ends_the_agent(state: AgentState) -> None:
    def broken(fragment: bytes, plan: Plan) -> bytes:
        raise ValueError("no such key")

    line: Any = Line()
    clock = SystemClock()
    publisher = Publisher(
        state, line, TOPICS, messages_per_second=100.0, period_s=1.0, clock=clock, seal=broken
    )
    (fragment,) = spooled(state, 1)
    publisher.open_window(PLAN, clock.monotonic())
    state.reschedule([(clock.monotonic() + 0.05, fragment.digest)])
    with publisher.running():
        publisher.publish_due()
        wait_until(lambda: publisher._departures._failure, "the failure")
        with pytest.raises(ValueError, match="no such key"):
            publisher.publish_due()
