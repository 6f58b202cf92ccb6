"""Signatures: bound to the key, the fleet and the kind of message."""

from __future__ import annotations

import base64

import pytest
from fleets import make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.protocol.codec import MessageError, decode, encode
from dpagent.protocol.messages import Plan, Receipts, Signed
from dpagent.protocol.signing import Signer, Verifier, decode_public_key, new_signing_secret

SECRET = bytes(range(32))  # fixed: it gives tests their names
SIGNER = Signer(SECRET, "testers")
VERIFIER = Verifier(SIGNER.public_key, "testers")
PLAN = make_plan()
RECEIPTS = Receipts(b"r" * 16)


def refused(verifier: Verifier, data: bytes) -> str:
    with pytest.raises(MessageError) as caught:
        verifier.open(data, Plan, "plan")
    return caught.value.reason


def test_what_is_signed_is_opened() -> None:
    assert VERIFIER.open(SIGNER.sign(PLAN, "plan"), Plan, "plan") == PLAN
    assert VERIFIER.open(SIGNER.sign(RECEIPTS, "receipts"), Receipts, "receipts") == RECEIPTS


def test_signing_is_deterministic_and_survives_a_restart() -> None:
    assert Signer(SECRET, "testers").sign(PLAN, "plan") == SIGNER.sign(PLAN, "plan")
    assert Signer(SECRET, "testers").public_key == SIGNER.public_key


def test_another_key_is_refused() -> None:
    other = Signer(new_signing_secret(), "testers")
    assert refused(VERIFIER, other.sign(PLAN, "plan")) == "bad signature"


def test_the_same_key_for_another_fleet_is_refused() -> None:
    assert refused(VERIFIER, Signer(SECRET, "other").sign(PLAN, "plan")) == "bad signature"
    assert refused(Verifier(SIGNER.public_key, "other"), SIGNER.sign(PLAN, "plan")) == "bad signature"


def test_a_signature_is_not_valid_for_another_kind() -> None:
    # The body is a well-formed plan; only what it was signed as differs.
    assert refused(VERIFIER, SIGNER.sign(PLAN, "receipts")) == "bad signature"
    with pytest.raises(MessageError, match="bad signature"):
        VERIFIER.open(SIGNER.sign(RECEIPTS, "plan"), Receipts, "receipts")


def test_a_receipt_signed_as_a_plan_is_still_no_plan() -> None:
    assert refused(VERIFIER, SIGNER.sign(RECEIPTS, "plan")) == "malformed"


def test_an_altered_body_or_a_swapped_signature_is_refused() -> None:
    signed = decode(SIGNER.sign(PLAN, "plan"), Signed)
    body = encode(make_plan(mechanism={"noise_multipliers": [4.0, 3.0, 0.05]}))
    swapped = Signed(signed.signature, body)
    assert refused(VERIFIER, encode(swapped)) == "bad signature"
    zeros = Signed(bytes(64), signed.body)
    assert refused(VERIFIER, encode(zeros)) == "bad signature"


@settings(max_examples=150)
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_no_byte_can_be_changed(place: int, flip: int) -> None:
    data = bytearray(SIGNER.sign(PLAN, "plan"))
    data[place % len(data)] ^= flip
    refused(VERIFIER, bytes(data))


def test_kind_and_fleet_cannot_run_into_each_other() -> None:
    # "plan a" for fleet "b" must not be "plan" for fleet "a b"; names with spaces do not exist,
    # and the body is separated by a byte that no name has.
    one = Signer(SECRET, "ab").sign(PLAN, "plan")
    assert refused(Verifier(SIGNER.public_key, "a"), one) == "bad signature"


@pytest.mark.parametrize(
    "text",
    ["", "short", "not base64!", base64.b64encode(b"x" * 31).decode(), base64.b64encode(b"x" * 33).decode(),
     "ä" * 44, SIGNER.public_key + "\n", SIGNER.public_key[:-1]],
)  # fmt: skip
def test_what_is_no_public_key_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="dpagent coordinator key"):
        decode_public_key(text)
    with pytest.raises(ValueError, match="dpagent coordinator key"):
        Verifier(text, "testers")


def test_the_key_as_printed_is_read() -> None:
    assert len(decode_public_key(SIGNER.public_key)) == 32
