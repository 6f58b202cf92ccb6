"""The hash of a name by which directories of certificates and revocation lists are sorted.

That of OpenSSL's ``X509_NAME_hash_ex`` and ``openssl crl -hash``, and of Erlang's
``public_key:short_name_hash``: of the SHA-1 over the name in a canonical form the first four bytes, the last
one first. It finds a file, and protects nothing. Canonical is each value as UTF-8, in lower case, with one
space for each run of white space (``crypto/x509/x_name.c``).
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from cryptography import x509

_WHITE_SPACE: Final = re.compile(r"[ \t\n\v\f\r]+")


def name_hash(name: x509.Name) -> str:
    """Eight hexadecimal digits.

    >>> from cryptography.x509.oid import NameOID
    >>> name_hash(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Porch  CA")]))
    '8edc468a'
    """
    canonical = b"".join(_field(0x31, b"".join(sorted(map(_attribute, rdn)))) for rdn in name.rdns)
    digest = hashlib.sha1(canonical, usedforsecurity=False).digest()
    return digest[3::-1].hex()


def _attribute(attribute: x509.NameAttribute[str | bytes]) -> bytes:
    value = attribute.value
    text = value if isinstance(value, str) else value.decode("utf-8", "replace")
    spaced = _WHITE_SPACE.sub(" ", text).strip(" ")
    lower = "".join(each.lower() if each.isascii() else each for each in spaced)
    return _field(0x30, _identifier(attribute.oid) + _field(0x0C, lower.encode()))


def _identifier(oid: x509.ObjectIdentifier) -> bytes:
    first, second, *rest = map(int, oid.dotted_string.split("."))
    encoded = b""
    for number in (40 * first + second, *rest):
        digits = [number & 0x7F]
        while number := number >> 7:
            digits.insert(0, number & 0x7F | 0x80)
        encoded += bytes(digits)
    return _field(0x06, encoded)


def _field(tag: int, content: bytes) -> bytes:
    """Type, length and value (DER)."""
    length = len(content)
    if length < 0x80:
        return bytes([tag, length]) + content
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + content
