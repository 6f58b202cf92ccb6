"""The supervised session against brokers that these tests play: that hang up, are slow, or never answer."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from brokers import HURRIED, Broker, wait_for, wait_until
from children import PATIENCE_S

from dpagent.errors import BrokerError
from dpagent.transport.events import Connected, Disconnected
from dpagent.transport.session import MqttSession, Pace
from dpagent.transport.settings import MqttSettings

_numbers = itertools.count()


def client() -> str:
    return f"client-{next(_numbers)}"


def session_with(server: socket.socket, pace: Pace = HURRIED, **changes: Any) -> MqttSession:
    """A session whose broker is played by ``server``."""
    settings = MqttSettings(url=f"mqtt://127.0.0.1:{server.getsockname()[1]}", **changes)
    return MqttSession(settings, client_id=client(), subscriptions=[], persistent=False, pace=pace)


def test_a_session_without_a_client_id_has_another_at_each_connection(new_broker: Any) -> None:
    """One that returned would link what a board sends before and after."""
    broker: Broker = new_broker()
    with (broker.directory / "mosquitto.conf").open("a") as configuration:
        configuration.write("log_type notice\n")
    session = MqttSession(broker.settings(), client_id=None, subscriptions=[], persistent=False, pace=HURRIED)
    seen: list[str] = []
    with session:
        for _ in range(3):
            broker.start()
            wait_for(session, Connected)
            log = (broker.directory / "broker.log").read_text()
            seen += re.findall(r"New client connected from \S+ as (\S+)", log)[-1:]
            broker.kill()
            wait_for(session, Disconnected)
    assert len(set(seen)) == len(seen) == 3


def test_a_client_id_that_is_taken_is_a_sentence() -> None:
    """As a broker of MQTT 5 says it. (Mosquitto 2.0.11 closes without a word.)"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        with session_with(server, protocol="5") as session:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(PATIENCE_S)
                connection.recv(1_000)
                connection.sendall(b"\x20\x03\0\0\0" + b"\xe0\x02\x8e\0")  # CONNACK; DISCONNECT 0x8E
                with pytest.raises(BrokerError, match="the same client id"):
                    wait_for(session, Disconnected)


@contextlib.contextmanager
def closing_server() -> Iterator[socket.socket]:
    """Accepts connections and closes each after the first bytes, like a proxy without a backend."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(1)
                        connection.recv(1_000)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize("protocol", ["auto", "5", "3.1.1"])
def test_a_server_that_hangs_up_is_reported(protocol: Any) -> None:
    with closing_server() as server, session_with(server, protocol=protocol) as session:
        if protocol == "5":
            # What hangs up on version 5 either does not speak it or has gone: both may be said.
            with contextlib.suppress(BrokerError):
                assert wait_for(session, Disconnected).reason
        else:
            assert wait_for(session, Disconnected).reason


@pytest.mark.parametrize("protocol", ["auto", "3.1.1"])
def test_a_server_that_never_answers_is_reported(protocol: Any) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        session_with(server, protocol=protocol, keepalive_s=5) as session,
    ):
        assert wait_for(session, Disconnected).reason


def test_a_session_does_not_tire_of_a_broker_that_stays_away() -> None:
    """Its pauses double at each attempt, and 2.0 ** 1024 is no number any more."""
    tireless = Pace(pause_s=1e-9, longest_s=1e-4)
    with closing_server() as server, session_with(server, tireless, protocol="3.1.1") as session:
        for _ in range(1_050):
            assert wait_for(session, Disconnected).reason


def test_a_slow_broker_is_reached_in_the_end() -> None:
    """An answer that takes longer than the first patience is waited for at a later attempt."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)

        def serve() -> None:
            while not done.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(0.1)
                        connection.recv(1_000)
                        if not done.wait(1.5 * HURRIED.answer_s):
                            connection.sendall(b"\x20\x02\x00\x00")
                            done.wait(1.0)

        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            with session_with(server, protocol="3.1.1") as session:
                wait_for(session, Connected)
        finally:
            done.set()
            for thread in threads:
                thread.join()


def test_what_was_published_before_a_loss_does_not_leave_in_a_burst_after_it() -> None:
    """Every connection starts with nothing queued: what is resent is for the caller to say."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        with session_with(server, protocol="3.1.1") as session:
            connection, _ = server.accept()
            connection.settimeout(PATIENCE_S)
            connection.recv(1_000)
            connection.sendall(b"\x20\x02\x00\x00")
            wait_for(session, Connected)
            sent = 0
            while session.has_room:
                assert session.publish("t", b"x" * 10) is not None
                sent += 1
            assert sent == 20
            connection.close()
            wait_for(session, Disconnected)

            def accept() -> socket.socket | None:
                session.next_event(0.05)
                server.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    return server.accept()[0]
                return None

            with wait_until(accept, "the next connection") as again:
                again.settimeout(PATIENCE_S)
                again.recv(1_000)
                again.sendall(b"\x20\x02\x00\x00")
                wait_for(session, Connected)
                assert session.has_room
                again.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    again.recv(1_000)


def hang_up_on_version_5(session: MqttSession, port: int) -> None:
    """Be the server that the session connects to next; it must still speak version 5."""
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(0.05)

        def accept() -> socket.socket | None:
            session.next_event(0.05)  # the program's thread keeps the session going
            with contextlib.suppress(TimeoutError):
                return server.accept()[0]
            return None

        with wait_until(accept, "the next attempt") as connection:
            connection.settimeout(PATIENCE_S)
            assert b"MQTT\x05" in connection.recv(1_000)


def test_a_broker_that_hung_up_once_is_still_spoken_to_in_version_5(new_broker: Any) -> None:
    """A broker that restarts between TCP and CONNACK is not one that speaks 3.1.1 only."""
    broker = new_broker("mosquitto", "auto").start()
    with broker.session(client()) as session:
        wait_for(session, Connected)
        broker.kill()
        wait_for(session, Disconnected)
        hang_up_on_version_5(session, broker.port)
        broker.start()
        wait_for(session, Connected)
        broker.kill()
        wait_for(session, Disconnected)
        hang_up_on_version_5(session, broker.port)
