"""Fault points: the steps between which a crash may come, each with a name.

A program reports each step that it reaches; nobody listens. No setting, environment variable or message
changes that. The tests replace :data:`reached` in programs that they start themselves, and kill them there
(``tests/crash``).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class FaultPoint(StrEnum):
    """A step of a program. *Written* is inside a transaction, just before its commit."""

    AGENT_OFFERED = "agent: a plan is on record"
    AGENT_OTHERS_EXPIRED = "agent: other rounds are given up"
    AGENT_ADMITTED = "agent: admitted, nothing charged"
    AGENT_CHARGE_WRITTEN = "agent: charge written"
    AGENT_CHARGED = "agent: charged, the heads are behind"
    AGENT_HEAD_SAVED = "agent: charged, the heads too"
    AGENT_TRAINS = "agent: before the first record is read"
    AGENT_TRAINED = "agent: trained, nothing spooled"
    AGENT_SPOOL_WRITTEN = "agent: fragments written"
    AGENT_SPOOLED = "agent: spooled"
    AGENT_TIMES_DRAWN = "agent: fragments have their times"
    AGENT_SEALED = "agent: sealed, not published"
    AGENT_PUBLISHED = "agent: published, not noted"
    AGENT_SENT_WRITTEN = "agent: note of publication written"
    AGENT_SENT_NOTED = "agent: publication noted"
    AGENT_RECEIPT_ARRIVED = "agent: a receipt has arrived"
    AGENT_RECEIPT_WRITTEN = "agent: receipt written"
    AGENT_RECEIPTED = "agent: receipt noted"

    COORDINATOR_JOB_WRITTEN = "coordinator: job written"
    COORDINATOR_JOB_BEGUN = "coordinator: job begun"
    COORDINATOR_ROUND_OPENED = "coordinator: round opened, not announced"
    COORDINATOR_MODEL_PUBLISHED = "coordinator: model published, plan not"
    COORDINATOR_PLAN_PUBLISHED = "coordinator: plan published, not noted"
    COORDINATOR_ANNOUNCED = "coordinator: announcement noted"
    COORDINATOR_FRAGMENTS_OPENED = "coordinator: fragments opened, not counted"
    COORDINATOR_COUNT_WRITTEN = "coordinator: count written"
    COORDINATOR_COUNTED = "coordinator: counted, no receipt"
    COORDINATOR_RECEIPTS_PUBLISHED = "coordinator: receipts published"
    COORDINATOR_CLOSES = "coordinator: round is to close"
    COORDINATOR_STEPPED = "coordinator: model stepped, not stored"
    COORDINATOR_CLOSE_WRITTEN = "coordinator: close written"
    COORDINATOR_CLOSED = "coordinator: round closed"
    COORDINATOR_SAID_GOODBYE = "coordinator: broker has the farewell, not noted"
    COORDINATOR_FINISHED = "coordinator: job finished"

    QUEUE_ADD_WRITTEN = "queue: a job written"
    QUEUE_ADDED = "queue: a job is in it"
    QUEUE_CHANGE_WRITTEN = "queue: a change to a job written"
    QUEUE_CHANGED = "queue: a job is changed"
    QUEUE_ROUND_GIVEN_UP = "queue: the round of a cancelled job is given up, nobody is told"
    QUEUE_TAKEN_UP = "queue: another job is taken up"

    TOKENS_ASKED = "tokens: requests are on disk"
    TOKENS_WRITTEN = "tokens: signed, and entered"
    TOKENS_GRANTED = "tokens: granted, not answered"
    TOKENS_TAKEN = "tokens: an answer is on disk"

    MIXER_OPENED = "mixer: the outer seal is off"
    MIXER_HELD = "mixer: a message is held"
    MIXER_BATCH_DRAWN = "mixer: a batch is drawn, not noted"
    MIXER_BATCH_NOTED = "mixer: a batch is noted, none has left"
    MIXER_PUBLISHED = "mixer: a message of a batch is published"
    MIXER_BATCH_LEFT = "mixer: all of a batch is published"

    FILE_WRITTEN = "a file is written, not in its place"


def _go_on(_point: FaultPoint) -> None:
    """The program goes on."""


reached: Callable[[FaultPoint], None] = _go_on
"""Called at each fault point as ``faults.reached(…)``."""
