"""What a broker may not send ends the connection; what is too long is cut; and the session goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from typing import Any

import pytest
from brokers import HURRIED, Broker, reserved_port, wait_for, wait_until
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from hostile_brokers import HostileBroker, Link, length, publication
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from dpagent.protocol.messages import MAX_MESSAGE_BYTES
from dpagent.transport.bounds import (
    LONGEST_PAYLOAD,
    MAX_PACKET_BYTES,
    BoundedClient,
    BoundedSocket,
    Publication,
    RulesBrokenError,
)
from dpagent.transport.events import Connected, Disconnected, Received
from dpagent.transport.session import MqttSession, Pace, Subscription
from dpagent.transport.settings import MqttSettings

GREETING = b"\x20\x02\0\0"
VERSIONS = ["3.1.1", "5"]


class Stream:
    """A socket whose bytes come in parts; enough of one for a :class:`BoundedSocket`."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = list(parts)

    def recv(self, buffer_size: int) -> bytes:
        if not self._parts:
            return b""
        part = self._parts.pop(0)
        if len(part) > buffer_size:
            self._parts.insert(0, part[buffer_size:])
        return part[:buffer_size]

    def send(self, buffer: bytes | bytearray) -> int:
        return len(buffer)

    def close(self) -> None:
        pass

    def fileno(self) -> int:
        return 0

    def setblocking(self, flag: bool) -> None:
        pass


def taking(found: list[Any]) -> Callable[[list[Publication]], list[Publication]]:
    """A program that takes all messages."""

    def take(publications: list[Publication]) -> list[Publication]:
        found.extend(publications)
        return []

    return take


def passed(*parts: bytes, has_properties: bool = False) -> list[bytes | Publication]:
    """What reaches the library, in pieces, and the program, in order."""
    found: list[bytes | Publication] = []
    bounded = BoundedSocket(Stream(*parts), has_properties=has_properties, arrived=taking(found))
    bounded._sign_due_at = math.inf  # It comes of a clock.
    while True:
        try:
            data = bounded.recv(1_000)
        except BlockingIOError:
            continue
        if not data:
            return joined(found)
        found.append(data)


def joined(found: list[bytes | Publication]) -> list[bytes | Publication]:
    """The same, with bytes that follow each other in one piece."""
    pieces: list[bytes | Publication] = []
    for each in found:
        if isinstance(each, bytes) and pieces and isinstance(before := pieces[-1], bytes):
            pieces[-1] = before + each
        else:
            pieces.append(each)
    return pieces


PING = b"\xd0\0"


@given(
    payloads=st.lists(st.binary(max_size=300), max_size=5),
    cuts=st.lists(st.integers(1, 200), max_size=20),
    version=st.sampled_from([4, 5]),
)
def test_messages_reach_the_program_and_other_packets_the_library_however_they_come(
    payloads: list[bytes], cuts: list[int], version: int
) -> None:
    greeting = GREETING if version == 4 else b"\x20\x03\0\0\0"
    data, expected = greeting, list[bytes | Publication]([greeting])
    for number, payload in enumerate(payloads, 1):
        data += publication("a/b", payload, number, version=version) + PING
        expected += [Publication("a/b", payload, number), PING]
    parts, at = [], 0
    for cut in cuts:
        parts.append(data[at : at + cut])
        at += cut
    found = passed(*filter(None, [*parts, data[at:]]), has_properties=version == 5)
    assert found == expected


def test_properties_are_passed_over_and_a_message_of_qos_0_has_no_number() -> None:
    properties = b"\x26\0\1a" + b"\0\x78" + b"b" * 120  # a user property
    long = bytes([128 | len(properties) & 127, len(properties) >> 7]) + properties
    for kind, number in ((b"\x30", b""), (b"\x3b", b"\2\1")):
        body = b"\0\1t" + number + long + b"payload"
        message = kind + length(len(body)) + body
        expected = Publication("t", b"payload", None if not number else 0x201)
        assert passed(GREETING, message, has_properties=True) == [GREETING, expected]


@pytest.mark.parametrize("size", [MAX_PACKET_BYTES - 1, MAX_PACKET_BYTES, MAX_PACKET_BYTES + 1, 3_000_000])
def test_a_long_message_is_cut_and_what_follows_is_whole(size: int) -> None:
    long, after = b"\x30" + length(size) + b"\0\1t" + bytes(size - 3), publication("t", b"x", 1, version=4)
    kept = min(size - 3, LONGEST_PAYLOAD)
    expected = [GREETING, Publication("t", bytes(kept), None), Publication("t", b"x", 1)]
    assert passed(GREETING + long + after) == expected
    assert passed(GREETING, *(long[at : at + 9_000] for at in range(0, len(long), 9_000)), after) == expected


def test_a_message_whose_properties_are_longer_than_any_packet_is_cut_as_well() -> None:
    """Any client gives its message such properties, and a broker may not mind what this side told it."""
    properties = 4 * (b"\x26\0\1a" + (20_000).to_bytes(2, "big") + bytes(20_000))
    body = b"\0\1t\0\7" + length(len(properties)) + properties + b"payload"
    long, after = b"\x32" + length(len(body)) + body, publication("t", b"x", 8, version=5)
    expected = [Publication("t", bytes(LONGEST_PAYLOAD), 7), Publication("t", b"x", 8)]
    assert passed(GREETING + long + after, has_properties=True) == [GREETING, *expected]


