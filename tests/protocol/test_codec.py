"""The codec: what is understood whole, and that everything else is a MessageError."""

from __future__ import annotations

import datetime
import math
from typing import Any

import cbor2
import pytest
from fleets import make_plan, plan_values
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpagent.protocol.codec import MessageError, decode, encode
from dpagent.protocol.messages import (
    MAX_CHUNKS,
    MAX_MESSAGE_BYTES,
    RECEIPT_DIGEST_BYTES,
    RECEIPTS_PER_MESSAGE,
    Fragment,
    Layout,
    Message,
    ModelChunk,
    Plan,
    Receipts,
    Sealed,
    Signed,
)

EXAMPLES: dict[str, Message | Layout] = {
    "plan": make_plan(),
    "model": ModelChunk(b"d" * 32, 3, b"weights"),
    "fragment": Fragment(1, 1, b"i" * 16, b"pay"),
    "receipts": Receipts(b"r" * 32),
    "signed": Signed(b"s" * 64, b"body"),
    "sealed": Sealed(b"c" * 80),
}
SCHEMAS: tuple[type[Message | Layout], ...] = tuple(type(message) for message in EXAMPLES.values())
MESSAGES = [pytest.param(message, id=kind) for kind, message in EXAMPLES.items()]
PLAN = make_plan()


VALUES = plan_values()
SECTIONS = [
    name
    for values in (VALUES, VALUES["release"])
    for name, value in values.items()
    if isinstance(value, dict)
]
"""Keys of a plan, or of its release, that hold a map."""


def refused(data: bytes, schema: type[Message | Layout]) -> MessageError:
    with pytest.raises(MessageError) as caught:
        decode(data, schema)
    assert caught.value.reason in ("malformed", "oversized", "unsupported version")
    return caught.value


def plan_bytes(**changes: Any) -> bytes:
    return bytes(cbor2.dumps(plan_values(**changes), canonical=True))


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_comes_back_as_it_was(message: Message | Layout) -> None:
    assert decode(encode(message), type(message)) == message


def test_encoding_does_not_depend_on_the_order_of_the_keys() -> None:
    turned = Plan.checked(dict(reversed(list(PLAN.as_dict().items()))))
    assert encode(turned) == encode(PLAN) == encode(decode(encode(PLAN), Plan))


def test_a_plan_cut_short_anywhere_is_refused() -> None:
    data = encode(PLAN)
    for length in range(len(data)):
        refused(data[:length], Plan)


@pytest.mark.parametrize("kind", ["model", "fragment", "signed"])
def test_a_layout_without_a_whole_head_is_refused(kind: str) -> None:
    message = EXAMPLES[kind]
    head = {"model": 36, "fragment": 24, "signed": 65}[kind]
    for length in range(head):
        refused(encode(message)[:length], type(message))
    decode(encode(message)[:head], type(message))


def test_trailing_bytes_are_refused() -> None:
    data = encode(PLAN)
    for tail in (b"\0", b"\xf6", b"\xff", data):
        refused(data + tail, Plan)


def test_unknown_and_missing_keys_are_refused() -> None:
    values = PLAN.as_dict()
    refused(cbor2.dumps(values | {"extra": 1}), Plan)
    refused(cbor2.dumps(values | {1: 1}), Plan)
    refused(cbor2.dumps(values | {b"fleet": 1}), Plan)
    for key in values:
        refused(cbor2.dumps({name: value for name, value in values.items() if name != key}), Plan)


def test_unknown_keys_inside_a_section_are_refused() -> None:
    for section in SECTIONS:
        refused(plan_bytes(**{section: {"extra": 1}}), Plan)


@pytest.mark.parametrize("kind", ["signed", "sealed"])
@pytest.mark.parametrize("version", [0, 2, 0xA3, 255])
def test_other_versions_are_refused(kind: str, version: int) -> None:
    message = EXAMPLES[kind]
    other = bytes([version]) + encode(message)[1:]
    assert refused(other, type(message)).reason == "unsupported version"


