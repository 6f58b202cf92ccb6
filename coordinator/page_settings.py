"""The section ``page`` of ``fleet.yaml``: where the page listens, who may see it, and who may give orders."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Final

from dpagent.configuration import resolve
from dpagent.protocol.enrolment import is_host
from dpagent.schema.base import rule
from dpagent.schema.limits import After, Limits
from dpagent.settings import FilePath, Settings

DEFAULT_PORT: Final = 8885


def _ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError("expected an IP address, such as 127.0.0.1 or ::1") from None


def _host(text: str) -> str:
    if not is_host(text):
        raise ValueError("expected a host name or an address, such as fleet.example")
    return text.lower()


IpAddress = Annotated[str, After(_ip)]
Host = Annotated[str, After(_host)]
HeaderName = Annotated[str, Limits(pattern=r"^[A-Za-z0-9-]{1,64}$")]


class PageSettings(Settings):
    """``dpagent coordinator serve``: where it listens, and who may see the page and give orders."""

    listen: IpAddress = "127.0.0.1"
    """Address of this machine that the page listens on. Any but a loopback address needs a token (``dpagent
    coordinator page-token``) or a proxy."""
    port: Annotated[int, Limits(ge=0, le=65_535)] = DEFAULT_PORT
    """Its port; 0: a free one, which the log names."""
    hosts: tuple[Host, ...] = ()
    """Names by which browsers reach the page, besides ``localhost`` and the address that it listens on.
    Requests for any other name are refused."""
    certificate: FilePath | None = None
    """Certificate of the page (PEM, with its chain), relative to this file; with it, the page is served over
    TLS."""
    key: FilePath | None = None
    """Key of ``certificate`` (PEM)."""
    proxies: tuple[IpAddress, ...] = ()
    """Addresses of reverse proxies that say who asks. Nobody else's word is taken."""
    proxy_user: str | None = None
    """The local user that a proxy on this machine runs as; needed with a loopback address in ``proxies``, as
    any user of the machine can connect from there."""
    identity_header: HeaderName = "X-Forwarded-User"
    """The header in which a proxy names who asks. The proxy has to remove it from what browsers send."""
    operators: tuple[str, ...] = ()
    """Who of those that a proxy names may give orders; all others only look."""
    most_viewers: Annotated[int, Limits(ge=1, le=1_000)] = 64
    """Pages that are open at once."""

    @rule
    def _goes_together(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together; expected both or none")
        local = [each for each in self.proxies if ipaddress.ip_address(each).is_loopback]
        if local and self.proxy_user is None:
            raise ValueError(
                f"proxies has {local[0]}, from where any user of this machine can connect; expected "
                "proxy_user besides, the local user that the proxy runs as"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the page."""
        return ipaddress.ip_address(self.listen).is_loopback

    def resolved(self, file: Path) -> PageSettings:
        """The same settings with paths resolved relative to the configuration ``file``."""
        changes = {
            name: resolve(path, file)
            for name, path in (("certificate", self.certificate), ("key", self.key))
            if path is not None
        }
        return self.with_values(changes)
