"""The outer seal: only the mixer's key, only this fleet and plan, one length, and nothing of the inside."""

from __future__ import annotations

import pytest
from fleets import make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.protocol.codec import MessageError, encode
from dpagent.protocol.messages import MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES, Fragment
from dpagent.protocol.mixing import OuterOpener, key_text, plan_digest, raw_key, seal_for
from dpagent.protocol.sealing import Opener, new_sealing_secret, seal

COORDINATOR = Opener(new_sealing_secret(), "testers")
MIXER = OuterOpener(new_sealing_secret(), "testers")
PLAN = make_plan(sealing_key=COORDINATOR.public_key, mixer=MIXER.public_key)
FRAGMENT = Fragment(1, 1, b"i" * 16, b"p" * 40)
ENCODED = encode(FRAGMENT)


def refused(data: bytes, opener: OuterOpener = MIXER) -> str:
    with pytest.raises(MessageError) as caught:
        opener.open(data)
    return caught.value.reason


def test_the_mixer_finds_what_only_the_coordinator_opens() -> None:
    inner = MIXER.open(seal_for(ENCODED, PLAN))
    assert inner.plan == plan_digest(PLAN)
    assert COORDINATOR.open(inner.sealed, PLAN.job) == FRAGMENT


def test_without_a_mixer_the_coordinator_opens_it() -> None:
    plan = make_plan(sealing_key=COORDINATOR.public_key)
    assert COORDINATOR.open(seal_for(ENCODED, plan), plan.job) == FRAGMENT


def test_both_layers_are_new_each_time() -> None:
    one, other = (seal_for(ENCODED, PLAN) for _ in range(2))
    assert len(one) == len(other)
    # The plan's digest, after the version, is alike for all devices.
    assert one[33:65] != other[33:65]
    assert MIXER.open(one).sealed[1:33] != MIXER.open(other).sealed[1:33]


def test_another_key_fleet_or_plan_cannot_open() -> None:
    secret = new_sealing_secret()
    mixer = OuterOpener(secret, "testers")
    data = seal_for(ENCODED, make_plan(sealing_key=COORDINATOR.public_key, mixer=mixer.public_key))
    assert mixer.open(data).plan
    assert refused(data) == "cannot open"
    assert refused(data, OuterOpener(secret, "others")) == "cannot open"
    assert refused(data[:1] + bytes(32) + data[33:], mixer) == "cannot open"


def test_a_plan_has_one_digest_until_anything_but_its_deadline_changes() -> None:
    values = {"sealing_key": COORDINATOR.public_key, "mixer": MIXER.public_key}
    assert plan_digest(make_plan(**values, deadline=1.0)) == plan_digest(make_plan(**values, deadline=2.0))
    for change in ({"job": b"k" * 16}, {"round": 2}, {"sealing_key": bytes(range(32))}, {"delta": 2e-5}):
        assert plan_digest(make_plan(**(values | change))) != plan_digest(PLAN)


def test_the_largest_fragment_fits_a_message() -> None:
    fragment = Fragment(1, 1, b"i" * 16, bytes(MAX_PAYLOAD_BYTES))
    assert len(seal_for(encode(fragment), PLAN)) <= MAX_MESSAGE_BYTES


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert refused(data) in {"cannot open", "malformed", "unsupported version"}


@settings(max_examples=50)
@given(place=st.integers(1, 10_000), flip=st.integers(1, 255))
def test_an_altered_message_is_refused(place: int, flip: int) -> None:
    data = bytearray(seal_for(ENCODED, PLAN))
    data[1 + place % (len(data) - 1)] ^= flip
    assert refused(bytes(data)) == "cannot open"


def test_a_message_to_the_coordinator_alone_is_refused() -> None:
    assert refused(seal(ENCODED, PLAN)) == "cannot open"


def test_a_key_of_low_order_is_found_when_sealing() -> None:
    plan = make_plan(sealing_key=COORDINATOR.public_key, mixer=bytes(32))
    with pytest.raises(ValueError, match=r"(?i)x25519|key|exchange|comput"):
        seal_for(ENCODED, plan)


def test_keys_are_text_in_files() -> None:
    assert raw_key(key_text(MIXER.public_key)) == MIXER.public_key
    for text in ("", "AAAA", "no base64", key_text(bytes(31)), key_text(bytes(33))):
        with pytest.raises(ValueError, match="mixer's key"):
            raw_key(text)
