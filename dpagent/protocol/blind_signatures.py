"""RSA blind signatures: RSABSSA-SHA384-PSS-Randomized of RFC 9474, the side that obtains and verifies.

Who asks *blinds* a message: its encoding (EMSA-PSS, RFC 8017, section 9.1.1) times r^e for a random r. The
signer takes an e-th root of that, and sees nothing of the message; what comes back, times 1/r, is a plain
RSASSA-PSS signature, which any library verifies. The side that signs is :mod:`coordinator.blind_signing`.

**Nothing but valid signatures may be shown.** A hostile signer may choose a modulus so that r^e is not
uniform (e divides φ(n)): then a blinded message tells the class of its encoding. Of such classes one alone
has e-th roots, and :func:`finalize` raises for the others. What is shown is of one class, and tells nothing.
An encoding that shares a factor with the modulus, which is likely where that has small ones, is drawn again.

**Several exponents on one modulus.** The j-th *class* of a modulus has the j-th prime from 65,537 as its
exponent (:func:`exponent`), so that a signature of one class is none of another. Chaum, *Security without
identification* (1985), signs denominations so; Amjad, Yeo, Yung, *RSA blind signatures with public metadata*
(2023), derive exponents from metadata. Assumed is that RSA inversion with several exponents on one modulus is
hard after queries (one-more). One root gives no other: for distinct primes e and e', roots of the second kind
of x are as far as before from x^(1/e).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

MODULUS_BITS: Final = 2048
SIGNATURE_BYTES: Final = MODULUS_BITS // 8
PREFIX_BYTES: Final = 32
"""Of the random bytes that begin a message (*PrepareRandomize*)."""
MAX_CLASSES: Final = 4_096

_HASH_BYTES: Final = 48
_SALT_BYTES: Final = _HASH_BYTES
_FIRST_EXPONENT: Final = 65_537
_PADDING: Final = padding.PSS(padding.MGF1(hashes.SHA384()), _SALT_BYTES)


class BlindSignatureError(ValueError):
    """What the signer sent is no signature of what it was asked to sign."""


@lru_cache(maxsize=1)
def _exponents() -> tuple[int, ...]:
    """The first :data:`MAX_CLASSES` primes from 65,537 on."""
    limit = 2 * _FIRST_EXPONENT
    sieve = bytearray([1]) * limit
    for number in range(2, math.isqrt(limit) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, limit, number)))
    return tuple(number for number in range(_FIRST_EXPONENT, limit) if sieve[number])[:MAX_CLASSES]


def exponent(number: int) -> int:
    """The public exponent of a class, from 0.

    >>> [exponent(number) for number in range(4)]
    [65537, 65539, 65543, 65551]
    """
    return _exponents()[number]


@dataclass(frozen=True, slots=True)
class PublicKey:
    """The public key of a class.

    Attributes:
        modulus: n.
        exponent: e.
    """

    modulus: int
    exponent: int

    @property
    def size(self) -> int:
        """Bytes of a signature."""
        return (self.modulus.bit_length() + 7) // 8

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether that is a signature of the message (RSASSA-PSS, SHA-384, a salt of 48 bytes)."""
        try:
            _library_key(self.modulus, self.exponent).verify(signature, message, _PADDING, hashes.SHA384())
        except (InvalidSignature, ValueError):  # ValueError: no library takes such a modulus.
            return False
        return True


# A board uses each key once, and a job has many rounds; a coordinator checks one round's at a time.
@lru_cache(maxsize=256)
def _library_key(modulus: int, exponent: int) -> rsa.RSAPublicKey:
    return rsa.RSAPublicNumbers(exponent, modulus).public_key()


@dataclass(frozen=True, slots=True)
class Blinded:
    """A blinded message, and what takes the blinding off again.

    Attributes:
        message: to send, as many bytes as the modulus has.
        inverse: 1/r modulo n, likewise. Secret: with it, the signer knows the signature when it sees it.
    """

    message: bytes
    inverse: bytes


def blind(key: PublicKey, message: bytes, *, entropy: Callable[[int], bytes] = os.urandom) -> Blinded:
    """Blind a message, which begins with :data:`PREFIX_BYTES` random bytes (RFC 9474, section 4.2).

    Raises:
        BlindSignatureError: its encoding shares a factor with the modulus. Draw another prefix; with a true
            key it never does.
    """
    encoded = int.from_bytes(_encoded(message, key.modulus.bit_length() - 1, entropy(_SALT_BYTES)), "big")
    if math.gcd(encoded, key.modulus) != 1:
        raise BlindSignatureError("the message shares a factor with the modulus")
    while True:
        factor = int.from_bytes(entropy(key.size), "big")
        if 0 < factor < key.modulus and math.gcd(factor, key.modulus) == 1:
            break
    blinded = encoded * pow(factor, key.exponent, key.modulus) % key.modulus
    inverse = pow(factor, -1, key.modulus)
    return Blinded(blinded.to_bytes(key.size, "big"), inverse.to_bytes(key.size, "big"))


def finalize(key: PublicKey, message: bytes, blind_signature: bytes, inverse: bytes) -> bytes:
    """The signature of a message, from that of what it was blinded to (RFC 9474, section 4.4).

    Raises:
        BlindSignatureError: it is none. The message must never be shown then; see the module's text.
    """
    root, factor = int.from_bytes(blind_signature, "big"), int.from_bytes(inverse, "big")
    signature = (root * factor % key.modulus).to_bytes(key.size, "big")
    if len(blind_signature) != key.size or root >= key.modulus or not key.has_signed(message, signature):
        raise BlindSignatureError("the answer is no signature of what was asked for")
    return signature


def _encoded(message: bytes, bits: int, salt: bytes) -> bytes:
    """EMSA-PSS with SHA-384 and MGF1 (RFC 8017, section 9.1.1)."""
    size = (bits + 7) // 8
    digest = hashlib.sha384(bytes(8) + hashlib.sha384(message).digest() + salt).digest()
    data = (b"\1" + salt).rjust(size - _HASH_BYTES - 1, b"\0")
    blocks = range(-(-len(data) // _HASH_BYTES))
    mask = b"".join(hashlib.sha384(digest + block.to_bytes(4, "big")).digest() for block in blocks)
    masked = bytearray(one ^ other for one, other in zip(data, mask, strict=False))
    masked[0] &= 0xFF >> (8 * size - bits)
    return bytes(masked) + digest + b"\xbc"
