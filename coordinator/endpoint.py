"""The enrolment endpoint: HTTPS, with bounds on everything that a stranger can send.

Anybody may connect. So a connection has :data:`DEADLINE_S` seconds for all of it, handshake, request and
answer; it may send :data:`MOST_SENT_BYTES`; and there are at most :data:`MOST_CONNECTIONS`, of which one
address has at most half. One request a connection. More cannot be had without a board's certificate or an
invitation, and a code cannot be guessed: it has 128 random bits.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import socketserver
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, cast

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.authority import Authorities, AuthorityFiles, pem_of
from coordinator.enrolment import Enrolment, RefusedError
from coordinator.enrolment_settings import split_address
from dpagent.errors import ConfigurationError, DpagentError
from dpagent.protocol.enrolment import (
    AUTHORITY_PATH,
    CONFIRM_PATH,
    ENROL_PATH,
    MOST_REQUEST_BYTES,
    RENEW_PATH,
    ConfirmRequest,
    EnrolRequest,
    Refusal,
    RenewRequest,
)
from dpagent.schema.json_values import json_of
from dpagent.schema.problems import SchemaError
from dpagent.service_manager import ServiceManager
from dpagent.storage import write_atomically
from dpagent.structured_log import Event, about

log = logging.getLogger(__name__)

DEADLINE_S: Final = 10.0
MOST_CONNECTIONS: Final = 64
MOST_SENT_BYTES: Final = MOST_REQUEST_BYTES + 8_192
"""Of one request, with its headers."""

_CERTIFICATE_DAYS: Final = 30.0
_POLL_S: Final = 0.25
_COMPLAINT_S: Final = 60.0
_AGAIN: Final = timedelta(hours=1)


class Endpoint(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """The server, from its first connection to :meth:`serve`'s end.

    Args:
        enrolment: What it answers with.

    Raises:
        ConfigurationError: It cannot listen, or no address is set.
        StorageError: Its certificate cannot be written.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, enrolment: Enrolment) -> None:
        settings = enrolment.settings.enrolment
        if settings.address is None:
            raise ConfigurationError(
                "enrolment.address is not set; expected host[:port], by which boards reach this endpoint."
            )
        self.host, port = split_address(settings.address)
        self._authority_file = AuthorityFiles(enrolment.settings.members_dir).certificate
        self._authority_stamp, self._follows_at = self._stamp(), 0.0
        self._certify(enrolment.anew())
        self._lock = threading.Lock()
        self._open: dict[socket.socket, tuple[str, float]] = {}
        """Address and deadline (monotonic) of each connection."""
        self._turned_away = self._refused = 0
        self._last_refusal = ""
        self._complained_at = 0.0
        listens_at = settings.listen or ("::" if socket.has_dualstack_ipv6() else "")
        self.address_family = socket.AF_INET6 if ":" in listens_at else socket.AF_INET
        try:
            super().__init__((listens_at, port), _Handler)
        except OSError as error:
            raise ConfigurationError(
                f"enrolment: cannot listen on {listens_at or '0.0.0.0'}, port {port} ({error.strerror}). End "
                "what listens there, or set enrolment.listen and enrolment.address."
            ) from error

    def serve(self, stop: threading.Event) -> None:
        """Answer requests until ``stop`` is set."""
        serving = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="endpoint")
        manager = ServiceManager()
        serving.start()
        try:
            manager.ready()
            log.info(
                "enrolment of fleet %s at %s",
                self.enrolment.settings.fleet,
                self.enrolment.settings.enrolment.address,
                extra=about(event=Event.STARTED, fleet=self.enrolment.settings.fleet),
            )
            while not stop.wait(_POLL_S) and serving.is_alive():
                manager.alive()
        finally:
            manager.stopping()
            self.shutdown()
            serving.join()
            self.server_close()
            self._complain()

    # The library calls the methods below.

    def server_bind(self) -> None:
        """Bind, for both families where the system can."""
        if self.address_family == socket.AF_INET6:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def service_actions(self) -> None:
        """Cut connections whose time is over, renew the endpoint's own certificate in time, and take up a
        change of the authority."""
        now = time.monotonic()
        with self._lock:
            late = [connection for connection, (_, ends_at) in self._open.items() if now >= ends_at]
        for connection in late:
            # The plain method: that of TLS takes the object away from the thread that reads from it.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
        if now >= self._follows_at and (stamp := self._stamp()) != self._authority_stamp:
            self._follow_authorities(stamp, now)
        if datetime.now(UTC) >= self._certified_until:
            self._certify_again()
        if (self._turned_away or self._refused) and now >= self._complained_at + _COMPLAINT_S:
            self._complain()
            self._complained_at = now

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for a connection, if there may be one more."""
        try:
            connection = self._context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        except OSError:  # It has gone already.
            self.shutdown_request(request)
            return
        address = str(client_address[0])
        with self._lock:
            same = sum(known == address for known, _ in self._open.values())
            has_room = len(self._open) < MOST_CONNECTIONS and same < MOST_CONNECTIONS // 2
            if has_room:
                self._open[connection] = (address, time.monotonic() + DEADLINE_S)
        if has_room:
            super().process_request(connection, client_address)
        else:
            self._turned_away += 1
            connection.close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in its thread."""
        try:
            request.settimeout(DEADLINE_S)
            request.do_handshake()
            self.finish_request(request, client_address)
        except (OSError, ValueError) as error:  # what a stranger's bytes, silence or departure raise
            log.debug("a connection from %s ended: %s", client_address[0], error)
        finally:
            with self._lock:
                self._open.pop(request, None)
            with contextlib.suppress(OSError):
                request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what nobody expected, and go on."""
        log.exception("a request from %s failed", client_address[0])

    def note_refusal(self, text: str) -> None:
        """Note why a request was refused. Strangers fill no log: it says how many there were, and of the
        last one why."""
        self._refused += 1
        self._last_refusal = text

    def _complain(self) -> None:
        if self._turned_away:
            log.warning("turned away %d connections: as many as there may be were open", self._turned_away)
        if self._refused:
            log.warning("refused %d requests; the last: %s", self._refused, self._last_refusal)
        self._turned_away = self._refused = 0

    def _stamp(self) -> tuple[int, int]:
        """What changes with the file of the authorities."""
        try:
            status = self._authority_file.stat()
        except OSError:
            return 0, 0
        return status.st_ino, status.st_mtime_ns

    def _follow_authorities(self, stamp: tuple[int, int], now: float) -> None:
        try:
            self._certify(self.enrolment.anew())
        except DpagentError as error:
            log.error("the authority has changed, and cannot be used; it will be tried again: %s", error)
            self._follows_at = now + _COMPLAINT_S
        else:
            log.info("the authority has changed")
            self._authority_stamp = stamp

    def _certify_again(self) -> None:
        try:
            self._certify(self.enrolment)
        except DpagentError as error:  # The one so far lasts for days.
            log.error("the endpoint's certificate was not renewed: %s", error)
            self._certified_until += _AGAIN

    def _certify(self, enrolment: Enrolment) -> None:
        """Answer with this from now on, under a fresh key and certificate for the endpoint's address.

        If it fails, all stays as it is: TLS without a certificate would answer nobody.
        """
        now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
        authority, context = enrolment.authorities.anchor, _context(enrolment.authorities)
        certificate = authority.issue_server(key.public_key(), [self.host], days=_CERTIFICATE_DAYS, now=now)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file = enrolment.settings.members_dir / "endpoint.pem"
        write_atomically(file, private + pem_of([certificate, *authority.chain[:-1]]), mode=0o600)
        context.load_cert_chain(file)
        self.enrolment, self._context = enrolment, context
        self._certified_until = certificate.not_valid_after_utc - timedelta(days=_CERTIFICATE_DAYS / 3)


def _context(authorities: Authorities) -> ssl.SSLContext:
    """TLS of a server that asks for a board's certificate, and does without one where a board has none yet.

    Who is a member is looked up, by the certificate itself; here only its issuer and its time are verified.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=pem_of(authorities.trusted).decode())
    return context


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server_version = "dpagent"
    sys_version = ""
    timeout = DEADLINE_S

    def setup(self) -> None:
        """Read no more than one request takes."""
        super().setup()
        self.rfile = cast(io.BufferedReader, _Bounded(self.rfile, MOST_SENT_BYTES))

    def do_GET(self) -> None:
        """The authority's certificate is for everybody."""
        if self.path == AUTHORITY_PATH:
            self._answer(
                HTTPStatus.OK, pem_of(self._enrolment.authorities.anchor.chain), "application/x-pem-file"
            )
        else:
            self._refuse(RefusedError("There is nothing here.", HTTPStatus.NOT_FOUND))

    def do_POST(self) -> None:
        """Enrol, renew, or note what a board has."""
        try:
            if self.path == ENROL_PATH:
                answer = json_of(self._enrolment.enrol(EnrolRequest.from_json(self._body())))
            elif self.path == RENEW_PATH:
                asked = RenewRequest.from_json(self._body())
                answer = json_of(self._enrolment.renew(asked, self._certificate()))
            elif self.path == CONFIRM_PATH:
                ConfirmRequest.from_json(self._body())
                answer = json_of(self._enrolment.confirm(self._certificate()))
            else:
                raise RefusedError("There is nothing here.", HTTPStatus.NOT_FOUND)
        except RefusedError as error:
            self._refuse(error)
        except SchemaError:
            self._refuse(RefusedError("The request is malformed.", HTTPStatus.BAD_REQUEST))
        except DpagentError as error:  # the operator's, such as a full disk
            log.error("a request failed: %s", error)
            self._refuse(RefusedError("The endpoint cannot answer now.", HTTPStatus.SERVICE_UNAVAILABLE))
        else:
            self._answer(HTTPStatus.OK, answer)

    @property
    def _enrolment(self) -> Enrolment:
        return cast(Endpoint, self.server).enrolment

    def _body(self) -> bytes:
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise RefusedError("The request has no length.", HTTPStatus.LENGTH_REQUIRED)
        if int(text) > MOST_REQUEST_BYTES:
            raise RefusedError("The request is too long.", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return self.rfile.read(int(text))

    def _certificate(self) -> x509.Certificate | None:
        data = cast(ssl.SSLSocket, self.connection).getpeercert(binary_form=True)
        return None if data is None else x509.load_der_x509_certificate(data)

    def _refuse(self, error: RefusedError) -> None:
        cast(Endpoint, self.server).note_refusal(f"{error} ({self.client_address[0]})")
        self._answer(error.status, json_of(Refusal(reason=str(error))))

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing by the library: it would log what strangers send."""


class _Bounded:
    """A stream that ends after so many bytes."""

    def __init__(self, inner: Any, size: int) -> None:
        self._inner, self._left = inner, size

    def readline(self, limit: int = -1) -> bytes:
        """A line, or what is left of one."""
        return self._taken(self._inner.readline(min(limit, self._left) if limit >= 0 else self._left))

    def read(self, size: int) -> bytes:
        """So many bytes, or fewer at the end."""
        return self._taken(self._inner.read(min(size, self._left)))

    def _taken(self, data: bytes) -> bytes:
        self._left -= len(data)
        return data

    def close(self) -> None:
        """Close the stream."""
        self._inner.close()