@pytest.mark.parametrize("value", [1, None, "text", b"bytes", [], [{}], True, 1.5])
def test_what_is_no_map_is_refused(value: object) -> None:
    refused(cbor2.dumps(value), Plan)


def test_the_largest_message_passes_and_one_byte_more_does_not() -> None:
    largest = Sealed(b"c" * (MAX_MESSAGE_BYTES - 1))
    assert len(encode(largest)) == MAX_MESSAGE_BYTES
    assert decode(encode(largest), Sealed) == largest
    larger = Sealed(largest.ciphertext + b"c")
    with pytest.raises(MessageError, match="oversized"):
        encode(larger)
    assert refused(larger.to_bytes(), Sealed).reason == "oversized"


def test_the_fullest_receipts_and_the_longest_schedule_can_be_sent() -> None:
    encode(Signed(b"s" * 64, encode(Receipts(b"r" * RECEIPT_DIGEST_BYTES * RECEIPTS_PER_MESSAGE))))
    noise = [1 / 3 + index for index in range(5_000)]
    encode(Signed(b"s" * 64, encode(make_plan(mechanism={"noise_multipliers": noise}))))


# --- CBOR that is well-formed and not welcome -------------------------------------------------

_SHARED = bytes.fromhex("d81c81d81d00")  # a list that contains itself (tags 28 and 29)


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), datetime.date(2026, 1, 1), 2**70, -(2**70),
        cbor2.CBORTag(1, 0), cbor2.CBORTag(24, b"0"), cbor2.CBORTag(55_799, 1), cbor2.CBORTag(9_999, 1),
        cbor2.CBORTag(37, b"u" * 16), cbor2.CBORTag(35, "(a+)+"), cbor2.CBORTag(258, [1]),
        cbor2.CBORTag(4, [1, 2]), cbor2.CBORTag(5, [1, 2]), cbor2.CBORTag(30, [1, 2]),
        cbor2.CBORTag(2**64 - 1, 0), cbor2.undefined, cbor2.CBORSimpleValue(99),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("key", ["round", "deadline", "job"])
def test_tags_and_odd_values_are_refused(value: object, key: str) -> None:
    refused(cbor2.dumps(plan_values() | {key: value}), Plan)


def test_no_tag_whatsoever_is_read() -> None:
    tail = encode(PLAN)
    contents = [bytes.fromhex(text) for text in ("00", "4100", "6130", "80", "820102", "a0")]
    for tag in (*range(300), 1_004, 43_000, 55_799, 2**16 - 1, 2**16, 2**32 - 1, 2**64 - 1):
        head = cbor2.dumps(cbor2.CBORTag(tag, 0))[:-1]
        refused(head + tail, Plan)
        for inside in contents:
            refused(head + inside, Plan)
            refused(b"\xa1\x61k" + head + inside, Plan)


def test_shared_references_are_refused() -> None:
    refused(_SHARED, Plan)
    refused(b"\xa1\x65round" + _SHARED, Plan)


def test_duplicate_keys_are_refused() -> None:
    data = encode(PLAN)
    doubled = bytes([data[0] + 1]) + data[1:] + cbor2.dumps("round") + b"\x01"
    refused(doubled, Plan)
    cap = VALUES["release"]["cap"]
    inner = cbor2.dumps(cap)
    broken = bytes([inner[0] + 1]) + inner[1:] + cbor2.dumps("kind") + cbor2.dumps("none")
    whole = plan_bytes()
    assert whole.count(cbor2.dumps(cap, canonical=True)) == 1
    refused(whole.replace(cbor2.dumps(cap, canonical=True), broken), Plan)


def test_indefinite_lengths_are_refused() -> None:
    data = encode(PLAN)
    refused(b"\xbf" + data[1:] + b"\xff", Plan)
    body = cbor2.dumps(b"j" * 16)
    assert data.count(body) == 1
    refused(data.replace(body, b"\x5f" + body + b"\xff"), Plan)


