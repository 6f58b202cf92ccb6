"""Columns of many rows as PostgreSQL's arrays, in its binary form.

As ``array_recv`` of PostgreSQL's ``arrayfuncs.c`` reads it: how many dimensions, whether there are nulls, the
type of the elements; length and lower bound of each dimension; then each element behind its length. All
integers are big-endian. The library makes the same, element by element in Python: that takes longer than to
check the values of the fragments whose ids are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

_HEADER: Final = np.dtype([("dimensions", ">i4"), ("nulls", ">i4"), ("type", ">u4"), ("length", ">i4"),
                           ("first", ">i4")])  # fmt: skip
_NUMBERS: Final = {
    "INTEGER": (20, np.dtype([("size", ">i4"), ("value", ">i8")])),
    "REAL": (701, np.dtype([("size", ">i4"), ("value", ">f8")])),
}
"""By SQLite's names of types: that of the elements in PostgreSQL (``pg_type.dat``), and how each is sent."""
_BYTEA: Final = 17


@dataclass(frozen=True, slots=True)
class BinaryArray:
    """An array of one dimension, in PostgreSQL's binary form."""

    data: bytes


def array_of(kind: str, values: Sequence[Any]) -> BinaryArray:
    """Values as an array.

    Args:
        kind: ``INTEGER``, ``REAL`` or ``BLOB``, as :mod:`coordinator.database.schema` calls it.
        values: of that type, none of them None.

    >>> array_of("BLOB", [b"ab", b"c"]).data.hex(" ", 4)
    '000000 01000000 00000000 11000000 02000000 01000000 02616200 00000163'
    """
    if kind == "BLOB":
        return BinaryArray(_header(_BYTEA, len(values)) + _elements(values))
    number, form = _NUMBERS[kind]
    elements = np.empty(len(values), form)
    elements["size"], elements["value"] = 8, values
    return BinaryArray(_header(number, len(values)) + elements.tobytes())


def _header(kind: int, length: int) -> bytes:
    return np.array((1, 0, kind, length, 1), _HEADER).tobytes()


def _elements(values: Sequence[bytes]) -> bytes:
    sizes = {*map(len, values)}
    if len(sizes) == 1:
        size = sizes.pop().to_bytes(4, "big")
        return size + size.join(values)
    return b"".join(part for value in values for part in (len(value).to_bytes(4, "big"), value))
