"""Values to payloads of one length and back, whatever the values and whatever the bytes."""

from __future__ import annotations

import math
import tracemalloc
import zlib
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpagent.norm import Norm
from dpagent.privacy.mechanisms.wire import MAX_WIRE_VALUE
from dpagent.protocol.packing import MAX_LEVEL, highest_level, pack, payload_bytes, unpack
from dpagent.protocol.sizes import least_payload_bytes

THREE_STEPS = math.log2(2 * math.pi * math.e * (9 + 1 / 12)) / 2
"""Entropy of a value of noise alone."""


def noise(block: int, deviation: float = 3.0, seed: int = 0) -> NDArray[np.int64]:
    return np.rint(np.random.default_rng(seed).normal(0, deviation, block)).astype(np.int64)


vectors = st.lists(
    st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200) | st.integers(-3, 3), min_size=1, max_size=300
).map(lambda values: np.array(values, np.int64))


@settings(max_examples=300)
@given(values=vectors, spare=st.integers(0, 2_000))
def test_every_vector_has_a_payload_of_the_length_asked_for(values: NDArray[np.int64], spare: int) -> None:
    size = least_payload_bytes(len(values)) + spare
    payload = pack(values, size)
    assert len(payload) == size
    read, level = unpack(payload, len(values), size)
    within = np.clip(values, -MAX_WIRE_VALUE, MAX_WIRE_VALUE)
    assert np.abs(read - within).max() < 1 << level
    assert level > 0 or np.array_equal(read, within)


@pytest.mark.parametrize("block", [1, 2, 50, 1_626, 33_000, 220_000])
@pytest.mark.parametrize("kind", ["largest", "alternating", "random", "ternary", "one large"])
def test_the_least_length_is_enough_for_any_block(block: int, kind: str) -> None:
    values = {
        "largest": np.full(block, 2**31 - 1),
        "alternating": np.where(np.arange(block) % 2, 2**31 - 1, -(2**31)),
        "random": np.random.default_rng(1).integers(-(2**31), 2**31, block),
        "ternary": np.random.default_rng(2).integers(-1, 2, block) << 31,
        "one large": np.where(np.arange(block) == block // 2, 2**31 - 1, 0),
    }[kind]
    size = least_payload_bytes(block)
    read, level = unpack(pack(values, size), block, size)
    assert np.abs(read - np.clip(values, -MAX_WIRE_VALUE, MAX_WIRE_VALUE)).max() < 1 << level


@pytest.mark.parametrize("block", [100, 621, 1_626, 26_010])
def test_noise_alone_travels_as_it_is_in_under_four_bits(block: int) -> None:
    size = payload_bytes(block, THREE_STEPS)
    for seed in range(200 if block < 10_000 else 20):
        values = noise(block, seed=seed)
        read, level = unpack(pack(values, size), block, size)
        assert level == 0
        assert np.array_equal(read, values)
    assert block < 1_000 or 8 * size / block < 4


def test_a_few_values_far_beyond_a_byte_travel_as_they_are() -> None:
    values = noise(1_626)
    values[[3, 700, 1_625]] = MAX_WIRE_VALUE, -70_000, 128
    size = payload_bytes(1_626, THREE_STEPS)
    read, level = unpack(pack(values, size), 1_626, size)
    assert level == 0
    assert np.array_equal(read, values)


@pytest.mark.parametrize(
    ("most", "type_", "size"),
    [(127, np.int8, 500), (128, np.int64, 500), (2**31 - 1, np.int64, 500), (100, np.int64, 76)],
)
def test_values_are_read_into_the_narrower_type_that_holds_them(most: int, type_: type, size: int) -> None:
    """At a level they are multiples of a power of two, which a byte does not hold."""
    values = np.random.default_rng(4).integers(-most, most, 100, endpoint=True)
    values[:2] = most, -most
    read, level = unpack(pack(values, size), 100, size)
    assert read.dtype == type_
    assert (level > 0) == (size == 76)
    assert level or np.array_equal(read, values)


@pytest.mark.parametrize("signal", [20, 300, 40_000, 2**29])
def test_a_signal_far_beyond_the_noise_arrives_without_bias(signal: int) -> None:
    generator, block, draws = np.random.default_rng(3), 400, 500
    size = payload_bytes(block, THREE_STEPS)
    values = np.rint(generator.normal(0, signal, block)).astype(np.int64)
    total, levels = np.zeros(block), set()
    for _ in range(draws):
        read, level = unpack(pack(values, size), block, size)
        total += read - values
        levels.add(level)
    assert min(levels) > 0
    step = 1 << max(levels)
    # Each draw is within a step; six standard deviations of the mean of all and 400 values.
    assert np.abs(total / draws).max() < 6 * step / 2 / math.sqrt(draws)
    assert abs(total.sum() / draws / block) < 6 * step / 2 / math.sqrt(draws * block)
    # A few bits of precision are left.
    assert step < signal


def test_honest_values_need_no_more_than_the_highest_level() -> None:
    for block in (61, 173, 1_626):
        size, highest = payload_bytes(block, THREE_STEPS), partial(highest_level, block, tail=1e-9)
        for deviation in (0.3, 1.0, 2.0, 4.0, 8.1, 33.0, 1_000.0):
            shapes = [
                noise(block, deviation),
                np.full(block, math.ceil(deviation)),
                np.where(np.arange(block) % 7, 0, round(deviation * 2.6)),
                np.random.default_rng(4).integers(
                    -round(1.7 * deviation) - 1, round(1.7 * deviation) + 2, block
                ),
            ]
            for values in shapes:
                square, magnitude = float(values @ values), float(np.abs(values).sum())
                for _ in range(20):
                    level = pack(values, size)[0]
                    assert level == 0 if square <= 4 * block else level <= highest(Norm.L2, square)
                    assert level == 0 if magnitude <= 1.5 * block else level <= highest(Norm.L1, magnitude)


def test_room_is_made_for_the_signal_that_is_expected() -> None:
    sizes = [payload_bytes(1_626, bits) for bits in (THREE_STEPS, 5.0, 8.0, 9.0)]
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3]


