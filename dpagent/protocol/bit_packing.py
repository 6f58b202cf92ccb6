"""Whole numbers of a fragment in a fixed number of bits each.

A payload begins with a zero byte, where a dummy has its mark. The values follow, most significant bit first,
and zeros fill the last byte. There is one way to write values: a bit set in the rest is malformed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.protocol.sizes import packed_bytes


def pack_bits(values: NDArray[np.int64], width: int) -> bytes:
    """The payload of ``values`` (n,), each in [0, 2^width).

    >>> pack_bits(np.array([5, 1]), 3).hex(), unpack_bits(pack_bits(np.array([5, 1]), 3), 2, 3)
    ('00a4', array([5, 1]))
    """
    places = np.arange(width - 1, -1, -1, dtype=np.int64)
    bits = (values[:, np.newaxis] >> places & 1).astype(np.uint8)
    return b"\0" + np.packbits(bits).tobytes()


def unpack_bits(payload: bytes, values: int, width: int) -> NDArray[np.int64]:
    """Inverse of :func:`pack_bits`: shape (values,).

    Raises:
        ValueError: the length is another, the first byte is not zero, or a bit is set beyond the values.
    """
    expected = packed_bytes(values, width)
    if len(payload) != expected:
        raise ValueError(f"payload of {len(payload)} bytes; expected {expected}")
    if payload[0]:
        raise ValueError(f"the first byte is {payload[0]}; expected 0")
    bits = np.unpackbits(np.frombuffer(payload, np.uint8, offset=1))
    if bits[values * width :].any():
        raise ValueError("a bit is set beyond the last value")
    places = np.arange(width - 1, -1, -1, dtype=np.int64)
    return np.asarray((bits[: values * width].reshape(values, width).astype(np.int64) << places).sum(axis=1))
