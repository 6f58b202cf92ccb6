"""A board against an endpoint that answers with whatever it likes, with the key of the right authority."""

from __future__ import annotations

import json
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from endpoints import Answer, played, said
from members import certified, new_authority, written

import agent.enrolling
from agent.enrolling import enrol, renew
from coordinator.authority import Authority, pem_of
from dpagent.errors import BrokerError, ConfigurationError, UsageError
from dpagent.protocol.signing import Signer

KEY = Signer(bytes(32), "meadow").public_key


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return new_authority(tmp_path / "ca")


def answered(authority: Authority, pem: str, device_id: str, **changes: object) -> bytes:
    values = {
        "device": device_id, "certificate": pem, "authorities": pem_of(authority.chain).decode(),
        "fleet": "meadow", "coordinator_key": KEY,
        "broker": {"url": "mqtts://broker.example", "authority": "fleet"},
    }  # fmt: skip
    return said(json.dumps({**values, **changes}).encode())


def test_certificates_that_are_not_for_the_boards_own_key_are_refused(
    authority: Authority, tmp_path: Path
) -> None:
    other, foreign = certified(authority), certified(new_authority(tmp_path / "foreign"))
    for certificate in (other.certificate, foreign.certificate, authority.certificate):
        pem = pem_of([certificate]).decode()
        data = answered(authority, pem, other.device_id)
        with (
            played(authority, tmp_path, lambda sock, data=data: sock.sendall(data)) as code,
            pytest.raises(ConfigurationError, match="did not issue, or that is for another key"),
        ):
            enrol(code, ec.generate_private_key(ec.SECP256R1()))


def test_a_device_that_is_not_the_certificates_is_refused(authority: Authority, tmp_path: Path) -> None:
    own = certified(authority)
    pem = pem_of([own.certificate]).decode()
    with (
        played(authority, tmp_path, lambda sock: sock.sendall(answered(authority, pem, "0" * 32))) as code,
        pytest.raises(ConfigurationError, match="enrolled device 0000"),
    ):
        enrol(code, own.private_key)


@pytest.mark.parametrize(
    "changes",
    [
        {"fleet": "a/b"}, {"coordinator_key": "x"}, {"device": "../../etc"}, {"more": 1}, {"certificate": 7},
        {"certificate": "x" * 20_000}, {"authorities": "x" * 20_000}, {"authorities": None},
        {"broker": {"url": "mqtts://b", "authority": "fleet", "password": "x"}},
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused(
    authority: Authority, tmp_path: Path, changes: dict[str, object]
) -> None:
    own = certified(authority)
    data = answered(authority, pem_of([own.certificate]).decode(), own.device_id, **changes)
    with (
        played(authority, tmp_path, lambda sock: sock.sendall(data)) as code,
        pytest.raises(ConfigurationError, match="does not know"),
    ):
        enrol(code, own.private_key)


def test_a_refusal_is_passed_on_without_what_a_terminal_would_obey(
    authority: Authority, tmp_path: Path
) -> None:
    body = json.dumps({"reason": "No.\x1b[2J\r\n"}).encode()
    with (
        played(authority, tmp_path, lambda sock: sock.sendall(said(body, "403 Forbidden"))) as code,
        pytest.raises(UsageError, match=r"refuses: No\.\[2J Ask the fleet's operator"),
    ):
        enrol(code, ec.generate_private_key(ec.SECP256R1()))


def endless(connection: ssl.SSLSocket) -> None:
    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65_536)


def endless_headers(connection: ssl.SSLSocket) -> None:
    connection.sendall(b"HTTP/1.0 200 OK\r\n")
    while True:
        connection.sendall(b"X: y\r\n" * 1_000)


def chunked(size: bytes) -> Answer:
    """A chunk of a negative length, which the library takes for all that comes, or refuses in its own way."""

    def answer(connection: ssl.SSLSocket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\n")
        connection.sendall(b"{}")

    return answer


def slow(connection: ssl.SSLSocket) -> None:
    while True:
        connection.sendall(b"H")
        threading.Event().wait(0.2)


@pytest.mark.parametrize(
    "answer",
    [endless, endless_headers, slow, chunked(b"-5"), chunked(b"-1"), lambda sock: sock.sendall(b"\0" * 99)],
)
def test_an_answer_without_an_end_is_given_up(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setattr(agent.enrolling, "PATIENCE_S", 2.0)
    with (
        played(authority, tmp_path, answer) as code,
        pytest.raises(BrokerError, match="No enrolment endpoint"),
    ):
        enrol(code, ec.generate_private_key(ec.SECP256R1()))


def test_as_much_is_read_as_an_answer_says_that_it_has(authority: Authority, tmp_path: Path) -> None:
    unread = threading.Event()

    def answer(connection: ssl.SSLSocket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n")
        try:
            for _ in range(1_024):
                connection.sendall(b"x" * 65_536)
        except OSError:
            unread.set()
            raise

    with played(authority, tmp_path, answer) as code, pytest.raises(BrokerError, match="how long it is"):
        enrol(code, ec.generate_private_key(ec.SECP256R1()))
    assert unread.is_set()


def test_an_error_has_nothing_that_a_terminal_would_obey(authority: Authority, tmp_path: Path) -> None:
    with (
        played(authority, tmp_path, lambda sock: sock.sendall(b"\x1b[2J" + b"x" * 9_000 + b"\r\n")) as code,
        pytest.raises(BrokerError) as caught,
    ):
        enrol(code, ec.generate_private_key(ec.SECP256R1()))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_a_renewal_is_for_the_same_device_and_key_and_for_a_time_to_come(
    authority: Authority, tmp_path: Path
) -> None:
    own, other = certified(authority), certified(authority)
    same_key = authority.issue_device(
        own.private_key.public_key(), other.device_id, days=1, now=datetime.now(UTC)
    )
    expired = authority.issue_device(
        own.private_key.public_key(),
        own.device_id,
        days=1 / 96,
        now=datetime.now(UTC) - timedelta(minutes=30),
    )
    files = written(tmp_path, "device", own.certificate, own.private_key)
    for certificate, problem in (
        (other.certificate, "another key"), (same_key, "another device"), (expired, "expired already"),
    ):  # fmt: skip
        values = {
            "certificate": pem_of([certificate]).decode(), "authorities": pem_of(authority.chain).decode(),
        }  # fmt: skip
        body = said(json.dumps(values).encode())
        with (
            played(authority, tmp_path, lambda sock, body=body: sock.sendall(body)) as code,
            pytest.raises(ConfigurationError, match=problem),
        ):
            renew(code.url, tmp_path / "ca/ca.crt", *files)
