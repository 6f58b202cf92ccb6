"""Weights in chunks: any order, lies, and floods of foreign models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from fleets import make_plan
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.learning.models.spec import MAX_PARAMETERS
from dpagent.protocol import chunks
from dpagent.protocol.chunks import Assembler, chunked, content_digest
from dpagent.protocol.codec import MessageError, decode, encode
from dpagent.protocol.messages import (
    MAX_CHUNKS,
    MAX_WHOLE_BYTES,
    MODEL_CHUNK_BYTES,
    AssetTerms,
    ModelChunk,
    Plan,
)
from dpagent.protocol.weights import weights_to_bytes
from dpagent.schema.problems import SchemaError

WEIGHTS = np.random.default_rng(0).normal(size=30_000).astype(np.float32)  # 120,000 bytes: three chunks
DATA = weights_to_bytes(WEIGHTS, "float32")
CHUNKS = chunked(DATA)


WHOLE = (content_digest(DATA), len(DATA))


def lie(chunk: ModelChunk) -> ModelChunk:
    return replace(chunk, data=bytes(len(chunk.data)))


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
    for chunk in chunked(weights_to_bytes(other, "float32")):
        assembler.add(chunk)
    assembler.add(CHUNKS[0])
    assert assembler.get(*WHOLE) is None


# --- what a plan names stays, whatever else comes --------------------------------------------------


def of(value: int, chunks: int = 1) -> bytes:
    """Something of so many chunks, the last of them shorter."""
    return value.to_bytes(4, "big") * ((chunks * MODEL_CHUNK_BYTES - 400) // 4)


NAMED = {"weights": of(1), "training-graph": of(2, 2), "frozen-network": of(3, 3), "projection": of(4)}


def plan_of(weights: bytes, assets: Mapping[str, bytes] | None = None) -> Plan:
    return make_plan(
        model={"digest": content_digest(weights), "parameters": len(weights) // 4},
        assets=[
            {"role": role, "digest": content_digest(data), "size": len(data)}
            for role, data in (assets or {}).items()
        ],
    )


PLAN = plan_of(NAMED["weights"], {role: NAMED[role] for role in NAMED if role != "weights"})


def add(assembler: Assembler, *wholes: bytes) -> None:
    for data in wholes:
        for chunk in chunked(data):
            assembler.add(chunk)


def whole(assembler: Assembler, data: bytes) -> bool:
    found = assembler.get(content_digest(data), len(data))
    assert found in (None, data)
    return found is not None


@pytest.mark.parametrize("plan_first", [True, False])
@pytest.mark.parametrize("stale", [0, 40])
def test_all_that_a_plan_names_is_there_again_and_again(plan_first: bool, stale: int) -> None:
    """Weights and three assets, each asked for when the others are put together, beside leftovers."""
    assembler = Assembler()
    if plan_first:
        assembler.keep_for(PLAN)
    for number in range(stale):
        add(assembler, of(100 + number))
    chunks = [chunk for data in NAMED.values() for chunk in chunked(data)]
    for number, chunk in enumerate(chunks):
        assembler.add(chunk)
        add(assembler, of(200 + number))
    assembler.keep_for(PLAN)
    for _ in range(2):
        assert [whole(assembler, data) for data in NAMED.values()] == [True] * 4


def test_what_was_named_outlives_a_flood_and_the_flood_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Assembler, "FOREIGN_BYTES", 10 * MODEL_CHUNK_BYTES)
    assembler = Assembler()
    assembler.keep_for(PLAN)
    add(assembler, NAMED["weights"], NAMED["training-graph"])
    assert whole(assembler, NAMED["weights"])
    add(assembler, *(of(1_000 + number) for number in range(50)))
    add(assembler, NAMED["frozen-network"], NAMED["projection"])
    assert all(whole(assembler, data) for data in NAMED.values())
    left = [number for number in range(50) if whole(assembler, of(1_000 + number))]
    assert left == list(range(41, 50)), "the latest, as many as fit"


def test_a_flood_of_empty_chunks_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Assembler, "FOREIGN_BYTES", 100_000)
    assembler = Assembler()
    for number in range(5_000):
        digest = (number // 2).to_bytes(32, "big")
        assembler.add(ModelChunk(digest=digest, index=number % 2, data=b""))
    assert sum(map(len, assembler._chunks.values())) < 400
    assert set(assembler._chunks) == set(assembler._foreign)


def test_a_chunk_that_comes_again_takes_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Assembler, "FOREIGN_BYTES", 5 * MODEL_CHUNK_BYTES)
    assembler = Assembler()
    for _ in range(20):
        add(assembler, DATA)
    assert whole(assembler, DATA)


def test_the_room_that_is_taken_is_that_of_what_no_plan_names() -> None:
    """Round after round: a figure that drifted would let a flood in, or throw away what is wanted."""
    assembler = Assembler()
    for number in range(1, 5):
        weights, rest = of(number), of(500 + number, 2)
        add(assembler, weights, rest, rest)
        room = sum(len(chunk.data) + Assembler._CHUNK_OVERHEAD for chunk in chunked(rest))
        assert assembler._foreign_total > room
        for _ in range(2):  # a plan that is announced again
            assembler.keep_for(plan_of(weights))
        assert assembler._foreign_total == sum(assembler._foreign.values()) == room
        assert whole(assembler, weights)
        assert whole(assembler, rest)
        assembler._forget(content_digest(rest))
        assert (assembler._foreign_total, assembler._foreign) == (0, {})


def test_bytes_of_the_largest_thing_fit_before_its_plan_comes() -> None:
    assert MAX_WHOLE_BYTES + MAX_CHUNKS * Assembler._CHUNK_OVERHEAD < Assembler.FOREIGN_BYTES


def test_the_next_rounds_weights_come_before_their_plan_and_the_last_ones_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Round after round nothing is asked for again, and nothing piles up, trained or not."""
    monkeypatch.setattr(Assembler, "FOREIGN_BYTES", 9 * MODEL_CHUNK_BYTES)
    assets = {role: data for role, data in NAMED.items() if role != "weights"}
    assembler = Assembler()
    add(assembler, *assets.values())
    for number in range(12):
        weights = of(10 + number, 2)
        add(assembler, weights)
        assembler.keep_for(plan_of(weights, assets))
        if number % 2:
            assert whole(assembler, weights)
            assert all(whole(assembler, data) for data in assets.values())
        before = of(9 + number, 2)
        assert not whole(assembler, before)
    held = sum(len(data) for parts in assembler._chunks.values() for data in parts.values())
    held += sum(map(len, assembler._complete.values()))
    assert held == sum(map(len, assets.values())) + len(weights)


