"""A coordinator asks for more fragments than a board may send in the window: do they leave in a beat?

Claim: when a fragment leaves tells nothing of which others are its board's, also where each waits for its
    turn by ``limits.messages_per_second``.
Parameters: eight boards with 60 fragments each in a window of 5 s, the least that boards accept by default,
    at 10 a second, which is theirs by default: real spools and publishers, on one clock. The coordinator
    takes two fragments for one board's that arrive a tenth of a second apart, to a millisecond.

Power: where the rate is kept by equal distances, as it was, more than four of five of its guesses are right:
    it has the whole chain of each board, of which a probe, known by name, was a part.

Outcome: one in eight is right, as by chance.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clocks import MovableClock
from fleets import make_plan
from ledgers import open_state
from lines import Line
from scipy import stats

from agent.publisher import Publisher
from agent.spool import SpooledFragment
from agent.state import AgentState
from dpagent.protocol.codec import decode
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.topics import Topics
from dpagent.storage import transaction

BOARDS, FRAGMENTS, WINDOW_S, RATE, APART_S, ALPHA = 8, 60, 5.0, 10.0, 0.001, 1e-6
PLAN = make_plan(compute_slot_s=5.0, jitter_window_s=WINDOW_S)
Board = tuple[AgentState, Publisher, Line]


def unsealed(fragment: bytes, plan: Plan) -> bytes:
    return fragment


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(unix=5_000.0)


@pytest.fixture
def boards(tmp_path: Path, clock: MovableClock) -> Iterator[list[Board]]:
    with ExitStack() as held:
        found: list[Board] = []
        for number in range(BOARDS):
            state, line = open_state(tmp_path / str(number)), Line()
            held.callback(state.close)
            session: Any = line
            publisher = Publisher(
                state, session, Topics("testers"), messages_per_second=RATE, period_s=5.0, clock=clock,
                seal=unsealed,
            )  # fmt: skip
            fragments = [
                SpooledFragment.of(Fragment(PLAN.round, place, os.urandom(16), b"values"))
                for place in range(FRAGMENTS)
            ]
            with transaction(state.connection):
                state.spool.put(PLAN.job.hex(), PLAN.round, fragments)
            publisher.open_window(PLAN, publisher.grid_time(clock.monotonic()))
            publisher.draw_times()
            found.append((state, publisher, line))
        yield found


def guessed(boards: list[Board], clock: MovableClock) -> tuple[float, float]:
    """Of the pairs that the coordinator takes for one board's, how many are, and the probability that so many
    are by chance."""
    marks: list[tuple[float, int]] = []
    while len(marks) < BOARDS * FRAGMENTS:
        clock.advance(min(publisher.due_in_s() for _, publisher, _ in boards))
        for number, (state, publisher, line) in enumerate(boards):
            publisher.publish_due()
            while line.sent:
                state.mark_counted([receipt_digest(decode(line.sent.pop(), Fragment).id)], 0.0)
                marks.append((clock.monotonic(), number))
    times, owners = (np.array([mark[place] for mark in marks]) for place in (0, 1))
    rows, columns = np.triu_indices(len(marks), 1)
    is_taken = np.abs(np.abs(times[columns] - times[rows]) - 1 / RATE) < APART_S
    is_one = owners[rows] == owners[columns]
    right, taken = int((is_one & is_taken).sum()), int(is_taken.sum())
    test = stats.binomtest(right, taken, float(is_one.mean()), alternative="greater")
    print(f"{right} of {taken} right, by chance with a probability of {test.pvalue:.2g}")
    return right / taken, float(test.pvalue)


def test_what_waits_for_its_turn_leaves_at_no_beat(boards: list[Board], clock: MovableClock) -> None:
    right, probability = guessed(boards, clock)
    assert probability > ALPHA, right


def test_power_a_beat_tells_the_chain_of_each_board(boards: list[Board], clock: MovableClock) -> None:
    for _, publisher, _ in boards:
        publisher._departures._random.expovariate = lambda rate: 1 / rate  # type: ignore[method-assign]
    right, probability = guessed(boards, clock)
    assert probability < ALPHA
    assert right > 0.8
