"""Who asks, and what they may: a local user, a holder of a token, or whom a reverse proxy names.

In this order:

1. From an address in ``page.proxies``: whom the proxy names, and nobody without a name. What comes through a
   proxy is never taken for a local user.
2. With a token, in ``Authorization: Bearer`` or in the session that it began: the token's role.
3. Over a loopback connection: the local user at its other end, if that is this program's, or root
   (:mod:`coordinator.page.local_users`), and nothing says that the request was forwarded.

An order needs a key besides, which only a page of this server can have read: the browser sends cookies,
addresses and identities along with whatever another site asks it to send.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from coordinator.orders import MOST_CHARACTERS
from coordinator.page import local_users
from coordinator.page.tokens import Role, Tokens
from coordinator.page_settings import PageSettings

SESSION_S: Final = 12 * 3_600.0
_MOST_SESSIONS: Final = 256
_BEARER: Final = "bearer "
_FORWARDED: Final = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"})
"""By which a proxy shows that it is one: whom it connects as is not who asks."""
_NAME_CHARACTERS: Final = MOST_CHARACTERS - 20


@dataclass(frozen=True, slots=True)
class Visitor:
    """Somebody who may see the page.

    Attributes:
        name: for the log of orders; may be anything that a proxy says.
        role: what they may do.
    """

    name: str
    role: Role

    @property
    def is_operator(self) -> bool:
        """Whether they may give orders."""
        return self.role is Role.OPERATOR


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as it says who asks.

    Attributes:
        peer: address and port of the other end.
        own: of this end.
        headers: in lower case; the last of several.
        session: the session's cookie; empty without one.
    """

    peer: tuple[str, int]
    own: tuple[str, int]
    headers: Mapping[str, str]
    session: str = ""


@dataclass(frozen=True, slots=True)
class _Session:
    role: Role
    digest: bytes
    ends_at: float


class Access:
    """The rules of a page.

    Args:
        settings: its own.
        tokens: of the coordinator.
        monotonic: a clock, in seconds.
    """

    def __init__(
        self, settings: PageSettings, tokens: Tokens, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._tokens, self._monotonic = settings, tokens, monotonic
        self._key = secrets.token_bytes(32)
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._hosts = {"localhost", settings.listen, *settings.hosts}
        if settings.is_local:
            self._hosts |= {"127.0.0.1", "::1"}

    def visitor(self, asked: Asked) -> Visitor | None:
        """Who asks; None if it is nobody who may see the page."""
        address = local_users.plain_address(asked.peer[0])
        if address in self._settings.proxies:
            return self._named_by_proxy(asked, address)
        given = asked.headers.get("authorization", "")
        if given[: len(_BEARER)].lower() == _BEARER:
            role = self._tokens.role_of(given[len(_BEARER) :])
            return None if role is None else _holder(role)
        if asked.session and (role := self._role_of_session(asked.session)) is not None:
            return _holder(role)
        if ipaddress.ip_address(address).is_loopback and not _FORWARDED & asked.headers.keys():
            user = local_users.peer_user(asked.peer, asked.own)
            if user is not None and local_users.is_own(user):
                return Visitor(local_users.name_of(user), Role.OPERATOR)
        return None

    def is_ambiguous(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether a request has a header twice that says who asks: one may be a browser's, and no proxy's.

        Args:
            headers: names in lower case, and values.
        """
        telling = {b"host", b"authorization", self._settings.identity_header.lower().encode()}
        names = [name for name, _ in headers if name in telling]
        return len(names) != len(set(names))

    def _named_by_proxy(self, asked: Asked, address: str) -> Visitor | None:
        if ipaddress.ip_address(address).is_loopback:
            user = local_users.peer_user(asked.peer, asked.own)
            if user is None or local_users.name_of(user) != self._settings.proxy_user:
                return None
        name = asked.headers.get(self._settings.identity_header.lower(), "").strip()
        if not name:
            return None
        role = Role.OPERATOR if name in self._settings.operators else Role.VIEWER
        return Visitor(name[:_NAME_CHARACTERS], role)

    # Sessions: what a token is given for, once, so that the browser need not keep it.

    def begin_session(self, token: str) -> str | None:
        """A new session; None if the token is none."""
        role = self._tokens.role_of(token)
        digest = None if role is None else self._tokens.digest(role)
        if role is None or digest is None:
            return None
        text = secrets.token_urlsafe(32)
        self._sessions[_hash(text)] = _Session(role, digest, self._monotonic() + SESSION_S)
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return text

    def end_session(self, text: str) -> None:
        """Forget a session."""
        self._sessions.pop(_hash(text), None)

    def _role_of_session(self, text: str) -> Role | None:
        known = self._sessions.get(_hash(text))
        if known is None:
            return None
        if self._monotonic() >= known.ends_at or self._tokens.digest(known.role) != known.digest:
            self.end_session(text)
            return None
        return known.role

    # What keeps other sites from giving orders by an operator's browser.

    def order_key(self, visitor: Visitor) -> str:
        """What an order of a visitor has to carry; of this run of the program."""
        return hmac.new(self._key, f"{visitor.role}:{visitor.name}".encode(), hashlib.sha256).hexdigest()

    def is_order_of(self, visitor: Visitor, key: str) -> bool:
        """Whether an order was sent by a page that this visitor has read."""
        return hmac.compare_digest(self.order_key(visitor).encode(), key.encode())

    def knows_host(self, host: str) -> bool:
        """Whether a request is for this page by a name of its own (against DNS rebinding).

        Args:
            host: the header ``Host``, perhaps with a port.
        """
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        return name is not None and name in self._hosts

    def is_own_origin(self, origin: str | None, host: str) -> bool:
        """Whether a request comes from this page itself, or from no page at all.

        Args:
            origin: the header ``Origin``; None without one.
            host: the header ``Host``.
        """
        if origin is None:
            return True
        return urlsplit(origin).netloc.lower() == host.lower()


def _holder(role: Role) -> Visitor:
    return Visitor(f"holder of the {role.word}'s token", role)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
