"""Each role can do what it has a right to, and nothing else; and how each broker says so."""

from __future__ import annotations

import os

import pytest
from brokers import wait_for, wait_until
from observed import Observations
from servers import BOARDS, FLEET, Server

from dpagent.errors import BrokerError
from dpagent.protocol.access import Role, rights_of
from dpagent.protocol.topics import Topics
from dpagent.transport.events import Acknowledged, Connected, Disconnected, Received, Subscribed
from dpagent.transport.session import MqttSession

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(600)]

TOPICS = Topics(FLEET)
NAMES = {Role.COORDINATOR: "coordinator", Role.BOARD: BOARDS[0]}
ASSET = TOPICS.asset_chunk("frozen-network", 0)
PLACES = (TOPICS.plan, TOPICS.model_chunk(7), ASSET, TOPICS.receipts, TOPICS.fragments)
FORBIDDEN = (TOPICS.mixer, f"{FLEET}/plan", "dpagent/v1/another/plan", f"dpagent/v1/{FLEET}/plan/deeper")


def allowed(role: Role, may: str, topic: str) -> bool:
    rights = rights_of(TOPICS, mixed=False, enrolled=False)
    filters = [each.topics for each in rights if (each.role, each.may) == (role, may)]
    return any(fits(each, topic) for each in filters)


def fits(filter_: str, topic: str) -> bool:
    ours, theirs = filter_.split("/"), topic.split("/")
    return len(ours) == len(theirs) and all(a in ("+", b) for a, b in zip(ours, theirs, strict=True))


def other(role: Role) -> str:
    """Somebody who may read what this role writes, and write what it reads."""
    return BOARDS[1] if role is Role.COORDINATOR else "coordinator"


def connected(session: MqttSession) -> MqttSession:
    wait_for(session, Connected)
    return session


def hears(session: MqttSession, payload: bytes) -> bool:
    """Whether a message comes, before one whose payload begins with ``end``."""
    while True:
        message = wait_for(session, Received).payload
        if message == payload:
            return True
        if message.startswith(b"end"):
            return False


def heard_until_subscribed(session: MqttSession) -> list[bytes]:
    """What comes before the broker says that it has subscribed this session: some send first.

    Raises:
        BrokerError: It refuses.
        ConnectionError: It ends the connection.
    """
    heard: list[bytes] = []

    def is_subscribed() -> bool:
        event = session.next_event(0.1)
        if isinstance(event, Disconnected):
            raise ConnectionError(event.reason)
        if isinstance(event, Received):
            heard.append(event.payload)
        return isinstance(event, Subscribed)

    wait_until(is_subscribed, "the subscription")
    return heard


def answer_to(session: MqttSession, topic: str, payload: bytes) -> str:
    """What the broker answers to a publication."""
    wait_until(lambda: session.publish(topic, payload) is not None, "a connection")
    found: list[str] = []

    def answers() -> bool:
        try:
            event = session.next_event(0.1)
        except BrokerError:
            found.append("refused with a reason")
        else:
            if isinstance(event, Acknowledged):
                found.append("acknowledged, and dropped")
            elif isinstance(event, Disconnected):
                found.append("the connection ends")
        return bool(found)

    wait_until(answers, "an answer")
    return found[0]


@pytest.fixture
def with_rules(server: Server) -> Server:
    if not server.has_rules:
        pytest.skip("the demo's amqtt has one user, and no access rules")
    return server


@pytest.mark.parametrize("role", NAMES)
@pytest.mark.parametrize("topic", PLACES)
def test_a_role_writes_what_it_may_and_nothing_else(
    with_rules: Server, observations: Observations, role: Role, topic: str
) -> None:
    server, payload = with_rules, b"payload %s" % os.urandom(4).hex().encode()
    rightful = next(name for each, name in NAMES.items() if allowed(each, "write", topic))
    reader = BOARDS[1] if rightful == "coordinator" else "coordinator"
    with (
        server.session(reader, topic) as listener,
        server.session(NAMES[role]) as writer,
        server.session(rightful) as last,
    ):
        wait_for(listener, Subscribed)
        connected(writer)
        connected(last)
        answer = answer_to(writer, topic, payload)
        last.publish(topic, b"end %s" % os.urandom(4).hex().encode())
        assert hears(listener, payload) is allowed(role, "write", topic)
    if not allowed(role, "write", topic):
        observations.note("a publication that is not allowed", answer)


@pytest.mark.parametrize("role", NAMES)
@pytest.mark.parametrize("topic", PLACES)
def test_a_role_reads_what_it_may_and_nothing_else(
    with_rules: Server, observations: Observations, role: Role, topic: str
) -> None:
    server, payload = with_rules, b"payload %s" % os.urandom(4).hex().encode()
    rightful = next(name for each, name in NAMES.items() if allowed(each, "write", topic))
    # What it may read, to know when nothing else comes.
    own = TOPICS.fragments if role is Role.COORDINATOR else TOPICS.receipts
    with server.session(NAMES[role], own) as reader, server.session(rightful) as writer:
        wait_for(reader, Subscribed)
        connected(writer)
        try:
            if topic != own:
                reader.follow([topic])
                heard_until_subscribed(reader)
        except (BrokerError, ConnectionError) as error:
            assert not allowed(role, "read", topic)
            answer = "is refused" if isinstance(error, BrokerError) else "the connection ends"
        else:
            answer = "granted, and delivers nothing"
            writer.publish(topic, payload)
            wait_for(writer, Acknowledged)
            with server.session(other(role)) as last:
                connected(last)
                last.publish(own, b"end %s" % os.urandom(4).hex().encode())
                assert hears(reader, payload) is allowed(role, "read", topic)
    if not allowed(role, "read", topic):
        observations.note("a subscription that is not allowed", answer)


