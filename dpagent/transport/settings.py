"""Address and credentials of the broker: the ``mqtt`` section of both configuration files."""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from dpagent.configuration import read_password, resolve
from dpagent.errors import ConfigurationError
from dpagent.schema.limits import After, Limits
from dpagent.schema.problems import WithheldError
from dpagent.settings import FilePath, Settings

_DEFAULT_PORTS: Final = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
_FORMS: Final = (
    "mqtt://host[:port], or mqtts://host[:port] for TLS; over WebSocket ws://host[:port][/path] or wss://…"
)


def broker_url(url: str) -> str:
    """The URL, or a ValueError with what was expected.

    >>> broker_url("mqtts://broker.example")
    'mqtts://broker.example'
    """
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"expected {_FORMS}")
    if parts.username is not None or parts.password is not None:
        raise WithheldError("credentials do not belong in the URL; use `username` and `password_file`")
    has_path = parts.path not in ("", "/") and parts.scheme.startswith("mqtt")
    if has_path or parts.query or parts.fragment or not url.isascii() or not url.isprintable():
        raise ValueError("expected only mqtt://host[:port], without a path or query")
    if parts.port == 0:  # urlsplit raises ValueError for a port out of range
        raise ValueError("port 0 is not a valid port")
    return url


BrokerUrl = Annotated[str, After(broker_url)]

_FIELDS: Final = ("random", "cn")


def _client_id(template: str) -> str:
    rest = template
    for name in _FIELDS:
        rest = rest.replace(f"{{{name}}}", "")
    if not template or re.fullmatch(r"[\x21-\x7e]*", template) is None or "{" in rest or "}" in rest:
        raise ValueError("expected visible ASCII, with {random} and {cn} as the only fields")
    return template


def _topic_prefix(prefix: str) -> str:
    levels = prefix.split("/")
    if prefix and (prefix.startswith("$share") or not all(levels) or re.search(r"[+#\x00-\x1f\x7f]", prefix)):
        raise ValueError("expected topic levels with a / between them, without + and #, such as tenant/7")
    return prefix


ClientId = Annotated[str, Limits(max_length=200), After(_client_id)]
"""A template of client ids."""
TopicPrefix = Annotated[str, Limits(max_length=200), After(_topic_prefix)]
"""Topic levels before a fleet's own."""


def show_certificate(context: ssl.SSLContext, cert_file: Path, key_file: Path) -> None:
    """Have connections of a context show a certificate.

    Raises:
        ConfigurationError: A file cannot be used, or the hardware does not give the key that one names.
    """
    try:
        # Without a password the library would ask for one, at whatever terminal.
        context.load_cert_chain(cert_file, key_file, password="")
    except OSError as error:  # of TLS, an OSError too
        are_there = cert_file.is_file() and key_file.is_file()
        # OpenSSL's providers leave an error of the system that is of something else.
        reason = "OpenSSL gets no key by it" if are_there and isinstance(error, FileNotFoundError) else error
        raise ConfigurationError(
            f"mqtt.cert_file {cert_file} and mqtt.key_file {key_file} cannot be used ({reason}). Expected a "
            "certificate and its private key, in PEM and without a passphrase. If the file names a key in "
            "hardware, that has to be there, and to take the PIN that openssl.cnf has (docs/deploy.md)."
        ) from error


