"""What the page refuses: too much, for too long, of another site; and that it tells no secret, no markup."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
from pathlib import Path

import pytest
from brokers import wait_until
from page_servers import PageServer, events, next_state
from stores import BLANK_MODEL, begin_job

import coordinator.page.server
from coordinator.queue import Queue
from coordinator.queued_job import JobState
from coordinator.settings import FleetSettings
from coordinator.store import Store


def test_nothing_is_ordered_by_another_site(store: Store, page: PageServer) -> None:
    key = page.get("/api/me").values["order_key"]
    path = "/api/jobs/first/cancel"
    own = f"http://{page.host}"
    assert page.post(path, {}).status == 403, "without the key"
    assert page.post(path, {}, X_Dpagent_Order="0" * 64, Origin=own).status == 403
    assert page.post(path, {}, X_Dpagent_Order=key, Origin="http://evil.example").status == 403
    assert page.post(path, {}, X_Dpagent_Order=key, Origin="null").status == 403
    form = page.request(
        "POST", path, b"with_model=1", X_Dpagent_Order=key, Content_Type="application/x-www-form-urlencoded"
    )
    assert form.status == 415
    assert page.get(path).status in (404, 405)
    assert (
        page.request("OPTIONS", path, Origin="http://evil.example").headers.get("access-control-allow-origin")
        is None
    )
    (queued,) = Queue(store.database).jobs()
    assert queued.state is JobState.RUNNING


def test_a_name_that_is_not_its_own_is_refused(page: PageServer) -> None:
    """As when a site's name leads to this machine: the browser would send what it has for that site."""
    for path in ("/", "/api/state", "/login", "/metrics"):
        assert page.get(path, Host="evil.example").status == 421
    assert page.get("/api/state", Host=f"localhost:{page.port}").status == 200


def test_no_site_may_frame_the_page(page: PageServer) -> None:
    for path in ("/", "/login", "/api/state"):
        headers = page.get(path).headers
        assert headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in str(headers["content-security-policy"])


def test_a_request_that_says_twice_who_asks_is_refused(page: PageServer) -> None:
    """One of the two may be a browser's, and the other its proxy's."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)) as connection:
        connection.putrequest("GET", "/api/state")
        for token in ("one", "other"):
            connection.putheader("Authorization", f"Bearer {token}")
        connection.endheaders()
        assert connection.getresponse().status == 400


def test_a_key_that_no_answer_can_hold_is_refused(page: PageServer) -> None:
    answer = page.order("/api/jobs", {"name": "x", "text": "y", "\ud800": 1})
    assert (answer.status, r"\\ud800: expected no key of that name" in answer.body.decode()) == (400, True)


def test_too_much_is_refused(page: PageServer) -> None:
    key = page.get("/api/me").values["order_key"]
    long = json.dumps({"name": "x", "text": "y" * 70_000}).encode()
    assert page.request("POST", "/api/jobs", long, X_Dpagent_Order=key).status == 413
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)
    chunks = (b"y" * 8_192 for _ in range(16))
    headers = {"X-Dpagent-Order": key, "Content-Type": "application/json"}
    connection.request("POST", "/api/jobs", chunks, headers, encode_chunked=True)
    assert connection.getresponse().status == 408
    connection.close()
    with socket.create_connection(("127.0.0.1", page.port), timeout=20) as endless:
        endless.sendall(b"GET /api/state HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                endless.sendall(b"z" * 16_384)
        assert b"200 OK" not in read_all(endless)


def test_there_is_an_end_of_viewers(settings: FleetSettings, store: Store, tmp_path: Path) -> None:
    with PageServer(settings, tmp_path / "fleet", most_viewers=2) as page:
        with events(page) as first, events(page) as second:
            next_state(first)
            next_state(second)
            with events(page) as refused:
                assert refused.status == 503
            assert page.get("/api/state").status == 200

        def is_let_in() -> bool:
            with events(page) as answer:
                return answer.status == 200

        wait_until(is_let_in, "the place of a viewer that left")


def test_a_connection_without_a_request_is_cut(
    settings: FleetSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator.page.server, "REQUEST_S", 0.3)
    with PageServer(settings, tmp_path / "fleet") as page:
        for sent in (b"", b"GET /api/state HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b"\x16\x03\x01"):
            with socket.create_connection(("127.0.0.1", page.port), timeout=20) as connection:
                connection.sendall(sent)
                assert b"200 OK" not in read_all(connection)
        assert page.get("/api/state").status == 200


def read_all(connection: socket.socket) -> bytes:
    data = b""
    try:
        while part := connection.recv(4_096):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_whoever_fills_the_connections_keeps_nobody_else_out_for_long(
    settings: FleetSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator.page.server, "_MOST_CONNECTIONS", 4)
    monkeypatch.setattr(coordinator.page.server, "REQUEST_S", 0.5)
    with PageServer(settings, tmp_path / "fleet", most_viewers=1) as page:
        held = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(12)]
        wait_until(lambda: answers(page), "a place")
        for each in held:
            each.close()


def answers(page: PageServer) -> bool:
    try:
        return page.get("/login").status == 200
    except (OSError, http.client.HTTPException):
        return False


def test_a_failure_of_the_page_is_no_traceback_to_anybody(
    store: Store, settings: FleetSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(job: str) -> bytes:
        raise RuntimeError("a secret of the program")

    with PageServer(settings, tmp_path / "fleet", fail) as page:
        answer = page.get("/api/jobs/first/report")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert "a request failed" in caplog.text


def test_hostile_texts_stay_texts(settings: FleetSettings, page: PageServer) -> None:
    """A class name, a reason: whatever they are, they are strings of JSON with no markup of their own."""
    hostile = "</script><img src=x onerror=alert(1)>"
    store = begin_job(settings, BLANK_MODEL)
    Queue(store.database).halt(store.number, hostile)
    answer = page.get("/api/state")
    assert answer.headers["content-type"] == "application/json"
    assert answer.values["jobs"][0]["trouble"] == hostile


def test_the_log_of_a_stranger_is_short(page: PageServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", page.port), timeout=20) as connection:
                connection.sendall(b"rubbish\r\n\r\n")
                read_all(connection)
    assert "Invalid HTTP" not in caplog.text
