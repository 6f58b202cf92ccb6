"""The values of one fragment as bytes: few bits a value, and one length whatever the values are.

A payload of ``size`` bytes begins with a *level* k, one byte. A raw DEFLATE stream (RFC 1951) of the values
in units of 2^k follows, and zeros fill the rest. The stream's bytes are one for each value v (2v if v ≥ 0,
−2v − 1 if not) up to 127 in magnitude; 255 stands for any other, which then comes after the last of them as
four bytes, signed, little-endian, in their order. zlib's Huffman-only mode comes within a few hundredths of a
bit of the entropy of such values, in hundredths of a millisecond.

**The length is fixed.** :func:`pack` is total: it takes the first level at which the values fit. At level 0,
where all but a 10⁻⁵th of fragments fit whose signal is what :func:`payload_bytes` has room for, values travel
as they are. At level k each is rounded at random to a multiple of 2^k, without bias, with a variance of at
most 4^k/4; so a fragment with a signal far beyond the noise loses precision and nothing else. All of it acts
on a noisy sum: it is post-processing, the level and the time that finding it takes included.

*Every vector fits at some level.* Beyond level 31 all values are −1, 0 or 1. With the end of a block these
are four symbols, so a Huffman code takes at most two bits a value, and its tables less than 32 bytes for each
2¹⁵ values: in all less than :func:`least_payload_bytes`, below which no plan is accepted.

*How high a level honest values need.* Values with a mean square of up to 4 fit at level 0: their entropy is
less than that of three-step noise by more than Huffman codes lose. Of n values v, rounded at random to 2^k,
the squared norm in units of 2^k is a² + 2a·r + ‖r‖² for a = ‖v‖/2^k and rounding r with mean 0 in intervals
of length 1: but for a probability of 2e^−x it is at most a² + 2a·√(x/2) + n/4 + √(nx/2) (Hoeffding, twice),
and always at most (a + √n)². They fit once that is no more than 4n. Values with a
mean magnitude of up to 3/2 fit at level 0 likewise (two-sided geometric values have the greatest entropy,
3.1 bits), and with a = ‖v‖₁/2^k the L1 norm, in units of 2^k, is at most a + √(nx/2) but for a probability of
e^−x: see :func:`highest_level`.
"""

from __future__ import annotations

import math
import os
import zlib
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpagent.norm import Norm
from dpagent.privacy.mechanisms.wire import MAX_WIRE_VALUE
from dpagent.privacy.noise.entropy import Entropy, uniform_words
from dpagent.protocol.sizes import least_payload_bytes

Units: TypeAlias = NDArray[np.int8] | NDArray[np.int64]
"""Whole numbers in the narrower of two types that holds them."""

