"""Who may see the page and give orders: local users, holders of tokens, whom a proxy names; nobody else."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.page import local_users
from coordinator.page.access import SESSION_S, Access, Asked, Visitor
from coordinator.page.tokens import Role, Tokens, make_token, token_file
from coordinator.page_settings import PageSettings
from dpagent.errors import ConfigurationError

OWN = ("127.0.0.1", 8885)
SOMEBODY = ("192.0.2.7", 40_000)


def asked(peer: tuple[str, int] = SOMEBODY, session: str = "", **headers: str) -> Asked:
    return Asked(peer, OWN, {name.replace("_", "-"): value for name, value in headers.items()}, session)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def access(keys: Path, clock: Clock | None = None, **page: object) -> Access:
    return Access(PageSettings.checked(page), Tokens(keys), clock or Clock())


def test_nobody_comes_without_showing_who_they_are(tmp_path: Path) -> None:
    page = access(tmp_path)
    assert page.visitor(asked()) is None
    assert page.visitor(asked(authorization="Bearer nonsense")) is None
    assert page.visitor(asked(session="nonsense")) is None
    assert page.visitor(asked(x_forwarded_user="alice")) is None, "nobody was named as a proxy"


def test_a_token_has_its_role_until_it_is_renewed(tmp_path: Path, clock: Clock) -> None:
    operators, viewers = (make_token(tmp_path, role) for role in (Role.OPERATOR, Role.VIEWER))
    assert make_token(tmp_path, Role.VIEWER) == viewers, "made once"
    assert token_file(tmp_path, Role.VIEWER).stat().st_mode & 0o777 == 0o600
    page = access(tmp_path, clock)
    assert page.visitor(asked(authorization=f"Bearer {operators}")) == Visitor(
        "holder of the operator's token", Role.OPERATOR
    )
    viewer = page.visitor(asked(authorization=f"bearer {viewers}"))
    assert viewer is not None
    assert not viewer.is_operator
    session = page.begin_session(viewers)
    assert session is not None
    assert page.visitor(asked(session=session)) == viewer
    assert page.begin_session("nonsense") is None
    assert make_token(tmp_path, Role.VIEWER, renew=True) != viewers
    assert page.visitor(asked(session=session)) is None
    assert page.visitor(asked(authorization=f"Bearer {viewers}")) is None


def test_a_session_ends(tmp_path: Path, clock: Clock) -> None:
    token = make_token(tmp_path, Role.OPERATOR)
    page = access(tmp_path, clock)
    first, second = page.begin_session(token), page.begin_session(token)
    assert first is not None
    assert second is not None
    page.end_session(first)
    assert page.visitor(asked(session=first)) is None
    assert page.visitor(asked(session=second)) is not None
    clock.now = SESSION_S
    assert page.visitor(asked(session=second)) is None


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    token = make_token(tmp_path, Role.OPERATOR)
    token_file(tmp_path, Role.OPERATOR).chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        access(tmp_path).visitor(asked(authorization=f"Bearer {token}"))


def test_a_proxy_says_who_asks_and_nobody_else_does(tmp_path: Path) -> None:
    page = access(tmp_path, proxies=["192.0.2.7"], operators=["alice"])
    alice = page.visitor(asked(x_forwarded_user="alice"))
    bob = page.visitor(asked(x_forwarded_user=" bob "))
    assert (alice, bob) == (Visitor("alice", Role.OPERATOR), Visitor("bob", Role.VIEWER))
    assert page.visitor(asked(x_forwarded_user="")) is None
    assert page.visitor(asked(("192.0.2.8", 1), x_forwarded_user="alice")) is None
    token = make_token(tmp_path, Role.OPERATOR)
    assert page.visitor(asked(authorization=f"Bearer {token}")) is None, (
        "what a proxy passes on is the proxy's"
    )
    mapped = page.visitor(asked(("::ffff:192.0.2.7", 1), x_forwarded_user="alice"))
    assert mapped == alice


def test_a_header_that_says_who_asks_comes_once(tmp_path: Path) -> None:
    page = access(tmp_path)
    twice = [(b"x-forwarded-user", b"alice"), (b"x-forwarded-user", b"bob")]
    assert page.is_ambiguous(twice)
    assert page.is_ambiguous([(b"host", b"a"), (b"host", b"b")])
    assert not page.is_ambiguous([(b"cookie", b"a"), (b"cookie", b"b"), twice[0]])


def test_a_proxy_on_this_machine_needs_a_user_of_its_own() -> None:
    with pytest.raises(ValueError, match="proxy_user"):
        PageSettings.checked({"proxies": ["127.0.0.1"]})


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        own, _ = server.accept()
        yield client, own
        client.close()
        own.close()


def test_a_local_user_is_known_by_the_kernel(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket]
) -> None:
    _, own = connection
    request = Asked(own.getpeername(), own.getsockname(), {})
    name = pwd.getpwuid(os.geteuid()).pw_name
    assert access(tmp_path).visitor(request) == Visitor(name, Role.OPERATOR)


def test_what_was_forwarded_is_not_of_whoever_forwards_it(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket]
) -> None:
    """A proxy of root's that nobody named would make its visitors operators."""
    _, own = connection
    for header in ("x-forwarded-for", "forwarded", "via", "x-real-ip"):
        request = Asked(own.getpeername(), own.getsockname(), {header: "192.0.2.7"})
        assert access(tmp_path).visitor(request) is None, header


