"""A coordinator asks for more fragments than a board may send in the window: do they leave in a beat?

Claim: when a fragment leaves tells nothing of which others are its board's, also where each waits for its
    turn by ``limits.messages_per_second``.
Parameters: eight boards with 60 fragments each in a window of 5 s, the least that boards accept by default,
    at 10 a second, which is theirs by default: real spools and publishers, on one clock. The coordinator
    takes two fragments for one board's that arrive a tenth of a second apart, to a millisecond.

Power: where the rate is kept by equal distances, as it was, nearly all of its guesses are right, and half of
    them where the beats of some boards coincide: it has the whole chain of each board, of which a probe,
    known by name, was a part.

Outcome: one in eight is right, as by chance.

The same coordinator withholds the receipts, and sees each fragment again and again.

Claim: how long it takes from each copy to the next tells nothing of which fragments are one board's.
Parameters: four boards with 100 fragments each in a window of 5 s, at 2 a second, until 2,000 have left. Of
    those whose first copies came one after the other, it takes two for one board's that took as long from
    copy to copy, three times.

Power: where they leave in the order of their times, both wait for the same others: nearly all that are one
    board's come before nearly all others, by chance with a probability below 1e-16 in each of three runs.

Outcome: they come in no order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from dpagent.database_file import transaction
from dpagent.protocol.codec import decode
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.topics import Topics

BOARDS, FRAGMENTS, WINDOW_S, RATE, APART_S, ALPHA = 8, 60, 5.0, 10.0, 0.001, 1e-6
COPIES, LEAVE = 4, 2_000
PLAN = make_plan(compute_slot_s=5.0, jitter_window_s=WINDOW_S)
Board = tuple[AgentState, Publisher, Line]


def unsealed(fragment: bytes, plan: Plan) -> bytes:
    return fragment


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(unix=5_000.0)


@contextmanager
def fleet(
    directory: Path, clock: MovableClock, *, boards: int, fragments: int, rate: float
) -> Iterator[list[Board]]:
    with ExitStack() as held:
        found: list[Board] = []
        for number in range(boards):
            state, line = open_state(directory / str(number)), Line()
            line.room = line.accepts = 1 << 30
            held.callback(state.close)
            session: Any = line
            publisher = Publisher(
                state, session, Topics("testers"), messages_per_second=rate, period_s=5.0, clock=clock,
                seal=unsealed,
            )  # fmt: skip
            spooled = [
                SpooledFragment.of(Fragment(PLAN.round, place, os.urandom(16), b"values"))
                for place in range(fragments)
            ]
            with transaction(state.connection):
                state.spool.put(PLAN.job.hex(), PLAN.round, spooled)
            publisher.open_window(PLAN, publisher.grid_time(clock.monotonic()))
            publisher.draw_times()
            found.append((state, publisher, line))
        yield found


@pytest.fixture
def boards(tmp_path: Path, clock: MovableClock) -> Iterator[list[Board]]:
    with fleet(tmp_path, clock, boards=BOARDS, fragments=FRAGMENTS, rate=RATE) as found:
        yield found


@pytest.fixture
def slow_boards(tmp_path: Path, clock: MovableClock) -> Iterator[list[Board]]:
    with fleet(tmp_path, clock, boards=4, fragments=100, rate=2.0) as found:
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
    # By chance, one in eight. Of 28 pairs of boards, each has one beat to a millisecond in one run of fifty,
    # and a hundred guesses more are wrong then: two pairs do in one run of ten, six in one of 40,000.
    assert right > 0.4


def alike(boards: list[Board], clock: MovableClock) -> tuple[float, float]:
    """How often a pair of one board's took as long from copy to copy as no pair of two boards', and the
    probability that it is so often by chance."""
    copies: dict[bytes, list[float]] = {}
    owners: dict[bytes, int] = {}
    for _ in range(LEAVE):
        while not any(line.sent for *_, line in boards):
            clock.advance(min(publisher.due_in_s() for _, publisher, _ in boards))
            for _, publisher, _ in boards:
                publisher.publish_due()
        for number, (*_, line) in enumerate(boards):
            while line.sent:
                copies.setdefault(message := line.sent.pop(), []).append(clock.monotonic())
                owners[message] = number
    came = sorted((times[:COPIES], owners[each]) for each, times in copies.items() if len(times) >= COPIES)
    differences: dict[bool, list[float]] = {True: [], False: []}
    for (one, board), (other, another) in zip(came[::2], came[1::2], strict=False):
        differences[board == another].append(float(((np.diff(one) - np.diff(other)) ** 2).sum()))
    test = stats.mannwhitneyu(differences[True], differences[False], alternative="less")
    probability = float(test.pvalue)
    share = 1 - test.statistic / (len(differences[True]) * len(differences[False]))
    print(f"{share:.2f} of the pairs in order, by chance with a probability of {probability:.2g}")
    return share, probability


def test_copies_of_fragments_that_wait_together_come_in_no_order(
    slow_boards: list[Board], clock: MovableClock
) -> None:
    share, probability = alike(slow_boards, clock)
    assert probability > ALPHA, share


def test_power_in_the_order_of_their_times_copies_tell_which_wait_together(
    slow_boards: list[Board], clock: MovableClock
) -> None:
    for _, publisher, _ in slow_boards:
        publisher._departures._random.choice = lambda due: due[0]  # type: ignore[method-assign]
    share, probability = alike(slow_boards, clock)
    assert probability < ALPHA
    assert share > 0.7
