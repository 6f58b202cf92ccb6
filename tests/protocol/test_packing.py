"""Integers to bits and back, and updates to fragments and back."""

from __future__ import annotations

import numpy as np
import pytest
from fleets import make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.protocol.codec import MessageError, encode
from dpagent.protocol.fragments import block_count, cut, pack, read_block, receipt_digest, unpack
from dpagent.protocol.messages import MAX_MESSAGE_BYTES, Fragment, Plan
from dpagent.protocol.sealing import Opener, new_sealing_secret, seal

WIDTHS = range(2, 33)


@st.composite
def signed_integers(draw: st.DrawFn) -> tuple[int, list[int]]:
    width = draw(st.sampled_from(WIDTHS))
    half = 1 << (width - 1)
    return width, draw(st.lists(st.integers(-half, half - 1), min_size=1, max_size=40))


@given(signed_integers())
def test_what_is_packed_is_unpacked(case: tuple[int, list[int]]) -> None:
    width, values = case
    data = pack(np.array(values, np.int64), width)
    assert len(data) == -(-len(values) * width // 8)
    assert unpack(data, len(values), width).tolist() == values


@pytest.mark.parametrize("width", WIDTHS)
def test_extremes_of_every_width_travel_and_one_beyond_does_not(width: int) -> None:
    half = 1 << (width - 1)
    extremes = np.array([-half, half - 1, -half, 0, -1, half - 1, 1], np.int64)
    unpacked = unpack(pack(extremes, width), len(extremes), width)
    assert unpacked.dtype == np.int64
    assert unpacked.tolist() == extremes.tolist()
    for beyond in (-half - 1, half):
        with pytest.raises(ValueError, match=f"do not fit {width} signed bits"):
            pack(np.array([0, beyond], np.int64), width)


def test_the_bits_on_the_wire_are_the_documented_ones() -> None:
    # Offset by 2^(3-1) = 4, most significant bit first: 0 -> 100, -4 -> 000, 3 -> 111, padded.
    assert pack(np.array([0, -4, 3], np.int64), 3) == bytes([0b10000011, 0b10000000])


@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_another_length_is_refused(change: int) -> None:
    data = pack(np.zeros(10, np.int64), 12)
    with pytest.raises(MessageError) as caught:
        unpack(data[:change] if change < 0 else data + b"\0", 10, 12)
    assert caught.value.reason == "wrong size"


def _plan(dimension: int, block: int, width: int) -> Plan:
    return make_plan(model={"parameters": dimension}, wire={"block": block, "width": width})


@settings(max_examples=60)
@given(
    dimension=st.integers(1, 400), block=st.integers(1, 90), width=st.sampled_from(range(4, 33)),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_cut_and_read_in_any_order_give_the_update(dimension: int, block: int, width: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    half = 1 << (width - 1)
    update = generator.integers(-half, half, dimension)
    plan = _plan(dimension, block, width)
    fragments = list(cut(update, plan))
    assert len(fragments) == block_count(dimension, block)
    total = np.zeros(len(fragments) * block, np.int64)
    for index in generator.permutation(len(fragments)):
        position, values = read_block(fragments[index], plan.wire, dimension)
        total[position * block : (position + 1) * block] += values
    assert np.array_equal(total[:dimension], update)
    assert not total[dimension:].any()


def test_sealed_fragments_summed_over_devices_give_the_sum_of_the_updates() -> None:
    opener = Opener(new_sealing_secret(), "testers")
    plan = _plan(1_003, 100, 17)
    updates = np.random.default_rng(1).integers(-(2**16), 2**16, (3, 1_003))
    messages = [
        seal(fragment, plan.fleet, opener.public_key) for update in updates for fragment in cut(update, plan)
    ]
    total = np.zeros(1_100, np.int64)
    for message in sorted(messages):
        position, values = read_block(opener.open(message), plan.wire, 1_003)
        total[position * 100 : position * 100 + 100] += values
    assert np.array_equal(total[:1_003], updates.sum(axis=0))


def test_all_sealed_fragments_of_a_round_have_one_length() -> None:
    opener = Opener(new_sealing_secret(), "testers")
    dimension, block = 9_930, 33  # 301 blocks, the last one not full: one and two byte indices
    plan = _plan(dimension, block, 13)
    updates = [
        np.zeros(dimension, np.int64),
        np.full(dimension, -(2**12), np.int64),
        np.full(dimension, 2**12 - 1, np.int64),
        np.random.default_rng(0).integers(-(2**12), 2**12, dimension),
    ]
    lengths = {
        len(seal(fragment, plan.fleet, opener.public_key))
        for update in updates for _ in range(2) for fragment in cut(update, plan)
    }  # fmt: skip
    assert block_count(dimension, block) == 301
    assert len(lengths) == 1


@pytest.mark.parametrize("round_number", [1, 23, 24, 255, 256, 99_999])
def test_the_length_does_not_tell_the_position(round_number: int) -> None:
    def length(where: int) -> int:
        return len(
            encode(
                Fragment(
                    version=1, kind="fragment", job=b"j" * 16, round=round_number, id=b"i" * 16,
                    position=where.to_bytes(4, "big"), dummy=False, payload=b"p" * 50,
                )
            )
        )  # fmt: skip

    positions = [0, 1, 7, 23, 24, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1]
    assert len(set(map(length, positions))) == 1


def test_the_largest_fragment_a_plan_allows_can_be_sealed_and_sent() -> None:
    block = (MAX_MESSAGE_BYTES - 512) * 8 // 32
    plan = _plan(block, block, 32)
    opener = Opener(new_sealing_secret(), "testers")
    (fragment,) = cut(np.full(block, -(2**31), np.int64), plan)
    message = seal(fragment, plan.fleet, opener.public_key)
    assert len(message) <= MAX_MESSAGE_BYTES
    assert read_block(opener.open(message), plan.wire, block)[1].tolist() == [-(2**31)] * block


def test_ids_are_fresh_for_every_fragment_of_every_cut() -> None:
    plan, update = _plan(1_000, 10, 8), np.zeros(1_000, np.int64)
    ids = [fragment.id for _ in range(20) for fragment in cut(update, plan)]
    assert len(set(ids)) == len(ids) == 2_000
    # Random bits: each of the 128 is set in about half of the ids (six standard deviations).
    ones = np.unpackbits(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16), axis=1).mean(axis=0)
    assert np.all(np.abs(ones - 0.5) < 6 * 0.5 / np.sqrt(len(ids)))


def test_nothing_but_payload_position_and_id_differs_between_devices() -> None:
    plan = _plan(100, 10, 8)
    one, other = (next(cut(np.full(100, value, np.int64), plan)) for value in (1, 2))
    hidden = {"id", "payload"}
    assert one.model_dump(exclude=hidden) == other.model_dump(exclude=hidden)


def test_a_position_outside_the_update_is_refused() -> None:
    plan = _plan(100, 10, 8)
    fragment = next(cut(np.zeros(100, np.int64), plan))
    for position in (10, 256, 2**32 - 1):
        moved = fragment.model_copy(update={"position": position.to_bytes(4, "big")})
        with pytest.raises(MessageError) as caught:
            read_block(moved, plan.wire, 100)
        assert caught.value.reason == "bad position"


def test_receipt_digests_do_not_give_the_id_away() -> None:
    ids = [bytes([number]) * 16 for number in range(100)]
    digests = [receipt_digest(identity) for identity in ids]
    assert len(set(digests)) == 100
    assert {len(digest) for digest in digests} == {16}
    assert not set(digests) & set(ids)
