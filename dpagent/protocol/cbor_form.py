"""The form of a CBOR item (RFC 8949), looked at before a library builds anything of it.

What a stranger may write is bounded by it where cbor2 does not do that: before 6.2, as on boards of 32 bits
with Debian's packages, it knows no bound on depth, and takes tags, indefinite lengths and a key twice.
"""

from __future__ import annotations

from typing import Final

MAX_DEPTH: Final = 8
"""Levels of maps and lists, counting the outermost."""

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _LIST, _MAP, _TAG, _SIMPLE = range(8)
_ARGUMENT_BYTES: Final = {24: 1, 25: 2, 26: 4, 27: 8}
_FALSE_TRUE_NULL: Final = (20, 21, 22)
_FLOATS: Final = (25, 26, 27)


class CborFormError(ValueError):
    """Not one CBOR item of the form that the protocol allows."""


class _Open:
    """A list or a map whose end has not come.

    Attributes:
        left: items to come; a pair of a map is two.
        keys: those of a map so far, as UTF-8; None for a list.
    """

    __slots__ = ("keys", "left")

    def __init__(self, left: int, keys: set[bytes] | None) -> None:
        self.left = left
        self.keys = keys


def require_form(data: bytes) -> None:
    """Refuse what is not one CBOR item of integers, floats, byte and text strings, booleans, null, lists and
    maps with text keys, each of a length that is given, in at most :data:`MAX_DEPTH` levels.

    Takes time and memory in proportion to ``data``, whatever lengths it promises. Whether text is UTF-8 is
    left to whoever reads it.

    Raises:
        CborFormError: a tag, an indefinite length, a key twice or that is not text, another simple value, too
            many levels, an end that is missing or bytes after it.
    """
    place = 0
    levels: list[_Open] = []
    while True:
        kind, argument, place = _head(data, place)
        content = b""
        if kind in (_BYTES, _TEXT):
            if argument > len(data) - place:
                raise CborFormError(f"a string of {argument} bytes where {len(data) - place} are left")
            content = data[place : place + argument]
            place += argument
        if levels:
            _count(levels[-1], kind, content)
        if kind in (_LIST, _MAP):
            if len(levels) == MAX_DEPTH:
                raise CborFormError(f"more than {MAX_DEPTH} levels of maps and lists")
            levels.append(_Open(argument, None) if kind == _LIST else _Open(2 * argument, set()))
        while levels and not levels[-1].left:
            levels.pop()
        if not levels:
            break
    if place != len(data):
        raise CborFormError(f"{len(data) - place} bytes follow the item")


def _head(data: bytes, place: int) -> tuple[int, int, int]:
    """Major type and argument of the item at a place (RFC 8949, section 3), and the place after both."""
    if place >= len(data):
        raise CborFormError("the item has no end")
    kind, info = data[place] >> 5, data[place] & 31
    if kind == _TAG:
        raise CborFormError("a tag: tags are not part of the protocol")
    if kind == _SIMPLE and info not in (*_FALSE_TRUE_NULL, *_FLOATS):
        raise CborFormError(f"simple value or break {info}: not part of the protocol")
    place += 1
    if info < 24:
        return kind, info, place
    if (length := _ARGUMENT_BYTES.get(info)) is None:
        raise CborFormError("an indefinite or undefined length: not part of the protocol")
    if length > len(data) - place:
        raise CborFormError("the item has no end")
    return kind, int.from_bytes(data[place : place + length], "big"), place + length


def _count(level: _Open, kind: int, content: bytes) -> None:
    """Take in one item of a list, or a key or a value of a map."""
    if level.keys is not None and level.left % 2 == 0:
        if kind != _TEXT:
            raise CborFormError("a key that is not text")
        if content in level.keys:
            raise CborFormError("a key twice")
        level.keys.add(content)
    level.left -= 1
