"""The page over HTTP: what it shows, what it refuses, and what orders do to the queue of a real database."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
from fleets import write_job
from page_servers import PageServer, events, next_state
from postgresql import Postgresql, new_place
from stores import BLANK_MODEL, begin, begin_job, open_store
from token_desks import Desk

import coordinator.page.server
from benchmarks.certificates import broker_certificate
from cli.watching import lines_of
from coordinator.database.opening import open_database
from coordinator.database.settings import PostgresqlAddress, StoreSettings
from coordinator.keys import load_signer
from coordinator.page.server import serve
from coordinator.page.tokens import Role, make_token
from coordinator.page.view import View
from coordinator.planning import new_job
from coordinator.queue import Queue
from coordinator.queued_job import JobState
from coordinator.settings import FleetSettings
from coordinator.shared_store import Workers
from coordinator.store import Store
from dpagent.errors import ConfigurationError


def test_an_empty_coordinator_is_shown_as_one(page: PageServer) -> None:
    state = page.get("/api/state").values
    assert (state["jobs"], state["current"], state["open"], state["problem"]) == ([], None, None, None)
    assert "No coordinator runs here" in state["coordinator"]["words"]
    assert page.get("/api/jobs/first").status == 404


def test_a_job_is_shown_with_its_rounds(store: Store, page: PageServer) -> None:
    state = page.get("/api/state").values
    (job,) = state["jobs"]
    assert (job["name"], job["state"], job["closed"], job["rounds"]) == ("first", "running", 1, 2)
    assert job["accuracy"] == pytest.approx(5 / 6)
    assert (state["open"]["round"], state["open"]["counted"], state["open"]["expected"]) == (2, 0, 10)
    found = page.get("/api/jobs/first").values
    assert found["rows"]["accuracy"] == [pytest.approx(5 / 6)]
    assert (found["rows"]["loss"], found["rows"]["received"], found["rows"]["published"]) == (
        [0.5],
        [700],
        [900],
    )
    assert found["majority_class_accuracy"] == pytest.approx(4 / 6)
    assert found["classes"]["confusion"] == [[3, 1], [0, 2]]
    (column,) = found["columns"]
    assert column["spent"] == 1.25
    assert column["target"] - column["left"] == pytest.approx(1.25)
    assert page.get("/api/jobs/first?after=1").values["rows"]["number"] == []
    for wrong in ("-1", "x", "9" * 30, "1.5", "%C2%B2", 12 * "0" + 20 * "9"):
        assert page.get(f"/api/jobs/first?after={wrong}").status == 400


def in_postgresql(settings: FleetSettings, server: Postgresql) -> tuple[PostgresqlAddress, FleetSettings]:
    """A place of its own for the state of this fleet's coordinator, and the settings that name it."""
    address = new_place(server)
    store = StoreSettings(url=address.url, password_file=server.password_file)
    return address, settings.with_values({"store": store})


def test_a_store_in_postgresql_is_shown_and_watched_too(
    settings: FleetSettings, tmp_path: Path, postgresql: Postgresql
) -> None:
    address, shared = in_postgresql(settings, postgresql)
    with PageServer(shared, tmp_path / "fleet") as page:
        assert page.get("/api/state").values["problem"] is None, "there are no tables yet"
        store = open_store(address, new_job(settings), settings.job().stored())
        begin(store, BLANK_MODEL)
        store.start_round(1, 10.0, 70.0)
        with events(page) as answer:
            assert next_state(answer)["current"] == "first"
            assert page.order("/api/jobs/first/pause").status == 200
            until = time.monotonic() + 20
            while len(next_state(answer)["orders"]) < 2:
                assert time.monotonic() < until
        assert page.get("/api/jobs/first").values["paused"]
        store.database.close()


