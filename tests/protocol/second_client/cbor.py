"""CBOR (RFC 8949), by hand: what the protocol uses of it."""

from __future__ import annotations

import struct
from typing import Any


class Rejected(Exception):
    """A message is rejected; its text is the page's name for the reason."""


def encode(value: Any) -> bytes:
    """In the core deterministic encoding (section 4.2.1)."""
    match value:
        case None:
            return b"\xf6"
        case bool():
            return b"\xf5" if value else b"\xf4"
        case int():
            return _head(0, value) if value >= 0 else _head(1, -1 - value)
        case float():
            return next(filter(None, (_as_float(value, *form) for form in _FLOATS)))
        case bytes():
            return _head(2, len(value)) + value
        case str():
            return _head(3, len(value.encode())) + value.encode()
        case list():
            return _head(4, len(value)) + b"".join(map(encode, value))
        case dict():
            items = sorted(encode(key) + encode(item) for key, item in value.items())
            return _head(5, len(value)) + b"".join(items)
    raise TypeError(f"{value!r} is not part of the protocol")


_FLOATS = ((b"\xf9", ">e"), (b"\xfa", ">f"), (b"\xfb", ">d"))
_WIDTHS = {24: 1, 25: 2, 26: 4, 27: 8}


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes([major << 5 | argument])
    code, width = next((code, width) for code, width in _WIDTHS.items() if argument < 1 << 8 * width)
    return bytes([major << 5 | code]) + argument.to_bytes(width, "big")


def _as_float(value: float, mark: bytes, form: str) -> bytes | None:
    try:
        packed = struct.pack(form, value)
    except OverflowError:
        return None
    return mark + packed if struct.unpack(form, packed)[0] == value else None


def decode(data: bytes) -> Any:
    """Any encoding but tags, indefinite lengths, duplicate keys and more than 8 levels."""
    value, end = _item(data, 0, 1)
    if end != len(data):
        raise Rejected("malformed")
    return value


def _item(data: bytes, at: int, level: int) -> tuple[Any, int]:
    """The item that begins at ``at``, and where it ends."""
    major, low = divmod(_take(data, at, 1)[0], 32)
    width = _WIDTHS.get(low, 0)
    raw = _take(data, at + 1, width)
    at += 1 + width
    argument = int.from_bytes(raw, "big") if width else low
    match major:
        case _ if low > 27:
            raise Rejected("malformed")  # indefinite or reserved
        case 0:
            return argument, at
        case 1:
            return -1 - argument, at
        case 2:
            return _take(data, at, argument), at + argument
        case 3:
            try:
                return _take(data, at, argument).decode(), at + argument
            except UnicodeDecodeError:
                raise Rejected("malformed") from None
        case 4 | 5 if level <= 8:
            items = []
            for _ in range(argument * (major - 3)):
                item, at = _item(data, at, level + 1)
                items.append(item)
            return (items if major == 4 else _map(items)), at
        case 7 if width >= 2:
            return struct.unpack({2: ">e", 4: ">f", 8: ">d"}[width], raw)[0], at
        case 7 if low in (20, 21, 22):
            return {20: False, 21: True, 22: None}[low], at
    raise Rejected("malformed")


def _take(data: bytes, at: int, count: int) -> bytes:
    if at + count > len(data):
        raise Rejected("malformed")
    return data[at : at + count]


def _map(items: list[Any]) -> dict[str, Any]:
    keys = items[::2]
    if not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise Rejected("malformed")
    return dict(zip(keys, items[1::2], strict=True))
