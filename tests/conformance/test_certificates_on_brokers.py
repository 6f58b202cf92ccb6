"""Boards that are known by certificates: who has none does not get in, and who is a member no more neither.

The fleet enrols its boards by its own endpoint while the broker runs.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from brokers import wait_until
from observed import Observations
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from servers import BOARDS, FLEET, SOFTWARE, Server

from agent.enrolling import confirm, renew
from agent.identity import Identity
from benchmarks.certificates import broker_certificate
from dpagent.protocol.receipts import receipt_place
from dpagent.protocol.topics import Topics

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(600)]

TOPICS = Topics(FLEET)


@pytest.fixture(scope="module", params=[name for name in SOFTWARE if name != "amqtt"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A broker that knows boards by their certificates."""
    directory = tmp_path_factory.mktemp(f"guarded-{request.param}") / "server"
    server = Server(request.param, directory, "certificates")
    try:
        yield server.start()
    finally:
        server.give_up()


class Client:
    """A client with a certificate, or none; with the coordinator's name, or none.

    The library itself, to show what the program would not.
    """

    def __init__(
        self, server: Server, pair: tuple[Path, Path] | None, name: str | None = None, *topics: str
    ) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.subscribed, self.answered = threading.Event(), threading.Event()
        self._client = client = paho.Client(
            CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv311
        )
        context = ssl.create_default_context(cafile=server.ca_file)
        if pair is not None:
            context.load_cert_chain(*pair)
        client.tls_set_context(context)
        if name is not None and (password := server.password(name)) is not None:
            client.username_pw_set(name, password)
        client.on_message = lambda _client, _data, message: self.heard.append(
            (message.topic, message.payload)
        )
        client.on_subscribe = lambda *_: self.subscribed.set()
        client.on_publish = client.on_disconnect = lambda *_: self.answered.set()
        if topics:
            client.on_connect = lambda client, *_: client.subscribe([(topic, 1) for topic in topics])
        with contextlib.suppress(OSError):  # A broker may refuse in the handshake.
            client.connect("127.0.0.1", server.port)
            client.loop_start()

    def is_let_in(self) -> bool:
        return self._client.is_connected()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, quality: int = 1) -> None:
        self._client.publish(topic, payload, qos=quality, retain=retain)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@contextlib.contextmanager
def client(
    server: Server, pair: tuple[Path, Path] | None, name: str | None = None, *topics: str
) -> Iterator[Client]:
    found = Client(server, pair, name, *topics)
    try:
        yield found
    finally:
        found.close()


def test_a_certificate_is_a_boards_login_and_gives_it_a_boards_rights(guarded: Server) -> None:
    coordinator, first, second = (guarded.pair(name) for name in ("coordinator", *BOARDS[:2]))
    with (
        client(guarded, coordinator, "coordinator", TOPICS.fragments) as center,
        client(guarded, first, None, TOPICS.plan, TOPICS.receipts) as board,
    ):
        wait_until(center.subscribed.is_set, "the coordinator's subscription")
        wait_until(board.subscribed.is_set, "the board's subscription")
        with client(guarded, second) as forger:
            wait_until(forger.is_let_in, "the other board's login")
            forger.publish(TOPICS.plan, b"forged")
            wait_until(forger.answered.is_set, "an answer, or the end of the connection")
        center.publish(TOPICS.plan, b"plan")
        wait_until(lambda: board.heard, "the plan")
        assert board.heard == [(TOPICS.plan, b"plan")]
    with (
        client(guarded, coordinator, "coordinator", TOPICS.fragments) as center,
        client(guarded, second) as board,
    ):
        wait_until(center.subscribed.is_set, "the coordinator's subscription")
        wait_until(board.is_let_in, "the board's login")
        board.publish(TOPICS.fragments, b"fragment")
        wait_until(lambda: center.heard, "the fragment")
        assert center.heard == [(TOPICS.fragments, b"fragment")]


def test_a_board_hears_its_own_receipts_and_the_coordinator_alone_makes_them(guarded: Server) -> None:
    """At QoS 0, and as soon as the subscription was sent: the fragment follows it on the same connection."""
    coordinator, first, second = (guarded.pair(name) for name in ("coordinator", *BOARDS[:2]))
    own, others = (TOPICS.receipt(receipt_place(each * 16)) for each in (b"1", b"2"))
    with (
        client(guarded, coordinator, "coordinator", TOPICS.fragments) as center,
        client(guarded, first, None, own) as board,
    ):
        wait_until(center.subscribed.is_set, "the coordinator's subscription")
        wait_until(board.subscribed.is_set, "the board's subscription")
        with client(guarded, second) as forger:
            wait_until(forger.is_let_in, "the other board's login")
            forger.publish(own, b"forged")
            wait_until(forger.answered.is_set, "an answer, or the end of the connection")
        center.publish(others, b"another's", quality=0)
        center.publish(own, b"receipt", quality=0)
        wait_until(lambda: board.heard, "the receipt")
        assert board.heard == [(own, b"receipt")]


def test_who_has_no_certificate_of_the_authority_does_not_get_in(guarded: Server, tmp_path: Path) -> None:
    # A foreign authority may issue whatever name it likes: a member's, and the coordinator's.
    member = Identity.load(*guarded.pair(BOARDS[0])).device_id
    foreign = broker_certificate(tmp_path / "foreign", clients=("coordinator", member)).clients
    for pair in (None, foreign[member], foreign["coordinator"]):
        for name in (None, "coordinator"):
            with client(guarded, pair, name) as stranger:
                # Somebody who may comes after: the broker has had the time to let the other in.
                with client(guarded, guarded.pair("coordinator"), "coordinator") as center:
                    wait_until(center.is_let_in, "the coordinator's login")
                assert not stranger.is_let_in()
    Observations(guarded.software).note("boards known by their certificates", "hold")