@pytest.mark.parametrize(
    "opening", [b"\x81", b"\xa1\x61a", b"\xc6", b"\xa1", b"\x9f", b"\xbf\x61a", b"\xd8\x1c"]
)
def test_deep_nesting_is_refused(opening: bytes) -> None:
    refused((opening * 30_000)[: MAX_MESSAGE_BYTES - 1] + b"\0", Plan)


@pytest.mark.parametrize("head", ["9b", "bb", "5b", "7b"])
@pytest.mark.parametrize("length", [2**16, 2**31 - 1, 2**40, 2**63 - 1, 2**64 - 1])
def test_a_length_that_promises_too_much_takes_no_memory(head: str, length: int) -> None:
    refused(bytes.fromhex(head) + length.to_bytes(8, "big") + b"\0" * 20, Plan)


def test_text_that_is_not_utf_8_is_refused() -> None:
    refused(encode(PLAN).replace(b"testers", b"teste\xff\xfe"), Plan)


# --- types and ranges -------------------------------------------------------------------------


def placed(path: str, value: object) -> dict[str, Any]:
    """The change to a plan that puts ``value`` at a path such as ``wire.block``."""
    section, _, key = path.rpartition(".")
    known = VALUES | VALUES["release"]
    assert key in (known[section] if section else known), f"a plan has no {path}"
    return {section: {key: value}} if section else {key: value}


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, b"\1", [1]])
@pytest.mark.parametrize("path", ["round", "wire.block", "sampling.local_steps", "model.parameters"])
def test_loose_integers_are_refused(path: str, value: object) -> None:
    refused(plan_bytes(**placed(path, value)), Plan)


