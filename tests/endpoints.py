"""An enrolment endpoint that answers with whatever a test likes, with the key of the right authority."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from children import PATIENCE_S
from cryptography.hazmat.primitives.asymmetric import ec
from members import written

from coordinator.authority import Authority, pem_of
from dpagent.protocol.enrolment import CONFIRM_PATH, ConfirmAnswer, Invitation, new_secret
from dpagent.schema.json_values import json_of

Answer = Callable[[ssl.SSLSocket], None]


@contextmanager
def played(authority: Authority, directory: Path, answer: Answer) -> Iterator[Invitation]:
    """An endpoint that shows the authority first, and then answers so, and hears who shows a certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = authority.issue_server(key.public_key(), ["127.0.0.1"], days=1, now=datetime.now(UTC))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*written(directory, "endpoint", certificate, key))
    stopping = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)

        def serves() -> None:
            while not stopping.is_set():
                try:
                    plain, _ = server.accept()
                except TimeoutError:
                    continue
                plain.settimeout(PATIENCE_S)
                try:
                    with context.wrap_socket(plain, server_side=True) as connection:
                        asked = request(connection)
                        if asked.startswith(b"GET "):
                            connection.sendall(said(pem_of(authority.chain)))
                        elif asked.startswith(f"POST {CONFIRM_PATH} ".encode()):
                            connection.sendall(said(json_of(ConfirmAnswer())))
                        else:
                            answer(connection)
                except OSError:
                    continue

        thread = threading.Thread(target=serves)
        thread.start()
        try:
            yield Invitation("127.0.0.1", server.getsockname()[1], authority.fingerprint, new_secret())
        finally:
            stopping.set()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def request(connection: ssl.SSLSocket) -> bytes:
    """All of a request: to close a connection with some unread would take the answer back."""
    asked = b""
    while b"\r\n\r\n" not in asked:
        asked += connection.recv(65_536)
    head, _, body = asked.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    while length is not None and len(body) < int(length[1]):
        body += connection.recv(65_536)
    return asked


def said(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.0 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
