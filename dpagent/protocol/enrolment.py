"""What a board and the enrolment endpoint say to each other: the invitation code, requests and answers.

An *invitation code* carries what a board needs to enrol: the endpoint's address, a fingerprint of the fleet's
certificate authority, and a secret. Whoever holds it can enrol in the fleet as often as it allows; it says
nothing else, and the fleet keeps only a hash of the secret.

    DP1-<base32 of: 16 bytes fingerprint ‖ 16 bytes secret ‖ 2 bytes port ‖ host ‖ 4 bytes checksum>

All of it is letters and digits of one case, which a QR code holds most densely (ISO/IEC 18004,
alphanumeric mode) and a person can read out. The fingerprint is the first half of a SHA-256: who wants to
pass for the authority has to find a second preimage, 2¹²⁸ trials. The secret has 128 bits as well, so a fast
hash of it can be kept.

Requests and answers are JSON over HTTPS. The authority's certificate is asked for first, on a connection that
is not verified, and is trusted by its fingerprint alone; the secret goes over a second one, which is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from dpagent.protocol.device_signing import DEVICE_PATTERN
from dpagent.protocol.signing import CoordinatorKey
from dpagent.protocol.topics import FleetName
from dpagent.schema.base import Schema
from dpagent.schema.limits import Limits

CODE_BEGINS: Final = "DP1-"
SECRET_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 16

AUTHORITY_PATH: Final = "/v1/authority"
ENROL_PATH: Final = "/v1/enrol"
RENEW_PATH: Final = "/v1/renew"
CONFIRM_PATH: Final = "/v1/confirm"

MOST_REQUEST_BYTES: Final = 4_096
"""Of a request's body: a code's secret and a request for a P-256 certificate take some 500."""
MOST_ANSWER_BYTES: Final = 65_536
"""Of an answer: certificates, and where the broker is."""

_CHECKSUM_BYTES: Final = 4
_LONGEST_HOST: Final = 253
_LABEL: Final = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True, slots=True)
class Invitation:
    """An invitation to a fleet.

    >>> made = Invitation("fleet.example", 8884, bytes(16), new_secret())
    >>> Invitation.read(made.code().lower()) == made
    True

    Attributes:
        host: name or address of the enrolment endpoint.
        port: its TCP port.
        authority: fingerprint of the fleet's authority.
        secret: what the endpoint knows the invitation by.
    """

    host: str
    port: int
    authority: bytes
    secret: bytes = field(repr=False)

    def code(self) -> str:
        """The invitation as text."""
        body = self.authority + self.secret + self.port.to_bytes(2, "big") + self.host.encode()
        text = base64.b32encode(body + _checksum(body)).decode().rstrip("=")
        return CODE_BEGINS + text

    @classmethod
    def read(cls, text: str) -> Invitation:
        """The invitation of a code, in capitals or not, whatever white space or hyphens are in it.

        Raises:
            ValueError: It is none; says what is wrong, and nothing of the secret.
        """
        letters = "".join(text.split()).upper()
        if not letters.startswith(CODE_BEGINS):
            raise ValueError(f"expected a code that begins with {CODE_BEGINS}")
        letters = letters.removeprefix(CODE_BEGINS).replace("-", "")
        try:
            data = base64.b32decode(letters + "=" * (-len(letters) % 8))
        except binascii.Error as error:
            raise ValueError("the code has a character that no code has, or lacks some") from error
        body, check = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        fixed = FINGERPRINT_BYTES + SECRET_BYTES + 2
        if len(body) <= fixed or check != _checksum(body):
            raise ValueError("the code has a mistake in it, or is not whole")
        host, port = body[fixed:].decode("ascii", "replace"), int.from_bytes(body[fixed - 2 : fixed], "big")
        if not is_host(host) or port == 0:
            raise ValueError(f"the code names {host!r}, port {port}, which is no address")
        return cls(
            host, port, body[:FINGERPRINT_BYTES], body[FINGERPRINT_BYTES : FINGERPRINT_BYTES + SECRET_BYTES]
        )

    @property
    def name(self) -> str:
        """By what the fleet's list calls the invitation: nothing of the secret."""
        return name_of(hash_of(self.secret))

    @property
    def url(self) -> str:
        """The endpoint."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}"


def is_host(text: str) -> bool:
    """Whether a text is an address, or may be a host name.

    >>> [is_host(text) for text in ("fleet.example", "192.0.2.7", "2001:db8::1", "fleet..example", "1:2")]
    [True, True, True, False, False]
    """
    return is_address(text) or (len(text) <= _LONGEST_HOST and _HOST_NAME.fullmatch(text) is not None)


def is_address(text: str) -> bool:
    """Whether a text is an IP address, without a zone."""
    try:
        return bool(ipaddress.ip_address(text)) and "%" not in text
    except ValueError:
        return False


def new_secret() -> bytes:
    """The secret of an invitation: 128 random bits."""
    return secrets.token_bytes(SECRET_BYTES)


def hash_of(secret: bytes) -> bytes:
    """What a fleet keeps of a secret."""
    return hashlib.sha256(b"dpagent v1 invitation\0" + secret).digest()


def name_of(hashed: bytes) -> str:
    """A short name of an invitation, from the :func:`hash_of` its secret."""
    return hashed.hex()[:8]


def fingerprint(chain: Sequence[x509.Certificate]) -> bytes:
    """By what an invitation names an authority, and all that is trusted with it."""
    ders = b"".join(each.public_bytes(Encoding.DER) for each in chain)
    return hashlib.sha256(ders).digest()[:FINGERPRINT_BYTES]


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"dpagent v1 code\0" + body).digest()[:_CHECKSUM_BYTES]


class _Said(Schema):
    """What one side said, and nothing beyond it."""


Pem = Annotated[str, Limits(max_length=16_384)]
_Base64 = Annotated[str, Limits(max_length=2_048, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]


class EnrolRequest(_Said):
    """A board with an invitation asks for its first certificate."""

    secret: _Base64
    """Of the invitation."""
    request: _Base64
    """A PKCS #10 request, in DER. The names in it are ignored."""


