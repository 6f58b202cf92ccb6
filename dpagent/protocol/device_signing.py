"""Signatures of devices: ECDSA on P-256 with SHA-256 (FIPS 186-5), by the key of a device's certificate.

A signature is r ‖ s, 64 bytes whatever was signed: in DER its length would vary. What is signed begins with a
context of its own, so that none of it is a handshake of TLS, for which the same key signs too (RFC 8446,
section 4.4.3, begins with 64 spaces; TLS 1.2 with the first handshake message).
"""

from __future__ import annotations

import re
import secrets
from typing import Final, Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.x509.oid import NameOID

DEVICE_PATTERN: Final = r"^[0-9a-f]{32}$"
"""A device's id: 16 random bytes in hexadecimal, the common name of its certificate."""
SIGNATURE_BYTES: Final = 64

_CONTEXT: Final = b"dpagent v1 device\0"
_HALF: Final = SIGNATURE_BYTES // 2


def new_device_id() -> str:
    """An id that no other device has, and that says nothing of the device."""
    return secrets.token_hex(16)


class SigningKey(Protocol):
    """A private key on P-256, wherever it is."""

    def public_key(self) -> ec.EllipticCurvePublicKey:
        """Its public part."""

    def sign(self, data: bytes, signature_algorithm: ec.EllipticCurveSignatureAlgorithm) -> bytes:
        """A signature in DER."""


def sign(key: SigningKey, message: bytes) -> bytes:
    """A device's signature of ``message``, 64 bytes."""
    r, s = decode_dss_signature(key.sign(_CONTEXT + message, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(_HALF, "big") + s.to_bytes(_HALF, "big")


def is_signed(certificate: x509.Certificate, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` is one of ``message`` by the key of a device's certificate.

    It says nothing of the certificate: whether that is a member's is for who keeps the members to say.
    """
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or len(signature) != SIGNATURE_BYTES:
        return False
    r, s = int.from_bytes(signature[:_HALF], "big"), int.from_bytes(signature[_HALF:], "big")
    try:
        key.verify(encode_dss_signature(r, s), _CONTEXT + message, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def common_name(certificate: x509.Certificate) -> str:
    """The common name of a certificate's subject, or an empty text without exactly one."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if len(names) == 1 else ""


def device_id_of(certificate: x509.Certificate) -> str | None:
    """The id of the device that a certificate was issued to, or None if it is no device's."""
    name = common_name(certificate)
    return name if re.fullmatch(DEVICE_PATTERN, name) else None
