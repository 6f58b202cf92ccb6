"""What an agent over a real broker is announced by others than its coordinator, or cannot do: it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import wait_until
from daemons import agent_thread
from fleets import DIGITS
from lone_agents import DECLINED, WEIGHTS, charges, counter, plan_for, rows
from observers import Announcer, in_an_hour

from dpagent.protocol.chunks import chunked, content_digest
from dpagent.protocol.codec import encode
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.weights import weights_to_bytes

pytestmark = pytest.mark.usefixtures("attentive")


def test_plans_that_are_not_the_coordinators_are_ignored(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    other = Signer(new_signing_secret(), fleet)
    with agent_thread(file) as agent:
        announcer.announce(plan_for(fleet), other)
        agent.clock.advance_until(lambda: counter(file, "rejected") == 1, "the first rejection")
        wrong = [
            b"", b"garbage", other.sign(plan_for(fleet), "plan"),
            announcer.signer.sign(plan_for(fleet), "receipts"),
            announcer.signer.sign(plan_for("another"), "plan"),
        ]  # fmt: skip
        for message in wrong:
            announcer.publish(announcer.topics.plan, message)
        announcer.publish(announcer.topics.receipts, b"garbage")
        # An empty payload with the retain flag only clears the topic, and arrives as well.
        agent.clock.advance_until(lambda: counter(file, "rejected") == 7, "all rejections")
        assert charges(file) == []
        assert announcer.fragments == []
        announcer.announce(plan_for(fleet, deadline=in_an_hour()))
        wait_until(lambda: charges(file), "the charge for the true plan")
        assert agent.is_running


def test_a_flood_of_rubbish_is_counted_and_does_not_fill_the_log(
    announcer: Announcer, file: Path, fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    with agent_thread(file) as agent:
        announcer.announce(plan_for(fleet, deadline=1_000.0))
        wait_until(
            lambda: rows(file, DECLINED),
            "the agent to listen",
        )
        for _ in range(50):
            announcer.publish(announcer.topics.plan, b"rubbish")
        announcer.publish(announcer.topics.receipts, b"rubbish")
        agent.clock.advance_until(lambda: counter(file, "rejected") == 51, "the rejections")
    assert caplog.text.count("rejected a message") == 1


@pytest.mark.parametrize(
    "changes",
    [{"mechanism": {"noise_multipliers": [10_000.0] * 3}}, {"mechanism": {"noise_multipliers": [1e300] * 3}},
     {"mechanism": {"name": "unheard-of"}}, {"model": {"description": b"resnet"}},
     {"deadline": 1_000.0}, {"sealing_key": bytes(32)}],
    ids=lambda changes: next(iter(changes)) + str(next(iter(changes.values()))),
)  # fmt: skip
def test_no_plan_that_is_signed_can_end_the_agent(
    announcer: Announcer, file: Path, fleet: str, changes: dict[str, Any]
) -> None:
    with agent_thread(file) as agent:
        announcer.announce(plan_for(fleet, **changes))
        wait_until(
            lambda: not agent.is_running or rows(file, DECLINED),
            "a decision",
        )
        assert agent.is_running
        assert charges(file) == []


def test_undefined_weights_do_not_end_the_agent(announcer: Announcer, file: Path, fleet: str) -> None:
    weights = weights_to_bytes(np.full(DIGITS.parameter_count, np.nan, np.float32), "float32")
    plan = plan_for(
        fleet, model={"digest": content_digest(weights)}, cap={"kind": "clamp", "where": "device"}
    )
    with agent_thread(file) as agent:
        announcer.announce_model(weights)
        announcer.announce(plan)
        wait_until(
            lambda: not agent.is_running or rows(file, DECLINED),
            "a decision",
        )
        assert agent.is_running
        assert charges(file) == []


def test_a_lying_chunk_does_not_keep_the_agent_out_of_the_round(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    """Anyone in the fleet may publish; the retained chunks are the truth and can be had again."""
    with agent_thread(file):
        (chunk,) = chunked(WEIGHTS)
        announcer.announce(plan_for(fleet, round=2, deadline=1_000.0))
        wait_until(
            lambda: rows(file, DECLINED),
            "the agent to have the model",
        )
        lie = replace(chunk, data=bytes(len(chunk.data)))
        announcer.publish(announcer.topics.model_chunk(0), encode(lie))
        announcer.announce(plan_for(fleet, round=2))
        wait_until(lambda: charges(file), "the charge")


def test_a_model_that_did_not_come_whole_is_asked_for_again(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    (chunk,) = chunked(WEIGHTS)
    damaged = replace(chunk, data=bytes(len(chunk.data)))
    topic = announcer.topics.model_chunk(0)
    with agent_thread(file) as agent:
        announcer.publish(topic, announcer.signer.sign(damaged, "model"), retain=True)
        announcer.announce(plan_for(fleet))
        wait_until(lambda: rows(file, "SELECT 1 FROM rounds WHERE state = 'offered'"), "the offer")
        announcer.publish(announcer.topics.plan, b"rubbish")
        agent.clock.advance_until(lambda: counter(file, "rejected") == 1, "a turn of the loop after the plan")
        assert charges(file) == []
        announcer.publish(topic, announcer.signer.sign(chunk, "model"), retain=True)
        agent.clock.advance_until(lambda: charges(file), "the charge")


def test_an_older_round_is_a_replay(announcer: Announcer, file: Path, fleet: str) -> None:
    with agent_thread(file) as agent:
        announcer.announce(plan_for(fleet, round=2))
        wait_until(lambda: charges(file), "the second round")
        announcer.announce(plan_for(fleet, round=1))
        agent.clock.advance_until(lambda: counter(file, "rejected") == 1, "the rejection")
    assert charges(file) == [((b"j" * 16).hex(), 2)]
