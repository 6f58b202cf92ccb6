"""The way to the broker: each step that fails is named, with what to do; over real brokers and real TLS."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from brokers import USER, Broker
from children import PATIENCE_S

from benchmarks.certificates import broker_certificate
from dpagent.diagnosis import Finding, Verdict
from dpagent.errors import ExitCode
from dpagent.transport.diagnosis import BrokerExamination
from dpagent.transport.settings import MqttSettings

STEPS = ["name", "port", "TLS", "login", "topics"]


def examined(settings: MqttSettings, **changes: Any) -> list[Finding]:
    changes = {"reads": ("a/plan", "a/model/+"), "writes": ("a/fragments",), "patience_s": 2.0} | changes
    return list(BrokerExamination(settings, **changes).run())


def only_problem(findings: list[Finding], check: str) -> Finding:
    """The one problem, after which nothing is tried."""
    (found,) = (finding for finding in findings if finding.verdict is Verdict.PROBLEM)
    assert found.check == check
    assert found.exit_code in (ExitCode.BROKER, ExitCode.CONFIGURATION)
    assert found.remedy or ". " in found.text
    after = STEPS[STEPS.index(check) + 1 :]
    assert [finding.check for finding in findings if finding.verdict is Verdict.SKIPPED] == after
    return found


def test_a_broker_that_takes_all_is_found_well(mosquitto: Broker) -> None:
    findings = examined(mosquitto.settings())
    assert [(finding.check, finding.verdict) for finding in findings] == [
        (step, Verdict.OK) for step in STEPS
    ]
    login = next(finding for finding in findings if finding.check == "login")
    assert all(part in login.text for part in ("mosquitto version", "MQTT 5", USER))


def test_an_old_version_of_the_protocol_is_named(mosquitto: Broker) -> None:
    findings = examined(mosquitto.settings(protocol="3.1.1"))
    assert any("MQTT 3.1.1" in finding.text for finding in findings)
    assert all(finding.verdict is Verdict.OK for finding in findings)


def test_what_is_retained_is_handed_on(mosquitto: Broker) -> None:
    with mosquitto.session("writer") as session:
        from brokers import wait_for

        from dpagent.transport.events import Acknowledged, Connected

        wait_for(session, Connected)
        session.publish("handed/plan", b"a plan", retain=True)
        session.publish("handed/model/0", b"a chunk", retain=True)
        wait_for(session, Acknowledged)
    examination = BrokerExamination(
        mosquitto.settings(), reads=("handed/plan", "handed/model/+"), writes=(), awaited=("handed/plan",)
    )
    list(examination.run())
    assert examination.received == {"handed/plan": b"a plan"}, "and nothing else is kept"


def test_a_name_that_nobody_knows() -> None:
    found = only_problem(examined(MqttSettings(url="mqtt://nowhere.invalid")), "name")
    assert "nowhere.invalid cannot be resolved" in found.text


def test_a_port_where_nothing_listens(new_broker: Any) -> None:
    found = only_problem(examined(new_broker().settings()), "port")
    assert "nothing listens" in found.text


def test_a_port_that_does_not_answer() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        fillers = [socket.socket() for _ in range(8)]
        try:
            for filler in fillers:  # until the queue of connections is full
                filler.setblocking(False)
                filler.connect_ex(address)
            url = f"mqtt://127.0.0.1:{address[1]}"
            found = only_problem(examined(MqttSettings(url=url), patience_s=0.5), "port")
        finally:
            for filler in fillers:
                filler.close()
    assert "does not answer within 0.5 s" in found.text


# --- TLS ---


def secure_settings(broker: Broker, ca_file: Path | None, **changes: Any) -> MqttSettings:
    return broker.settings(url=broker.url.replace("mqtt:", "mqtts:"), ca_file=ca_file, **changes)


def test_a_broker_of_a_trusted_authority_is_found_well(new_broker: Any, tmp_path: Path) -> None:
    files = broker_certificate(tmp_path / "tls")
    broker = new_broker(options=files.options).start()
    findings = examined(secure_settings(broker, files.authority))
    assert [finding.verdict for finding in findings] == [Verdict.OK] * len(STEPS)
    assert any("TLSv1.3; the certificate is valid until" in finding.text for finding in findings)


def test_a_certificate_that_ends_soon_is_a_warning(new_broker: Any, tmp_path: Path) -> None:
    files = broker_certificate(tmp_path / "tls", ends_in_days=9.6)
    broker = new_broker(options=files.options).start()
    (found,) = (
        finding
        for finding in examined(secure_settings(broker, files.authority))
        if finding.verdict is not Verdict.OK
    )
    assert (found.check, found.verdict) == ("TLS", Verdict.WARNING)
    assert "10 days" in found.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ends_in_days": -0.5}, "the certificate has expired"),
        ({"begins_in_days": 2}, "the certificate is not valid yet"),
        ({"name": "broker.example"}, "the certificate is for another"),
        ({"name": "127.0.0.2"}, "the certificate is for another"),
    ],
)
def test_a_certificate_that_does_not_hold(
    new_broker: Any, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    files = broker_certificate(tmp_path / "tls", **changes)
    broker = new_broker(options=files.options).start()
    assert words in only_problem(examined(secure_settings(broker, files.authority)), "TLS").text


def test_an_authority_that_is_not_trusted(new_broker: Any, tmp_path: Path) -> None:
    files, other = broker_certificate(tmp_path / "tls"), broker_certificate(tmp_path / "other")
    broker = new_broker(options=files.options).start()
    for ca_file in (None, other.authority):
        found = only_problem(examined(secure_settings(broker, ca_file)), "TLS")
        assert "an authority signed the certificate that is not trusted" in found.text
        assert "mqtt.ca_file" in found.remedy


@pytest.mark.parametrize("text", ["not a certificate", None])
def test_a_file_of_an_authority_that_is_none(mosquitto: Broker, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "ca.pem").write_text(text)
    found = only_problem(examined(secure_settings(mosquitto, tmp_path / "ca.pem")), "TLS")
    assert found.exit_code == ExitCode.CONFIGURATION
    assert str(tmp_path / "ca.pem") in found.text


def test_tls_at_a_port_without_it_and_none_at_a_port_with_it(
    new_broker: Any, mosquitto: Broker, tmp_path: Path
) -> None:
    found = only_problem(examined(secure_settings(mosquitto, None)), "TLS")
    assert "speaks MQTT without TLS, and mqtt.url says mqtts://" in found.text
    broker = new_broker(options=broker_certificate(tmp_path / "tls").options).start()
    found = only_problem(examined(broker.settings()), "TLS")
    assert "speaks TLS, and mqtt.url says mqtt://" in found.text


def test_a_port_that_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)

        def answer() -> None:
            for _ in range(3):  # a look at the port, the greeting in TLS, the one in MQTT
                link, _ = server.accept()
                with link:
                    link.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"mqtts://127.0.0.1:{server.getsockname()[1]}"
        found = only_problem(examined(MqttSettings(url=url)), "TLS")
        thread.join(PATIENCE_S)
    assert "does not speak TLS" in found.text


# --- login and rights ---


def test_a_wrong_password(mosquitto: Broker, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("wrong\n")
    found = only_problem(examined(mosquitto.settings(password_file=tmp_path / "password")), "login")
    assert "not authorized" in found.text
    assert "mqtt.password_file" in found.text


def test_a_password_that_cannot_be_read(mosquitto: Broker, tmp_path: Path) -> None:
    found = only_problem(examined(mosquitto.settings(password_file=tmp_path / "nothing")), "login")
    assert found.exit_code == ExitCode.CONFIGURATION
    assert str(tmp_path / "nothing") in found.text


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([f"user {USER}", "topic read a/plan", "topic read a/model/+"], "may not write to a/fragments"),
        ([f"user {USER}", "topic read a/#", "topic write a/fragments"], ""),
    ],
)
def test_a_right_that_is_missing(new_broker: Any, tmp_path: Path, rules: list[str], words: str) -> None:
    (tmp_path / "rules").write_text("\n".join(rules) + "\n")
    broker = new_broker(options=[f"acl_file {tmp_path / 'rules'}"]).start()
    findings = examined(broker.settings())
    if words:
        assert words in only_problem(findings, "topics").text
    else:
        assert all(finding.verdict is Verdict.OK for finding in findings)


def test_limits_that_are_too_low_are_named(new_broker: Any) -> None:
    broker = new_broker(options=["max_packet_size 20000", "retain_available false", "max_qos 0"]).start()
    found = [finding for finding in examined(broker.settings()) if finding.verdict is Verdict.PROBLEM]
    assert [finding.check for finding in found] == ["login"] * 3
    words = " ".join(finding.text for finding in found)
    assert all(part in words for part in ("20,000 bytes", "retains no messages", "QoS 0 alone"))


def test_without_tls_to_another_machine_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, mosquitto: Broker
) -> None:
    # The name of this machine's own address.
    monkeypatch.setattr("dpagent.transport.diagnosis._is_local", lambda _: False)
    (found,) = (each for each in examined(mosquitto.settings()) if each.verdict is not Verdict.OK)
    assert (found.check, found.verdict) == ("TLS", Verdict.WARNING)
    assert "reads the password" in found.text
