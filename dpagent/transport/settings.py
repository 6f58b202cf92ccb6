"""Address and credentials of the broker: the ``mqtt`` section of both configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from dpagent.configuration import FilePath, Settings, WithheldError, resolve
from dpagent.errors import ConfigurationError

_DEFAULT_PORTS = {"mqtt": 1883, "mqtts": 8883}


def broker_url(url: str) -> str:
    """The URL, or a ValueError with what was expected.

    >>> broker_url("mqtts://broker.example")
    'mqtts://broker.example'
    """
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError("expected mqtt://host[:port], or mqtts://host[:port] for TLS")
    if parts.username is not None or parts.password is not None:
        raise WithheldError("credentials do not belong in the URL; use `username` and `password_file`")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("expected only mqtt://host[:port], without a path or query")
    if parts.port == 0:  # urlsplit raises ValueError for a port out of range
        raise ValueError("port 0 is not a valid port")
    return url


BrokerUrl = Annotated[str, AfterValidator(broker_url)]


class MqttSettings(Settings):
    """Address and credentials of the broker."""

    url: BrokerUrl = "mqtt://127.0.0.1:1883"
    """``mqtt://host[:port]`` or, over TLS, ``mqtts://host[:port]``."""
    username: str | None = None
    """User name; needs ``password_file``."""
    password_file: FilePath | None = None
    """A file whose first line is the password, relative to the configuration file."""
    ca_file: FilePath | None = None
    """Certificate authority for TLS (PEM); the system's by default."""
    protocol: Literal["auto", "5", "3.1.1"] = "auto"
    """MQTT version; ``auto`` tries 5 and falls back to 3.1.1."""
    keepalive_s: int = Field(default=30, ge=5, le=3600)
    """Keep-alive interval in seconds."""

    @property
    def host(self) -> str:
        """The broker's host name or address."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The broker's TCP port."""
        parts = urlsplit(self.url)
        return parts.port or _DEFAULT_PORTS[parts.scheme]

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return urlsplit(self.url).scheme == "mqtts"

    def resolved(self, file: Path) -> MqttSettings:
        """The same settings with paths resolved relative to the configuration ``file``."""
        changes = {
            name: resolve(path, file)
            for name, path in (("password_file", self.password_file), ("ca_file", self.ca_file))
            if path is not None
        }
        return self.model_copy(update=changes)

    def password(self) -> str | None:
        """Read the password.

        Raises:
            ConfigurationError: The file is missing, or only one of username and password_file is set.
        """
        if (self.username is None) != (self.password_file is None):
            there, missing = ("username", "password_file") if self.username else ("password_file", "username")
            raise ConfigurationError(f"mqtt.{there} is set and mqtt.{missing} is not; set both or neither.")
        if self.password_file is None:
            return None
        try:
            lines = self.password_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"mqtt.password_file {self.password_file} cannot be read "
                f"({getattr(error, 'strerror', None) or 'not UTF-8'}). Its first line is the password."
            ) from error
        if not lines or not lines[0]:
            raise ConfigurationError(
                f"mqtt.password_file {self.password_file} is empty; its first line is the password."
            )
        return lines[0]