def test_what_an_earlier_plan_named_is_kept_while_it_is_still_to_come() -> None:
    model = of(40, 3)
    asset = AssetTerms(role="model", digest=content_digest(model), size=len(model))
    assembler = Assembler()
    assembler.keep_for(PLAN, asset)
    first, *others = chunked(model)
    assembler.add(first)
    assembler.keep_for(plan_of(of(41, 2), {}), asset)
    assert list(assembler.missing(asset.digest, asset.size)) == [1, 2]
    for chunk in others:
        assert assembler.add(chunk), "it is waited for"
    assert assembler.get(asset.digest, asset.size) == model
    assembler.keep_for(PLAN)
    assert list(assembler.missing(asset.digest, asset.size)) == [0, 1, 2]


def test_what_is_complete_is_not_gathered_a_second_time() -> None:
    assembler = Assembler()
    assembler.keep_for(PLAN)
    for _ in range(2):  # the broker sends all it retains at each connection
        add(assembler, *NAMED.values())
        assert all(whole(assembler, data) for data in NAMED.values())
    assert assembler._chunks == {}


def test_chunks_beyond_the_size_that_a_plan_names_take_no_room() -> None:
    for plan_first in (True, False):
        assembler = Assembler()
        if plan_first:
            assembler.keep_for(PLAN)
        (chunk,) = chunked(NAMED["weights"])
        for index in range(30):
            assembler.add(replace(chunk, index=index))
        if not plan_first:
            assembler.keep_for(PLAN)
        assert [list(parts) for parts in assembler._chunks.values()] == [[0]]
        assert whole(assembler, NAMED["weights"])