def test_an_audit_export_is_offered_where_a_board_has_enrolled(
    settings: FleetSettings, tmp_path: Path, postgresql: Postgresql
) -> None:
    """In PostgreSQL the tables are there before there is a member."""
    address, shared = in_postgresql(settings, postgresql)
    store = open_store(address, new_job(settings), settings.job().stored())
    begin(store, BLANK_MODEL)
    store.database.close()
    desk = Desk(tmp_path / "desk", load_signer(settings.keys_dir, settings.fleet), place=address)
    with PageServer(shared, tmp_path / "fleet") as page:
        assert page.get("/api/jobs/first").values["downloads"]["audit"] is False
        refused = page.get("/api/audit")
        assert (refused.status, "No board has enrolled" in refused.values["error"]) == (409, True)
        board = desk.member()
        assert page.get("/api/jobs/first").values["downloads"]["audit"] is True
        exported = page.get("/api/audit")
        assert (exported.status, [each["device"] for each in exported.values["devices"]]) == (
            200, [board.device_id],
        )  # fmt: skip
    desk.close()


def test_workers_are_shown_with_what_they_count_and_when_they_were_seen(
    settings: FleetSettings, tmp_path: Path, postgresql: Postgresql
) -> None:
    address, shared = in_postgresql(settings, postgresql)
    store = open_store(address, new_job(settings), settings.job().stored())
    begin(store, BLANK_MODEL)
    store.start_round(1, 10.0, 70.0)
    workers = Workers(store.database)
    view = View(shared)
    assert view.state()["workers"] == []
    lines = list(lines_of(view.state(), None))
    assert any("none counts fragments: start `dpagent coordinator worker`" in line for line in lines)
    first, second, third = (workers.register(name, "1.0") for name in ("one", "two", "three"))
    with store.database.transaction():
        store.database.execute("UPDATE workers SET fragments = 7 WHERE number = ?", (first,))
        store.database.execute("UPDATE workers SET seen_at = seen_at - 31 WHERE number = ?", (second,))
        store.database.execute("UPDATE workers SET seen_at = seen_at - 3601 WHERE number = ?", (third,))
    with PageServer(shared, tmp_path / "fleet") as page:
        found = {each["name"]: each for each in page.get("/api/state").values["workers"]}
        exposed = page.get("/metrics").body.decode()
    assert {name: (each["counts"], each["fragments"]) for name, each in found.items()} == {
        "one": (True, 7),
        "two": (False, 0),
    }
    assert found["two"]["seen_s"] >= 31 > found["one"]["seen_s"]
    assert "dpagent_workers 1.0" in exposed
    assert 'dpagent_worker_fragments_total{worker="one"} 7.0' in exposed
    assert 'worker="two"' not in exposed
    (line,) = [line for line in lines_of(view.state(), None) if line.startswith("workers")]
    assert line.endswith("1 worker: one (7 fragments).")
    workers.end(first)
    (one, _) = view.state()["workers"]
    assert (one["name"], one["counts"]) == ("one", False)
    store.database.close()


