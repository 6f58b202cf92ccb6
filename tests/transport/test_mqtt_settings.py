"""Address and credentials of the broker, as both configuration files have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpagent.errors import ConfigurationError
from dpagent.schema.problems import SchemaError
from dpagent.transport.settings import MqttSettings


def test_a_password_is_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\nsecond\n")
    assert MqttSettings(username="u", password_file=file).password() == "first"
    assert MqttSettings().password() is None


@pytest.mark.parametrize("content", [b"", b"\n", b"\nsecond\n", b"\xff\xfe"])
def test_a_password_file_without_a_password_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=re.escape(f"mqtt.password_file {file}")):
        MqttSettings(username="u", password_file=file).password()


def test_a_password_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        MqttSettings(username="u", password_file=tmp_path / "missing").password()


def test_a_user_without_a_password_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="set both or neither"):
        MqttSettings(username="u").password()


def test_a_password_without_a_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pw\n")
    with pytest.raises(ConfigurationError, match="set both or neither"):
        MqttSettings(password_file=tmp_path / "password").password()


@pytest.mark.parametrize(
    ("url", "host", "port", "tls"),
    [("mqtt://h", "h", 1883, False), ("mqtts://h/", "h", 8883, True), ("mqtt://[::1]:99", "::1", 99, False)],
)  # fmt: skip
def test_addresses(url: str, host: str, port: int, tls: bool) -> None:
    settings = MqttSettings(url=url)
    assert (settings.host, settings.port, settings.tls) == (host, port, tls)


def test_a_certificate_needs_its_key_and_tls(tmp_path: Path) -> None:
    file = tmp_path / "file.pem"
    for changes in ({"cert_file": file}, {"key_file": file}):
        with pytest.raises(ConfigurationError, match="set both or neither"):
            MqttSettings(url="mqtts://h", **changes).require_whole_pair()
    both = {"cert_file": file, "key_file": file}
    with pytest.raises(ConfigurationError, match="without TLS"):
        MqttSettings(url="mqtt://h", **both).require_whole_pair()
    file.write_text("nothing")
    with pytest.raises(ConfigurationError, match=r"mqtt\.cert_file .* cannot be used"):
        MqttSettings(url="mqtts://h", **both).tls_context()
    with pytest.raises(ConfigurationError, match=r"mqtt\.ca_file .* cannot be used"):
        MqttSettings(url="mqtts://h", ca_file=tmp_path / "missing").tls_context()


def test_client_ids_follow_their_template() -> None:
    ids = {MqttSettings().new_client_id(None) for _ in range(20)}
    assert len(ids) == 20
    assert all(re.fullmatch("[0-9a-f]{20}", each) for each in ids)
    assert MqttSettings().new_client_id("own") == "own"
    assert re.fullmatch("a-[0-9a-f]{20}", MqttSettings(client_id="a-{random}").new_client_id("own"))
    with pytest.raises(ConfigurationError, match="cert_file is not set"):
        MqttSettings(client_id="{cn}").new_client_id(None)


@pytest.mark.parametrize("template", ["", "{name}", "{", "a b", "ä", "{random", "x" * 201])
def test_a_template_that_is_none_is_refused(template: str) -> None:
    with pytest.raises(SchemaError):
        MqttSettings(client_id=template)


@pytest.mark.parametrize("prefix", ["/a", "a/", "a//b", "a/+", "#", "$share/x", "a\0", "x" * 201])
def test_a_prefix_that_is_none_is_refused(prefix: str) -> None:
    with pytest.raises(SchemaError):
        MqttSettings(topic_prefix=prefix)
