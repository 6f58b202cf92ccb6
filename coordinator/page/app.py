"""The page as an application: its addresses, and what each answers. The guard decides what comes here."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from coordinator.budget_export import export, without_tokens
from coordinator.devices import Devices
from coordinator.keys import find_signer
from coordinator.page.access import Access
from coordinator.page.guard import COOKIE, LOGOUT, Guard, refused, visitor_of
from coordinator.page.orders import Orders
from coordinator.page.view import View
from coordinator.page.watcher import Watcher, as_json, server_sent
from coordinator.registry import RegistryReader
from coordinator.settings import CoordinatorSettings
from dpagent.errors import DpagentError
from dpagent.schema.base import Schema
from dpagent.schema.limits import Limits
from dpagent.schema.problems import SchemaError

log = logging.getLogger(__name__)

_TYPES: Final = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}  # fmt: skip
_STATIC: Final = files("coordinator.page") / "static"
_LONGEST_STREAM_S: Final = 3_600.0
"""Of events; the page asks again, and shows again that it may."""
_SEND_S: Final = 30.0
"""For a viewer that reads nothing."""
_MOST_DIGITS: Final = 9

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]


class _Body(Schema):
    """What a button sends."""


class _Login(_Body):
    token: Annotated[str, Limits(max_length=200)]


class _Nothing(_Body):
    pass


class _Addition(_Body):
    name: Annotated[str, Limits(max_length=100)]
    text: str
    start_later: bool = False


class _Cancellation(_Body):
    with_model: bool = False


class _Deadline(_Body):
    seconds: Annotated[float, Limits(gt=0, le=86_400)]


BodyT = TypeVar("BodyT", bound=_Body)


class Page:
    """The page of one coordinator.

    Args:
        settings: ``fleet.yaml``.
        directory: that it is in.
        access: who may see the page.
        view: reads what it shows.
        watcher: tells what changes.
        make_report: the HTML report of a job, by its name.
        make_metrics: the answer to a request for metrics, with its media type; by the header ``Accept``.
        is_secure: whether browsers reach it by TLS of its own.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        directory: Path,
        *,
        access: Access,
        view: View,
        watcher: Watcher,
        make_report: Callable[[str], bytes],
        make_metrics: Callable[[str], tuple[bytes, str]],
        is_secure: bool,
    ) -> None:
        self._settings, self._access, self._view, self._watcher = settings, access, view, watcher
        self._orders = Orders(settings, directory)
        self._make_report, self._make_metrics = make_report, make_metrics
        self._is_secure = is_secure
        self._one_order = asyncio.Lock()
        """One at a time: adding a job computes for seconds."""
        self._one_report = asyncio.Lock()

    def application(self) -> Guard:
        """All of it, guarded."""
        routes = [
            Route("/", self._static("index.html")),
            Route("/login", self._static("login.html"), methods=["GET"]),
            Route("/login", self._login, methods=["POST"]),
            Route(LOGOUT, self._logout, methods=["POST"]),
            *(
                Route(f"/static/{each.name}", self._static(each.name))
                for each in _STATIC.iterdir()
                if not each.name.endswith(".html")
            ),
            Route("/api/me", self._me),
            Route("/api/state", self._state),
            Route("/api/events", _Events(self._watcher, self._settings.page.most_viewers)),
            Route("/api/jobs", self._add, methods=["POST"]),
            Route("/api/jobs/{name}", self._job),
            Route("/api/jobs/{name}/model", self._model),
            Route("/api/jobs/{name}/report", self._report),
            Route("/api/jobs/{name}/pause", self._pause, methods=["POST"]),
            Route("/api/jobs/{name}/resume", self._resume, methods=["POST"]),
            Route("/api/jobs/{name}/cancel", self._cancel, methods=["POST"]),
            Route("/api/jobs/{name}/deadline", self._deadline, methods=["POST"]),
            Route("/api/audit", self._audit),
            Route("/metrics", self._metrics),
        ]
        handlers: Any = {404: _not_found, 405: _not_found, 500: _failed}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), self._access)

    # What is shown.

    def _static(self, name: str) -> Endpoint:
        data = (_STATIC / name).read_bytes()
        kind = _TYPES[Path(name).suffix]

        async def answer(request: Request) -> Response:
            return Response(data, media_type=kind)

        return answer

    async def _me(self, request: Request) -> Response:
        visitor = visitor_of(request.state)
        return JSONResponse(
            {
                "name": visitor.name,
                "may_order": visitor.is_operator,
                "order_key": self._access.order_key(visitor),
                "has_session": COOKIE in request.cookies,
            }
        )

    async def _state(self, request: Request) -> Response:
        return await _answered(self._view.state)

    async def _job(self, request: Request) -> Response:
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) <= _MOST_DIGITS):
            return refused(400, f"after is {after[:40]!r}; expected the number of a round.")
        return await _answered(lambda: self._view.job(request.path_params["name"], int(after)))

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            file = await asyncio.to_thread(self._view.model_file, name)
        except DpagentError as error:
            return refused(404, str(error))
        except FileNotFoundError:
            return refused(404, f"Job {name} has no model yet.")
        return FileResponse(file, filename=f"{name}-{file.name}", media_type="application/octet-stream")

    async def _report(self, request: Request) -> Response:
        name = request.path_params["name"]
        async with self._one_report:
            try:
                await asyncio.to_thread(self._view.require, name)
                page = await asyncio.to_thread(self._make_report, name)
            except DpagentError as error:
                return refused(409, str(error))
        return _download(page, f"{name}-report.html", "text/html; charset=utf-8")

    async def _audit(self, request: Request) -> Response:
        if not visitor_of(request.state).is_operator:
            return refused(403, "The audit export tells of single boards: an operator can have it.")
        try:
            data = await asyncio.to_thread(self._exported)
        except DpagentError as error:
            return refused(409, str(error))
        return _download(data, f"{self._settings.fleet}-budgets.json", "application/json")

    def _exported(self) -> bytes:
        members = self._settings.members_place
        reader = RegistryReader(members)
        try:
            with Devices(members) as devices:
                signer = find_signer(self._settings.keys_dir, self._settings.fleet)
                values = export(
                    reader,
                    devices,
                    fleet=self._settings.fleet,
                    untold=without_tokens(self._settings.store_place),
                    signer=signer,
                    now=time.time(),
                )
        finally:
            reader.close()
        return json.dumps(values, indent=2, allow_nan=False).encode()

    async def _metrics(self, request: Request) -> Response:
        data, kind = await asyncio.to_thread(self._make_metrics, request.headers.get("accept", ""))
        return Response(data, media_type=kind)

    # Who comes, and goes.

    async def _login(self, request: Request) -> Response:
        body = await _body(request, _Login)
        if isinstance(body, Response):
            return body
        session = self._access.begin_session(body.token)
        if session is None:
            return refused(401, "That is no token of this page. `dpagent coordinator page-token` prints one.")
        answer = JSONResponse({})
        answer.set_cookie(COOKIE, session, httponly=True, samesite="strict", secure=self._is_secure, path="/")
        return answer

    async def _logout(self, request: Request) -> Response:
        self._access.end_session(request.cookies.get(COOKIE, ""))
        answer = JSONResponse({})
        answer.delete_cookie(COOKIE, path="/")
        return answer

    # Orders.

    async def _add(self, request: Request) -> Response:
        body = await _body(request, _Addition)
        if isinstance(body, Response):
            return body
        by = visitor_of(request.state)
        return await self._carry_out(
            lambda: self._orders.add(by, body.name, body.text, is_paused=body.start_later)
        )

    async def _pause(self, request: Request) -> Response:
        by, name = visitor_of(request.state), request.path_params["name"]
        return await self._carry_out(lambda: self._orders.pause(by, name))

    async def _resume(self, request: Request) -> Response:
        by, name = visitor_of(request.state), request.path_params["name"]
        return await self._carry_out(lambda: self._orders.resume(by, name))

    async def _cancel(self, request: Request) -> Response:
        body = await _body(request, _Cancellation)
        if isinstance(body, Response):
            return body
        by, name = visitor_of(request.state), request.path_params["name"]
        return await self._carry_out(lambda: self._orders.cancel(by, name, sends_model=body.with_model))

    async def _deadline(self, request: Request) -> Response:
        body = await _body(request, _Deadline)
        if isinstance(body, Response):
            return body
        by, name = visitor_of(request.state), request.path_params["name"]
        return await self._carry_out(lambda: self._orders.set_deadline(by, name, body.seconds))

    async def _carry_out(self, order: Callable[[], str]) -> Response:
        async with self._one_order:
            try:
                words = await asyncio.to_thread(order)
            except DpagentError as error:
                return refused(409, str(error))
        return JSONResponse({"words": words})


