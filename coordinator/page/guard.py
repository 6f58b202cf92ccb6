"""Around every request: its name, its size, who asks, and the headers of the answer.

Raw ASGI, without a library's middleware: an event stream passes through it unread.
"""

from __future__ import annotations

import asyncio
import logging
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final

from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.page.access import Access, Asked, Visitor
from dpagent.errors import DpagentError

log = logging.getLogger(__name__)

MOST_BODY_BYTES: Final = 65_536
BODY_S: Final = 10.0
COOKIE: Final = "dpagent-page"
ORDER_HEADER: Final = "x-dpagent-order"
LOGOUT: Final = "/api/logout"
_FREE: Final = frozenset({"/login", "/static/page.css", "/static/login.js", "/static/icon.svg"})
"""What is shown to whoever has to show a token yet."""
_SAFE: Final = frozenset({"GET", "HEAD"})
_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """Lets through what may come to an application, with its visitor in ``request.state.visitor``.

    Args:
        app: behind it.
        access: the page's rules.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in _HEADERS}
                kept = [each for each in message["headers"] if each[0].lower() not in names]
                message["headers"] = [*kept, *_HEADERS]
            await send(message)

        refusal = await self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, guarded)
            return
        await self._app(scope, _Bounded(receive), guarded)

    async def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that may not come through; None if it may."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if len(headers) != len(scope["headers"]) and self._access.is_ambiguous(scope["headers"]):
            return refused(400, "The request says more than once who asks.")
        host = headers.get("host", "")
        if not self._access.knows_host(host):
            return refused(
                421, "This page is not known by that name. Whoever runs it can add the name to page.hosts."
            )
        if int(headers.get("content-length", "0") or "0") > MOST_BODY_BYTES:
            return refused(413, f"The request is too long: at most {MOST_BODY_BYTES:,} bytes.")
        client, server = scope.get("client"), scope.get("server")
        if client is None or server is None:
            return refused(400, "The connection has no address.")
        asked = Asked((client[0], client[1]), (server[0], server[1]), headers, _session_of(headers))
        try:
            visitor = self._access.visitor(asked)
        except DpagentError as error:
            log.error("a request was refused: %s", error)
            return refused(503, "The page cannot tell who asks. Its log says why.")
        scope.setdefault("state", {})["visitor"] = visitor
        path, is_safe = scope["path"], scope["method"] in _SAFE
        if not is_safe and not self._access.is_own_origin(headers.get("origin"), host):
            return refused(403, "The request came from another site.")
        if path in _FREE:
            return None
        if visitor is None:
            if path == "/" and is_safe:
                return RedirectResponse("/login", 303)
            return refused(401, "Show a token: `dpagent coordinator page-token` makes one.")
        if not is_safe:
            return self._refused_order(visitor, path, headers)
        return None

    def _refused_order(self, visitor: Visitor, path: str, headers: dict[str, str]) -> Response | None:
        if not self._access.is_order_of(visitor, headers.get(ORDER_HEADER, "")):
            return refused(403, "The page is of an earlier start of the server. Load it again.")
        if not visitor.is_operator and path != LOGOUT:
            return refused(403, f"{visitor.name} may look, and give no orders.")
        return None


class _Bounded:
    """A request's body within its bounds, whatever its headers say."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._left, self._is_whole = receive, MOST_BODY_BYTES, False

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()  # The end of the connection, which may take hours.
        try:
            async with asyncio.timeout(BODY_S):
                message = await self._receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            return {"type": "http.disconnect"}
        self._is_whole = not message.get("more_body", False)
        return message


def refused(status: int, reason: str) -> Response:
    """A refusal, with its reason in a sentence."""
    return JSONResponse({"error": reason}, status)


def visitor_of(state: Any) -> Visitor:
    """Who asks, in a handler behind the guard."""
    visitor = state.visitor
    assert isinstance(visitor, Visitor)
    return visitor


def _session_of(headers: dict[str, str]) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value
