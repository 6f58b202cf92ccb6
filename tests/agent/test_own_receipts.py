"""Receipts on topics of their own, on the device: who hears them, who declines, what they change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from devices import KEY, PERIOD_S, Device, open_device
from fleets import make_plan, write_agent
from members import certified, new_authority

from agent.custody import begin_ledger
from agent.daemon import Agent
from agent.identity import Identity
from agent.settings import load_agent_settings
from agent.spool import SpooledFragment
from dpagent.database_file import transaction
from dpagent.protocol.codec import decode
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.receipts import receipt_place
from dpagent.protocol.topics import Topics

TOPICS = Topics("testers")
BLOCKS = 4


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return certified(new_authority(tmp_path / "members", "testers"))


def plan(**changes: Any) -> Plan:
    return make_plan(**({"receipts": "fragment", "wire": {"block": 2_500}} | changes))


def run(device: Device, announced: Plan, seconds: float = 4.0) -> None:
    device.give()
    device.take_plan(announced, confirmed=False)
    pass_time(device, seconds)


def pass_time(device: Device, seconds: float) -> None:
    for _ in range(round(seconds / PERIOD_S)):
        device.clock.advance(PERIOD_S)
        device.cycle.advance()
        device.cycle._publisher.publish_due()


def ids(device: Device) -> dict[str, str]:
    """By the topic of its receipt, whether a fragment is a probe or one of the update."""
    rows = device.state.connection.execute("SELECT message FROM messages").fetchall()
    probes = device.state.connection.execute("SELECT message FROM probes WHERE message IS NOT NULL")
    places = {row[0]: "fragment" for row in rows} | {row[0]: "probe" for row in probes}
    return {
        TOPICS.receipt(receipt_place(decode(message, Fragment).id)): kind for message, kind in places.items()
    }


@pytest.mark.parametrize("dummies", [False, True])
def test_a_board_with_a_certificate_hears_the_receipt_of_all_that_it_sends(
    tmp_path: Path, identity: Identity, dummies: bool
) -> None:
    """Also of dummies: the broker sees as many subscriptions, of one form."""
    limits = {"dummy_traffic": True} | ({"maximum_job_epsilon": 1e-6} if dummies else {})
    with open_device(tmp_path / "board", identity=identity, limits=limits) as device:
        run(device, plan())
        assert bool(device.charged()) is not dummies
        wanted = ids(device)
        assert sorted(wanted.values()) == ["fragment"] * BLOCKS + ["probe"]
        assert device.line.heard == wanted.keys()
        steps = device.line.steps
        for place, (step, _) in enumerate(steps):
            if step == "hear":
                assert steps[place + 1] == ("publish", TOPICS.fragments), "right before its fragment"
        assert sum(step == "hear" for step, _ in steps) == BLOCKS + 1


@pytest.mark.parametrize("dummy_traffic", [False, True])
def test_a_board_without_one_declines_in_silence(tmp_path: Path, dummy_traffic: bool) -> None:
    """The broker would know its connections by the topics that it hears again."""
    with open_device(tmp_path, limits={"dummy_traffic": dummy_traffic}) as device:
        run(device, plan())
        assert (device.charged(), device.line.steps) == ([], [])
        ((number, reason, _),) = device.declined()
        assert number == 1
        assert "it has no certificate: enrol with `dpagent enrol`" in reason
        assert "receipts: fleet" in reason
        run(device, plan(job=b"k" * 16, receipts="fleet"))
        assert device.charged() == [1], "as before"
        assert device.line.heard == set()


def test_what_is_spooled_does_not_leave_once_the_certificate_is_gone(
    tmp_path: Path, identity: Identity
) -> None:
    announced = plan(jitter_window_s=60.0)
    with open_device(tmp_path / "board", identity=identity) as device:
        run(device, announced, 1.5)
        assert device.charged() == [1]
        assert device.pending()
    with open_device(tmp_path / "board") as device:
        run(device, announced, 100.0)
        assert device.line.steps == []


def test_a_receipt_of_a_fragment_changes_nothing_that_the_broker_sees_until_it_would_leave_again(
    tmp_path: Path, identity: Identity
) -> None:
    for receipted in (False, True):
        with open_device(tmp_path / str(receipted), identity=identity) as device:
            run(device, plan(), 2.0)
            pending = [digest for digests in device.pending().values() for digest in digests]
            assert len(pending) == BLOCKS
            if receipted:
                device.state.mark_counted(pending, 0.0)
            before = list(device.line.steps)
            pass_time(device, 3.0)
            assert device.line.steps == before
            pass_time(device, 7.0)
            after = device.line.steps[len(before) :]
            assert {step for step, _ in after} == ({"publish", "hear no more"} if receipted else {"publish"})


def test_what_is_no_receipt_on_such_a_topic_is_passed_over_without_a_trace(tmp_path: Path) -> None:
    """Who counted it on the board's disk would have the coordinator, which knows the fragment, make one board
    write."""
    settings = load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy"))
    if not settings.ledger_files.database.exists():
        begin_ledger(settings.ledger_files, settings.lifetime_budgets)
    agent = Agent(settings)
    try:
        fragment = SpooledFragment.of(Fragment(1, 0, os.urandom(16), b"values"))
        with transaction(agent._state.connection):
            agent._state.spool.put("j", 1, [fragment])
        topic = agent._topics.receipt(fragment.receipt_place)
        for payload in (b"", b"junk", os.urandom(16), fragment.digest + b"\0", os.urandom(60_000)):
            agent._receive(topic, payload)
        assert (agent._rejected, agent._last_receipt_at) == (0, None)
        assert fragment.digest in agent._state.spool.pending()
        agent._receive(agent._topics.receipt(receipt_place(os.urandom(16))), fragment.digest)
        assert fragment.digest in agent._state.spool.pending(), "it came where it does not belong"
        agent._receive(topic, fragment.digest)
        assert agent._state.spool.pending() == {}
        assert agent._last_receipt_at is not None
    finally:
        agent.close()