# --- hostile bytes -----------------------------------------------------------------------------


def deflated(plain: bytes, level: int = 0) -> bytes:
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    return bytes([level]) + deflater.compress(plain) + deflater.flush()


def refused(payload: bytes, block: int, size: int = 200) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpack(payload.ljust(size, b"\0"), block, size)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\0", deflated(b""), deflated(bytes(3)), deflated(bytes(5)), deflated(bytes(4))[:-1] + b"\xff",
        deflated(b"\xff" * 4), deflated(b"\xff\0\0\0" + bytes(3)), deflated(b"\xff\0\0\0" + bytes(5)),
        deflated(bytes(4), MAX_LEVEL + 1), deflated(bytes(4), 255), deflated(bytes(4)) + b"\1",
        deflated(bytes(4)) + deflated(bytes(4)), b"\0" + zlib.compress(bytes(4)),
        deflated(b"\xff\0\0\0" + b"\0\0\0\x80", 3), deflated(b"\xff\0\0\0" + b"\xff" * 3 + b"\x7f", 32),
    ],
)  # fmt: skip
def test_a_payload_that_is_none_is_refused(payload: bytes) -> None:
    refused(payload, 4)


def test_a_payload_of_another_length_is_refused() -> None:
    payload = pack(noise(10), 60)
    for other in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(ValueError, match="expected 60"):
            unpack(other, 10, 60)


def test_a_bomb_takes_no_memory() -> None:
    bomb = deflated(bytes(20_000_000))
    assert len(bomb) < 50_000
    tracemalloc.start()
    refused(bomb, 1_626, 50_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


@settings(max_examples=400)
@given(data=st.binary(max_size=120), block=st.integers(1, 40))
def test_any_bytes_are_values_or_refused(data: bytes, block: int) -> None:
    try:
        values, level = unpack(data, block, len(data))
    except ValueError:
        return
    assert values.shape == (block,)
    assert np.abs(values).max() <= 2 << MAX_LEVEL
    assert not (values & ((1 << level) - 1)).any()
