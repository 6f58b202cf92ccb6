"""Weights in chunks: any order, lies, and floods of foreign models."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpagent.protocol.codec import MessageError, decode, encode
from dpagent.protocol.fragments import (
    Assembler,
    chunked,
    content_digest,
    weights_from_bytes,
    weights_to_bytes,
)
from dpagent.protocol.messages import MODEL_CHUNK_BYTES, ModelChunk

WEIGHTS = np.random.default_rng(0).normal(size=30_000).astype(np.float32)  # 120,000 bytes: three chunks
DATA = weights_to_bytes(WEIGHTS)
CHUNKS = chunked(DATA)


WHOLE = (content_digest(DATA), len(DATA))


def lie(chunk: ModelChunk) -> ModelChunk:
    return chunk.model_copy(update={"data": bytes(len(chunk.data))})


def test_weights_travel_bit_by_bit() -> None:
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38], np.float32)
    back = weights_from_bytes(weights_to_bytes(odd))
    assert back.dtype == np.float32
    assert back.tobytes() == odd.tobytes()
    assert back.flags.writeable


def test_chunks_fit_a_message_and_cover_the_model() -> None:
    assert [chunk.index for chunk in CHUNKS] == [0, 1, 2]
    assert all(len(chunk.data) <= MODEL_CHUNK_BYTES for chunk in CHUNKS)
    assert b"".join(decode(encode(chunk), ModelChunk).data for chunk in CHUNKS) == DATA


@given(st.permutations([0, 1, 2, 0, 1, 2]))
def test_chunks_in_any_order_and_twice(order: list[int]) -> None:
    assembler = Assembler()
    seen: set[int] = set()
    for index in order:
        assert assembler.get(*WHOLE) == (DATA if len(seen) == 3 else None)
        assembler.add(CHUNKS[index])
        seen.add(index)
    assert assembler.get(*WHOLE) == DATA


def test_nothing_without_the_last_chunk() -> None:
    assembler = Assembler()
    for chunk in CHUNKS[1:]:
        assembler.add(chunk)
    assert assembler.get(*WHOLE) is None


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_lying_chunk_never_gives_a_model_and_the_truth_heals_it(index: int) -> None:
    assembler = Assembler()
    for chunk in CHUNKS:
        assembler.add(lie(chunk) if chunk.index == index else chunk)
    assert assembler.get(*WHOLE) is None
    for chunk in CHUNKS:
        assembler.add(chunk)
    assert assembler.get(*WHOLE) == DATA


def test_a_lie_that_the_truth_overwrites_in_time_does_no_harm() -> None:
    assembler = Assembler()
    assembler.add(lie(CHUNKS[1]))
    for chunk in CHUNKS:
        assembler.add(chunk)
    assert assembler.get(*WHOLE) == DATA


def test_a_chunk_of_another_model_is_not_used() -> None:
    other = WEIGHTS + np.float32(1)
    assembler = Assembler()
    for chunk in chunked(weights_to_bytes(other)):
        assembler.add(chunk)
    assembler.add(CHUNKS[0])
    assert assembler.get(*WHOLE) is None


def test_a_flood_of_foreign_chunks_displaces_the_oldest() -> None:
    models = [weights_to_bytes(np.full(10, value, np.float32)) for value in range(7)]
    assembler = Assembler()
    for data in models:
        assembler.add(chunked(data)[0])
    found = [assembler.get(content_digest(data), 40) for data in models]
    assert found == [None, None, *models[2:]]


def test_what_is_complete_stays_while_the_next_arrives() -> None:
    models = [weights_to_bytes(np.full(10, value, np.float32)) for value in range(3)]
    wanted = [(content_digest(data), 40) for data in models]
    assembler = Assembler()
    for data, known in zip(models, wanted, strict=True):
        assembler.add(chunked(data)[0])
        assert assembler.get(*known) == data
    assert [assembler.get(*known) for known in wanted] == [None, models[1], models[2]]


def test_a_model_of_another_length_than_the_plan_says_is_refused() -> None:
    assembler = Assembler()
    for chunk in CHUNKS:
        assembler.add(chunk)
    assert assembler.get(content_digest(DATA), len(DATA) - 4) is None
    assert assembler.get(content_digest(DATA), len(DATA) + 4) is None


def test_more_chunks_than_the_plan_says_are_not_read() -> None:
    assembler = Assembler()
    for chunk in CHUNKS:
        assembler.add(chunk)
    assembler.add(CHUNKS[0].model_copy(update={"index": 3}))
    assert assembler.get(*WHOLE) == DATA


def test_an_oversized_chunk_is_refused() -> None:
    data = encode(CHUNKS[0]).replace(CHUNKS[0].data, CHUNKS[0].data + b"x")
    with pytest.raises(MessageError):
        decode(data, ModelChunk)
