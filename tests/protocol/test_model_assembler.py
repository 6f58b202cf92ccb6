"""Weights in chunks: any order, lies, and floods of foreign models."""

from __future__ import annotations

import numpy as np
import pytest
from fleets import make_plan
from hypothesis import given
from hypothesis import strategies as st

from dpagent.protocol.codec import MessageError, decode, encode
from dpagent.protocol.fragments import (
    ModelAssembler,
    chunk_model,
    model_digest,
    weights_from_bytes,
    weights_to_bytes,
)
from dpagent.protocol.messages import MODEL_CHUNK_BYTES, ModelChunk, Plan

WEIGHTS = np.random.default_rng(0).normal(size=30_000).astype(np.float32)  # 120,000 bytes: three chunks
DATA = weights_to_bytes(WEIGHTS)
CHUNKS = chunk_model(DATA)


def plan_of(data: bytes, chunks: int) -> Plan:
    return make_plan(model={"parameters": len(data) // 4, "digest": model_digest(data), "chunks": chunks})


PLAN = plan_of(DATA, 3)


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
    assembler = ModelAssembler()
    seen: set[int] = set()
    for index in order:
        assert assembler.get(PLAN) == (DATA if len(seen) == 3 else None)
        assembler.add(CHUNKS[index])
        seen.add(index)
    assert assembler.get(PLAN) == DATA


def test_nothing_without_the_last_chunk() -> None:
    assembler = ModelAssembler()
    for chunk in CHUNKS[1:]:
        assembler.add(chunk)
    assert assembler.get(PLAN) is None


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_lying_chunk_never_gives_a_model_and_the_truth_heals_it(index: int) -> None:
    assembler = ModelAssembler()
    for chunk in CHUNKS:
        assembler.add(lie(chunk) if chunk.index == index else chunk)
    assert assembler.get(PLAN) is None
    for chunk in CHUNKS:
        assembler.add(chunk)
    assert assembler.get(PLAN) == DATA


def test_a_lie_that_the_truth_overwrites_in_time_does_no_harm() -> None:
    assembler = ModelAssembler()
    assembler.add(lie(CHUNKS[1]))
    for chunk in CHUNKS:
        assembler.add(chunk)
    assert assembler.get(PLAN) == DATA


def test_a_chunk_of_another_model_is_not_used() -> None:
    other = WEIGHTS + np.float32(1)
    assembler = ModelAssembler()
    for chunk in chunk_model(weights_to_bytes(other)):
        assembler.add(chunk)
    assembler.add(CHUNKS[0])
    assert assembler.get(PLAN) is None


def test_two_models_are_kept_and_a_third_displaces_the_oldest() -> None:
    models = [weights_to_bytes(np.full(10, value, np.float32)) for value in (1, 2, 3)]
    plans = [plan_of(data, 1) for data in models]
    assembler = ModelAssembler()
    for data in models[:2]:
        assembler.add(chunk_model(data)[0])
    assert [assembler.get(plan) for plan in plans] == [models[0], models[1], None]
    assembler.add(chunk_model(models[2])[0])
    assert [assembler.get(plan) for plan in plans] == [None, models[1], models[2]]


def test_a_model_of_another_length_than_the_plan_says_is_refused() -> None:
    assembler = ModelAssembler()
    for chunk in CHUNKS:
        assembler.add(chunk)
    assert (
        assembler.get(make_plan(model={"parameters": 29_999, "digest": model_digest(DATA), "chunks": 3}))
        is None
    )


def test_more_chunks_than_the_plan_says_are_not_read() -> None:
    assembler = ModelAssembler()
    for chunk in CHUNKS:
        assembler.add(chunk)
    assembler.add(CHUNKS[0].model_copy(update={"index": 3}))
    assert assembler.get(PLAN) == DATA


def test_an_oversized_chunk_is_refused() -> None:
    data = encode(CHUNKS[0]).replace(CHUNKS[0].data, CHUNKS[0].data + b"x")
    with pytest.raises(MessageError):
        decode(data, ModelChunk)