FORBIDDEN = {
    "a message before the greeting": publication("t", b"x", 1, version=4),
    "a second greeting": GREETING * 2,
    "a message at QoS 2": GREETING + b"\x34\x06\0\1t\0\1x",
    "a message at QoS 3": GREETING + b"\x36\x06\0\1t\0\1x",
    "the end of a message at QoS 2": GREETING + b"\x62\x02\0\1",
    "a request": GREETING + b"\xc0\0",
    "type 0": GREETING + b"\0\0",
    "an authentication": GREETING + b"\xf0\0",
    "a length of five bytes": GREETING + b"\x30\xff\xff\xff\xff\1",
    "a long answer": GREETING + b"\x90" + length(MAX_PACKET_BYTES + 1),
    "a topic that does not end": GREETING + b"\x30\x04\0\5ab",
    "a message without a number": GREETING + b"\x32\x03\0\1t",
    "a topic that is no text": GREETING + b"\x30\x03\0\1\xff",
    "a flood to acknowledge": GREETING + publication("t", b"x", 1, version=4) * 4_097,
}


@pytest.mark.parametrize("data", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_no_broker_may_send_is_refused(data: bytes) -> None:
    with pytest.raises(RulesBrokenError):
        passed(data)


@pytest.mark.parametrize(
    "properties",
    [b"\x80" * 60_000 + b"\0", b"\x80\x80", b"\x05abcd"],
    ids=["a length of many bytes", "a length that does not end", "properties that do not end"],
)
def test_properties_of_no_length_are_refused(properties: bytes) -> None:
    body = b"\0\1t\0\1" + properties
    with pytest.raises(RulesBrokenError):
        passed(GREETING + b"\x32" + length(len(body)) + body, has_properties=True)


def test_while_a_program_takes_nothing_the_library_goes_on_and_nothing_is_lost() -> None:
    messages = [Publication("t", bytes([number]), None) for number in range(5)]
    data = b"".join(b"\x30\x04\0\1t" + each.payload for each in messages)
    found: list[Publication] = []
    room = 2

    def take(publications: list[Publication]) -> list[Publication]:
        nonlocal room
        now, room = min(room, len(publications)), max(0, room - len(publications))
        found.extend(publications[:now])
        return publications[now:]

    stream = Stream(GREETING + data, PING)
    bounded = BoundedSocket(stream, has_properties=False, arrived=take)
    bounded._sign_due_at = math.inf
    came = b""
    while GREETING not in came:
        came += bounded.recv(8)
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            bounded.recv(1)
    assert found == messages[:2]
    assert stream._parts == [PING], "not read"
    assert bounded.pending(), "or the library would wait"
    bounded._sign_due_at = 0.0
    assert bounded.recv(9) == PING, "the broker is there, though nobody reads"
    bounded._sign_due_at = math.inf
    room = 9
    with pytest.raises(BlockingIOError):
        bounded.recv(1)
    assert found == messages
    assert bounded.recv(2) == PING


def test_a_broker_that_takes_answers_may_send_for_ever() -> None:
    message = publication("t", b"x", 1, version=4)
    found: list[Publication] = []
    bounded = BoundedSocket(
        Stream(GREETING, *[message] * 10_000), has_properties=False, arrived=taking(found)
    )
    while True:
        try:
            if not bounded.recv(1 << 16):
                break
        except BlockingIOError:
            bounded.send(b"answer")
    assert len(found) == 10_000


class Trickle(Stream):
    """A socket of which the other side takes a byte now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def send(self, buffer: bytes | bytearray) -> int:
        self._calls += 1
        if self._calls % 1_000:
            raise BlockingIOError
        return 1


def slow_client() -> BoundedClient:
    client = BoundedClient(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv311)
    client._sock = Trickle()
    return client


def test_what_may_be_lost_does_not_pile_up_for_a_broker_that_takes_less() -> None:
    client = slow_client()
    for _ in range(20_000):
        client.publish_together([("t", bytes(16))], properties=b"")
    assert len(client._out_packet) < 300


def test_a_broker_that_takes_less_than_it_sends_is_left() -> None:
    client = slow_client()
    for _ in range(4_000):
        client.acknowledge([1])
        client.require_answers_taken()
    for _ in range(1_000):
        client.acknowledge([1])
    with pytest.raises(RulesBrokenError, match="takes less than it sends"):
        client.require_answers_taken()


def session_at(
    broker: HostileBroker, protocol: str, pace: Pace = HURRIED, *, keepalive_s: int = 30
) -> MqttSession:
    settings = MqttSettings.checked({"url": broker.url, "protocol": protocol})
    settings = settings.with_values({"keepalive_s": keepalive_s})  # shorter than anybody may set it
    return MqttSession(
        settings, client_id=None, subscriptions=[Subscription("t")], persistent=False, pace=pace
    )


def greeted(link: Link, session: MqttSession) -> None:
    link.greet()
    link.take_subscription()
    wait_for(session, Connected)


@pytest.mark.parametrize("protocol", VERSIONS)
@pytest.mark.parametrize(
    "data",
    [
        b"\x62\x02\0\1", b"\x30\xff\xff\xff\xff\1",
        # Malformed within their length, which only the library finds out.
        b"\x32\x02\xff\xff", b"\x32\x01\0", b"\x32\x03\0\1t", b"\x90\x01\0", b"\x40\x01\0",
        b"\x32\x05\0\1\xff\0\1",
    ],
    ids=bytes.hex,
)  # fmt: skip
def test_a_broker_that_breaks_the_rules_is_left_and_tried_again(data: bytes, protocol: str) -> None:
    with HostileBroker() as broker, session_at(broker, protocol) as session:
        with broker.link() as link:
            greeted(link, session)
            link.send(data)
            assert "no broker answers" not in wait_for(session, Disconnected).reason
            assert not session.connected
            assert link.is_closed()
        session.next_event(0.3)
        session.next_event(0.0)
        with broker.link() as link:
            greeted(link, session)
            link.send(publication("t", b"at last", 7, version=link.version))
            assert wait_for(session, Received).payload == b"at last"


def test_pauses_double_as_long_as_the_broker_breaks_the_rules() -> None:
    pace, pauses = Pace(pause_s=100.0, longest_s=500.0), []
    with HostileBroker() as broker, session_at(broker, "3.1.1", pace) as session:
        for _ in range(4):
            with broker.link() as link:
                greeted(link, session)
                link.send(b"\x62\x02\0\1")
                wait_for(session, Disconnected)
            assert session._start_at is not None
            pauses.append(session._start_at - time.monotonic())
            session._start_at = 0.0  # now
            session.next_event(0.0)
    assert pauses == pytest.approx([100.0, 200.0, 400.0, 500.0], rel=0.2)


@pytest.mark.parametrize("protocol", VERSIONS)
@pytest.mark.parametrize("pieces", [1, 12], ids=["in messages", "in one message"])
def test_what_arrives_shows_that_the_broker_is_there(protocol: str, pieces: int) -> None:
    """On a slow link, the answer to a ping waits behind all that the broker has sent before."""
    with (
        HostileBroker() as broker,
        session_at(broker, protocol, keepalive_s=1) as session,
        broker.link() as link,
    ):
        greeted(link, session)
        message = publication("t", bytes(2_400), 7, version=link.version)
        step = len(message) // pieces + 1
        for _ in range(12 // pieces):
            for at in range(0, len(message), step):
                link.send(message[at : at + step])
                time.sleep(0.3)
            assert wait_for(session, Received).payload == bytes(2_400)
        assert session.connected
        assert not isinstance(session.next_event(0.0), Disconnected)
        # A broker that has nothing more to say, also to a ping, is given up.
        assert "keep" in wait_for(session, Disconnected).reason.lower()


# --- TLS ----------------------------------------------------------------------------------------


def with_tls(broker: Broker) -> MqttSettings:
    """Let a broker listen with a certificate of its own, before it starts; return how to reach it there."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now, address = datetime.now(UTC), x509.IPAddress(IPv4Address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, secret = broker.directory / "certificate.pem", broker.directory / "key.pem"
    pem.write_bytes(certificate.public_bytes(Encoding.PEM))
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with reserved_port() as reservation:
        port = reservation.getsockname()[1]
    with (broker.directory / "mosquitto.conf").open("a") as configuration:
        configuration.write(f"listener {port} 127.0.0.1\ncertfile {pem}\nkeyfile {secret}\n")
    return broker.settings(url=f"mqtts://127.0.0.1:{port}", ca_file=pem)


@pytest.mark.parametrize("protocol", VERSIONS)
def test_over_tls_long_messages_are_cut_and_short_ones_come_at_once(new_broker: Any, protocol: str) -> None:
    """Many short messages share a record of TLS, of which ``select`` knows nothing."""
    broker: Broker = new_broker()
    settings = with_tls(broker).with_values({"protocol": protocol})
    broker.start()
    payloads = [b"%d" % number for number in range(500)]
    with (
        MqttSession(
            settings, client_id=None, subscriptions=[Subscription("t")], persistent=False, pace=HURRIED
        ) as receiver,
        broker.session("sender", protocol="3.1.1") as sender,
    ):
        wait_for(receiver, Connected)
        wait_for(sender, Connected)
        wait_until(lambda: sender.publish("t", b"ready?") and receiver.next_event(0.1), "a subscription")
        if protocol == "3.1.1":
            sender.publish("t", bytes(20 * MAX_MESSAGE_BYTES))
        for payload in payloads:
            sender.publish("t", payload)
        came: list[bytes] = []
        while came[-1:] != payloads[-1:]:
            came.append(wait_for(receiver, Received).payload)
    came = [payload for payload in came if payload != b"ready?"]
    if protocol == "3.1.1":
        assert len(came.pop(0)) == MAX_MESSAGE_BYTES + 1, "of twenty times as many"
    assert came == payloads
