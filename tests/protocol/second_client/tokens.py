"""One-time tokens, by plain integers and a hash function."""

from __future__ import annotations

import hashlib
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa


def key_digest(keys: dict[str, Any], number: int, fleet: str) -> bytes:
    modulus = keys["moduli"][number - keys["first_round"]]
    said = b"dpagent v1 token-key " + fleet.encode() + b"\0" + keys["job"] + number.to_bytes(4, "big")
    said += keys["linkability"].encode() + b"\0" + keys["tokens"].to_bytes(4, "big")
    return hashlib.sha256(said + keys["sealing_key"] + modulus).digest()


def token_message(nonce: bytes, fleet: str, job: bytes, number: int, block: int) -> bytes:
    place = number.to_bytes(4, "big") + block.to_bytes(4, "big")
    return nonce + b"dpagent v1 token " + fleet.encode() + b"\0" + job + place


def token_fragment_id(token: bytes, position: int) -> bytes:
    said = b"dpagent v1 fragment-id\0" + token[:32] + position.to_bytes(4, "big")
    return hashlib.sha256(said).digest()[:16]


def exponent_of(number: int) -> int:
    candidate, found = 65_536, -1
    while found < number:
        candidate += 1
        found += all(candidate % divisor for divisor in range(2, 1 + int(candidate**0.5)))
    return candidate


def blinded_of(message: bytes, salt: bytes, inverse: bytes, modulus: int, exponent: int) -> bytes:
    """EMSA-PSS (RFC 8017, section 9.1.1) of 2,047 bits, times r^e."""
    digest = hashlib.sha384(bytes(8) + hashlib.sha384(message).digest() + salt).digest()
    data = bytes(256 - 48 - 48 - 2) + b"\1" + salt
    mask = b"".join(hashlib.sha384(digest + number.to_bytes(4, "big")).digest() for number in range(5))
    masked = int.from_bytes(data, "big") ^ int.from_bytes(mask[: len(data)], "big")
    masked &= (1 << 8 * len(data) - 1) - 1
    encoded = int.from_bytes(masked.to_bytes(len(data), "big") + digest + b"\xbc", "big")
    factor = pow(int.from_bytes(inverse, "big"), -1, modulus)
    return (encoded * pow(factor, exponent, modulus) % modulus).to_bytes(256, "big")


def unblinded(blind_signature: bytes, inverse: bytes, modulus: int) -> bytes:
    product = int.from_bytes(blind_signature, "big") * int.from_bytes(inverse, "big")
    return (product % modulus).to_bytes(256, "big")


def verify(message: bytes, signature: bytes, modulus: int, exponent: int) -> None:
    key = rsa.RSAPublicNumbers(exponent, modulus).public_key()
    key.verify(signature, message, padding.PSS(padding.MGF1(hashes.SHA384()), 48), hashes.SHA384())
