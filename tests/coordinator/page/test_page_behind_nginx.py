"""The page behind nginx, with the configuration that docs/operating.md has for it."""

from __future__ import annotations

import base64
import os
import re
import socket
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from http.client import HTTPSConnection
from pathlib import Path

import pytest
from brokers import reserved_port, wait_until
from children import Child
from fleets import write_fleet
from page_servers import PageClient, PageServer, next_state
from stores import BLANK_MODEL, begin_job

from benchmarks.certificates import broker_certificate
from benchmarks.programs import ROOT
from coordinator.settings import FleetSettings, load_fleet_settings

NGINX = Path("/usr/sbin/nginx")
PROXY_USER = "www-data"
PASSWORDS = {"alice": "correct horse", "bob": "battery staple"}

pytestmark = pytest.mark.skipif(
    not NGINX.exists() or os.geteuid() != 0, reason="needs nginx, and root to start it as another user"
)


@pytest.fixture
def settings(tmp_path: Path) -> FleetSettings:
    values = load_fleet_settings(
        write_fleet(tmp_path / "fleet", None, mqtt={"url": "mqtt://nowhere.invalid"})
    )
    begin_job(values, BLANK_MODEL)
    return values


@pytest.fixture
def page(settings: FleetSettings, tmp_path: Path) -> Iterator[PageServer]:
    told = {"proxies": ["127.0.0.1"], "proxy_user": PROXY_USER, "operators": ["alice"]}
    with PageServer(settings, tmp_path / "fleet", **told) as server:
        yield server


@pytest.fixture
def port(page: PageServer) -> Iterator[int]:
    """Of nginx before the page. Its workers read the users, so its files are where they may."""
    with tempfile.TemporaryDirectory() as name, closing(reserved_port()) as reserved:
        directory, own = Path(name), reserved.getsockname()[1]
        directory.chmod(0o755)
        files = broker_certificate(directory / "tls")
        users = directory / "users"
        users.write_text("".join(f"{user}:{{PLAIN}}{word}\n" for user, word in PASSWORDS.items()))
        (server,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs/operating.md").read_text(), re.DOTALL)
        for said, here in (
            ("listen 443", f"listen 127.0.0.1:{own}"), ("http://127.0.0.1:8885", f"http://{page.host}"),
            ("fleet.example", "127.0.0.1"), ("/etc/nginx/fleet.crt", files.certificate),
            ("/etc/nginx/fleet.key", files.key), ("/etc/nginx/fleet-users", users),
        ):  # fmt: skip
            assert said in server
            server = server.replace(said, str(here))
        (directory / "nginx.conf").write_text(
            f"user {PROXY_USER};\ndaemon off;\npid {directory}/pid;\nerror_log stderr;\n"
            f"events {{}}\nhttp {{\naccess_log off;\n{server}}}\n"
        )
        nginx = Child([NGINX, "-p", directory, "-c", directory / "nginx.conf"], directory / "log")
        try:
            wait_until(partial(_is_open, own), "nginx")
            yield own
        finally:
            nginx.stop()


def _is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def asking(port: int, directory: Path, user: str, **headers: str) -> PageClient:
    """A browser in which somebody has logged in at nginx."""
    secret = base64.b64encode(f"{user}:{PASSWORDS[user]}".encode()).decode()
    return PageClient(port, trusting(port), Authorization=f"Basic {secret}", **headers)


def trusting(port: int) -> ssl.SSLContext:
    pem = ssl.get_server_certificate(("127.0.0.1", port))
    context = ssl.create_default_context(cadata=pem)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def test_whom_nginx_lets_in_may_do_what_the_page_says(page: PageServer, port: int, tmp_path: Path) -> None:
    alice, bob = (asking(port, tmp_path, name) for name in PASSWORDS)
    assert alice.get("/api/me").values["name"] == "alice"
    assert alice.order("/api/jobs/first/pause").status == 200
    assert bob.get("/api/state").values["jobs"][0]["paused"]
    assert bob.order("/api/jobs/first/resume").status == 403
    assert bob.get("/api/state").values["jobs"][0]["paused"]
    assert PageClient(port, trusting(port)).get("/api/state").status == 401


@pytest.mark.parametrize("header", ["X_Forwarded_User", "x-forwarded-user"])
def test_who_says_at_nginx_to_be_another_is_not(
    page: PageServer, port: int, tmp_path: Path, header: str
) -> None:
    bob = asking(port, tmp_path, "bob", **{header: "alice"})
    assert bob.get("/api/me").values["name"] == "bob"
    assert bob.order("/api/jobs/first/pause").status == 403


def test_who_passes_nginx_by_is_nobody(page: PageServer, port: int) -> None:
    """Root of this machine, too, since it is not nginx's user."""
    assert page.get("/api/state", X_Forwarded_User="alice").status in (401, 303)


def test_what_changes_comes_through_nginx_at_once(page: PageServer, port: int, tmp_path: Path) -> None:
    alice = asking(port, tmp_path, "alice")
    connection = HTTPSConnection("127.0.0.1", port, timeout=20, context=trusting(port))
    with closing(connection):
        connection.request("GET", "/api/events", headers=alice.headers)
        answer = connection.getresponse()
        assert not next_state(answer)["jobs"][0]["paused"]
        assert alice.order("/api/jobs/first/pause").status == 200
        wait_until(lambda: next_state(answer)["jobs"][0]["paused"], "what was ordered")
