"""How many bytes, bits, fragments and values things on the wire have, by public numbers alone.

The form of a plan depends on them, and dummies have them; so they stand apart from the code that packs and
unpacks, which needs numpy.
"""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias

Precision: TypeAlias = Literal["int8", "float32"]

WEIGHTS_OF_A_SCALE: Final = 64
"""Weights at 8 bits have a scale for so many of them; see :mod:`dpagent.protocol.weights`."""


def block_count(dimension: int, block: int) -> int:
    """Number of fragments of an update: ⌈dimension / block⌉."""
    return -(-dimension // block)


def packed_bytes(values: int, width: int) -> int:
    """Bytes of a payload of so many values in so many bits each (:mod:`dpagent.protocol.bit_packing`).

    >>> packed_bytes(1_626, 1)
    205
    """
    return 1 + -(-values * width // 8)


def least_payload_bytes(block: int) -> int:
    """The bytes into which any values of a fragment can be brought (:mod:`dpagent.protocol.packing`)."""
    return 1 + math.ceil(block / 4) + math.ceil(block / 256) + 48


def report_width(dimension: int, coordinates: int) -> int:
    """Bits of a report (:mod:`dpagent.protocol.report_packing`): ⌈log₂⌉ of the size of the largest group, and
    the drawn bit.

    >>> [report_width(26_010, count) for count in (26_010, 13_000, 100)]
    [1, 3, 10]
    """
    return (-(-dimension // coordinates) - 1).bit_length() + 1


def update_width(largest: int) -> int:
    """Bits of a value of up to ``largest`` in magnitude (:mod:`dpagent.protocol.update_packing`).

    >>> [update_width(largest) for largest in (1, 127, 16_466)]
    [2, 8, 16]
    """
    return (2 * largest).bit_length()


def weights_bytes(parameters: int, precision: Precision) -> int:
    """Bytes of so many weights (:mod:`dpagent.protocol.weights`).

    >>> weights_bytes(26_010, "float32"), weights_bytes(26_010, "int8")
    (104040, 26824)
    """
    if precision == "float32":
        return 4 * parameters
    return 2 * block_count(parameters, WEIGHTS_OF_A_SCALE) + parameters
