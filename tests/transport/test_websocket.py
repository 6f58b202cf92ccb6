"""MQTT over WebSocket: through Mosquitto, with and without TLS, and against sides that break its rules."""

from __future__ import annotations

import base64
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from brokers import BrokerFactory, reserved_port, wait_for, wait_until
from children import PATIENCE_S
from cryptography.hazmat.primitives.asymmetric import ec
from members import new_authority, written

from dpagent.transport.events import Connected, Disconnected, Received
from dpagent.transport.session import MqttSession, Pace, Subscription
from dpagent.transport.settings import MqttSettings
from dpagent.transport.websocket import MOST_BYTES, WebSocket

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def session(settings: MqttSettings, *topics: str) -> MqttSession:
    return MqttSession(
        settings, client_id=None, persistent=False, pace=Pace(pause_s=0.1, longest_s=5.0),
        subscriptions=[Subscription(topic) for topic in topics],
    )  # fmt: skip


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
@pytest.mark.parametrize("scheme", ["ws", "wss"])
def test_messages_pass_both_ways(
    tmp_path: Path, new_broker: BrokerFactory, scheme: str, protocol: str
) -> None:
    authority, key = new_authority(tmp_path / "ca"), ec.generate_private_key(ec.SECP256R1())
    certificate = authority.issue_server(key.public_key(), ["127.0.0.1"], days=1, now=datetime.now(UTC))
    cert_file, key_file = written(tmp_path, "broker", certificate, key)
    with reserved_port() as reservation:
        port = reservation.getsockname()[1]
        tls = [f"certfile {cert_file}", f"keyfile {key_file}"] if scheme == "wss" else []
        broker = new_broker(options=[f"listener {port} 127.0.0.1", "protocol websockets", *tls]).start()
        settings = broker.settings(
            url=f"{scheme}://127.0.0.1:{port}", protocol=protocol,
            **({"ca_file": tmp_path / "ca/ca.crt"} if scheme == "wss" else {}),
        )  # fmt: skip
        with session(settings, "a/b") as far, broker.session("near", "a/b") as near:
            wait_for(far, Connected)
            wait_for(near, Connected)
            for sender, payload in ((far, b"up" * 30_000), (near, b"down" * 2_000)):

                def arrives(sender: MqttSession = sender, payload: bytes = payload) -> bool:
                    sender.publish("a/b", payload)
                    return all(came(receiver, payload) for receiver in (far, near))

                wait_until(arrives, "a message at both")


def came(receiver: MqttSession, payload: bytes) -> bool:
    return any(receiver.next_event(0.2) == Received("a/b", payload) for _ in range(40))


def accepted(request: bytes) -> bytes:
    key = next(line for line in request.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key"))
    token = base64.b64encode(hashlib.sha1(key.split(b": ")[1] + GUID).digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + token + b"\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
    )


@contextmanager
def played(answer: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """The address of a server that answers the first request so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serves() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(PATIENCE_S)
                request = b""
                while b"\r\n\r\n" not in request:
                    request += connection.recv(4_096)
                try:
                    answer(connection, request)
                    while connection.recv(65_536):
                        pass
                except OSError:
                    pass  # It was closed, as it should be.

        thread = threading.Thread(target=serves)
        thread.start()
        yield f"ws://127.0.0.1:{server.getsockname()[1]}/mqtt"
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def opened(url: str) -> WebSocket:
    host, port = url.removeprefix("ws://").split("/")[0].split(":")
    return WebSocket(socket.create_connection((host, int(port)), 20), url)


def endless(connection: socket.socket, _request: bytes) -> None:
    connection.sendall(b"HTTP/1.1 101 ")
    for _ in range(4_096):
        connection.sendall(b"x" * 65_536)


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection, _: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        lambda connection, _: connection.sendall(b"\x20\x02\0\0"),
        lambda connection, _: connection.shutdown(socket.SHUT_RDWR),
        lambda connection, request: connection.sendall(accepted(request).replace(b"mqtt", b"chat")),
        lambda connection, request: connection.sendall(accepted(request).replace(b"Accept: ", b"Accept: A")),
        endless,
    ],
    ids=["http", "mqtt", "closed", "another protocol", "a wrong hash", "an endless line"],
)  # fmt: skip
def test_a_side_that_does_not_shake_hands_is_left(answer: Callable[[socket.socket, bytes], None]) -> None:
    with played(answer) as url, pytest.raises((ConnectionError, OSError)):
        opened(url)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x82\x7f" + (1 << 40).to_bytes(8, "big"), b"\x82\x7f" + (MOST_BYTES + 1).to_bytes(8, "big"),
        b"\x02\x01a" * 2, b"\xff\xff", b"\x82\x81\0\0\0\0a", b"\x81\x02\xff\xff",
    ],
    ids=["huge", "too long", "interleaved", "reserved", "masked", "text"],
)  # fmt: skip
def test_a_frame_that_no_broker_may_send_ends_the_connection(frame: bytes) -> None:
    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(accepted(request))
        connection.recv(65_536)
        connection.sendall(frame)

    with played(answer) as url:
        stream = opened(url)
        stream.send(b"CONNECT")
        taken = b""
        while part := received(stream):
            taken += part
        assert len(taken) <= 1
        stream.close()


def received(stream: WebSocket) -> bytes:
    while True:
        try:
            return stream.recv(65_536)
        except BlockingIOError:
            continue


def test_a_message_in_pieces_between_pings_is_one_stream() -> None:
    pieces = [b"\x02\x02ab", b"\x89\x01p", b"\x80\x02cd", b"\x82\x00", b"\x82\x01e"]

    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(accepted(request))
        assert connection.recv(1) == b"\x82"  # MQTT begins with the client
        connection.recv(65_536)
        for piece in b"".join(pieces):
            connection.sendall(bytes([piece]))
        assert connection.recv(2) == b"\x8a\x81"  # a pong, masked
        connection.sendall(b"\x88\x00")

    with played(answer) as url:
        stream = opened(url)
        assert stream.send(b"CONNECT") == 7
        taken = b""
        while part := received(stream):
            taken += part
        assert taken == b"abcde"
        stream.close()


def test_a_session_says_why_and_tries_again() -> None:
    def refuses(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

    with played(refuses) as url, session(MqttSettings(url=url)) as tried:
        assert "403" in wait_for(tried, Disconnected).reason