MAX_LEVEL: Final = 32
_ESCAPE: Final = 255
_LARGEST_BYTE: Final = 127
_WINDOW: Final = -15
"""Raw DEFLATE: no header and no check sum, as the seal has one."""
_BYTES_OF: Final = np.array([2 * v if v >= 0 else -2 * v - 1 for v in range(-127, 128)], np.uint8)
"""By value, from −127 on."""
_VALUE_OF: Final = bytes((byte // 2 if byte % 2 == 0 else -(byte + 1) // 2) & 0xFF for byte in range(256))
"""Signed bytes, by the byte of a stream; what stands for a large value is replaced."""
_MOST: Final = 2 << MAX_LEVEL
MOST_BITS: Final = 8.0
"""Of a value that a payload makes room for at full precision."""
_SPREAD: Final = 4
"""Standard deviations of a payload's length that there is room for."""


def payload_bytes(block: int, bits: float) -> int:
    """The bytes of a payload: a function of public parameters alone.

    Room for values of the given entropy, the stream's tables (26 bytes measured for 1,626 values, growing
    with their number as more of them are rare), and four standard deviations of the length (0.14·√block
    bytes).

    Args:
        block: values in a fragment.
        bits: entropy of a value; of more than 8, no more is made room for.
    """
    tables = 24 + block / 250
    wanted = block * min(bits, MOST_BITS) / 8 + tables + _SPREAD * 0.14 * math.sqrt(block)
    return max(1 + math.ceil(wanted), least_payload_bytes(block))


def highest_level(block: int, norm: Norm, size: float, tail: float) -> int:
    """A level that honest values exceed with at most a probability ``tail``; see the module's text.

    Args:
        block: values in a fragment.
        norm: which, of power p.
        size: bound on ‖v‖^p.
        tail: in (0, 1).
    """
    square = size if norm is Norm.L2 else size**2  # ‖v‖₂ ≤ ‖v‖₁
    level = 1
    while not _fits(block, square, tail, level) and not (
        norm is Norm.L1 and size / 2**level + math.sqrt(-math.log(tail) * block / 2) <= 1.5 * block
    ):
        level += 1
    return level


def _fits(block: int, square: float, tail: float, level: int) -> bool:
    """Whether values of such a squared norm fit at a level, but for a probability ``tail``."""
    x, a = -math.log(tail / 2), math.sqrt(square) / 2**level
    likely = a**2 + 2 * a * math.sqrt(x / 2) + block / 4 + math.sqrt(block * x / 2)
    return bool(min(likely, (a + math.sqrt(block)) ** 2) <= 4 * block)


def pack(values: NDArray[np.int64], size: int, *, entropy: Entropy = os.urandom) -> bytes:
    """A payload of exactly ``size`` bytes, for whatever values.

    Args:
        values: shape (block,), whole numbers; those beyond ±(2³¹ − 1) saturate.
        size: at least :func:`least_payload_bytes` of their number.
        entropy: gives n uniform bytes for an argument n; to be replaced in tests only.

    >>> len(pack(np.array([3, -7, 0, 4_000_000]), 50)), unpack(pack(np.array([3, -7]), 50), 2, 50)
    (50, (array([ 3, -7], dtype=int8), 0))
    """
    values = np.clip(values, -MAX_WIRE_VALUE, MAX_WIRE_VALUE)
    level, coarse = 0, values
    while len(payload := bytes([level]) + _deflated(coarse)) > size:
        level = min(level + 1, MAX_LEVEL)
        coarse = _rounded(values, level, entropy)
    return payload.ljust(size, b"\0")


def unpack(payload: bytes, block: int, size: int) -> tuple[Units, int]:
    """The values of a payload, as multiples of 2^level, and the level. Memory and time are bounded by the
    arguments.

    Returns:
        Shape (block,), of ``int8`` where each fits into a byte of the stream, as nearly always, and else of
        ``int64``; and the level.

    Raises:
        ValueError: the length is another, or it is not a payload of so many values.
    """
    if len(payload) != size or not payload:
        raise ValueError(f"payload of {len(payload)} bytes; expected {size}")
    level = payload[0]
    if level > MAX_LEVEL:
        raise ValueError(f"level {level}; expected at most {MAX_LEVEL}")
    inflater = zlib.decompressobj(_WINDOW)
    try:
        plain = inflater.decompress(payload[1:], 5 * block + 1)
    except zlib.error as error:
        raise ValueError(f"not DEFLATE: {error}") from error
    if not inflater.eof or inflater.unused_data.strip(b"\0"):
        raise ValueError("the stream does not end, or other bytes than zeros follow it")
    if len(plain) < block:
        raise ValueError(f"{len(plain)} values; expected {block}")
    narrow = np.frombuffer(plain.translate(_VALUE_OF), np.int8, block)
    has_large = len(plain) > block or _ESCAPE in plain
    if not has_large and not level:
        return narrow, 0
    values = narrow.astype(np.int64)
    if has_large:
        escaped = np.flatnonzero(np.frombuffer(plain, np.uint8, block) == _ESCAPE)
        if len(plain) != block + 4 * len(escaped):
            raise ValueError(f"{len(plain)} bytes for {block} values, {len(escaped)} large")
        values[escaped] = np.frombuffer(plain, "<i4", offset=block)
    if level:
        if int(np.abs(values).max()) > _MOST >> level:
            raise ValueError(f"values beyond what rounding at level {level} gives")
        values <<= level
    return values, level


def _rounded(values: NDArray[np.int64], level: int, entropy: Entropy) -> NDArray[np.int64]:
    """⌊value/2^level + u⌋ with u uniform in [0, 1): its expectation is value/2^level exactly."""
    mask = np.uint64((1 << level) - 1)
    return np.asarray((values + (uniform_words(values.size, entropy) & mask).astype(np.int64)) >> level)


def _deflated(values: NDArray[np.int64]) -> bytes:
    large = np.abs(values) > _LARGEST_BYTE
    symbols = _BYTES_OF[np.where(large, 0, values) + _LARGEST_BYTE]
    symbols[large] = _ESCAPE
    plain = symbols.tobytes() + values[large].astype("<i4").tobytes()
    deflater = zlib.compressobj(9, zlib.DEFLATED, _WINDOW, 9, zlib.Z_HUFFMAN_ONLY)
    return deflater.compress(plain) + deflater.flush()
