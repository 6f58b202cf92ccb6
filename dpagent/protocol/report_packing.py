"""Two-point reports of one fragment as bytes: a fixed number of bits a report.

A payload holds the reports of consecutive *groups* of weights (:mod:`dpagent.protocol.bit_packing`), each in
as many bits: the place of the weight within its group, then the drawn bit. With a single weight a group,
there is no place to tell: one bit a weight. A place beyond the group is malformed.

A report is a whole number here, 2·place + bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.privacy.mechanisms.two_point import group_edges
from dpagent.protocol.bit_packing import unpack_bits
from dpagent.protocol.sizes import report_width


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
    values = unpack_bits(payload, block, report_width(dimension, coordinates))
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
