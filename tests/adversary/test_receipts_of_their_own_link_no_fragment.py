"""The coordinator asks a broker of MQTT 5 who hears a receipt: which fragments are one board's?

Claim: where each receipt has a topic of its own, when a board hears one tells nothing of which other
    fragments are its. It begins when the fragment arrives, and ends when this fragment would be sent again
    without a receipt, which is drawn for it alone.
Parameters: eight boards with 40 fragments each in a window of 100 s, real spools and publishers, on clocks
    that move by 10 ms. The coordinator knows of each fragment, to that, when its topic began to be heard and
    when it ended: a broker tells the publisher whether anybody hears a topic, as the first test sees. It
    takes two fragments for one board's if one of them begins or ends just when the other does.

A second attack: it withholds all receipts, and says on the topic of one fragment that all others count.

Power: where a topic ends with the next publication, it knows all pairs that leave one after the other; where
    all of a board end together, all pairs. More than four of five of its guesses are right.

    A board that takes a digest wherever it hears it tells by its silence all that are its.

Outcome: one in eight is right, as by chance; what is said on another's topic silences nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paho.mqtt.client as paho
import pytest
from brokers import USER, Broker, wait_until
from clocks import MovableClock
from fleets import make_plan
from ledgers import open_state
from lines import Line
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from scipy import stats

from agent.publisher import Publisher
from agent.spool import SpooledFragment
from agent.state import AgentState
from dpagent.database_file import transaction
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.receipts import receipt_place
from dpagent.protocol.topics import Topics

BOARDS, FRAGMENTS, WINDOW_S, STEP_S, ALPHA = 8, 40, 100.0, 0.01, 1e-6
ANSWER_S = 0.5
TOPICS = Topics("testers")
PLAN = make_plan(receipts="fragment", compute_slot_s=5.0, jitter_window_s=WINDOW_S)


def test_a_broker_of_mqtt_5_tells_whether_anybody_hears_a_topic(mosquitto: Broker) -> None:
    """So the coordinator can ask, as often as it likes."""
    heard, unheard = (TOPICS.receipt(receipt_place(os.urandom(16))) for _ in range(2))
    answers: dict[int, str] = {}
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
    client.username_pw_set(USER, mosquitto.password_file.read_text().strip())
    client.on_publish = lambda _client, _data, mid, reason, _properties: answers.update({mid: str(reason)})
    client.connect("127.0.0.1", mosquitto.port)
    client.loop_start()
    try:
        with mosquitto.session("a-board", heard) as session:
            wait_until(lambda: session.next_event(0.1) is None and session.connected, "the subscription")
            asked = {topic: client.publish(topic, b"?", qos=1).mid for topic in (heard, unheard)}
            wait_until(lambda: len(answers) == 2, "the answers")
    finally:
        client.disconnect()
        client.loop_stop()
    assert answers[asked[unheard]] == "No matching subscribers"
    assert answers[asked[heard]] == "Success"


@dataclass
class Board:
    """One that has spooled its update."""

    state: AgentState
    publisher: Publisher
    line: Line
    clock: MovableClock
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    receipts: list[tuple[float, bytes]] = field(default_factory=list)
    """When they come, and of what."""
    digests: dict[str, bytes] = field(default_factory=dict)
    seen: int = 0
    due_at: float = -math.inf
    """When the publisher has something to do, as it says itself; an agent waits until then, too."""

    @classmethod
    def opened(cls, directory: Path, held: ExitStack) -> Board:
        clock, line = MovableClock(unix=5_000.0), Line()
        state = open_state(directory)
        held.callback(state.close)
        session: Any = line
        publisher = Publisher(
            state, session, TOPICS, messages_per_second=10.0, period_s=5.0, clock=clock, seal=unsealed
        )
        board = cls(state, publisher, line, clock)
        fragments = [
            SpooledFragment.of(Fragment(PLAN.round, number, os.urandom(16), b"values"))
            for number in range(FRAGMENTS)
        ]
        board.digests = {TOPICS.receipt(each.receipt_place): each.digest for each in fragments}
        with transaction(state.connection):
            state.spool.put(PLAN.job.hex(), PLAN.round, fragments)
        publisher.open_window(PLAN, clock.monotonic())
        publisher.draw_times()
        return board

    def step(self, *, answers: bool = True) -> None:
        """Ten milliseconds; whatever arrives gets its receipt, if anything does."""
        self.clock.advance(STEP_S)
        now = self.clock.monotonic()
        while self.receipts and self.receipts[0][0] <= now:
            self.state.mark_counted([self.receipts.pop(0)[1]], 0.0)
            self.due_at = now
        if now < self.due_at:
            return
        self.publisher.publish_due()
        self.due_at = now + self.publisher.due_in_s()
        for step, topic in self.line.steps[self.seen :]:
            if step == "hear":
                self.began[topic] = now
                if answers:
                    self.receipts.append((now + ANSWER_S, self.digests[topic]))
            elif step == "hear no more":
                self.ended[topic] = now
        self.seen = len(self.line.steps)


def unsealed(fragment: bytes, plan: Plan) -> bytes:
    return fragment


@pytest.fixture
def boards(tmp_path: Path) -> Iterator[list[Board]]:
    with ExitStack() as held:
        yield [Board.opened(tmp_path / str(number), held) for number in range(BOARDS)]


def guessed(boards: list[Board]) -> tuple[float, float]:
    """Of the pairs that the coordinator takes for one board's, how many are, and the probability that so many
    are by chance."""
    for _ in range(round((5.0 + WINDOW_S + 15.0) / STEP_S)):
        for board in boards:
            board.step()
    marks = [
        (number, board.began[topic], board.ended[topic])
        for number, board in enumerate(boards)
        for topic in board.digests
    ]
    owners = np.array([number for number, _, _ in marks])
    began, ended = (np.array([mark[place] for mark in marks]) for place in (1, 2))
    rows, columns = np.triu_indices(len(marks), 1)
    apart = np.minimum(
        np.minimum(np.abs(ended[rows] - began[columns]), np.abs(began[rows] - ended[columns])),
        np.abs(ended[rows] - ended[columns]),
    )
    is_one, is_taken = owners[rows] == owners[columns], apart < 1.5 * STEP_S
    right, taken = int((is_one & is_taken).sum()), int(is_taken.sum())
    assert taken > 10, "it has something to go by"
    test = stats.binomtest(right, taken, float(is_one.mean()), alternative="greater")
    return right / taken, float(test.pvalue)


def test_when_topics_are_heard_tells_no_pair_of_one_board(boards: list[Board]) -> None:
    right, probability = guessed(boards)
    assert probability > ALPHA, right
    assert right < 0.5


def ends_with_the_next_publication(publisher: Publisher) -> None:
    session, hear = publisher._session, publisher._session.hear
    heard_until = publisher._departures._heard_until

    def hear_alone(topic: str) -> None:
        for before in [*heard_until]:
            del heard_until[before]
            session.hear_no_more(before)
        hear(topic)

    session.hear = hear_alone  # type: ignore[method-assign]


def ends_with_the_round(publisher: Publisher) -> None:
    ends_at = publisher._clock.monotonic() + 5.0 + WINDOW_S + publisher._random.uniform(5.0, 10.0)
    publisher._departures._resend_time = lambda plan, now, again_from: ends_at  # type: ignore[method-assign]


@pytest.mark.parametrize("rule", [ends_with_the_next_publication, ends_with_the_round])
def test_power_other_ends_tell_pairs(boards: list[Board], rule: Callable[[Publisher], None]) -> None:
    for board in boards:
        rule(board.publisher)
    right, probability = guessed(boards)
    assert probability < ALPHA
    # By chance, one in eight. Two boards' rounds may end within one and a half steps, in one run of six.
    assert right > 0.5


Takes = Callable[[AgentState, str, bytes], int]


def silenced(boards: list[Board], takes: Takes) -> set[str]:
    """Topics of fragments that are sent no more, after the digests of all were said on the topic of one."""
    told = next(iter(boards[0].digests))
    all_have_left_at = 5.0 + WINDOW_S + 4.0  # The last ones wait for their turn, for tenths of a second.
    for number in range(round((all_have_left_at + 14.0) / STEP_S)):
        for board in boards:
            board.step(answers=False)
            if number == round(all_have_left_at / STEP_S) and told in board.line.heard:
                for digest in [digest for each in boards for digest in each.digests.values()]:
                    takes(board.state, told.rpartition("/")[2], digest)
                board.due_at = -math.inf
    return {
        topic
        for board in boards
        for topic in board.digests
        if board.began[topic] < board.ended.get(topic, 0.0)
    }


def test_what_is_said_on_the_topic_of_another_silences_none(boards: list[Board]) -> None:
    told = next(iter(boards[0].digests))
    takes: Takes = lambda state, place, digest: state.mark_own_counted(place, digest, 0.0)  # noqa: E731
    assert silenced(boards, takes) == {told}


def test_power_a_board_that_takes_a_digest_anywhere_tells_all_that_are_its(boards: list[Board]) -> None:
    takes: Takes = lambda state, _place, digest: state.mark_counted([digest], 0.0)  # noqa: E731
    assert silenced(boards, takes) == boards[0].digests.keys()
