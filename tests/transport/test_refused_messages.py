"""A broker that refuses one message, or one topic: it costs that alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from brokers import HURRIED, wait_for, wait_until
from hostile_brokers import HostileBroker, Link, publication

from dpagent.errors import BrokerError
from dpagent.transport.events import Disconnected, Received, Subscribed
from dpagent.transport.session import MqttSession, Subscription
from dpagent.transport.settings import MqttSettings

VERSIONS = ["3.1.1", "5"]
SUBSCRIBE, UNSUBSCRIBE, PUBLISH, PUBACK = 0x82, 0xA2, 0x32, 0x40
QUOTA_EXCEEDED, NOT_AUTHORIZED = 0x97, 0x87


@contextmanager
def connected(protocol: str, *, persistent: bool = False) -> Iterator[tuple[MqttSession, Link]]:
    """A session with a subscription of its own, at a broker that the test plays."""
    with HostileBroker() as broker:
        session = MqttSession(
            MqttSettings.checked({"url": broker.url, "protocol": protocol}),
            client_id="one" if persistent else None, subscriptions=[Subscription("t")],
            persistent=persistent, pace=HURRIED,
        )  # fmt: skip
        with session, broker.link() as link:
            link.greet()
            link.take_subscription()
            wait_for(session, Subscribed)
            yield session, link


def answer(link: Link, kind: int, body: bytes, *reasons: int) -> None:
    """To a packet that begins with its identifier."""
    properties = b"\0" if link.version == 5 and kind == 0x90 else b""
    packet = body[:2] + properties + bytes(reasons)
    link.send(bytes([kind, len(packet)]) + packet)


def goes_on(session: MqttSession, link: Link) -> bool:
    link.send(publication("t", b"still here", 9, version=link.version))
    return wait_for(session, Received).payload == b"still here"


@pytest.mark.parametrize("protocol", VERSIONS)
def test_a_topic_that_a_program_can_do_without_is_refused_alone(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, a broker that refused the receipt of one fragment ended the agent."""
    with connected(protocol) as (session, link):
        for topic in ("receipts/of/one", "receipts/of/another"):
            session.hear(topic)
            kind, body = link.packet()
            assert (kind, topic.encode() in body) == (SUBSCRIBE, True)
            answer(link, 0x90, body, 0x80 if protocol == "3.1.1" else NOT_AUTHORIZED)
        assert goes_on(session, link)
        assert caplog.text.count("does not take everything") == 1
        assert "receipts/of" not in caplog.text, "who is shown the log would know whose fragment it is"
        session.hear_no_more("receipts/of/one")
        assert link.packet()[0] in (UNSUBSCRIBE, PUBACK)


@pytest.mark.parametrize("protocol", VERSIONS)
def test_a_topic_that_it_follows_is_not(protocol: str) -> None:
    with connected(protocol) as (session, link):
        session.follow(["model/0"])
        answer(link, 0x90, link.packet()[1], 0x80)
        with pytest.raises(BrokerError, match="no permission to subscribe to one of model/0"):
            wait_for(session, Disconnected)


@pytest.mark.parametrize("protocol", VERSIONS)
def test_a_broker_that_answers_no_subscription_is_sent_no_more(protocol: str) -> None:
    """Each that waits for its answer is kept."""
    with connected(protocol) as (session, link):
        for number in range(300):
            session.hear(f"receipts/{number}")
        assert not session.has_room
        for _ in range(100):
            answer(link, 0x90, link.packet()[1], 1)
        wait_until(lambda: session.has_room, "room")


@pytest.mark.parametrize("protocol", VERSIONS)
def test_an_answer_to_no_subscription_ends_the_connection(protocol: str) -> None:
    """Each was an event that waited for the program: a flood of them filled the memory."""
    with connected(protocol) as (session, link):
        answer(link, 0x90, b"\x77\x77", 1)
        assert "no subscription" in wait_for(session, Disconnected).reason
        assert link.is_closed()


def test_a_message_that_is_refused_for_a_while_costs_itself_alone() -> None:
    with connected("5") as (session, link):
        session.publish("fragments", b"one")
        kind, body = link.packet()
        assert kind == PUBLISH
        number = body[2 + len("fragments") :]
        answer(link, PUBACK, number, QUOTA_EXCEEDED)
        assert goes_on(session, link)
        assert session.has_room


def test_one_that_may_never_be_published_ends_the_session() -> None:
    with connected("5") as (session, link):
        session.publish("fragments", b"one")
        answer(link, PUBACK, link.packet()[1][2 + len("fragments") :], NOT_AUTHORIZED)
        with pytest.raises(BrokerError, match="no permission to publish"):
            wait_for(session, Disconnected)


@pytest.mark.parametrize("protocol", VERSIONS)
def test_a_broker_that_acknowledges_and_reads_nothing_is_sent_no_more(protocol: str) -> None:
    """Identifiers are counted: it can guess those of what it has not read. Before, all that the agent sent
    again piled up in its memory."""
    with connected(protocol) as (session, link):
        link.stop_reading()
        sent, payload = 0, bytes(50_000)
        while True:
            for _ in range(200):
                if session.has_room and session.publish("fragments", payload) is not None:
                    sent += 1
                    break
                session.next_event(0.01)
            else:
                break
            assert sent < 1_000, "its writes pile up"
            # One for the subscription came before.
            link.send(b"\x40\x02" + (sent + 1).to_bytes(2, "big"))
            session.next_event(0.0)
        assert session.connected
        assert sent > 200


@pytest.mark.parametrize("protocol", VERSIONS)
def test_what_is_sent_leaves_while_the_program_takes_nothing(protocol: str) -> None:
    """A window of messages is full, and more have come. Before, all waited until the program took one."""
    with connected(protocol) as (session, link):
        for number in range(1, 401):
            link.send(publication("t", bytes(100), number, version=link.version))
        wait_until(lambda: not session._room._free, "a full window")
        session.publish("fragments", b"one")
        while link.packet()[0] != PUBLISH:
            pass
        assert session._inbox.qsize() > 0, "nothing was taken"
        for _ in range(400):
            wait_for(session, Received)
