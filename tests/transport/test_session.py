"""The supervised session against real brokers: Mosquitto over MQTT 5 and 3.1.1, and amqtt."""

from __future__ import annotations

import itertools
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from brokers import Broker, Software, wait_for, wait_until

from benchmarks.certificates import broker_certificate
from dpagent.errors import BrokerError, ConfigurationError
from dpagent.transport.connection import Connection
from dpagent.transport.events import (
    Acknowledged,
    Connected,
    Disconnected,
    Received,
    Refused,
    Subscribed,
)
from dpagent.transport.session import MqttSession
from dpagent.transport.settings import MqttSettings

KINDS: list[tuple[Software, str]] = [("mosquitto", "5"), ("mosquitto", "3.1.1"), ("amqtt", "auto")]
IDS = ["mosquitto-5", "mosquitto-3.1.1", "amqtt-auto"]
# Falling back takes seconds; it is enough to do it where connections break.
STEADY_KINDS: list[tuple[Software, str]] = [*KINDS[:2], ("amqtt", "3.1.1")]
_numbers = itertools.count()


@pytest.fixture(params=STEADY_KINDS, ids="-".join)
def changes_of_broker(request: pytest.FixtureRequest) -> tuple[Broker, dict[str, Any]]:
    software, protocol = request.param
    return request.getfixturevalue(software), {"protocol": protocol}


@pytest.fixture
def topic() -> str:
    return f"tests/{next(_numbers)}/topic"


def client() -> str:
    return f"client-{next(_numbers)}"


Case = tuple[Broker, dict[str, Any]]


def deliver(sender: MqttSession, receiver: MqttSession, topic: str, payload: bytes) -> None:
    """Publish until it arrives: a subscription takes effect a moment after the connection."""

    def arrives() -> bool:
        sender.publish(topic, payload)
        return any(receiver.next_event(0.1) == Received(topic, payload) for _ in range(3))

    wait_until(arrives, f"a message on {topic}")


def retain(case: Case, topic: str, kept: Sequence[tuple[str, bytes]]) -> None:
    """Have the broker keep messages.

    amqtt acknowledges a message before it keeps it. It takes those of one client in order: when it has sent
    on a later one, it keeps all before.
    """
    broker, changes = case
    with broker.session(client(), f"{topic}/after", **changes) as sender:
        wait_for(sender, Connected)
        for name, payload in kept:
            sender.publish(name, payload, retain=True)
        deliver(sender, sender, f"{topic}/after", b"all are kept")


def take_all(receiver: MqttSession, topics: Sequence[str]) -> None:
    """Wait for a message on each; amqtt sends some of them twice."""
    missing = {*topics}
    while missing:
        missing.discard(wait_for(receiver, Received).topic)


def test_a_message_reaches_a_subscriber_and_is_acknowledged(changes_of_broker: Case, topic: str) -> None:
    broker, changes = changes_of_broker
    payload = bytes(range(256)) * 200
    with (
        broker.session(client(), topic, **changes) as receiver,
        broker.session(client(), **changes) as sender,
    ):
        wait_for(receiver, Connected)
        wait_for(sender, Connected)
        assert sender.connected
        deliver(sender, receiver, topic, payload)
        assert wait_for(sender, Acknowledged).handle > 0
        assert sender.bytes_up >= len(payload) + len(topic)
        assert receiver.bytes_down >= len(payload) + len(topic)
        assert receiver.bytes_up == 0


def test_every_publication_is_acknowledged_by_its_own_handle(changes_of_broker: Case, topic: str) -> None:
    broker, changes = changes_of_broker
    with broker.session(client(), **changes) as sender:
        wait_for(sender, Connected)
        handles = [sender.publish(topic, bytes([number])) for number in range(60)]
        assert None not in handles
        assert len(set(handles)) == 60
        assert {wait_for(sender, Acknowledged).handle for _ in range(60)} == set(handles)


def test_a_late_subscriber_gets_what_was_retained(changes_of_broker: Case, topic: str) -> None:
    broker, changes = changes_of_broker
    retain(changes_of_broker, topic, [(topic, b"old"), (topic, b"kept")])
    with broker.session(client(), topic, **changes) as receiver:
        assert wait_for(receiver, Received) == Received(topic, b"kept")


