"""The board's side of enrolment: asks the fleet's endpoint for a certificate, over HTTPS.

The endpoint's answers are taken from whoever holds the key of the authority that the invitation names. Even
so each is bounded in length and time, and a certificate is taken only for the board's own key.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from agent.identity import Identity, signing_request
from dpagent.errors import BrokerError, ConfigurationError, UsageError
from dpagent.protocol.device_signing import SigningKey, device_id_of
from dpagent.protocol.enrolment import (
    AUTHORITY_PATH,
    CONFIRM_PATH,
    ENROL_PATH,
    MOST_ANSWER_BYTES,
    RENEW_PATH,
    ConfirmAnswer,
    ConfirmRequest,
    EnrolAnswer,
    EnrolRequest,
    Invitation,
    Refusal,
    RenewAnswer,
    RenewRequest,
    base64_of,
    fingerprint,
)
from dpagent.schema.base import Schema
from dpagent.schema.json_values import json_of
from dpagent.schema.problems import SchemaError
from dpagent.transport.settings import show_certificate

PATIENCE_S: Final = 20.0
"""For one exchange with the endpoint."""
_ATTEMPTS: Final = 3
"""An endpoint that has as many connections as it takes closes further ones."""
_PAUSE_S: Final = 0.5
_MOST_SHOWN: Final = 200
"""Characters of an error that may be an endpoint's words."""

AnswerT = TypeVar("AnswerT", bound=Schema)


@dataclass(frozen=True, slots=True)
class Enrolled:
    """What an enrolment gave.

    Attributes:
        answer: the endpoint's, checked.
        authorities: all that the fleet trusts: one authority, or two during a change, and those above it.
        chain: what the board shows: its certificate, and those between it and the root.
        identity: the board's.
    """

    answer: EnrolAnswer
    authorities: tuple[x509.Certificate, ...]
    chain: tuple[x509.Certificate, ...]
    identity: Identity


def enrol(invitation: Invitation, key: SigningKey) -> Enrolled:
    """Become a member of a fleet.

    Args:
        invitation: from its operator.
        key: the board's own, which is on disk: if the answer is lost, the same key gets the same one again.

    Raises:
        BrokerError: The endpoint cannot be reached.
        UsageError: It refuses the invitation.
        ConfigurationError: It is not the endpoint of the fleet that the invitation is to.
    """
    authority = _authority(invitation)
    asked = EnrolRequest(secret=base64_of(invitation.secret), request=base64_of(signing_request(key)))
    context = _trusting(pem_of(authority))
    answer = _asked(invitation.url, context, ENROL_PATH, json_of(asked), EnrolAnswer)
    authorities, chain = _checked(answer, key.public_key(), invitation.url)
    certificate = chain[0]
    device = device_id_of(certificate)
    if device != answer.device or device is None:
        raise ConfigurationError(
            f"{invitation.url} enrolled device {answer.device} with a certificate of {device}."
        )
    return Enrolled(answer, authorities, chain, Identity(device, certificate, key))


def renew(url: str, ca_file: Path, cert_file: Path, key_file: Path) -> tuple[bytes, bytes]:
    """The next certificate of a member, for the same key, and all that the fleet trusts by now, in PEM.

    Args:
        url: of the endpoint.
        ca_file: the fleet's authority.
        cert_file: the certificate so far, which has not expired.
        key_file: its key.

    Raises:
        BrokerError: The endpoint cannot be reached.
        UsageError: It refuses.
        ConfigurationError, StorageError: A file, or the answer, cannot be used.
    """
    identity = Identity.load(cert_file, key_file)
    context = _showing(ca_file, cert_file, key_file)
    asked = RenewRequest(request=base64_of(signing_request(identity.private_key)))
    answer = _asked(url, context, RENEW_PATH, json_of(asked), RenewAnswer)
    authorities, chain = _checked(answer, identity.certificate.public_key(), url)
    certificate = chain[0]
    if device_id_of(certificate) != identity.device_id:
        raise ConfigurationError(f"{url} answered with the certificate of another device.")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        raise ConfigurationError(
            f"{url} answered with a certificate that has expired already; the one so far stays. Check the "
            "clock there, and here."
        )
    return pem_of(chain).encode(), pem_of(authorities).encode()


def confirm(url: str, ca_file: Path, cert_file: Path, key_file: Path) -> None:
    """Show the endpoint the certificate that a member has: that its operator knows that it came.

    Args:
        url: of the endpoint.
        ca_file: the fleet's authority.
        cert_file: the certificate.
        key_file: its key.

    Raises:
        BrokerError: The endpoint cannot be reached.
        UsageError: It refuses.
        ConfigurationError: A file, or the answer, cannot be used.
    """
    context = _showing(ca_file, cert_file, key_file)
    _asked(url, context, CONFIRM_PATH, json_of(ConfirmRequest()), ConfirmAnswer)


def pem_of(certificates: Sequence[x509.Certificate]) -> str:
    """Certificates, one after the other, in PEM."""
    return "".join(each.public_bytes(Encoding.PEM).decode() for each in certificates)