class MqttSettings(Settings):
    """Address and credentials of the broker."""

    url: BrokerUrl = "mqtt://127.0.0.1:1883"
    """``mqtt://host[:port]`` or, over TLS, ``mqtts://host[:port]``. Over WebSocket, for networks that let
    nothing else through, ``wss://host[:port][/path]`` (or ``ws://``); it needs the extra ``websockets``, and
    the path is ``/mqtt`` by default."""
    username: str | None = None
    """User name; needs ``password_file``."""
    password_file: FilePath | None = None
    """A file whose first line is the password, relative to the configuration file."""
    ca_file: FilePath | None = None
    """Certificate authority for TLS (PEM); the system's by default."""
    cert_file: FilePath | None = None
    """This program's own certificate for TLS (PEM), for a broker that asks for one; needs ``key_file``. Read
    at each connection."""
    key_file: FilePath | None = None
    """The private key of ``cert_file`` (PEM), which only this program's user may read."""
    topic_prefix: TopicPrefix = ""
    """Levels before the topics of the fleet, where a broker gives each tenant a part of its tree."""
    client_id: ClientId | None = None
    """Client identifier, where a broker demands a form: ``{random}`` is 20 characters, new at each
    connection, and ``{cn}`` the common name of ``cert_file``. By default a board's is random, and the
    coordinator's and a mixer's name fleet and program. Without ``{random}`` the broker can tell a board from
    others by it."""
    protocol: Literal["auto", "5", "3.1.1"] = "auto"
    """MQTT version; ``auto`` tries 5 and falls back to 3.1.1."""
    keepalive_s: Annotated[int, Limits(ge=5, le=3600)] = 30
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
        return urlsplit(self.url).scheme in ("mqtts", "wss")

    @property
    def websocket_url(self) -> str | None:
        """The address in the request of a WebSocket; None without one."""
        parts = urlsplit(self.url)
        if not parts.scheme.startswith("ws"):
            return None
        return parts._replace(path=parts.path if parts.path not in ("", "/") else "/mqtt").geturl()

    def resolved(self, file: Path) -> MqttSettings:
        """The same settings with paths resolved relative to the configuration ``file``."""
        changes = {
            name: resolve(path, file)
            for name, path in (
                ("password_file", self.password_file),
                ("ca_file", self.ca_file),
                ("cert_file", self.cert_file),
                ("key_file", self.key_file),
            )
            if path is not None
        }
        return self.with_values(changes)

    def tls_context(self) -> ssl.SSLContext:
        """What a connection is verified and encrypted by. The files are read each time, so that a certificate
        that was renewed is used from the next connection on.

        Raises:
            ConfigurationError: A file cannot be used, or only one of cert_file and key_file is set.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"mqtt.ca_file {self.ca_file} cannot be used ({error}). Give a certificate authority's "
                "certificate in PEM."
            ) from error
        self.require_whole_pair()
        if self.cert_file is None:
            return context
        assert self.key_file is not None
        show_certificate(context, self.cert_file, self.key_file)
        return context

    def require_whole_pair(self) -> None:
        """See that a certificate has its key, and TLS to be used in.

        Raises:
            ConfigurationError: Something is missing.
        """
        if (self.cert_file is None) != (self.key_file is None):
            there, missing = ("cert_file", "key_file") if self.cert_file else ("key_file", "cert_file")
            raise ConfigurationError(f"mqtt.{there} is set and mqtt.{missing} is not; set both or neither.")
        if self.cert_file is not None and not self.tls:
            raise ConfigurationError(
                f"mqtt.cert_file is set and mqtt.url is {self.url}, without TLS; expected mqtts:// or wss://"
            )

    def client_id_template(self, default: str | None) -> str:
        """What client identifiers are made of.

        Args:
            default: the program's own; None for a random one.
        """
        return self.client_id or default or "{random}"

    def for_one_of_many(self) -> MqttSettings:
        """The same settings for one of several programs that have them: each has a client identifier of its
        own."""
        if self.client_id is None or "{random}" in self.client_id:
            return self
        return self.with_values({"client_id": f"{self.client_id}-{{random}}"})

    def new_client_id(self, default: str | None) -> str:
        """The client identifier of the next connection; see :meth:`client_id_template`.

        Raises:
            ConfigurationError: The template wants a certificate's common name, and there is none.
        """
        template = self.client_id_template(default)
        return template.replace("{random}", os.urandom(10).hex()).replace("{cn}", self._common_name(template))

    def _common_name(self, template: str) -> str:
        if "{cn}" not in template:
            return ""
        from cryptography import x509

        from dpagent.protocol.device_signing import common_name

        if self.cert_file is None:
            raise ConfigurationError(f"mqtt.client_id is {template}, and mqtt.cert_file is not set.")
        try:
            return common_name(x509.load_pem_x509_certificate(self.cert_file.read_bytes()))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"mqtt.cert_file {self.cert_file} cannot be read ({error}).") from error

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
        return read_password(self.password_file, "mqtt.password_file")
