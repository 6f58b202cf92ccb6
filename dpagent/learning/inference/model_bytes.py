"""What a model's file says of itself, read without the ``onnx`` package, which no board has.

A file is one message of Protocol Buffers, `ModelProto <https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>`_:
fields one after the other, each a number and a kind, and of the kinds used here a number in groups of seven
bits or a length with as many bytes (the encoding: https://protobuf.dev/programming-guides/encoding). What is
not asked for is passed over unread, so a file may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from dpagent.errors import DataError

_METADATA: Final = 14  # of ModelProto; StringStringEntryProto has the key in field 1, the value in field 2
_MOST_ENTRIES: Final = 1_024
_WHOLE_BYTES: Final = {1: 8, 5: 4}
_MOST_SHIFT: Final = 63


class _Field(NamedTuple):
    number: int
    value: int
    """Of a number; 0 of any other kind."""
    begin: int
    end: int
    """Of the bytes; of all but bytes, where the field ends."""


def metadata_of(model: bytes) -> dict[str, str]:
    """The metadata of a model's file; of a key that stands twice, the first.

    Args:
        model: The file, whoever wrote it.

    Raises:
        DataError: It is no such file, or is damaged.
    """
    found: dict[str, str] = {}
    for entry in _fields(model, 0, len(model)):
        if entry.number != _METADATA:
            continue
        parts = {part.number: model[part.begin : part.end] for part in _fields(model, entry.begin, entry.end)}
        try:
            found.setdefault(parts.get(1, b"").decode(), parts.get(2, b"").decode())
        except UnicodeDecodeError as error:
            raise DataError("The model has metadata that are not UTF-8 text.") from error
        if len(found) > _MOST_ENTRIES:
            raise DataError(f"The model has more than {_MOST_ENTRIES:,} entries of metadata.")
    return found


def _fields(data: bytes, begin: int, end: int) -> Iterator[_Field]:
    """The fields of the message that ``data[begin:end]`` is."""
    at = begin
    while at < end:
        key, at = _number(data, at, end)
        kind = key & 7
        value, start = 0, at
        if kind == 0:
            value, at = _number(data, at, end)
            start = at
        elif kind == 2:
            length, start = _number(data, at, end)
            at = start + length
        elif kind in _WHOLE_BYTES:
            at = start = at + _WHOLE_BYTES[kind]
        else:
            raise DataError(f"The model is no ONNX file: a field of kind {kind} at byte {at:,}.")
        if at > end:
            raise DataError(f"The model ends within a field, at byte {end:,}.")
        yield _Field(key >> 3, value, start, at)


def _number(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number at a place, and the place behind it."""
    value = 0
    for shift in range(0, _MOST_SHIFT + 1, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DataError(f"The model is no ONNX file: no number ends before byte {at:,}.")