def _authority(invitation: Invitation) -> tuple[x509.Certificate, ...]:
    """The authority that an invitation names by its fingerprint, from whoever answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    status, body = _exchanged(invitation.url, context, "GET", AUTHORITY_PATH, b"")
    try:
        chain = tuple(x509.load_pem_x509_certificates(body)) if status == http.HTTPStatus.OK else ()
    except ValueError:
        chain = ()
    if not chain or fingerprint(chain) != invitation.authority:
        raise ConfigurationError(
            f"{invitation.url} is not the enrolment endpoint of the fleet that the code is of: it shows "
            "another certificate authority. Either the code is of another fleet, or somebody stands between. "
            "Nothing was sent to it."
        )
    return chain


def _trusting(pem: str) -> ssl.SSLContext:
    """TLS that trusts one authority, and checks names."""
    return ssl.create_default_context(cadata=pem)


def _showing(ca_file: Path, cert_file: Path, key_file: Path) -> ssl.SSLContext:
    """TLS of a member, with its certificate.

    Raises:
        ConfigurationError: A file cannot be used.
    """
    try:
        context = _trusting(ca_file.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:  # of TLS, an OSError
        raise ConfigurationError(f"enrolment.ca_file {ca_file} cannot be used ({error}).") from error
    show_certificate(context, cert_file, key_file)
    return context


def _asked(url: str, context: ssl.SSLContext, path: str, body: bytes, kind: type[AnswerT]) -> AnswerT:
    status, data = _exchanged(url, context, "POST", path, body)
    if status != http.HTTPStatus.OK:
        try:
            reason = _printable(Refusal.from_json(data).reason)
        except SchemaError:
            reason = f"status {status}"
        raise UsageError(f"{url} refuses: {reason} Ask the fleet's operator.")
    try:
        return kind.from_json(data)
    except SchemaError as error:
        raise ConfigurationError(
            f"{url} answers in a way that this program does not know. Update dpagent, here or there."
        ) from error


def _exchanged(url: str, context: ssl.SSLContext, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of an answer; an endpoint that closes the connection at once is asked again."""
    until = time.monotonic() + PATIENCE_S
    for attempt in range(_ATTEMPTS):
        try:
            return _once(url, context, method, path, body, until)
        except ssl.SSLCertVerificationError as error:
            raise ConfigurationError(
                f"{url} shows a certificate that this fleet's authority did not issue for that name "
                f"({error.verify_message}). Check this board's clock, and enrolment.address in fleet.yaml."
            ) from error
        except (OSError, http.client.HTTPException) as error:
            last = error
        if time.monotonic() + _PAUSE_S >= until:
            break
        if attempt < _ATTEMPTS - 1:
            time.sleep(_PAUSE_S * (attempt + 1))
    text = _printable(getattr(last, "strerror", None) or str(last) or type(last).__name__)[:_MOST_SHOWN]
    raise BrokerError(
        f"No enrolment endpoint answers at {url} ({text}). The operator starts it with `dpagent coordinator "
        "enrolment`; check the network, and that a certificate that is used has not expired."
    ) from last


def _printable(text: str) -> str:
    """What an endpoint said, without what a terminal would obey."""
    return "".join(each for each in text if each.isprintable())


def _once(
    url: str, context: ssl.SSLContext, method: str, path: str, body: bytes, until: float
) -> tuple[int, bytes]:
    parts = urlsplit(url)
    left_s = max(0.1, until - time.monotonic())
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port, timeout=left_s / 2, context=context
    )
    try:
        connection.connect()
        # The library's own timeout begins anew with each byte.
        with _cut_at(until, connection.sock):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                # None without a length, as of chunks, in which the library takes -1 for all that comes.
                if response.length is None or response.length > MOST_ANSWER_BYTES:
                    raise http.client.HTTPException("the answer is too long, or does not say how long it is")
                return response.status, response.read()
    finally:
        connection.close()


@contextlib.contextmanager
def _cut_at(until: float, connection: socket.socket) -> Iterator[None]:
    """End a connection at a time (monotonic), whatever a thread is waiting for on it."""

    def cut() -> None:
        with contextlib.suppress(OSError):
            # The plain method: that of TLS takes the object away from the thread that reads from it.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, until - time.monotonic()), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _checked(
    answer: EnrolAnswer | RenewAnswer, key: object, url: str
) -> tuple[tuple[x509.Certificate, ...], tuple[x509.Certificate, ...]]:
    """All that the fleet trusts, and what the board shows: its certificate, and those above it but the root.

    Nothing else that the answer has reaches a file.

    Raises:
        ConfigurationError: The certificate is not for the board's key, or of none of the authorities.
    """
    try:
        certificate = x509.load_pem_x509_certificate(answer.certificate.encode())
        authorities = tuple(x509.load_pem_x509_certificates(answer.authorities.encode()))
        is_own = certificate.public_key() == key
    except (ValueError, TypeError, UnsupportedAlgorithm):
        is_own = False
    if is_own:
        for place, authority in enumerate(authorities):
            if _has_issued(authority, certificate):
                return authorities, (certificate, *_below_root(authorities[place:]))
    raise ConfigurationError(
        f"{url} answered with a certificate that its authority did not issue, or that is for another key."
    )


def _has_issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _below_root(chain: Sequence[x509.Certificate]) -> Iterator[x509.Certificate]:
    """The certificates before the first root, each followed by its issuer."""
    for each in chain:
        if each.issuer == each.subject:
            return
        yield each
