"""Updates to fragments and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fleets import make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.protocol.codec import MessageError, encode
from dpagent.protocol.dummies import as_sent, dummies_for
from dpagent.protocol.fragments import cut, read_block, require_place
from dpagent.protocol.messages import MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES, Plan
from dpagent.protocol.sealing import Opener, new_sealing_secret, seal
from dpagent.protocol.sizes import block_count, least_payload_bytes

OPENER = Opener(new_sealing_secret(), "testers")


def _plan(dimension: int, block: int) -> Plan:
    return make_plan(model={"parameters": dimension}, wire={"block": block}, sealing_key=OPENER.public_key)


@settings(max_examples=60)
@given(dimension=st.integers(1, 400), block=st.integers(1, 90), seed=st.integers(0, 2**32 - 1))
def test_cut_and_read_in_any_order_give_the_update(dimension: int, block: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    update = generator.integers(-127, 128, dimension)
    plan = _plan(dimension, block)
    fragments = list(cut(update, plan))
    assert len(fragments) == block_count(dimension, block)
    total = np.zeros(len(fragments) * block, np.int64)
    for index in generator.permutation(len(fragments)):
        fragment = fragments[index]
        values, level = read_block(fragment, plan.wire, len(fragments))
        assert level == 0
        total[fragment.position * block : (fragment.position + 1) * block] += values
    assert np.array_equal(total[:dimension], update)
    assert not total[dimension:].any()


def test_sealed_fragments_summed_over_devices_give_the_sum_of_the_updates() -> None:
    plan = _plan(1_003, 100)
    updates = np.random.default_rng(1).integers(-(2**6), 2**6, (3, 1_003))
    updates[:, ::50] *= 2**24  # far beyond one byte
    messages = [seal(encode(fragment), plan) for update in updates for fragment in cut(update, plan)]
    total = np.zeros(1_100, np.int64)
    for message in sorted(messages):
        fragment = OPENER.open(message, plan.job)
        values, _ = read_block(fragment, plan.wire, 11)
        total[fragment.position * 100 : fragment.position * 100 + 100] += values
    assert np.array_equal(total[:1_003], updates.sum(axis=0))


def test_all_sealed_fragments_of_a_round_have_one_length() -> None:
    dimension, block = 9_930, 33  # 301 blocks, the last one not full
    plan = _plan(dimension, block)
    updates = [
        np.zeros(dimension, np.int64),
        np.full(dimension, -(2**62), np.int64),
        np.full(dimension, 2**12 - 1, np.int64),
        np.random.default_rng(0).integers(-(2**31), 2**31, dimension),
    ]
    lengths = {
        len(seal(encode(fragment), plan))
        for update in updates for _ in range(2) for fragment in cut(update, plan)
    }  # fmt: skip
    lengths |= {len(seal(as_sent(encode(dummy), plan), plan)) for dummy in dummies_for(plan)}
    assert block_count(dimension, block) == 301
    assert len(lengths) == 1


def test_the_largest_fragment_a_plan_allows_can_be_sealed_and_sent() -> None:
    block = 200_000
    assert least_payload_bytes(block) <= MAX_PAYLOAD_BYTES
    plan = _plan(block, block)
    (fragment,) = cut(np.full(block, -(2**31) + 1, np.int64), plan)
    message = seal(encode(fragment), plan)
    assert len(message) <= MAX_MESSAGE_BYTES
    values, level = read_block(OPENER.open(message, plan.job), plan.wire, 1)
    assert np.abs(values + 2**31).max() <= 1 << level


def test_ids_are_fresh_for_every_fragment_of_every_cut() -> None:
    plan, update = _plan(1_000, 10), np.zeros(1_000, np.int64)
    ids = [fragment.id for _ in range(20) for fragment in cut(update, plan)]
    assert len(set(ids)) == len(ids) == 2_000
    # Random bits: each of the 128 is set in about half of the ids (six standard deviations).
    ones = np.unpackbits(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16), axis=1).mean(axis=0)
    assert np.all(np.abs(ones - 0.5) < 6 * 0.5 / np.sqrt(len(ids)))


def test_nothing_but_payload_position_and_id_differs_between_devices() -> None:
    plan = _plan(100, 10)
    one, other = (next(cut(np.full(100, value, np.int64), plan)) for value in (1, 2))
    assert replace(one, id=other.id, payload=other.payload) == other


def test_a_fragment_without_a_place_in_the_update_is_refused() -> None:
    plan = _plan(100, 10)
    fragment = next(cut(np.zeros(100, np.int64), plan))
    dummy = replace(fragment, payload=b"\xff".ljust(plan.wire.bytes, b"\0"))
    for position in (10, 256, 2**32 - 1):
        with pytest.raises(MessageError) as caught:
            read_block(replace(fragment, position=position), plan.wire, 10)
        assert caught.value.reason == "bad position"
        with pytest.raises(MessageError, match="bad position"):
            require_place(replace(dummy, position=position), plan.wire, 10)
    for payload in (b"", fragment.payload + b"\0", dummy.payload[:-1]):
        with pytest.raises(MessageError) as caught:
            require_place(replace(fragment, payload=payload), plan.wire, 10)
        assert caught.value.reason == "wrong size"
    with pytest.raises(MessageError) as caught:
        read_block(dummy, plan.wire, 10)
    assert caught.value.reason == "bad values"