def test_the_page_has_its_own_tls(settings: FleetSettings, tmp_path: Path) -> None:
    """Who trusts its authority reads it and gives orders; nothing crosses the network in the clear."""
    files = broker_certificate(tmp_path / "tls")
    trusting = ssl.create_default_context(cafile=str(files.authority))
    own = {"certificate": files.certificate, "key": files.key}
    begin_job(settings, BLANK_MODEL)
    with PageServer(settings, tmp_path / "fleet", trusting=trusting, **own) as page:
        assert page.get("/api/state").values["fleet"] == settings.fleet
        assert page.order("/api/jobs/first/pause").status == 200
        token = make_token(settings.keys_dir, Role.VIEWER)
        begun = page.post("/login", {"token": token}, Origin=f"https://{page.host}")
        assert begun.status == 200
        assert {"Secure", "HttpOnly"} <= set(begun.headers["set-cookie"].split("; "))
        with socket.create_connection(("127.0.0.1", page.port), timeout=20) as plain:
            plain.sendall(b"GET /api/state HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"fleet" not in plain.recv(4_096)
        stranger = ssl.create_default_context()
        with (
            socket.create_connection(("127.0.0.1", page.port), timeout=20) as plain,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            stranger.wrap_socket(plain, server_hostname="127.0.0.1")


@pytest.mark.parametrize("wrong", ["no certificate", "another's key", "a missing file"])
def test_a_certificate_that_cannot_be_used_is_named(
    settings: FleetSettings, tmp_path: Path, wrong: str
) -> None:
    files = broker_certificate(tmp_path / "tls")
    key = broker_certificate(tmp_path / "other").key if wrong == "another's key" else files.key
    certificate = tmp_path / "page.crt" if wrong == "a missing file" else files.certificate
    if wrong == "no certificate":
        certificate.write_text("nothing")
    page = settings.page.with_values({"port": 0, "certificate": certificate, "key": key})
    with pytest.raises(ConfigurationError, match=r"page\.certificate and page\.key .* cannot be used"):
        serve(settings.with_values({"page": page}), tmp_path, threading.Event(), str.encode)


def test_orders_change_the_queue_and_are_on_record(
    store: Store, page: PageServer, settings: FleetSettings
) -> None:
    assert page.order("/api/jobs/first/pause").status == 200
    (queued,) = Queue(store.database).jobs()
    assert queued.is_paused
    again = page.order("/api/jobs/first/pause")
    assert (again.status, "paused already" in again.values["error"]) == (409, True)
    assert page.order("/api/jobs/first/resume").status == 200
    assert page.order("/api/jobs/first/deadline", {"seconds": 90.0}).status == 200
    assert "leaves" not in page.order("/api/jobs/first/deadline", {"seconds": 0.1}).values["error"]
    assert page.order("/api/jobs/first/cancel", {"with_model": True}).status == 200
    (queued,) = Queue(store.database).jobs()
    assert (queued.state, queued.sends_model, queued.deadline_s) == (JobState.CANCELLING, True, 90.0)
    orders = page.get("/api/state").values["orders"]
    assert [each["kind"] for each in orders] == ["cancel", "deadline", "resume", "pause", "add"]
    assert all(each["by"].endswith(", by the page") for each in orders[:-1])
    assert page.order("/api/jobs/nothing/pause").status == 409


def test_a_job_is_added_as_by_the_command(page: PageServer, settings: FleetSettings, tmp_path: Path) -> None:
    text = write_job(tmp_path / "job.yaml").read_text()
    added = page.order("/api/jobs", {"name": "next", "text": text, "start_later": True})
    assert added.status == 200, added.body
    database = open_database(settings.state_dir)
    first, second = Queue(database).jobs()
    database.close()
    assert (first.name, second.name, second.is_paused) == ("first", "next", True)
    for name, wrong, why in (
        ("next", text, "already"),
        ("first", text, "fleet.yaml itself"),
        ("../other", text, "letters, digits"),
        ("", text, "letters, digits"),
        ("bad", "rounds: [", "not valid YAML"),
        ("bad", "rounds: 0", "rounds"),
        ("bad", "fleet: mine\nrounds: 3", "key of the whole fleet"),
        ("bad", text + "\ntest_data: {path: /etc/passwd, kind: csv}\n", "directory of fleet.yaml"),
        ("bad", text + "\ntest_data: {path: ../../x.npz, kind: npz}\n", "directory of fleet.yaml"),
        ("bad", text.replace("name: digits", "name: /etc/model.yaml"), "directory of fleet.yaml"),
    ):
        refused = page.order("/api/jobs", {"name": name, "text": wrong, "start_later": False})
        assert refused.status == 409, (name, refused.body)
        assert why in refused.values["error"], (name, refused.body)
    assert "bad" not in [each["name"] for each in page.get("/api/state").values["jobs"]]


def test_every_answer_has_its_headers(store: Store, page: PageServer) -> None:
    for path in ("/", "/login", "/static/page.js", "/api/state", "/api/nothing", "/metrics", "/static/../x"):
        headers = page.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert (headers["x-frame-options"], headers["cache-control"]) == ("DENY", "no-store")
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert "server" not in headers


def test_static_files_need_no_foreign_host_and_nothing_inline() -> None:
    static = Path(coordinator.page.server.__file__).parent / "static"
    files = sorted(static.iterdir())
    assert sum(each.stat().st_size for each in files) < 200_000
    for file in files:
        text = file.read_text()
        plain = text.replace("http://www.w3.org/", "")
        foreign = ("http:", "https:", 'src="//')
        inline = ("<style", " style=", " onclick=", "<script>") if file.suffix == ".html" else ()
        markup = (
            ("innerHTML", "insertAdjacentHTML", "eval(", "document.write") if file.suffix == ".js" else ()
        )
        assert [each for each in (*foreign, *inline, *markup) if each in plain] == [], file


def test_what_changes_is_sent(store: Store, page: PageServer) -> None:
    with events(page) as answer:
        assert (answer.getheader("content-type") or "").startswith("text/event-stream")
        assert next_state(answer)["open"]
        store.reject("malformed", 3)
        until = time.monotonic() + 20
        while "malformed" not in json.dumps(next_state(answer)):
            assert time.monotonic() < until


def test_a_page_that_others_reach_needs_a_token(settings: FleetSettings, tmp_path: Path) -> None:
    open_to_all = settings.with_values({"page": settings.page.with_values({"listen": "0.0.0.0"})})
    with pytest.raises(ConfigurationError, match="page-token"):
        serve(open_to_all, tmp_path, threading.Event(), str.encode)


def test_who_has_a_token_signs_in_and_out(
    settings: FleetSettings, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.page.local_users.is_own", lambda user: False)
    operators, viewers = (make_token(settings.keys_dir, role) for role in (Role.OPERATOR, Role.VIEWER))
    with PageServer(settings, tmp_path / "fleet") as page:
        first = page.get("/")
        assert (first.status, first.headers["location"]) == (303, "/login")
        for path in (
            "/api/state",
            "/api/me",
            "/api/events",
            "/api/jobs/first",
            "/metrics",
            "/static/page.js",
        ):
            assert page.get(path).status == 401, path
        assert page.post("/login", {"token": "nonsense"}).status == 401
        assert page.post("/login", {"token": operators}, Origin="http://evil.example").status == 403
        signed = page.post("/login", {"token": operators})
        cookie = signed.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        session = cookie.partition(";")[0]
        assert page.get("/", Cookie=session).status == 200
        assert page.order("/api/jobs/first/pause", Cookie=session).status == 200
        bearer = f"Bearer {viewers}"
        assert page.get("/metrics", Authorization=bearer).status == 200
        refused = page.order("/api/jobs/first/resume", Authorization=bearer)
        assert (refused.status, "give no orders" in refused.values["error"]) == (403, True)
        kept = page.get("/api/audit", Authorization=bearer)
        assert (kept.status, "single boards" in kept.values["error"]) == (403, True)
        looking = page.post("/login", {"token": viewers}).headers["set-cookie"].partition(";")[0]
        for each in (session, looking):
            assert page.order("/api/logout", Cookie=each).status == 200
            assert page.get("/api/state", Cookie=each).status == 401


def test_downloads(store: Store, page: PageServer, settings: FleetSettings) -> None:
    assert page.get("/api/jobs/first/model").status == 404
    models = settings.directory_of("first") / "models"
    models.mkdir(parents=True)
    for number in (1, 2):
        (models / f"round-{number:04d}.onnx").write_bytes(b"model %d" % number)
    model = page.get("/api/jobs/first/model")
    assert (model.status, model.body) == (200, b"model 2")
    assert "first-round-0002.onnx" in model.headers["content-disposition"]
    report = page.get("/api/jobs/first/report")
    assert (report.body, report.headers["content-disposition"]) == (
        b"first", 'attachment; filename="first-report.html"',
    )  # fmt: skip
    assert page.get("/api/audit").status == 409, "there are no members"
    for name in ("%2e%2e", "..%2f..%2fkeys", "first%00"):
        assert page.get(f"/api/jobs/{name}/model").status == 404, name