def test_a_lie_about_what_a_plan_names_is_healed() -> None:
    assembler = Assembler()
    assembler.keep_for(PLAN)
    for chunk in chunked(NAMED["frozen-network"]):
        assembler.add(lie(chunk))
    assert not whole(assembler, NAMED["frozen-network"])
    assert assembler._chunks == {}, "or the daemon's loop would hash them again and again"
    add(assembler, NAMED["frozen-network"])
    assert whole(assembler, NAMED["frozen-network"])


# --- sizes ----------------------------------------------------------------------------------------


def test_the_largest_thing_that_a_plan_may_name_can_be_sent() -> None:
    size = 200_000_000
    assert AssetTerms.checked({"role": "projection", "digest": bytes(32), "size": size}).size == size
    assert make_plan(model={"parameters": size // 4}).model.parameters == size // 4 == MAX_PARAMETERS
    last = (size - 1) // MODEL_CHUNK_BYTES
    chunk = ModelChunk(digest=bytes(32), index=last, data=b"end")
    assert decode(encode(chunk), ModelChunk) == chunk


def test_one_byte_more_is_refused_everywhere() -> None:
    size = 200_000_001
    with pytest.raises(ParameterError, match="200,000,001 bytes; expected at most 200,000,000"):
        chunked(bytes(size))
    with pytest.raises(SchemaError, match="size"):
        AssetTerms.checked({"role": "projection", "digest": bytes(32), "size": size})
    with pytest.raises(SchemaError, match="parameters"):
        make_plan(model={"parameters": size // 4 + 1})
    beyond = (size - 2) // MODEL_CHUNK_BYTES + 1
    with pytest.raises(MessageError, match="index"):
        decode(encode(ModelChunk(digest=bytes(32), index=beyond, data=b"")), ModelChunk)


def test_the_largest_whole_is_cut_and_one_byte_more_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAX_WHOLE_BYTES", 10)
    assert [chunk.data for chunk in chunked(bytes(10))] == [bytes(10)]
    with pytest.raises(ParameterError):
        chunked(bytes(11))


def test_what_fills_the_room_exactly_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    wholes = [of(1), of(2, 2)]
    room = sum(len(chunk.data) + Assembler._CHUNK_OVERHEAD for data in wholes for chunk in chunked(data))
    monkeypatch.setattr(Assembler, "FOREIGN_BYTES", room)
    assembler = Assembler()
    add(assembler, *wholes)
    assert all(whole(assembler, data) for data in wholes)
    monkeypatch.setattr(Assembler, "FOREIGN_BYTES", room - 1)
    add(assembler, wholes[1])
    assert not whole(assembler, wholes[0])


def test_a_whole_is_not_given_as_one_of_another_length() -> None:
    assembler = Assembler()
    data = NAMED["weights"]
    assembler.keep_for(PLAN)
    add(assembler, data)
    assert whole(assembler, data)
    assert assembler.get(content_digest(data), len(data) + 1) is None
    assert whole(assembler, data)


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
    assembler.add(replace(CHUNKS[0], index=3))
    assert assembler.get(*WHOLE) == DATA


def test_an_oversized_chunk_is_refused() -> None:
    data = encode(CHUNKS[0]).replace(CHUNKS[0].data, CHUNKS[0].data + b"x")
    with pytest.raises(MessageError):
        decode(data, ModelChunk)
