"""The form of a CBOR item, against cbor2's own bounds (since 6.2), which know nothing of it."""

from __future__ import annotations

import inspect
import io
import math
from typing import Any

import cbor2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpagent.protocol import codec
from dpagent.protocol.cbor_form import MAX_DEPTH, CborFormError, require_form

pytestmark = pytest.mark.skipif(
    not codec.has_bounds(cbor2.load), reason="cbor2 before 6.2 has no bounds to compare with"
)


class _Odd(Exception):
    """A value that the protocol has not, and cbor2 has."""


def _refuse(*_: object) -> object:
    raise _Odd


_NO_TAGS = dict.fromkeys(
    [0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 43000, 52, 54, 100, 256, 258, 260, 261, 1004, 55799],
    _refuse,
)
# More than a message or a model's description has, so that bounds are met and passed.
_ITEMS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.floats() | st.binary(max_size=40)
    | st.text(max_size=40) | st.sampled_from([cbor2.undefined, cbor2.CBORTag(24, b"0"), 2**64]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=3) | st.binary(max_size=1), inner),
    max_leaves=20,
)  # fmt: skip


def accepted(data: bytes) -> bool:
    try:
        require_form(data)
    except CborFormError:
        return False
    return True


def accepted_by_cbor2(data: bytes) -> bool:
    """As far as cbor2 can say: it takes a key of bytes, and simple values, which are looked for here. Text of
    any bytes passes, each other's as another: whether it is UTF-8 is no question of form."""
    stream = io.BytesIO(data)
    try:
        value = cbor2.load(
            stream, tag_hook=_refuse, max_depth=MAX_DEPTH, allow_indefinite=False, allow_duplicate_keys=False,
            strict_hashable_types=True, semantic_decoders=_NO_TAGS, str_errors="surrogateescape",
        )  # fmt: skip
    except (cbor2.CBORError, _Odd, ValueError, OverflowError):
        return False
    return stream.tell() == len(data) and _is_plain(value)


def _is_plain(value: Any) -> bool:
    match value:
        case dict():
            return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
        case list():
            return all(map(_is_plain, value))
        case None | bool() | int() | float() | bytes() | str():
            return True
        case _:
            return False


@given(item=_ITEMS, edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=2))
@settings(max_examples=400)
def test_what_is_refused_is_what_cbor2_refuses_with_the_same_bounds(
    item: object, edits: list[tuple[int, int]]
) -> None:
    data = bytearray(cbor2.dumps(item))
    for place, value in edits:
        data[place % len(data)] = value
    assert accepted(bytes(data)) == accepted_by_cbor2(bytes(data))


@given(data=st.binary(min_size=1, max_size=12))
@settings(max_examples=1_000)
@example(data=b"")
@example(data=b"\xff")
@example(data=b"\xf8\x14")  # false, in two bytes
@example(data=b"\xa2\x61a\x00\x78\x01a\x00")  # a key twice, in two widths
def test_so_it_is_with_bytes_at_random(data: bytes) -> None:
    assert accepted(data) == accepted_by_cbor2(data)


@pytest.mark.parametrize("opening", [b"\x81", b"\xa1\x61a"])
def test_the_levels_that_are_allowed_are_those_that_the_protocol_names(opening: bytes) -> None:
    for depth in range(1, 12):
        data = opening * depth + b"\0"
        assert accepted(data) == accepted_by_cbor2(data) == (depth <= 8)


@pytest.mark.parametrize("value", [0.0, -1.5, 1e-300, math.inf, math.nan])
def test_floats_of_any_width_are_read(value: float) -> None:
    for canonical in (False, True):
        require_form(cbor2.dumps(value, canonical=canonical))


@given(data=_ITEMS.map(cbor2.dumps) | st.binary(min_size=1, max_size=12))
@settings(max_examples=300)
def test_what_both_ways_read_is_the_same(data: bytes) -> None:
    """With cbor2's own bounds, and with the walk before a cbor2 that may have none."""
    found = []
    for is_bounded in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "_IS_BOUNDED", is_bounded)
            try:
                found.append(repr(codec.read_cbor(data)))
            except codec.MessageError:
                found.append("refused")
    within, walked = found
    # cbor2 takes a key of bytes and other simple values, which no message has.
    assert walked in (within, "refused")
    assert within == walked or not _is_plain(cbor2.loads(data))


def test_a_cbor2_in_c_that_has_no_bounds_says_so() -> None:
    """As before 6, and so in Debian's packages: it cannot be asked for its parameters, and is called, as this
    other function in C. Before, whatever imports the codec ended there."""
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(int)
    assert not codec.has_bounds(int)