@pytest.mark.parametrize("value", [True, "1.0", None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "path",
    ["deadline", "compute_slot_s", "jitter_window_s", "clipping.accumulation_slack", "clipping.count_weight",
     "sampling.rate", "sampling.local_learning_rate", "sampling.expected_lot", "delta", "cap.regularisation",
     "cap.floor"],
)  # fmt: skip
def test_loose_and_undefined_numbers_are_refused(path: str, value: object) -> None:
    refused(plan_bytes(**placed(path, value)), Plan)


@pytest.mark.parametrize("value", [True, "1.0", None, math.nan, math.inf, 0.0, -1.0])
def test_every_noise_multiplier_is_checked(value: object) -> None:
    refused(plan_bytes(mechanism={"noise_multipliers": [1.0, value]}), Plan)


def clipping(norms: list[Any], shares: list[Any], count_weight: float) -> dict[str, Any]:
    return {"norms": norms, "shares": shares, "count_weight": count_weight, "accumulation_slack": 0.001}


RANGES: list[tuple[str, list[Any], list[Any]]] = [
    # path, accepted, refused
    ("fleet", ["a", "A-9_z", "x" * 63], ["", "x" * 64, "a/b", "a+", "#", "ä", "-a", "a b", "a\n", "a\0"]),
    ("job", [b"x" * 16], [b"x" * 15, b"x" * 17, "x" * 16]),
    ("round", [1, 3], [0, -1, 4, 100_001]),
    ("state", ["open", "finished"], ["closed", ""]),
    ("method", ["dp-sgd", "a", "unknown-here", "x" * 64], ["", "x" * 65, "DP", "9a", "-a", "a b", 1, None]),
    ("model.parameters", [1, 50_000_000], [0, -1, 50_000_001]),
    ("model.architecture", [b"x" * 32], [b"x" * 31, b"x" * 33]),
    ("model.digest", [b"x" * 32], [b"x" * 31, b"x" * 33]),
    ("model.description", [b"x", b"x" * 8_192], [b"", b"x" * 8_193, "text"]),
    ("mechanism.name", ["discrete-gaussian", "a", "unknown-here", "x" * 64],
     ["", "x" * 65, "Gaussian", "9a", "-a", "a b", "a_b", "a\n", b"a", 1, None]),
    ("mechanism.noise_multipliers", [[1e-300] * 3, [1e300] * 3, [1] * 3, [1.0] * 5_000],
     [[], [0.0] * 3, [-1.0] * 3, [1.0] * 5_001, {}, 1.0]),
    ("mechanism.parameters", [{}, {"a": 1}, {"a_9": -0.5}, {f"p{index}": 0 for index in range(16)}],
     [{f"p{index}": 0 for index in range(17)}, {"": 1}, {"A": 1}, {"9": 1}, {"a-b": 1}, {"a" * 65: 1}, {1: 1},
      {"a": True}, {"a": "1"}, {"a": None}, {"a": math.nan}, {"a": math.inf}, {"a": [1]}, {"a": {}}, [],
      None]),
    ("clipping",
     [clipping([norm], [1.0], weight) for norm in (1e-9, 1e6) for weight in (0.0, 1.0)],
     [clipping([], [], 0.0), clipping([0.0], [1.0], 0.0), clipping([1.1e6], [1.0], 0.0),
      clipping([1.0], [0.0], 0.0), clipping([1.0], [1.1], 0.0), clipping([1.0], [1.0], -0.1),
      clipping([1.0], [1.0], 1.1), clipping([1.0], [0.5, 0.5], 0.0), clipping([1.0, 1.0], [0.5, 0.5], 0.2),
      clipping([1.0] * 513, [1.0] * 513, 0.0)]),
    ("clipping.accumulation_slack", [0.0, 0.01], [-1e-9, 0.011]),
    ("sampling.rate", [1e-9, 1.0, 1], [0.0, -0.1, 1.0001]),
    ("sampling.expected_lot", [1e-6, 1e7], [0.0, -1.0, 5e-324, 9e-7, 1.1e7]),
    ("sampling.local_steps", [1, 64], [0, 65]),
    ("sampling.local_learning_rate", [0.0, 1e3], [-0.1, 1001.0]),
    ("delta", [1e-300, 0.999], [0.0, 1.0, -1e-9]),
    ("augmentation",
     [None, {"views": 2, "shift": 0, "flip": False}, {"views": 64, "shift": 1024, "flip": True}],
     [{"views": 1, "shift": 0, "flip": False}, {"views": 65, "shift": 0, "flip": False}, {"views": 2},
      {"views": 2, "shift": -1, "flip": False}, {"views": 1, "shift": 0, "flip": 1}]),
    ("projection", [None, {"values": 1, "record_norm": 1e-4}, {"values": 4_096, "record_norm": 1e4}],
     [{"values": 0, "record_norm": 1.0}, {"values": 4_097, "record_norm": 1.0}, {"values": 1},
      {"values": 1, "record_norm": 0.9e-4}, {"values": 1, "record_norm": 1.1e4}]),
    ("assets", [[], [{"role": "training-graph", "digest": b"x" * 32, "size": 1}] * 4],
     [[{"role": "training-graph", "digest": b"x" * 32, "size": 1}] * 5,
      [{"role": "malware", "digest": b"x" * 32, "size": 1}],
      [{"role": "projection", "digest": b"x" * 31, "size": 1}],
      [{"role": "projection", "digest": b"x" * 32, "size": 0}]]),
    ("cap.kind", ["none", "clamp"], ["published", ""]),
    ("cap.where", ["device", "coordinator"], ["both"]),
    ("cap.regularisation", [1e-9, 1e6], [0.0, 1.1e6]),
    ("cap.floor", [1e-9, 1e6], [0.0, 1.1e6]),
    ("model.precision", ["int8", "float32"], ["int4", "", 8]),
    ("wire.block", [1, 4_000], [0, 10_000, 400_001]),
    ("wire.bytes", [303, 59_488], [-1, 0, 302, 59_489]),
    ("step", [1, 3, 2**40 - 1], [0, -1, 2, 2**40, 2**40 + 1]),
    ("sealing_key", [b"x" * 32], [b"x" * 31, b"x" * 33, "x" * 32]),
    ("linkability", ["fragment", "round", "none"], ["device", "", None, 1]),
    ("mixer", [None, b"x" * 32], [b"x" * 31, b"x" * 33, "x" * 32]),
    ("receipts", ["fragment", "fleet"], ["device", "", None, 1]),
    ("deadline", [0.0, 4e9], [-1.0]),
    ("compute_slot_s", [1e-3, 86_400.0], [0.0, 5e-324, 9e-4, 86_401.0]),
    ("jitter_window_s", [0.0, 86_400.0], [-1.0, 86_401.0]),
]  # fmt: skip


def test_the_range_of_every_value_of_a_plan_is_looked_at() -> None:
    looked_at = (
        {path for path, *_ in RANGES}
        | {"kind"}
        | {f"clipping.{key}" for key in ("norms", "shares", "count_weight")}
    )
    known = VALUES | VALUES["release"]
    leaves = {key for key in known if key not in SECTIONS} | {
        f"{section}.{key}" for section in SECTIONS if section != "release" for key in known[section]
    }
    assert leaves == looked_at - {"clipping"}


@pytest.mark.parametrize(("path", "accepted", "wrong"), RANGES, ids=[path for path, *_ in RANGES])
def test_ranges_of_a_plan(path: str, accepted: list[Any], wrong: list[Any]) -> None:
    section, _, key = path.rpartition(".")
    values = plan_values()
    place = values if key in values else values["release"]
    if section:
        place = values[section] if section in values else values["release"][section]
    for value in accepted:
        place[key] = value
        decode(cbor2.dumps(values), Plan)
    for value in wrong:
        place[key] = value
        refused(cbor2.dumps(values), Plan)


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        (ModelChunk, b"d" * 32 + MAX_CHUNKS.to_bytes(4, "big")), (ModelChunk, b"d" * 36 + bytes(48_001)),
        (Receipts, b"r" * 15), (Receipts, b"r" * 17), (Receipts, b"r" * 16 * 2_049),
    ],
)  # fmt: skip
def test_ranges_of_the_other_messages(schema: type[Layout], wrong: bytes) -> None:
    assert refused(wrong, schema).reason == "malformed"