def test_only_what_was_subscribed_to_arrives(changes_of_broker: Case, topic: str) -> None:
    broker, changes = changes_of_broker
    with (
        broker.session(client(), f"{topic}/+", **changes) as receiver,
        broker.session(client(), **changes) as sender,
    ):
        wait_for(receiver, Connected)
        wait_for(sender, Connected)
        sender.publish(f"{topic}/a/b", b"deeper")
        sender.publish(topic, b"higher")
        deliver(sender, receiver, f"{topic}/last", b"end")


def test_a_session_follows_what_it_is_told_on_each_connection(changes_of_broker: Case, topic: str) -> None:
    broker, changes = changes_of_broker
    names = [f"{topic}/{number}" for number in range(20)]
    retain(changes_of_broker, topic, [(name, name.encode()) for name in names])
    with broker.session(client(), **changes) as sender:
        wait_for(sender, Connected)
        receiver = broker.session(client(), **changes)
        for _ in range(2):
            with receiver:
                receiver.follow(names)
                take_all(receiver, names)
                receiver.follow(names[5:])
                receiver.ask_again()
                take_all(receiver, names[5:])
                sender.publish(names[0], b"not followed any more")
                deliver(sender, receiver, names[9], b"end")


def test_a_wrong_password_is_a_sentence(changes_of_broker: Case, tmp_path: Path) -> None:
    broker, changes = changes_of_broker
    (tmp_path / "password").write_text("wrong\n")
    with (
        broker.session(client(), password_file=tmp_path / "password", **changes) as session,
        pytest.raises(BrokerError, match=rf"{broker.url} refuses the connection: .*mqtt\.password_file"),
    ):
        wait_for(session, Connected)


def test_a_password_that_is_not_there_is_noticed_before_connecting(mosquitto: Broker) -> None:
    with pytest.raises(ConfigurationError, match="password_file"):
        mosquitto.session(client(), password_file=Path("/nowhere/password"))


def test_a_certificate_authority_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("not a certificate")
    for file in (tmp_path / "ca.pem", tmp_path / "missing.pem"):
        settings = MqttSettings(url="mqtts://127.0.0.1:1", ca_file=file)
        session = MqttSession(settings, client_id="c", subscriptions=[], persistent=False)
        with pytest.raises(ConfigurationError, match=r"mqtt\.ca_file"):
            session.start()


