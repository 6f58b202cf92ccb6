"""Blind signatures: the RFC's vectors, and what a hostile signer or asker may try."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gmpy2
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from coordinator import blind_signing
from coordinator.blind_signing import FaultError, PrivateKey
from dpagent.protocol import blind_signatures
from dpagent.protocol.blind_signatures import (
    MAX_CLASSES,
    PREFIX_BYTES,
    BlindSignatureError,
    PublicKey,
    blind,
    exponent,
    finalize,
)

# RFC 9474, appendix A: the variants with a salt of 48 bytes.
VECTORS: list[dict[str, str]] = json.loads(Path(__file__).with_name("rfc9474.json").read_text())
CLASSES = 4


@pytest.fixture(scope="module")
def key() -> PrivateKey:
    return PrivateKey.generate(CLASSES)


def in_turn(*draws: bytes) -> Callable[[int], bytes]:
    """Entropy that gives what it is told."""
    left: Iterator[bytes] = iter(draws)

    def draw(size: int) -> bytes:
        drawn = next(left)
        assert len(drawn) == size
        return drawn

    return draw


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_the_vectors_of_the_rfc_are_met(vector: dict[str, str]) -> None:
    raw = {name: bytes.fromhex(value) for name, value in vector.items() if name != "name"}
    n, e = int.from_bytes(raw["n"], "big"), int.from_bytes(raw["e"], "big")
    public = PublicKey(n, e)
    message = raw.get("msg_prefix", b"") + raw["msg"]
    assert message == raw["prepared_msg"]
    factor = pow(int.from_bytes(raw["inv"], "big"), -1, n).to_bytes(public.size, "big")
    blinded = blind(public, message, entropy=in_turn(raw["salt"], factor))
    assert blinded.message == raw["blinded_msg"]
    assert blinded.inverse == raw["inv"]
    signer = blind_signing._Signer(int.from_bytes(raw["p"], "big"), int.from_bytes(raw["q"], "big"), e)
    assert signer.sign(blinded.message) == raw["blind_sig"]
    assert finalize(public, message, raw["blind_sig"], blinded.inverse) == raw["sig"]


def test_any_library_verifies_a_signature(key: PrivateKey) -> None:
    message = os.urandom(PREFIX_BYTES) + b"a token"
    for number in range(CLASSES):
        public = key.public(number)
        blinded = blind(public, message)
        signature = finalize(public, message, key.blind_sign(number, blinded.message), blinded.inverse)
        library = rsa.RSAPublicNumbers(exponent(number), key.modulus).public_key()
        library.verify(signature, message, padding.PSS(padding.MGF1(hashes.SHA384()), 48), hashes.SHA384())
        assert not public.has_signed(message + b"!", signature)


def test_a_signature_of_one_class_is_none_of_another(key: PrivateKey) -> None:
    message = os.urandom(PREFIX_BYTES)
    blinded = blind(key.public(1), message)
    signature = finalize(key.public(1), message, key.blind_sign(1, blinded.message), blinded.inverse)
    assert [key.public(number).has_signed(message, signature) for number in range(CLASSES)] == [
        False, True, False, False,
    ]  # fmt: skip
    with pytest.raises(BlindSignatureError):
        finalize(key.public(1), message, key.blind_sign(2, blinded.message), blinded.inverse)


def test_exponents_are_the_primes_from_65537_on() -> None:
    found = [exponent(number) for number in range(MAX_CLASSES)]
    assert found[0] == 65_537
    expected, candidate = [], 65_536
    while len(expected) < MAX_CLASSES:
        candidate = int(gmpy2.next_prime(candidate))
        expected.append(candidate)
    assert found == expected


def test_the_private_operation_takes_the_same_time_whatever_it_is_given(
    key: PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both exponentiations with a secret exponent are those of GMP that do."""
    blinded, moduli, power = blind(key.public(0), bytes(40)), list[int](), gmpy2.powmod_sec

    def secret(base: Any, exponent: Any, modulus: Any) -> Any:
        moduli.append(int(modulus))
        return power(base, exponent, modulus)

    monkeypatch.setattr(gmpy2, "powmod_sec", secret)
    blind_signing.forget_keys()
    key.blind_sign(0, blinded.message)
    assert moduli == [key.p, key.q]


