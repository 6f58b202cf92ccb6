"""An agent that is handed messages as the broker would: what one plan names, the next, and others."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fleets import DIGITS, make_plan, write_agent

from agent.daemon import Agent
from agent.settings import load_agent_settings
from dpagent.protocol.chunks import chunked, content_digest
from dpagent.protocol.messages import Plan
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.weights import weights_to_bytes

SIGNER = Signer(new_signing_secret(), "testers")
ASSETS = {"training-graph": b"graph" * 11, "frozen-network": b"network" * 20_000, "projection": b"file" * 64}


def weights_of(number: int) -> bytes:
    return weights_to_bytes(np.full(DIGITS.parameter_count, number, np.float32), "float32")


def plan_of(number: int) -> Plan:
    return make_plan(
        round=number,
        model={"digest": content_digest(weights_of(number))},
        assets=[
            {"role": role, "digest": content_digest(data), "size": len(data)} for role, data in ASSETS.items()
        ],
    )


def plan_with(number: int, asset: bytes) -> Plan:
    terms = {"role": "projection", "digest": content_digest(asset), "size": len(asset)}
    return make_plan(round=number, assets=[terms], mechanism={"noise_multipliers": [4.0] * 10})


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(load_agent_settings(write_agent(tmp_path, None, SIGNER.public_key, engine="auto")))
    yield agent
    agent._state.close()


def send(agent: Agent, *wholes: bytes) -> None:
    for data in wholes:
        for chunk in chunked(data):
            agent._receive(agent._topics.model_chunk(chunk.index), SIGNER.sign(chunk, "model"))


def announce(agent: Agent, plan: Plan) -> None:
    agent._receive(agent._topics.plan, SIGNER.sign(plan, "plan"))


def test_all_that_a_round_needs_is_there_when_its_turn_comes(agent: Agent) -> None:
    """The loop asks whether all is there, and then for each of them again."""
    send(agent, *(b"left of an earlier job, %d" % number for number in range(20)))
    send(agent, *ASSETS.values(), weights_of(1))
    announce(agent, plan_of(1))
    for number in (1, 2):
        assert agent._cycle.due_in_s() < 1
        model = agent._announcements.model_for(plan_of(number))
        assert model is not None
        assert (model.weights, model.assets) == (weights_of(number), ASSETS)
        send(agent, weights_of(number + 1))
        announce(agent, plan_of(number + 1))
        assert agent._announcements.model_for(plan_of(number)) is None, "the last round's are gone"
    assert agent._rejected == 0


def test_the_plan_may_come_first(agent: Agent) -> None:
    announce(agent, plan_of(1))
    send(agent, weights_of(1))
    assert agent._cycle.due_in_s() > 1
    send(agent, *ASSETS.values())
    for _ in range(2):
        assert agent._cycle.due_in_s() < 1


def test_assets_of_plans_whose_weights_never_came_are_let_go(agent: Agent) -> None:
    """Or a coordinator that goes on to new assets again and again would fill the board's memory."""
    size = 1_000_000
    tracemalloc.start()
    try:
        for number in range(1, 11):
            asset = bytes([number]) * size
            announce(agent, plan_with(number, asset))
            send(agent, asset)
            agent._cycle.advance()
        assert tracemalloc.get_traced_memory()[0] < 5 * size
    finally:
        tracemalloc.stop()


def followed(agent: Agent) -> list[str]:
    return agent._topics_of_chunks()


def test_only_topics_of_missing_chunks_are_followed_by_their_exact_names(agent: Agent) -> None:
    """Whoever subscribes with wildcards gets nothing that RabbitMQ retains, and needs wider rights."""
    assert followed(agent) == [], "before a plan, nobody knows their names"
    announce(agent, plan_of(1))
    weights = [agent._topics.model_chunk(chunk.index) for chunk in chunked(weights_of(1))]
    assets = [
        agent._topics.asset_chunk(role, chunk.index)
        for role, data in ASSETS.items()
        for chunk in chunked(data)
    ]
    assert followed(agent) == [*weights, *assets][:5]
    send(agent, weights_of(1), ASSETS["frozen-network"])
    assert followed(agent) == [topic for topic in assets if "frozen" not in topic]
    announce(agent, plan_of(2))
    assert followed(agent) == [*weights, *(topic for topic in assets if "frozen" not in topic)]
    assert not any("+" in topic or "#" in topic for topic in followed(agent))


def test_a_model_that_is_too_large_is_not_fetched_and_a_large_one_in_parts(agent: Agent) -> None:
    large = bytes(60_000) * 50
    announce(agent, plan_with(1, large))
    assert len(followed(agent)) == 5, "with plan and receipts, fewer than any broker allows"
    send(agent, large)
    assert followed(agent) == [agent._topics.model_chunk(0)]
    terms = {
        "role": "projection",
        "digest": bytes(32),
        "size": agent._settings.limits.maximum_model_mib << 20,
    }
    announce(agent, make_plan(round=2, assets=[terms]))
    assert followed(agent) == []


def test_false_chunks_are_not_fetched_again_at_once(agent: Agent) -> None:
    """A broker that retains them would send them at once: as much traffic as the network takes."""
    announce(agent, plan_with(1, b"asset"))
    (chunk,) = chunked(b"asset")
    agent._receive("", SIGNER.sign(replace(chunk, data=b"false"), "model"))
    send(agent, weights_to_bytes(DIGITS.initial_weights(0), "float32"))
    agent._cycle.advance()
    assert followed(agent) == []
    agent._announcements._assembler.fetch_again()
    assert followed(agent) == [agent._topics.asset_chunk("projection", 0)]


def test_only_the_model_of_a_finished_job_that_is_wanted_is_followed(agent: Agent) -> None:
    model = {"role": "model", "digest": content_digest(b"model"), "size": 5}
    announce(agent, make_plan(state="finished", assets=[model]))
    assert followed(agent) == [agent._topics.asset_chunk("model", 0)]
    assert agent._announcements.topics_of_chunks(None) == []
    # Whatever comes after, until it is here.
    announce(agent, make_plan(job=b"k" * 16, state="finished"))
    assert followed(agent) == [agent._topics.asset_chunk("model", 0)]
    agent._announcements.take_chunk(*chunked(b"model"))
    agent._take_model()
    assert followed(agent) == []
