"""The side of blind signatures that signs (:mod:`dpagent.protocol.blind_signatures`): RSA roots that tell
nothing of the key.

The private operation takes the same time whatever it is given: its argument is blinded with a random factor,
and both exponentiations of the Chinese remainder theorem are GMP's ``mpz_powm_sec``. Its result is
checked before it leaves: a fault in one of them would give the modulus' factors away (Boneh, DeMillo, Lipton,
*On the importance of checking cryptographic protocols for faults*, 1997).
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import gmpy2
from cryptography.hazmat.primitives.asymmetric import rsa

from dpagent.protocol.blind_signatures import (
    MODULUS_BITS,
    SIGNATURE_BYTES,
    BlindSignatureError,
    PublicKey,
    exponent,
)

_PRIME_BYTES: Final = SIGNATURE_BYTES // 2
_SQUARES: Final = 31


class FaultError(RuntimeError):
    """The private operation went wrong, and nothing of it may leave."""


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A modulus, by its prime factors. Its classes are those of a number that was chosen with it."""

    p: int
    q: int

    @classmethod
    def generate(cls, classes: int) -> PrivateKey:
        """A fresh one of 2,048 bits, whose first ``classes`` exponents have private counterparts.

        It takes some tenths of a second.
        """
        wanted = math.prod(exponent(number) for number in range(classes))
        while True:
            made = rsa.generate_private_key(exponent(0), MODULUS_BITS).private_numbers()
            if math.gcd(wanted, (made.p - 1) * (made.q - 1)) == 1:
                return cls(made.p, made.q)

    @classmethod
    def from_bytes(cls, data: bytes) -> PrivateKey:
        """Inverse of :meth:`to_bytes`."""
        p, q = data[:_PRIME_BYTES], data[_PRIME_BYTES:]
        return cls(int.from_bytes(p, "big"), int.from_bytes(q, "big"))

    def to_bytes(self) -> bytes:
        """Both factors, 128 bytes each."""
        return self.p.to_bytes(_PRIME_BYTES, "big") + self.q.to_bytes(_PRIME_BYTES, "big")

    @property
    def modulus(self) -> int:
        """n."""
        return self.p * self.q

    def public(self, number: int) -> PublicKey:
        """The public key of a class."""
        return PublicKey(self.modulus, exponent(number))

    def blind_sign(self, number: int, blinded: bytes) -> bytes:
        """The root of a blinded message by a class's exponent (RFC 9474, section 4.3).

        Raises:
            BlindSignatureError: it is not below the modulus.
            FaultError: what was computed is not the root.
        """
        return _signer(self.p, self.q, exponent(number)).sign(blinded)


class _Signer:
    """The private operation of one exponent."""

    def __init__(self, p: int, q: int, e: int) -> None:
        self._p, self._q, self._n, self._e = gmpy2.mpz(p), gmpy2.mpz(q), gmpy2.mpz(p * q), gmpy2.mpz(e)
        # Of d modulo each prime less one: what there is for each class follows from the factors.
        self._d_p, self._d_q = gmpy2.mpz(pow(e, -1, p - 1)), gmpy2.mpz(pow(e, -1, q - 1))
        self._q_inverse = gmpy2.mpz(pow(q, -1, p))
        self._size = (self._n.bit_length() + 7) // 8
        self._factor, self._factors_left = (gmpy2.mpz(1), gmpy2.mpz(1)), 0

    def sign(self, blinded: bytes) -> bytes:
        """See :meth:`PrivateKey.blind_sign`."""
        message = gmpy2.mpz(int.from_bytes(blinded, "big"))
        if len(blinded) != self._size or not message < self._n:
            raise BlindSignatureError("a blinded message is not below the modulus")
        power, inverse = self._next_factor()
        root = self._root(message * power % self._n) * inverse % self._n
        if gmpy2.powmod(root, self._e, self._n) != message:
            raise FaultError("a blind signature came out wrong; it was not sent")
        return int(root).to_bytes(self._size, "big")

    def _next_factor(self) -> tuple[gmpy2.mpz, gmpy2.mpz]:
        """u^e and 1/u for a u that nobody else knows: a fresh one now and then, in between the square of the
        one before, as OpenSSL has it."""
        if self._factors_left == 0:
            factor = gmpy2.mpz(1 + secrets.randbelow(int(self._n) - 1))  # It shares no factor with n.
            self._factor = gmpy2.powmod(factor, self._e, self._n), gmpy2.invert(factor, self._n)
            self._factors_left = _SQUARES
        else:
            power, inverse = self._factor
            self._factor = power * power % self._n, inverse * inverse % self._n
            self._factors_left -= 1
        return self._factor

    def _root(self, hidden: gmpy2.mpz) -> gmpy2.mpz:
        of_p = gmpy2.powmod_sec(hidden % self._p, self._d_p, self._p)
        of_q = gmpy2.powmod_sec(hidden % self._q, self._d_q, self._q)
        return of_q + self._q * ((of_p - of_q) * self._q_inverse % self._p)


def forget_keys() -> None:
    """Let go of what was kept of private keys to sign sooner."""
    _signer.cache_clear()


@lru_cache(maxsize=1_024)
def _signer(p: int, q: int, e: int) -> _Signer:
    return _Signer(p, q, e)
