"""The section ``enrolment`` of ``fleet.yaml``: how boards become members, and what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from dpagent.configuration import resolve
from dpagent.protocol.enrolment import is_host
from dpagent.schema.limits import After, Limits
from dpagent.settings import FilePath, Settings
from dpagent.transport.settings import BrokerUrl, ClientId

DEFAULT_PORT: Final = 8884


def _address(text: str) -> str:
    split_address(text)
    return text


def split_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host and port of ``host``, ``host:port`` or ``[address]:port``.

    >>> split_address("fleet.example"), split_address("[::1]:99")
    (('fleet.example', 8884), ('::1', 99))

    Raises:
        ValueError: It is none.
    """
    host, port = text, str(default_port)
    if text.startswith("["):
        host, end, rest = text[1:].partition("]")
        port = port if end and not rest else rest.removeprefix(":")
    elif text.count(":") == 1:
        host, port = text.split(":")
    if not is_host(host) or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise ValueError(f"expected host[:port], such as fleet.example:{default_port}")
    return host, int(port)


Address = Annotated[str, After(_address)]


class EnrolmentSettings(Settings):
    """How boards become members, and what they are told of the broker."""

    address: Address | None = None
    """``host[:port]`` by which boards reach ``dpagent coordinator enrolment``, written into every invitation;
    the port is 8884 by default. Without it nobody is invited."""
    listen: str = ""
    """Address of this machine that the endpoint listens on; by default all of them."""
    certificate_days: Annotated[float, Limits(gt=0, le=7300)] = 365.0
    """Life of a board's certificate. A board renews it when a third is left; one that is off for longer than
    that third needs a new invitation."""
    broker_url: BrokerUrl | None = None
    """The broker's address as boards reach it; by default ``mqtt.url``."""
    broker_authority: Literal["fleet", "system"] | FilePath = "fleet"
    """Who issued the broker's certificate: this fleet's authority (``dpagent coordinator ca server``), one
    that boards' systems trust, or that of a file (PEM), relative to this one."""
    client_id: ClientId | None = None
    """``mqtt.client_id`` of boards, for brokers that demand a form."""
    revocation_file: FilePath | None = None
    """Where the revocation list is written for a broker that ``dpagent coordinator broker-config`` did not
    set up (PEM), relative to this file: a place that the broker's user may read. By default ``revoked.crl``
    in ``members_dir``, which it may not."""
    on_members_change: tuple[str, ...] = ()
    """Program and arguments that make the broker read its files again, run after they are written: when a
    device is revoked or replaced, and with NATS when one enrols; it has 60 seconds. For example
    ``[systemctl, restart, mosquitto]``. A broker that ``broker-config --run`` started needs none."""

    def resolved(self, file: Path) -> EnrolmentSettings:
        """The same settings with paths resolved relative to the configuration ``file``."""
        changes = {
            name: resolve(path, file)
            for name, path in (
                ("broker_authority", self.broker_authority),
                ("revocation_file", self.revocation_file),
            )
            if isinstance(path, Path)
        }
        return self.with_values(changes)