def test_a_fault_in_the_private_operation_does_not_leave(
    key: PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong exponentiation of the two would give the factors away: gcd(s^e − m, n)."""
    signer, blinded = blind_signing._signer(key.p, key.q, exponent(0)), blind(key.public(0), bytes(40))
    true_root = signer._root

    def faulty(hidden: Any) -> Any:
        root = true_root(hidden)
        # As if the exponentiation modulo q had flipped a bit.
        return (root + gmpy2.mpz(key.p)) % key.modulus

    monkeypatch.setattr(blind_signing._Signer, "_root", lambda _self, hidden: faulty(hidden))
    hidden = gmpy2.mpz(12_345)
    wrong = faulty(hidden)
    assert math.gcd(int(gmpy2.powmod(wrong, exponent(0), key.modulus) - hidden), key.modulus) == key.p
    with pytest.raises(FaultError):
        signer.sign(blinded.message)


def test_what_the_private_operation_is_given_is_never_what_was_asked(
    key: PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    true_root = blind_signing._Signer._root

    def root(signer: Any, hidden: Any) -> Any:
        seen.append(int(hidden))
        return true_root(signer, hidden)

    monkeypatch.setattr(blind_signing._Signer, "_root", root)
    blinded = blind(key.public(0), bytes(40)).message
    assert len({key.blind_sign(0, blinded) for _ in range(8)}) == 1
    assert len({*seen, int.from_bytes(blinded, "big")}) == 9


@pytest.mark.parametrize("size", [-1, 1])
def test_a_blinded_message_of_another_length_is_refused(key: PrivateKey, size: int) -> None:
    with pytest.raises(BlindSignatureError):
        key.blind_sign(0, bytes(256 + size))


def test_a_blinded_message_beyond_the_modulus_is_refused(key: PrivateKey) -> None:
    with pytest.raises(BlindSignatureError):
        key.blind_sign(0, key.modulus.to_bytes(256, "big"))


def test_a_modulus_with_small_factors_learns_no_message() -> None:
    """Of an encoding that 3 divides, no blinding hides that; it is not sent."""
    public = PublicKey(3 * (1 << 2046 | 1), exponent(0))
    sent = 0
    for _ in range(60):
        message = os.urandom(PREFIX_BYTES)
        try:
            blinded = blind(public, message)
        except BlindSignatureError:
            continue
        sent += 1
        assert int.from_bytes(blinded.message, "big") % 3
    assert 0 < sent < 60


def test_a_modulus_whose_order_an_exponent_divides_is_shown_nothing() -> None:
    """There r^e is not uniform: of a class of order e that the signer can tell, it signs one in e."""
    small = 7
    p = q = 0
    while not (p and q):
        prime = int(gmpy2.next_prime(int.from_bytes(os.urandom(64), "big") | 1 << 511))
        if prime % small == 1 and (prime - 1) // small % small and not p:
            p = prime
        elif prime % small != 1:
            q = prime
    public = PublicKey(p * q, small)
    told, shown = set(), set()
    for _ in range(120):
        message = os.urandom(PREFIX_BYTES)
        blinded = blind(public, message)
        # What the signer can tell of the message though it is blinded: its class modulo e-th powers.
        residue = pow(int.from_bytes(blinded.message, "big"), (p - 1) // small, p)
        told.add(residue)
        # The best that it can answer: a root where there is one, else anything.
        d_q = pow(small, -1, q - 1)
        root_p = _root_modulo(int.from_bytes(blinded.message, "big") % p, small, p)
        root_q = pow(int.from_bytes(blinded.message, "big"), d_q, q)
        answer = (root_q + q * ((root_p - root_q) * pow(q, -1, p) % p)) % (p * q)
        try:
            finalize(public, message, answer.to_bytes(public.size, "big"), blinded.inverse)
        except BlindSignatureError:
            continue
        shown.add(residue)
    assert len(told) > 1
    assert shown == {1}


def _root_modulo(value: int, small: int, p: int) -> int:
    """A ``small``-th root modulo p, if there is one and the order has ``small`` once."""
    rest = (p - 1) // small
    return pow(value, pow(small, -1, rest), p)


def test_what_is_not_below_the_modulus_is_no_signature(key: PrivateKey) -> None:
    public, message = key.public(0), os.urandom(PREFIX_BYTES)
    blinded = blind(public, message)
    root = int.from_bytes(key.blind_sign(0, blinded.message), "big")
    with pytest.raises(BlindSignatureError):
        finalize(public, message, bytes(1) + root.to_bytes(256, "big"), blinded.inverse)
    assert blind_signatures.SIGNATURE_BYTES == 256


def test_keys_of_rounds_long_over_take_no_memory() -> None:
    """A board finishes some tokens a round, each of another key."""
    for number in range(300):
        PublicKey((1 << 2048) - 2 * number - 1, exponent(0)).has_signed(b"", bytes(256))
    assert blind_signatures._library_key.cache_info().currsize <= 256
