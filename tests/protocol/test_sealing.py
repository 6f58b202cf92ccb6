"""Sealing: only the coordinator's key, only this fleet, only what was sealed."""

from __future__ import annotations

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.protocol.codec import MessageError, encode
from dpagent.protocol.messages import Fragment, Sealed
from dpagent.protocol.sealing import _SUITE, Opener, new_sealing_secret, seal

FRAGMENT = Fragment(
    version=1,
    kind="fragment",
    job=b"j" * 16,
    round=1,
    id=b"i" * 16,
    position=b"\0\0\0\1",
    dummy=False,
    payload=b"p" * 40,
)
OPENER = Opener(new_sealing_secret(), "testers")


def refused(opener: Opener, data: bytes) -> str:
    with pytest.raises(MessageError) as caught:
        opener.open(data)
    return caught.value.reason


def test_what_is_sealed_is_opened() -> None:
    assert OPENER.open(seal(FRAGMENT, "testers", OPENER.public_key)) == FRAGMENT


def test_the_same_secret_has_the_same_public_key_again() -> None:
    secret = new_sealing_secret()
    message = seal(FRAGMENT, "testers", Opener(secret, "testers").public_key)
    assert Opener(secret, "testers").open(message) == FRAGMENT


def test_two_seals_of_one_fragment_share_nothing() -> None:
    one, other = (cbor2.loads(seal(FRAGMENT, "testers", OPENER.public_key))["ciphertext"] for _ in range(2))
    assert len(one) == len(other)
    assert one[:32] != other[:32]
    assert not {one[i : i + 8] for i in range(len(one) - 7)} & {
        other[i : i + 8] for i in range(len(other) - 7)
    }


def test_nothing_of_the_fragment_is_readable() -> None:
    message = seal(FRAGMENT, "testers", OPENER.public_key)
    for part in (FRAGMENT.job, FRAGMENT.id, FRAGMENT.payload[:8], b"payload", b"position"):
        assert part not in message


def test_another_key_and_another_fleet_cannot_open() -> None:
    secret = new_sealing_secret()
    message = seal(FRAGMENT, "testers", Opener(secret, "testers").public_key)
    assert refused(OPENER, message) == "cannot open"
    assert refused(Opener(secret, "others"), message) == "cannot open"
    assert Opener(secret, "testers").open(message) == FRAGMENT


@settings(max_examples=80)
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_an_altered_ciphertext_is_refused(place: int, flip: int) -> None:
    ciphertext = bytearray(cbor2.loads(seal(FRAGMENT, "testers", OPENER.public_key))["ciphertext"])
    # The top bit of an X25519 key's last byte is ignored by definition (RFC 7748), but HPKE binds it.
    ciphertext[place % len(ciphertext)] ^= flip
    altered = encode(Sealed(version=1, kind="sealed", ciphertext=bytes(ciphertext)))
    assert refused(OPENER, altered) == "cannot open"


@settings(max_examples=100)
@given(st.binary(max_size=120))
def test_ciphertexts_of_random_bytes_are_refused(ciphertext: bytes) -> None:
    assert refused(OPENER, encode(Sealed(version=1, kind="sealed", ciphertext=ciphertext))) == "cannot open"


def test_a_low_order_ephemeral_key_is_refused() -> None:
    for key in (bytes(32), b"\1" + bytes(31), b"\xff" * 32):
        message = encode(Sealed(version=1, kind="sealed", ciphertext=key + b"c" * 100))
        assert refused(OPENER, message) == "cannot open"


@pytest.mark.parametrize("inside", [b"", b"\0", b"\xff" * 40, cbor2.dumps({"version": 1}), b"\x81" * 5_000])
def test_a_well_sealed_message_that_is_no_fragment_is_refused(inside: bytes) -> None:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    key = X25519PublicKey.from_public_bytes(OPENER.public_key)
    ciphertext = _SUITE.encrypt(inside, key, b"dpagent v1 fragment testers")
    message = encode(Sealed(version=1, kind="sealed", ciphertext=ciphertext))
    assert refused(OPENER, message) in ("malformed", "unsupported version")


def test_a_secret_of_the_wrong_size_is_no_key() -> None:
    with pytest.raises(ValueError, match="32"):
        Opener(b"short", "testers")


def test_secrets_are_fresh() -> None:
    assert len({new_sealing_secret() for _ in range(10)}) == 10
    assert len(new_sealing_secret()) == 32
