"""A session with more messages than its program takes: it holds a window of them, and loses none."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from brokers import Broker, Software, wait_for, wait_until

from dpagent.protocol.messages import MAX_MESSAGE_BYTES
from dpagent.transport.connection import WINDOW
from dpagent.transport.events import Acknowledged, Connected, Disconnected, Received
from dpagent.transport.session import MqttSession

KINDS: list[tuple[Software, str]] = [("mosquitto", "5"), ("mosquitto", "3.1.1"), ("amqtt", "3.1.1")]
MANY = 5_000
"""Twenty windows."""
_numbers = itertools.count()


def client() -> str:
    return f"pressed-{next(_numbers)}"


@pytest.fixture
def topic() -> str:
    return f"pressure/{next(_numbers)}"


def publish_all(sender: MqttSession, topic: str, payloads: list[bytes]) -> None:
    """Publish as fast as the broker acknowledges."""
    waiting: set[int | None] = set()
    left = iter(payloads)
    payload = next(left, None)
    while payload is not None or waiting:
        while payload is not None and sender.has_room:
            waiting.add(sender.publish(topic, payload))
            payload = next(left, None)
        event = sender.next_event(20.0)
        assert isinstance(event, Acknowledged), event
        waiting.discard(event.handle)


def subscribed(broker: Broker, name: str, topic: str, **changes: Any) -> None:
    """Make the persistent session of ``name`` known to the broker."""
    with (
        broker.session(name, topic, persistent=True, **changes) as receiver,
        broker.session(client(), **changes) as sender,
    ):
        wait_for(receiver, Connected)
        wait_for(sender, Connected)
        for _ in range(200):
            sender.publish(topic, b"ready?")
            event = receiver.next_event(0.1)
            if isinstance(event, Received):
                break
        while isinstance(event, Received) or receiver.bytes_down == 0:
            if isinstance(event, Received):
                receiver.acknowledge([event])
            event = receiver.next_event(0.5)


def numbered(count: int, size: int) -> list[bytes]:
    return [number.to_bytes(4, "big") + bytes(size - 4) for number in range(count)]


def take(receiver: MqttSession, wanted: set[bytes], *, acknowledge: bool = True) -> list[Received]:
    """Take messages until all that are wanted have come."""
    taken: list[Received] = []
    missing = set(wanted)
    while missing:
        message = wait_for(receiver, Received)
        taken.append(message)
        missing.discard(message.payload)
        if acknowledge:
            receiver.acknowledge([message])
    return taken


@pytest.mark.parametrize(("software", "protocol"), KINDS, ids="-".join)
@pytest.mark.parametrize("persistent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_program_that_takes_nothing_holds_a_window_and_then_gets_everything(
    request: pytest.FixtureRequest, software: Software, protocol: str, persistent: bool, topic: str
) -> None:
    """amqtt forgets what is not acknowledged within five seconds, so it gets fewer."""
    broker: Broker = request.getfixturevalue(software)
    payloads = numbered(MANY if software == "mosquitto" else 2_000, 200)
    with (
        broker.session(client(), topic, persistent=persistent, protocol=protocol) as receiver,
        broker.session(client(), protocol=protocol) as sender,
    ):
        wait_for(receiver, Connected)
        wait_for(sender, Connected)
        wait_until(lambda: sender.publish(topic, b"first") and receiver.next_event(0.1), "a subscription")
        publish_all(sender, topic, payloads)
        # All is at the broker; nobody has asked the session since.
        assert receiver._inbox.qsize() <= WINDOW
        assert len(take(receiver, set(payloads))) >= len(payloads)


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_only_what_was_not_acknowledged_comes_again(mosquitto: Broker, protocol: str, topic: str) -> None:
    name, payloads = client(), numbered(10, 8)
    subscribed(mosquitto, name, topic, protocol=protocol)
    with mosquitto.session(client(), protocol=protocol) as sender:
        wait_for(sender, Connected)
        publish_all(sender, topic, payloads)
    with mosquitto.session(name, topic, persistent=True, protocol=protocol) as receiver:
        taken = take(receiver, set(payloads), acknowledge=False)
        receiver.acknowledge(taken[:4])
        # The broker reads in order. It would not read on in a connection that another one by its name ends.
        receiver.publish(f"{topic}/after", b"")
        wait_for(receiver, Acknowledged)
    with mosquitto.session(name, topic, persistent=True, protocol=protocol) as receiver:
        again = [wait_for(receiver, Received).payload for _ in range(6)]
        assert again == payloads[4:]
        assert not isinstance(receiver.next_event(0.3), Received)


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_an_acknowledgement_of_an_earlier_connection_takes_nothing_from_the_next(
    new_broker: Any, protocol: str, topic: str
) -> None:
    """Ids of messages begin anew with each connection, so that an old one is another message's."""
    broker = new_broker("mosquitto", protocol).start()
    name, payloads = client(), numbered(10, 8)
    subscribed(broker, name, topic)
    with broker.session(name, topic, persistent=True) as receiver:
        wait_for(receiver, Connected)
        with broker.session(client()) as sender:
            wait_for(sender, Connected)
            publish_all(sender, topic, payloads)
        old = take(receiver, set(payloads), acknowledge=False)
        broker.stop()
        wait_for(receiver, Disconnected)
        broker.start()
        wait_for(receiver, Connected)
        receiver.acknowledge(old)
    with broker.session(name, topic, persistent=True) as receiver:
        assert [message.payload for message in take(receiver, set(payloads))] == payloads


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_a_broker_killed_in_the_middle_gives_the_rest_again(
    new_broker: Any, protocol: str, topic: str
) -> None:
    broker = new_broker("mosquitto", protocol).start()
    name, payloads = client(), numbered(2_000, 200)
    subscribed(broker, name, topic)
    with broker.session(client()) as sender:
        wait_for(sender, Connected)
        publish_all(sender, topic, payloads)
    broker.wait_until_stored()
    with broker.session(name, topic, persistent=True) as receiver:
        missing = set(payloads)
        for number in range(3):
            for _ in range(300):
                message = wait_for(receiver, Received)
                missing.discard(message.payload)
                receiver.acknowledge([message])
            broker.kill()
            wait_for(receiver, Disconnected)
            broker.start()
            assert missing, f"kill {number} came too late"
        take(receiver, missing)


def test_a_message_longer_than_any_is_held_no_longer_than_needed(mosquitto: Broker, topic: str) -> None:
    """MQTT 3.1.1 cannot tell the broker a largest size. Decoders refuse what arrives for its length."""
    with (
        mosquitto.session(client(), topic, protocol="3.1.1") as receiver,
        mosquitto.session(client(), protocol="3.1.1") as sender,
    ):
        wait_for(receiver, Connected)
        wait_for(sender, Connected)
        time.sleep(0.2)
        sender.publish(topic, bytes(10 * MAX_MESSAGE_BYTES))
        assert len(wait_for(receiver, Received).payload) == MAX_MESSAGE_BYTES + 1
