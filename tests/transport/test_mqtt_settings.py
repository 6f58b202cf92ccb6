"""Address and credentials of the broker, as both configuration files have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpagent.errors import ConfigurationError
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
