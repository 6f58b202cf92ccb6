"""Topics that a session hears for a while, and short messages that it sends together, at real brokers."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
from brokers import Broker, Software, wait_for, wait_until

from dpagent.transport.events import Acknowledged, Connected, Disconnected, Received, Subscribed

KINDS: list[tuple[Software, str]] = [("mosquitto", "5"), ("mosquitto", "3.1.1"), ("amqtt", "3.1.1")]
_numbers = itertools.count()


@pytest.fixture(params=KINDS, ids=["mosquitto-5", "mosquitto-3.1.1", "amqtt"])
def kind(request: pytest.FixtureRequest) -> tuple[Broker, str]:
    software, protocol = request.param
    return request.getfixturevalue(software), protocol


def test_a_topic_is_heard_before_what_is_published_next_arrives_and_until_it_is_not(
    kind: tuple[Broker, str],
) -> None:
    """The session hears its own message: had it been published first, nobody would."""
    broker, protocol = kind
    with broker.session(f"hearing-{next(_numbers)}", protocol=protocol) as session:
        wait_for(session, Connected)
        for _ in range(3):
            topic, payload = f"hearing/{os.urandom(4).hex()}", os.urandom(8)
            session.hear(topic)
            session.hear(topic)
            session.publish(topic, payload)
            assert wait_for(session, Received).payload == payload
            session.hear_no_more(topic)
            session.hear_no_more(topic)
            session.publish(topic, b"unheard")
        session.hear("hearing/last")
        session.publish("hearing/last", b"last")
        assert wait_for(session, Received).payload == b"last"


def test_messages_are_sent_together_whole_and_in_order(kind: tuple[Broker, str]) -> None:
    broker, protocol = kind
    base = f"together/{next(_numbers)}"
    messages = [(f"{base}/{number % 7}", number.to_bytes(4, "big") + bytes(number)) for number in range(300)]
    with (
        broker.session(f"listener-{next(_numbers)}", f"{base}/+", protocol=protocol) as listener,
        broker.session(f"sender-{next(_numbers)}", protocol=protocol) as sender,
    ):
        wait_for(listener, Subscribed)
        wait_for(sender, Connected)
        sender.publish_together(messages)
        found = [wait_for(listener, Received) for _ in messages]
        assert [(each.topic, each.payload) for each in found] == messages
        sender.publish_together([])
        handle = sender.publish(f"{base}/1", b"one more")
        assert wait_for(sender, Acknowledged).handle == handle, "nothing is said of those before"
        assert sender.bytes_up == sum(len(topic) + len(payload) for topic, payload in messages) + len(
            f"{base}/1one more"
        )


def test_with_its_connection_a_session_forgets_what_it_heard(new_broker: Any) -> None:
    broker: Broker = new_broker().start()
    with broker.session("forgetful") as session:
        session.hear("too/early")
        wait_for(session, Connected)
        session.hear("before/the/kill")
        wait_for(session, Subscribed)
        broker.kill()
        wait_for(session, Disconnected)
        session.publish_together([("nobody/hears", b"this")])
        broker.start()
        wait_for(session, Connected)
        session.hear_no_more("before/the/kill")
        for topic in ("too/early", "before/the/kill"):
            session.publish(topic, b"unheard")
        session.hear("after/it")
        session.publish("after/it", b"heard")
        wait_until(lambda: session.connected, "the connection")
        assert wait_for(session, Received).payload == b"heard"
