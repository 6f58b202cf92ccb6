"""When a board renews its certificate: by dates alone, in a thread that nothing waits for."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from brokers import wait_until
from children import PATIENCE_S
from clocks import MovableClock
from cryptography.hazmat.primitives.asymmetric import ec
from fleets import agent_values
from members import certified, new_authority, written

import agent.enrolling
from agent.identity import Identity, read_certificate
from agent.renewal import Renewal
from agent.settings import AgentSettings
from coordinator.authority import load_authorities, pem_of
from dpagent.errors import BrokerError, ConfigurationError
from dpagent.protocol.signing import Signer


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return certified(new_authority(tmp_path / "ca"), days=90)


def board(directory: Path, identity: Identity) -> AgentSettings:
    cert_file, key_file = written(directory, "device", identity.certificate, identity.private_key)
    key = Signer(bytes(32), "testers").public_key
    return AgentSettings.checked(
        agent_values(
            None, key, mqtt={"url": "mqtts://h", "cert_file": cert_file, "key_file": key_file},
            enrolment={"url": "https://127.0.0.1:1", "ca_file": directory / "ca/ca.crt"},
        )
    )  # fmt: skip


def test_it_asks_when_a_third_is_left_and_waits_for_no_answer(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def slow(*_: object) -> tuple[bytes, bytes]:
        asked.set()
        assert answers.wait(PATIENCE_S)
        return b"the next", b"all who issue"

    monkeypatch.setattr(agent.enrolling, "renew", slow)
    settings = board(tmp_path, identity)
    clock = MovableClock(identity.renews_at.timestamp() - 1)
    renewal = Renewal(settings, clock)
    renewal.tend()
    assert not asked.wait(0.2)
    clock.advance(2)
    renewal.tend()  # It has looked, and looks again in an hour.
    assert not asked.wait(0.2)
    clock.advance(2 * 3600)
    renewal.tend()
    assert asked.wait(PATIENCE_S)
    clock.advance(2 * 3600)
    renewal.tend()  # One at a time.
    answers.set()
    assert settings.mqtt.cert_file is not None
    assert settings.enrolment is not None
    file = settings.mqtt.cert_file
    wait_until(lambda: file.read_bytes().rstrip().endswith(b"the next"), "the certificate in its place")
    assert settings.enrolment.ca_file.read_bytes().rstrip() == b"all who issue"


def test_a_renewal_that_fails_leaves_the_certificate_and_is_tried_again(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def fails(*_: object) -> bytes:
        tries.append(1)
        raise BrokerError("nobody answers")

    monkeypatch.setattr(agent.enrolling, "renew", fails)
    settings = board(tmp_path, identity)
    assert settings.mqtt.cert_file is not None
    before = settings.mqtt.cert_file.read_bytes()
    clock = MovableClock(identity.renews_at.timestamp())
    renewal = Renewal(settings, clock)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 4):
            renewal.tend()
            wait_until(lambda number=number: caplog.text.count("will be tried again") == number, "a failure")
            clock.advance(2 * 3600)
    assert len(tries) == 3
    assert settings.mqtt.cert_file.read_bytes().rstrip() == before.rstrip()


def test_the_endpoint_is_shown_the_new_certificate_until_it_has_seen_it(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is renewed meanwhile: the new one is not due."""
    authority = load_authorities(tmp_path / "ca", now=datetime.now(UTC)).issuing
    key = identity.private_key
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    later = datetime.now(UTC) + timedelta(days=60)
    following = authority.issue_device(key.public_key(), identity.device_id, days=90, now=later)
    renewed, shown = [], []

    def renews(*_: object) -> tuple[bytes, bytes]:
        renewed.append(1)
        return pem_of([following]), pem_of(authority.chain)

    def fails_twice(_url: str, _ca: Path, cert_file: Path, _key: Path) -> None:
        shown.append(read_certificate(cert_file))
        if len(shown) < 3:
            raise BrokerError("nobody answers")

    monkeypatch.setattr(agent.enrolling, "renew", renews)
    monkeypatch.setattr(agent.enrolling, "confirm", fails_twice)
    clock = MovableClock(identity.renews_at.timestamp())
    settings = board(tmp_path, identity)
    renewal = Renewal(settings, clock)
    for number in range(1, 6):
        if number == 2:  # The board has restarted.
            renewal = Renewal(settings, clock)
        renewal.tend()
        if number > 3:
            assert renewal._thread is None or not renewal._thread.is_alive()
            continue
        wait_until(lambda number=number: len(shown) >= min(number, 3), "the endpoint")
        assert renewal._thread is not None
        renewal._thread.join(PATIENCE_S)
        clock.advance(2 * 3600)
    assert shown == [following] * 3
    assert renewed == [1]
    assert caplog.text.count("it will be told again") == 2


def test_a_key_that_cannot_be_used_is_named_and_not_the_authority(tmp_path: Path, identity: Identity) -> None:
    """As one whose token is gone: OpenSSL finds nothing at it, and the file is there."""
    mqtt = board(tmp_path, identity).mqtt
    assert mqtt.cert_file is not None
    assert mqtt.key_file is not None
    mqtt.key_file.write_text(
        "-----BEGIN PKCS#11 PROVIDER URI-----\nMAA=\n-----END PKCS#11 PROVIDER URI-----\n"
    )
    with pytest.raises(
        ConfigurationError, match=r"mqtt\.key_file .* cannot be used.* names a key in hardware"
    ):
        agent.enrolling.confirm("https://127.0.0.1:1", tmp_path / "ca/ca.crt", mqtt.cert_file, mqtt.key_file)


def test_one_that_has_expired_is_not_asked_for(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent.enrolling, "renew", lambda *_: pytest.fail("it was asked for"))
    renewal = Renewal(
        board(tmp_path, identity), MovableClock(identity.certificate.not_valid_after_utc.timestamp())
    )
    renewal.tend()
    assert f"devices replace {identity.device_id[:8]}" in caplog.text


def test_a_board_with_a_password_has_nothing_to_renew(tmp_path: Path) -> None:
    key = Signer(bytes(32), "testers").public_key
    Renewal(AgentSettings.checked(agent_values(None, key)), MovableClock()).tend()