def test_a_socket_that_its_process_has_closed_is_nobodys(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    """The kernel writes user 0 for it, who could do everything."""
    client, own = connection
    peer, here = own.getpeername(), own.getsockname()
    client.sendall(b"POST /api/jobs/first/cancel HTTP/1.1\r\n")
    client.close()
    assert local_users.peer_user(peer, here) is None


def test_ipv6_and_ipv4_over_ipv6_are_known_too() -> None:
    for listens_at, connects_to in (("::1", "::1"), ("::", "127.0.0.1")):
        try:
            server = socket.create_server((listens_at, 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError:
            pytest.skip("no IPv6 here")
        with server, socket.create_connection((connects_to, server.getsockname()[1])):
            own, _ = server.accept()
            with own:
                peer, here = own.getpeername()[:2], own.getsockname()[:2]
                assert local_users.peer_user(peer, here) == os.geteuid(), listens_at


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_another_user_of_the_machine_is_nobody(tmp_path: Path) -> None:
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("no Python that others may run")
    code = (
        "import socket, sys, time; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        other = subprocess.Popen([python, "-I", "-c", code, port], user="nobody", cwd="/")
        own, _ = server.accept()
        with own:
            peer, here = own.getpeername(), own.getsockname()
            assert local_users.peer_user(peer, here) == pwd.getpwnam("nobody").pw_uid
            assert access(tmp_path).visitor(Asked(peer, here, {})) is None
            proxied = access(tmp_path, proxies=["127.0.0.1"], proxy_user="nobody", operators=["alice"])
            named = Asked(peer, here, {"x-forwarded-user": "alice"})
            assert proxied.visitor(named) == Visitor("alice", Role.OPERATOR)
            other_proxy = access(tmp_path, proxies=["127.0.0.1"], proxy_user="daemon", operators=["alice"])
            assert other_proxy.visitor(named) is None
        other.wait(20)


def test_orders_are_of_a_page_that_this_visitor_has_read(tmp_path: Path) -> None:
    page = access(tmp_path)
    alice, bob = Visitor("alice", Role.OPERATOR), Visitor("bob", Role.VIEWER)
    assert page.is_order_of(alice, page.order_key(alice))
    assert not page.is_order_of(alice, page.order_key(bob))
    assert not page.is_order_of(alice, "")
    assert not page.is_order_of(alice, "ä")
    assert not page.is_order_of(alice, access(tmp_path).order_key(alice)), "of another start"


def test_hosts_and_origins(tmp_path: Path) -> None:
    page = access(tmp_path, hosts=["Fleet.example"])
    for host in ("localhost", "127.0.0.1:8885", "[::1]:8885", "fleet.example", "fleet.example:443"):
        assert page.knows_host(host), host
    for host in ("", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "a b"):
        assert not page.knows_host(host), host
    assert page.is_own_origin(None, "localhost:8885")
    assert page.is_own_origin("http://localhost:8885", "localhost:8885")
    for origin in ("null", "http://evil.example", "http://localhost:1", "http://localhost:8885.evil.example"):
        assert not page.is_own_origin(origin, "localhost:8885"), origin