def test_a_board_that_is_revoked_does_not_get_in_and_others_go_on(guarded: Server) -> None:
    """And what becomes of the connection that it has."""
    lost, other = guarded.pair("lost"), guarded.pair(BOARDS[0])
    assert guarded.fleet is not None
    with (
        client(guarded, guarded.pair("coordinator"), "coordinator", TOPICS.fragments) as center,
        client(guarded, lost) as thief,
        client(guarded, other) as board,
    ):
        wait_until(center.subscribed.is_set, "the coordinator's subscription")
        wait_until(lambda: thief.is_let_in() and board.is_let_in(), "both boards' logins")
        revoked = guarded.fleet.run("devices", "revoke", Identity.load(*lost).device_id)
        assert (revoked.returncode, revoked.stderr) == (0, "")
        wait_until(lambda: not guarded.gets_in(lost), "a broker that refuses it")
        thief.publish(TOPICS.fragments, b"stolen")
        wait_until(thief.answered.is_set, "an answer, or the end of the connection")
        board.publish(TOPICS.fragments, b"fragment")
        wait_until(lambda: (TOPICS.fragments, b"fragment") in center.heard, "the other's fragment")
        if (TOPICS.fragments, b"stolen") in center.heard:
            answer = "goes on"
        else:
            answer = "stays, and is of no use" if thief.is_let_in() else "ends"
        assert board.is_let_in()
    Observations(guarded.software).note("a connection that a revoked board has", answer)
    assert guarded.gets_in(other)


def test_no_session_of_tls_that_is_resumed_lets_a_revoked_board_in(guarded: Server) -> None:
    """Who resumes a session need not show its certificate again."""
    pair = guarded.pair("hoarder")
    assert guarded.fleet is not None
    versions = [ssl.TLSVersion.TLSv1_3]
    if guarded.software != "mosquitto":  # It takes 1.3 alone.
        versions.append(ssl.TLSVersion.TLSv1_2)
    kept = []
    for version in versions:
        context = ssl.create_default_context(cafile=guarded.ca_file)
        context.minimum_version = context.maximum_version = version
        context.load_cert_chain(*pair)
        accepted, session = guarded.attempt(context, None)
        assert accepted
        kept.append((context, session))
    revoked = guarded.fleet.run("devices", "revoke", Identity.load(*pair).device_id)
    assert (revoked.returncode, revoked.stderr) == (0, "")
    wait_until(lambda: not guarded.gets_in(pair), "a broker that refuses it")
    for context, session in kept:
        assert not guarded.attempt(context, session)[0]


@pytest.mark.parametrize("software", ["mosquitto", "nats"])
def test_who_is_locked_out_by_a_change_of_the_authority_is_so_on_an_open_connection_too(
    tmp_path: Path, software: str
) -> None:
    """Without another start of the broker. RabbitMQ looks at connections when they begin, and not later."""
    server = Server(software, tmp_path / "server", "certificates")
    try:
        fleet = server.start().fleet
        assert fleet is not None
        asleep, awake = server.pair("asleep"), server.pair("awake")
        with client(server, asleep) as left:
            wait_until(left.is_let_in, "the login of the board that is left behind")
            changed = fleet.run("ca", "change")
            assert (changed.returncode, changed.stderr) == (0, "")
            # Boards trust both by then; the broker's own certificate is still of the first.
            server.ca_file = tmp_path / "both.crt"
            server.ca_file.write_bytes((fleet.members / "ca.crt").read_bytes())
            endpoint = fleet.endpoint
            assert endpoint is not None
            wait_until(lambda: "the authority has changed" in endpoint.said(), "the endpoint")
            certificate, _ = renew(fleet.url, server.ca_file, *awake)
            awake[0].write_bytes(certificate)
            assert "0 of 2 members" in fleet.run("ca", "show").stdout, "it was sent, and not seen yet"
            confirm(fleet.url, server.ca_file, *awake)
            assert "1 of 2 members" in fleet.run("ca", "show").stdout
            for suffix in ("crt", "key"):
                (fleet.members / f"coordinator.{suffix}").unlink()
            assert fleet.run("ca", "client", "coordinator").returncode == 0
            retired = fleet.run("ca", "retire", "--lock-out")
            device = Identity.load(*asleep).device_id
            assert (retired.returncode, retired.stderr) == (0, "")
            assert f"Locked out: {device}." in retired.stdout
            wait_until(lambda: not server.gets_in(asleep), "a broker that refuses it")
            with (
                client(server, server.pair("coordinator"), "coordinator", TOPICS.fragments) as center,
                client(server, awake) as board,
            ):
                wait_until(center.subscribed.is_set, "the coordinator's subscription")
                wait_until(board.is_let_in, "the other board's login")
                left.publish(TOPICS.fragments, b"of a board that is locked out")
                wait_until(left.answered.is_set, "an answer, or the end of the connection")
                board.publish(TOPICS.fragments, b"fragment")
                wait_until(lambda: center.heard, "the other's fragment")
                assert center.heard == [(TOPICS.fragments, b"fragment")]
    finally:
        server.give_up()