@pytest.mark.parametrize("topic", FORBIDDEN)
def test_nobody_writes_elsewhere(with_rules: Server, observations: Observations, topic: str) -> None:
    """Nobody could read it there, so that the answer has to do: the same as of what is seen not to arrive."""
    for name in NAMES.values():
        with with_rules.session(name) as writer:
            connected(writer)
            observations.note("a publication that is not allowed", answer_to(writer, topic, b"anything"))


def test_what_is_retained_reaches_exact_topics_and_wildcards_do_not_matter(
    server: Server, observations: Observations
) -> None:
    topic = TOPICS.model_chunk(3)
    with server.session("coordinator") as writer:
        connected(writer)
        writer.publish(topic, b"retained", retain=True)
        wait_for(writer, Acknowledged)
    with server.session(BOARDS[0], topic) as late:
        assert wait_for(late, Received) == Received(topic, b"retained")
        protocol = "5" if late._protocol == 5 else "3.1.1"
        observations.note("MQTT", protocol)

    def wildcard() -> str:
        try:
            with server.session(BOARDS[0], TOPICS.receipts) as late, server.session("coordinator") as writer:
                wait_for(late, Subscribed)
                connected(writer)
                late.follow([TOPICS.model_chunks])
                heard = heard_until_subscribed(late)
                writer.publish(TOPICS.receipts, b"end")
                comes = b"retained" in heard or hears(late, b"retained")
                return "delivers what is retained" if comes else "delivers nothing retained"
        except BrokerError:
            return "is refused"
        except ConnectionError:
            return "ends the connection"

    observations.note("a board's subscription with a wildcard", wildcard())


def test_a_broker_that_is_stopped_and_started_keeps_what_it_acknowledged(
    server: Server, observations: Observations
) -> None:
    topic = TOPICS.model_chunk(4)
    with server.session("coordinator", TOPICS.fragments, client_id="keeper", persistent=True) as keeper:
        wait_for(keeper, Subscribed)
        keeper.publish(topic, b"retained", retain=True)
        wait_for(keeper, Acknowledged)
    with server.session(BOARDS[0]) as writer:
        connected(writer)
        writer.publish(TOPICS.fragments, b"queued")
        wait_for(writer, Acknowledged)
    server.stop()
    server.start()
    # Both have to be there, or what comes first is what is published now.
    with server.session("coordinator") as last, server.session(BOARDS[0], topic) as board:
        connected(last)
        heard = heard_until_subscribed(connected(board))
        last.publish(topic, b"end")
        retained = "kept" if b"retained" in heard or hears(board, b"retained") else "lost"
    observations.note("what is retained, over a restart", retained)
    with (
        server.session("coordinator", TOPICS.fragments, client_id="keeper", persistent=True) as keeper,
        server.session(BOARDS[0]) as last,
    ):
        heard = heard_until_subscribed(connected(keeper))
        connected(last)
        last.publish(TOPICS.fragments, b"end")
        queued = "kept" if b"queued" in heard or hears(keeper, b"queued") else "lost"
    observations.note("what is queued for the coordinator, over a restart", queued)


def test_workers_share_fragments_and_read_and_write_nothing_else(with_rules: Server) -> None:
    server = with_rules
    if server.software != "mosquitto" or server.admits != "passwords":
        pytest.skip("a broker of workers is Mosquitto or EMQX")
    sent = [b"fragment %d" % number for number in range(20)]
    shared = [server.shared_session("worker", TOPICS.fragments) for _ in range(2)]
    with shared[0] as one, shared[1] as two, server.session(BOARDS[0]) as board:
        for each in (one, two):
            wait_for(each, Subscribed)
        connected(board)
        for each in sent:
            wait_until(lambda each=each: board.publish(TOPICS.fragments, each) is not None, "room")
        found: list[tuple[int, bytes]] = []

        def all_came() -> bool:
            for number, session in enumerate((one, two)):
                if isinstance(event := session.next_event(0.05), Received):
                    found.append((number, event.payload))
            return len(found) >= len(sent)

        wait_until(all_came, "all fragments")
        assert sorted(payload for _, payload in found) == sorted(sent), "each once"
        assert {number for number, _ in found} == {0, 1}
    with server.session("coordinator", TOPICS.fragments) as reader, server.session("worker") as worker:
        wait_for(reader, Subscribed)
        connected(worker)
        assert answer_to(worker, TOPICS.fragments, b"forged") == "refused with a reason"
    with (
        server.session("worker", TOPICS.plan) as reader,
        server.shared_session("worker", TOPICS.fragments) as last,
        server.session("coordinator") as coordinator,
        server.session(BOARDS[0]) as board,
    ):
        for each in (reader, last):
            wait_for(each, Subscribed)
        connected(coordinator)
        connected(board)
        coordinator.publish(TOPICS.plan, b"a plan")
        board.publish(TOPICS.fragments, b"end")
        assert wait_for(last, Received).payload == b"end"
        assert not isinstance(reader.next_event(1.0), Received)