# --- noise ------------------------------------------------------------------------------------


def only_message_errors(data: bytes) -> None:
    for schema in SCHEMAS:
        try:
            message = decode(data, schema)
        except MessageError:
            continue
        assert decode(encode(message), schema) == message


@settings(max_examples=400)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xa1\xa0\x00")
@example(b"\xa1\x81\x00\x00")
@example(b"\xf8\x18")
@example(b"\xfb\x7f\xf8\0\0\0\0\0\1")
def test_random_bytes_are_refused_in_order(data: bytes) -> None:
    only_message_errors(data)


_leaves = (
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=40) | st.datetimes(timezones=st.just(datetime.UTC)) | st.uuids() | st.decimals()
)  # fmt: skip
_trees = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner),
    max_leaves=12,
)


@settings(max_examples=300)
@given(data=st.data())
def test_a_plan_with_one_value_replaced_is_refused_in_order(data: st.DataObject) -> None:
    values = PLAN.as_dict()
    key = data.draw(st.sampled_from(sorted(values)))
    values[key] = data.draw(_trees)
    only_message_errors(cbor2.dumps(values))


@settings(max_examples=400)
@given(
    kind=st.sampled_from(sorted(EXAMPLES)),
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255), st.sampled_from("sid")), min_size=1,
                   max_size=6),
)  # fmt: skip
def test_a_message_with_bytes_changed_is_refused_in_order(
    kind: str, edits: list[tuple[int, int, str]]
) -> None:
    data = bytearray(encode(EXAMPLES[kind]))
    for place, value, verb in edits:
        index = place % len(data)
        if verb == "s":
            data[index] = value
        elif verb == "i":
            data.insert(index, value)
        elif len(data) > 1:
            del data[index]
    only_message_errors(bytes(data))


def test_what_a_message_error_says_is_short_enough_to_be_logged() -> None:
    huge = "v" * 50_000
    for changes in ({"fleet": huge}, {huge: 1}, {"job": huge}):
        assert len(str(refused(cbor2.dumps(PLAN.as_dict() | changes), Plan))) < 1_000
