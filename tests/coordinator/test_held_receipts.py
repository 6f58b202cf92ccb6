"""Receipts on topics of their own: what leaves, and when."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from clocks import MovableClock
from fleets import write_fleet

from coordinator.own_receipts import OwnReceipts
from coordinator.settings import load_fleet_settings
from dpagent.errors import ConfigurationError
from dpagent.protocol.mixing import key_text
from dpagent.protocol.receipts import receipt_digest, receipt_place
from dpagent.protocol.topics import Topics

TOPICS = Topics("testers")


class Wire:
    """A session that notes when what was sent."""

    def __init__(self, clock: MovableClock) -> None:
        self.clock = clock
        self.sent: list[tuple[float, str, bytes]] = []

    def publish_together(self, messages: list[tuple[str, bytes]]) -> None:
        self.sent += [(self.clock.monotonic(), *each) for each in messages]


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def wire(clock: MovableClock) -> Wire:
    return Wire(clock)


@pytest.fixture
def receipts(wire: Wire, clock: MovableClock) -> OwnReceipts:
    session: Any = wire
    return OwnReceipts(session, TOPICS, clock)


@pytest.mark.parametrize("counting_s", [0.0, 0.001, 0.1, 0.4])
def test_when_a_receipt_leaves_tells_nothing_of_how_long_counting_took(
    receipts: OwnReceipts, wire: Wire, clock: MovableClock, counting_s: float
) -> None:
    """A dummy is counted sooner than a fragment."""
    taken_at = clock.monotonic()
    clock.advance(counting_s)
    identity = os.urandom(16)
    receipts.put([identity], taken_at)
    assert receipts.due_in_s() == pytest.approx(0.5 - counting_s)
    clock.advance(0.499 - counting_s)
    receipts.publish_due()
    assert wire.sent == []
    clock.advance(0.001)
    receipts.publish_due()
    assert wire.sent == [
        (pytest.approx(taken_at + 0.5), TOPICS.receipt(receipt_place(identity)), receipt_digest(identity))
    ]
    assert receipts.due_in_s() == math.inf


def test_each_leaves_once_and_batches_that_are_due_leave_together(
    receipts: OwnReceipts, wire: Wire, clock: MovableClock
) -> None:
    ids = [os.urandom(16) for _ in range(5)]
    receipts.put(ids[:2], clock.monotonic())
    receipts.put([], clock.monotonic())
    receipts.put(ids[2:4], clock.monotonic() + 0.1)
    receipts.put(ids[4:], clock.monotonic() + 3.0)
    clock.advance(1.0)
    for _ in range(2):
        receipts.publish_due()
    assert [digest for _, _, digest in wire.sent] == [receipt_digest(each) for each in ids[:4]]
    assert receipts.due_in_s() == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "fleet"),
        ({"linkability": "fragment"}, "fragment"),
        ({"linkability": "round"}, "fragment"),
        ({"linkability": "fragment", "receipts": "fleet"}, "fleet"),
        ({"receipts": "fragment"}, "fragment"),
        ({"linkability": "fragment", "mixer_key": key_text(bytes(range(32)))}, "fleet"),
    ],
)
def test_where_receipts_go_follows_from_tokens_and_the_mixer_unless_it_is_said(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    settings = load_fleet_settings(write_fleet(tmp_path, None, **changes))
    assert settings.receipt_topics == expected
    assert settings.job_terms()["receipts"] == expected, "it stays as it is while the job lasts"


def test_a_fleet_with_a_mixer_has_none_on_topics_of_their_own(tmp_path: Path) -> None:
    file = write_fleet(tmp_path, None, receipts="fragment", mixer_key=key_text(bytes(range(32))))
    with pytest.raises(ConfigurationError, match="receipts is fragment and mixer_key is set; expected fleet"):
        load_fleet_settings(file)