class _Events:
    """The stream of events. Raw ASGI: what a viewer does not read is not kept for it."""

    def __init__(self, watcher: Watcher, most: int) -> None:
        self._watcher, self._most = watcher, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._watcher.viewers >= self._most:
            answer = refused(
                503, f"{self._most} pages are open, as many as there may be (page.most_viewers)."
            )
            await answer(scope, receive, send)
            return
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
            }
        )

        async def chunk(data: bytes) -> None:
            async with asyncio.timeout(_SEND_S):
                await send({"type": "http.response.body", "body": data, "more_body": True})

        sending = asyncio.ensure_future(server_sent(self._watcher, chunk))
        leaving = asyncio.ensure_future(_left(receive))
        done, waiting = await asyncio.wait(
            {sending, leaving}, timeout=_LONGEST_STREAM_S, return_when=asyncio.FIRST_COMPLETED
        )
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        if leaving in done:
            return
        for task in done:
            if isinstance(task.exception(), TimeoutError):
                log.debug("a viewer that reads nothing is let go")
        await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answered(read: Callable[[], dict[str, Any]]) -> Response:
    try:
        data = await asyncio.to_thread(lambda: as_json(read()))
    except DpagentError as error:
        return refused(404, str(error))
    return Response(data, media_type="application/json")


async def _body(request: Request, schema: type[BodyT]) -> BodyT | Response:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return refused(415, "The request is no JSON.")
    try:
        return schema.from_json(await request.body())
    except SchemaError as error:
        said = error.first.complaint(shows_value=False)
        return refused(400, f"{error.first.key or 'The request'}: {said}.")
    except (ClientDisconnect, TimeoutError):
        return refused(408, "The request did not come whole, or is too long.")


def _download(data: bytes, name: str, kind: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(data, media_type=kind, headers=headers)


async def _not_found(request: Request, error: Exception) -> Response:
    return refused(404, "There is nothing here.")


async def _failed(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return refused(500, "That failed by an error of the page itself; its log has the details.")
