"""Sealing: only the coordinator's key, only this fleet, only what was sealed."""

from __future__ import annotations

import pytest
from fleets import make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.protocol.codec import MessageError, encode
from dpagent.protocol.messages import Fragment, Sealed
from dpagent.protocol.sealing import SUITE, Opener, new_sealing_secret, seal

OPENER = Opener(new_sealing_secret(), "testers")
PLAN = make_plan(sealing_key=OPENER.public_key)
JOB = PLAN.job
FRAGMENT = Fragment(1, 1, b"i" * 16, b"p" * 40)
ENCODED = encode(FRAGMENT)


def refused(opener: Opener, data: bytes) -> str:
    with pytest.raises(MessageError) as caught:
        opener.open(data, JOB)
    return caught.value.reason


def test_what_is_sealed_is_opened() -> None:
    assert OPENER.open(seal(ENCODED, PLAN), JOB) == FRAGMENT


def test_the_same_secret_has_the_same_public_key_again() -> None:
    secret = new_sealing_secret()
    message = seal(ENCODED, make_plan(sealing_key=Opener(secret, "testers").public_key))
    assert Opener(secret, "testers").open(message, JOB) == FRAGMENT


def test_two_seals_of_one_fragment_share_nothing() -> None:
    one, other = (seal(ENCODED, PLAN)[1:] for _ in range(2))
    assert len(one) == len(other)
    assert one[:32] != other[:32]
    assert not {one[i : i + 8] for i in range(len(one) - 7)} & {
        other[i : i + 8] for i in range(len(other) - 7)
    }


def test_nothing_of_the_fragment_is_readable() -> None:
    message = seal(ENCODED, PLAN)
    for part in (JOB, FRAGMENT.id, FRAGMENT.payload[:8]):
        assert part not in message


def test_another_key_fleet_or_job_cannot_open() -> None:
    secret = new_sealing_secret()
    message = seal(ENCODED, make_plan(sealing_key=Opener(secret, "testers").public_key))
    assert refused(OPENER, message) == "cannot open"
    assert refused(Opener(secret, "others"), message) == "cannot open"
    with pytest.raises(MessageError, match="cannot open"):
        Opener(secret, "testers").open(message, b"k" * 16)
    assert Opener(secret, "testers").open(message, JOB) == FRAGMENT


@settings(max_examples=80)
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_an_altered_ciphertext_is_refused(place: int, flip: int) -> None:
    ciphertext = bytearray(seal(ENCODED, PLAN)[1:])
    # The top bit of an X25519 key's last byte is ignored by definition (RFC 7748), but HPKE binds it.
    ciphertext[place % len(ciphertext)] ^= flip
    altered = encode(Sealed(bytes(ciphertext)))
    assert refused(OPENER, altered) == "cannot open"


@settings(max_examples=100)
@given(st.binary(max_size=120))
def test_ciphertexts_of_random_bytes_are_refused(ciphertext: bytes) -> None:
    assert refused(OPENER, encode(Sealed(ciphertext))) == "cannot open"


def test_a_low_order_ephemeral_key_is_refused() -> None:
    for key in (bytes(32), b"\1" + bytes(31), b"\xff" * 32):
        message = encode(Sealed(key + b"c" * 100))
        assert refused(OPENER, message) == "cannot open"


@pytest.mark.parametrize("inside", [b"", b"\0", b"\xff" * 23])
def test_a_well_sealed_message_that_is_no_fragment_is_refused(inside: bytes) -> None:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    key = X25519PublicKey.from_public_bytes(OPENER.public_key)
    ciphertext = SUITE.encrypt(inside, key, b"dpagent v1 fragment testers\0" + JOB)
    message = encode(Sealed(ciphertext))
    assert refused(OPENER, message) == "malformed"


def test_a_secret_of_the_wrong_size_is_no_key() -> None:
    with pytest.raises(ValueError, match="32"):
        Opener(b"short", "testers")


def test_secrets_are_fresh() -> None:
    assert len({new_sealing_secret() for _ in range(10)}) == 10
    assert len(new_sealing_secret()) == 32
