"""The fleet's page on a free loopback port, served in a thread, and requests as a browser sends them."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brokers import reserved_port, wait_until

from coordinator.page.server import serve
from coordinator.settings import CoordinatorSettings


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def values(self) -> Any:
        return json.loads(self.body)


def next_state(answer: http.client.HTTPResponse) -> dict[str, Any]:
    """What the stream of events says next."""
    while True:
        line = answer.readline().decode()
        if line.startswith("data: "):
            values: dict[str, Any] = json.loads(line[6:])
            return values


class PageClient:
    """Asks a page, or a proxy before it, as a browser does.

    Args:
        port: on loopback.
        trusting: the authorities that the requests trust; None where there is no TLS.
        **headers: of every request.
    """

    def __init__(self, port: int, trusting: ssl.SSLContext | None = None, **headers: str) -> None:
        self.port, self._trusting, self.headers = port, trusting, headers

    @property
    def scheme(self) -> str:
        return "http" if self._trusting is None else "https"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _connection(self) -> http.client.HTTPConnection:
        if self._trusting is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=self._trusting)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = self._connection()
        try:
            named = {name.replace("_", "-"): value for name, value in (self.headers | headers).items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **headers)

    def post(self, path: str, values: Any, **headers: str) -> Answer:
        given = {"Content_Type": "application/json"} | headers
        return self.request("POST", path, json.dumps(values).encode(), **given)

    def order(self, path: str, values: Any = None, **headers: str) -> Answer:
        """What the page itself sends: with the key that it has read."""
        key = self.get("/api/me", **headers).values["order_key"]
        own = {"X_Dpagent_Order": key, "Origin": f"{self.scheme}://{self.host}"}
        return self.post(path, values or {}, **(own | headers))


@contextmanager
def events(page: PageClient) -> Iterator[http.client.HTTPResponse]:
    """A stream of events, as a browser holds it open."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)
    connection.request("GET", "/api/events")
    answer = connection.getresponse()
    try:
        yield answer
    finally:
        answer.close()
        connection.close()


class PageServer(PageClient):
    """A page that is served while the block lasts.

    Attributes:
        port: that it listens on.

    Args:
        settings: of the coordinator.
        directory: of ``fleet.yaml``.
        make_report: of a job.
        trusting: the authorities that the requests trust; None where the page has no TLS of its own.
        **page: changes of its settings.
    """

    def __init__(
        self, settings: CoordinatorSettings, directory: Path, make_report: Callable[[str], bytes] =
        str.encode, *, trusting: ssl.SSLContext | None = None,
        **page: Any,
    ) -> None:  # fmt: skip
        self._reserved = reserved_port()
        super().__init__(self._reserved.getsockname()[1], trusting)
        self.settings = settings.with_values({"page": settings.page.with_values({"port": self.port, **page})})
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=(directory, make_report))

    def _serve(self, directory: Path, make_report: Callable[[str], bytes]) -> None:
        try:
            serve(self.settings, directory, self._stop, make_report)
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(self._answers, "the page")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(20)
        self._reserved.close()
        assert not self._thread.is_alive(), "the page does not end"
        if self._error is not None and value is None:
            raise self._error

    def _answers(self) -> bool:
        if self._error is not None:
            raise self._error
        try:
            return bool(self.get("/login").status)
        except OSError:
            return False