def test_a_file_that_is_being_renewed_is_read_again(new_broker: Any, tmp_path: Path, topic: str) -> None:
    """A program ended for good if it connected again while the file of its authority was half written."""
    files = broker_certificate(tmp_path / "tls")
    broker, ca_file = new_broker(options=files.options).start(), tmp_path / "ca.crt"
    whole = files.authority.read_bytes()
    ca_file.write_bytes(whole)
    changes = {"url": broker.url.replace("mqtt:", "mqtts:"), "ca_file": ca_file}
    with broker.session(client(), topic, **changes) as session:
        wait_for(session, Connected)
        ca_file.write_bytes(whole[: len(whole) // 2])
        broker.stop()
        broker.start()
        wait_until(lambda: "mqtt.ca_file" in wait_for(session, Disconnected).reason, "the half file")
        ca_file.write_bytes(whole)
        wait_for(session, Connected)


@pytest.mark.parametrize(("software", "protocol"), KINDS, ids=IDS)
def test_a_session_waits_for_a_broker_that_comes_later(
    new_broker: Any, software: Software, protocol: str, topic: str
) -> None:
    broker = new_broker(software, protocol)
    with broker.session(client(), topic) as session:
        assert "no broker answers" in wait_for(session, Disconnected).reason
        assert not session.connected
        assert session.publish(topic, b"lost") is None
        assert session.bytes_up == 0
        broker.start()
        wait_for(session, Connected)
        deliver(session, session, topic, b"to myself")


@pytest.mark.parametrize(("software", "protocol"), KINDS, ids=IDS)
def test_a_session_survives_a_broker_that_is_killed_and_comes_back(
    new_broker: Any, software: Software, protocol: str, topic: str
) -> None:
    broker = new_broker(software, protocol).start()
    with broker.session(client(), topic) as session:
        wait_for(session, Connected)
        for number in range(2):
            broker.kill()
            assert wait_for(session, Disconnected).reason
            wait_until(lambda: not session.connected, "the loss of the connection")
            assert session.publish(topic, b"lost") is None
            broker.start()
            wait_for(session, Connected)
            deliver(session, session, topic, b"again %d" % number)


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_a_persistent_session_gets_what_came_while_it_was_away(
    mosquitto: Broker, topic: str, protocol: str
) -> None:
    name = client()
    with mosquitto.session(client(), protocol=protocol) as sender:
        wait_for(sender, Connected)
        with mosquitto.session(name, topic, persistent=True, protocol=protocol) as receiver:
            wait_for(receiver, Subscribed)
        handles = [sender.publish(topic, b"away %d" % number) for number in range(5)]
        while wait_for(sender, Acknowledged).handle != handles[-1]:
            pass
    with mosquitto.session(name, topic, persistent=True, protocol=protocol) as receiver:
        came = {wait_for(receiver, Received).payload for _ in range(5)}
    assert came == {b"away %d" % number for number in range(5)}


def test_a_persistent_session_is_none_of_those_that_end() -> None:
    """Mosquitto 2.0.11 crashes by its list of these: see :mod:`dpagent.transport.connection`."""
    session_expiry = b"\x11"  # MQTT 5, 3.1.2.11.2
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        settings = MqttSettings(url=f"mqtt://127.0.0.1:{listener.getsockname()[1]}", protocol="5")
        for persistent, expected in ((True, b"\xff\xff\xff\xff"), (False, bytes(4))):
            session = MqttSession(settings, client_id="one", subscriptions=[], persistent=persistent)
            session.start()
            try:
                with listener.accept()[0] as connection:
                    connection.settimeout(20)
                    assert session_expiry + expected in connection.recv(1024)
            finally:
                session.stop()


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_a_session_that_is_not_persistent_gets_nothing_of_it(
    mosquitto: Broker, topic: str, protocol: str
) -> None:
    name = client()
    with mosquitto.session(client(), protocol=protocol) as sender:
        wait_for(sender, Connected)
        with mosquitto.session(name, topic, protocol=protocol) as receiver:
            wait_for(receiver, Connected)
            deliver(sender, receiver, topic, b"there")
        handle = sender.publish(topic, b"away")
        while wait_for(sender, Acknowledged).handle != handle:
            pass
        with mosquitto.session(name, topic, protocol=protocol) as receiver:
            wait_for(receiver, Connected)
            deliver(sender, receiver, topic, b"end")  # would have been preceded by b"away"
            assert receiver.bytes_down % (len(topic) + len(b"end")) == 0


def test_nothing_is_published_before_start_and_after_stop(mosquitto: Broker, topic: str) -> None:
    session = mosquitto.session(client(), topic)
    assert session.publish(topic, b"x") is None
    session.start()
    wait_for(session, Connected)
    session.stop()
    assert session.publish(topic, b"x") is None
    assert session.bytes_up == 0
    session.stop()


def test_nothing_that_tells_senders_apart_travels_beside_the_payload(mosquitto: Broker, topic: str) -> None:
    import paho.mqtt.client as paho
    from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

    arrived: list[Any] = []
    observer = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
    observer.username_pw_set("tester", mosquitto.password_file.read_text().strip())
    observer.on_message = lambda _client, _data, message: arrived.append(message)
    observer.connect("127.0.0.1", mosquitto.port)
    observer.loop_start()
    try:
        with mosquitto.session(client(), protocol="5") as sender:
            wait_for(sender, Connected)
            handle = sender.publish(topic, b"x", retain=True)
            while wait_for(sender, Acknowledged).handle != handle:
                pass
            observer.subscribe(topic, 1)
            wait_until(lambda: arrived, "the message")
    finally:
        observer.disconnect()
        observer.loop_stop()
    # An expiry, for one, would show by how much a board's clock is off.
    assert arrived[0].properties.isEmpty()


def _take_turns(*sessions: MqttSession) -> None:
    for _ in range(150):
        for session in sessions:
            session.next_event(0.1)


def test_two_programs_under_one_client_id_do_not_fight_for_ever(mosquitto: Broker) -> None:
    """Two coordinators that throw each other out each second would both look busy."""
    name = client()
    with (
        mosquitto.session(name, protocol="5", persistent=True) as first,
        mosquitto.session(name, protocol="5", persistent=True) as second,
        pytest.raises(BrokerError, match="another program"),
    ):
        _take_turns(first, second)


# --- versions -----------------------------------------------------------------------------------


def test_auto_falls_back_for_a_broker_that_speaks_the_older_version_only(amqtt: Broker, topic: str) -> None:
    with amqtt.session(client(), topic, protocol="auto") as session:
        wait_for(session, Connected)
        deliver(session, session, topic, b"x")


def test_insisting_on_version_5_is_a_sentence_if_the_broker_does_not_speak_it(amqtt: Broker) -> None:
    """amqtt says nothing to a version 5 CONNECT with properties: no proof, so a hint and no end."""
    with amqtt.session(client(), protocol="5") as session:
        assert "set mqtt.protocol: auto" in wait_for(session, Disconnected).reason


def test_a_refused_publication_is_a_sentence(tmp_path: Path, new_broker: Any) -> None:
    broker = new_broker("mosquitto", "5")
    rules = broker.directory / "acl"
    rules.write_text("user tester\ntopic read #\n")
    rules.chmod(0o600)
    configuration = broker.directory / "mosquitto.conf"
    configuration.write_text(configuration.read_text() + f"acl_file {rules}\n")
    broker.start()
    with broker.session(client()) as session:
        wait_for(session, Connected)
        session.publish("t", b"x")
        with pytest.raises(BrokerError, match="no permission to publish"):
            wait_for(session, Disconnected)


def test_stopping_waits_for_no_pause_of_the_library(
    new_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses between attempts are the session's own."""
    slept: list[float] = []
    session = new_broker().session(client())  # Its configuration waits for a program.

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():  # where `wait_for` sleeps
            slept.append(seconds)

    monkeypatch.setattr("paho.mqtt.client.time.sleep", sleep)
    with session:
        assert "no broker answers" in wait_for(session, Disconnected).reason
    assert slept == []


def test_a_signal_does_not_prolong_a_wait() -> None:
    """SIGTERM must end a program that waits. Power: with a SimpleQueue, one of about 100 calls never ends."""
    session = MqttSession(MqttSettings(), client_id=None, subscriptions=[], persistent=False)
    done = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until = time.monotonic() + 30.0
        while not done.wait(0.0013) and time.monotonic() < until:
            signal.pthread_kill(main, signal.SIGUSR1)
        if not done.is_set():
            session._inbox.put((cast(Connection, None), Refused("never")))

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        events = [session.next_event(0.002) for _ in range(1_000)]
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert not any(events)


def test_a_prefix_is_the_brokers_alone(mosquitto: Broker, topic: str) -> None:
    """A program knows its fleet's topics; whoever listens at the broker sees them below the prefix."""
    with (
        mosquitto.session(client(), f"tenant/7/{topic}") as outside,
        mosquitto.session(client(), topic) as elsewhere,
        mosquitto.session(client(), topic, topic_prefix="tenant/7") as receiver,
        mosquitto.session(client(), topic_prefix="tenant/7") as sender,
    ):
        for session in (outside, elsewhere, receiver, sender):
            wait_for(session, Connected)
        for session in (outside, elsewhere):
            wait_for(session, Subscribed)
        deliver(sender, receiver, topic, b"payload")
        assert wait_for(outside, Received) == Received(f"tenant/7/{topic}", b"payload")
        assert elsewhere.bytes_down == 0


def test_a_program_that_must_be_known_again_takes_no_random_name(mosquitto: Broker) -> None:
    settings = mosquitto.settings(client_id="x-{random}")
    with pytest.raises(ConfigurationError, match=r"mqtt\.client_id"):
        MqttSession(settings, client_id=client(), subscriptions=[], persistent=True)