class RenewRequest(_Said):
    """A board, known by its certificate, asks for the next one."""

    request: _Base64
    """As in :class:`EnrolRequest`."""


class BrokerAnswer(_Said):
    """Where the broker is: the keys of ``mqtt`` in a board's configuration."""

    url: Annotated[str, Limits(max_length=512)]
    authority: Literal["fleet", "system"] | Pem
    """Who issued the broker's certificate: the fleet's authority, one that the system trusts, or this one."""
    protocol: Literal["auto", "5", "3.1.1"] = "auto"
    keepalive_s: Annotated[int, Limits(ge=5, le=3600)] = 30
    topic_prefix: Annotated[str, Limits(max_length=200)] = ""
    client_id: Annotated[str, Limits(max_length=200)] | None = None


class EnrolAnswer(_Said):
    """A member's certificate, and where its fleet is."""

    device: Annotated[str, Limits(pattern=DEVICE_PATTERN)]
    certificate: Pem
    authorities: Pem
    """All whose certificates the fleet accepts, each followed by those above it: one, or two during a
    change."""
    fleet: FleetName
    coordinator_key: CoordinatorKey
    broker: BrokerAnswer


class RenewAnswer(_Said):
    """The next certificate."""

    certificate: Pem
    authorities: Pem
    """As in :class:`EnrolAnswer`."""


class ConfirmRequest(_Said):
    """A board has its next certificate: it is the one of this connection."""


class ConfirmAnswer(_Said):
    """The fleet knows that the board has it."""


class Refusal(_Said):
    """Why a request was refused."""

    reason: Annotated[str, Limits(max_length=500)]


def base64_of(data: bytes) -> str:
    """Bytes as they are in a request."""
    return base64.b64encode(data).decode()


def bytes_of(text: str) -> bytes:
    """Bytes of a request.

    Raises:
        ValueError: They are none.
    """
    return base64.b64decode(text, validate=True)
