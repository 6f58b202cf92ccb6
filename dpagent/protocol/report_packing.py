"""Two-point reports of one fragment as bytes: a fixed number of bits a report.

A payload begins with a zero byte, where a dummy has its mark. The reports of consecutive *groups* of weights
follow, each in as many bits: the place of the weight within its group, most significant bit first, then the
drawn bit. With a single weight a group, there is no place to tell: one bit a weight. Zeros fill the rest, and
there is one way to write a report: a place beyond the group, or a bit set in the rest, is malformed.

A report is a whole number here, 2·place + bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.privacy.mechanisms.two_point import group_edges


def report_width(dimension: int, coordinates: int) -> int:
    """Bits of a report: ⌈log₂⌉ of the size of the largest group, and the drawn bit.

    >>> [report_width(26_010, count) for count in (26_010, 13_000, 100)]
    [1, 3, 10]
    """
    return (-(-dimension // coordinates) - 1).bit_length() + 1


def reports_bytes(reports: int, width: int) -> int:
    """Bytes of a payload of so many reports.

    >>> reports_bytes(1_626, 1)
    205
    """
    return 1 + -(-reports * width // 8)


def pack_reports(reports: NDArray[np.int64], width: int) -> bytes:
    """The payload of ``reports`` (n,), each in [0, 2^width).

    >>> pack_reports(np.array([5, 1]), 3).hex(), unpack_reports(pack_reports(np.array([5, 1]), 3), 2, 3)
    ('00a4', array([5, 1]))
    """
    places = np.arange(width - 1, -1, -1, dtype=np.int64)
    bits = (reports[:, np.newaxis] >> places & 1).astype(np.uint8)
    return b"\0" + np.packbits(bits).tobytes()


def unpack_reports(payload: bytes, reports: int, width: int) -> NDArray[np.int64]:
    """Inverse of :func:`pack_reports`: shape (reports,).

    Raises:
        ValueError: the length is another, the first byte is not zero, or a bit is set beyond the reports.
    """
    expected = reports_bytes(reports, width)
    if len(payload) != expected:
        raise ValueError(f"payload of {len(payload)} bytes; expected {expected}")
    if payload[0]:
        raise ValueError(f"the first byte is {payload[0]}; expected 0")
    bits = np.unpackbits(np.frombuffer(payload, np.uint8, offset=1))
    if bits[reports * width :].any():
        raise ValueError("a bit is set beyond the last report")
    places = np.arange(width - 1, -1, -1, dtype=np.int64)
    return np.asarray(
        (bits[: reports * width].reshape(reports, width).astype(np.int64) << places).sum(axis=1)
    )


def read_reports(
    payload: bytes, position: int, block: int, *, dimension: int, coordinates: int
) -> NDArray[np.int64]:
    """What one fragment adds to the tally of its block: ones, then reports, of each weight of its groups.

    Args:
        payload: of the fragment.
        position: of its block.
        block: groups of a fragment.
        dimension: weights of the model.
        coordinates: groups of the model.

    Returns:
        Shape (2n,), n being the weights of the block's groups.

    Raises:
        ValueError: it is not a payload of one report for each group of the block, with zeros for the rest.
    """
    values = unpack_reports(payload, block, report_width(dimension, coordinates))
    first = position * block
    last = min(first + block, coordinates)
    if values[last - first :].any():
        raise ValueError("there are reports beyond the last group")
    edges = group_edges(dimension, coordinates, first, last)
    places, bits = values[: last - first] >> 1, values[: last - first] & 1
    if (places >= np.diff(edges)).any():
        raise ValueError("a report names a place beyond its group")
    at, size = places + edges[:-1] - edges[0], int(edges[-1] - edges[0])
    tally = np.zeros(2 * size, np.int64)
    tally[at] = bits
    tally[size + at] = 1
    return tally
