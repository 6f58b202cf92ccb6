"""Integers drawn from a table of exact probabilities, with 4 random bytes a value.

The common part of the discrete Gaussian and Laplace samplers: a distribution on 0..n−1, given as n whole
numbers that add up to 2¹⁵⁹ exactly, drawn by Walker's alias method in Vose's form (1991), all of it in
integers. The values drawn have exactly these probabilities.

**Table.** 2ᵐ ≥ n columns of 2¹⁵⁹⁻ᵐ units. A column i is divided between the value i, which has its
first s_i units, and one other value, its alias a_i. A draw takes a uniform column and a uniform
unit of it: the value is i if the unit is below s_i, else a_i.

**Draw.** A 32-bit word is a sign, the b = 31 − m high bits of the unit, and the column. The table
holds the b high bits of s_i and i ⊕ a_i, packed into the other 31 bits alike, so one access a value
fetches both, and the difference of the two 31-bit numbers has the sign of the comparison unless
their b high bits are the same, a *tie* (probability 2⁻ᵇ, in every column, so that it tells nothing
about the column). A tie is decided by the 128 low bits of the unit, drawn after the fact, which
changes nothing in the distribution.

**Time.** All values of a block take the same arithmetic and one memory access. Ties would take
more, and a value that was tied is not distributed like the others; therefore low bits for _SPARE
ties are drawn with *every* block, and the decision is computed for that many places, tied or not.
The number of ties in a block of 2¹⁵ is binomial with mean 2^(m−16), at most 4, for m ≤ 18; it
exceeds _SPARE = 64 with probability below 4⁶⁵/65! < 2⁻¹⁷² a block, and only then are more
bytes read than 4 a value and 1,024 a block. One more place, which counts as tied, has ties looked for to the
end of a block, wherever they are. One dependence remains: the addresses read within the
table are random and secret: against an observer of the processor's cache this is not constant
time. The device sends at times drawn independently of it.

**Rounding.** :meth:`AliasTable.from_weights` turns weights W_j ≥ 0, whole multiples of 2⁻²⁰⁸ and at most 4,
into counts: with S = ΣW_j and r = ⌊2¹⁵⁹·2²¹⁰/(2²⁰⁸·S)⌋, c_j = ⌊2²⁰⁸·W_j·r/2²¹⁰⌋, and what is missing from
2¹⁵⁹ goes to the largest. Rounding r costs at most W_j/4 ≤ 1 unit and the floor another, so c_j is low by
at most 2 units and the largest high by at most 2n: a total variation distance of at most
2n·2⁻¹⁵⁹. If the weights are themselves off by e_j, and S ≥ 1, normalising adds at most Σ|e_j|. Every
caller shows that Σ|e_j| ≤ n·2⁻¹⁵⁸; then both together are at most n·2⁻¹⁵⁷ = :func:`table_distance`.

**Memory.** A column takes 20 bytes, and the samplers' largest table, of 2¹⁴ columns, 320 KiB. It is made in
these and half a MiB besides: weights are computed twice in place of being kept, counts become shares where
they stand, and these the arrays of :meth:`AliasTable.draw`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.privacy.noise.entropy import Entropy, random_bytes

#: log₂ of the number of units a table's counts add up to.
TOTAL_BITS: Final = 159

#: Weights are whole multiples of 2⁻²⁰⁸.
WEIGHT_BITS: Final = 208

#: Values drawn at a time: bounds the memory, and fits the processor's second-level cache.
BLOCK: Final = 32_768

_LOW_BITS: Final = 128
_SPARE: Final = 64
_SPARE_BYTES: Final = _SPARE * _LOW_BITS // 8
_WORD: Final = (1 << 64) - 1
_AT_ONCE: Final = 512  # columns packed at a time
_DECIMAL: Final = Context(prec=110)


class Workspace:
    """Arrays that the draws of one call use again and again."""

    def __init__(self, size: int) -> None:
        self.column = np.empty(size, dtype=np.intp)
        self.word = np.empty(size, dtype=np.int32)
        self.entry = np.empty(size, dtype=np.int32)
        self.value = np.empty(size, dtype=np.int32)
        self.tied = np.empty(size + 1, dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class AliasTable:
    """A distribution on 0..size − 1 with counts of 2¹⁵⁹ units, ready to be drawn from.

    Attributes:
        size: n, number of values.
        column_bits: m.
        packed: shape (2ᵐ,), int32: b high bits of s_i, then m bits of i ⊕ a_i.
        low: 128 low bits of s_i, high word first, shape (2ᵐ, 2), uint64.
    """

    size: int
    column_bits: int
    packed: NDArray[np.int32]
    low: NDArray[np.uint64]

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> AliasTable:
        """The table of whole numbers that add up to 2¹⁵⁹ exactly; at most 2¹⁸ of them."""
        units = _Units(_column_bits(len(counts)))
        units.fill(counts)
        return cls._divided(len(counts), units)

    @classmethod
    def from_weights(cls, weights: Callable[[], Iterable[int]]) -> AliasTable:
        """The table of probabilities proportional to weights, within the module's bound.

        Args:
            weights: gives the weights in units of 2⁻²⁰⁸, the same ones at each call; at most 2²¹⁰ each, with
                a sum of at least 2²⁰⁸, and at most 2¹⁸ of them.
        """
        size = total = most = largest = 0
        for value, weight in enumerate(weights()):
            size, total = size + 1, total + weight
            if weight > most:
                most, largest = weight, value
        shift = WEIGHT_BITS + 2
        reciprocal = (1 << TOTAL_BITS + shift) // total
        units = _Units(_column_bits(size))
        given = units.fill(weight * reciprocal >> shift for weight in weights())
        units[largest] += (1 << TOTAL_BITS) - given
        return cls._divided(size, units)

    @classmethod
    def _divided(cls, size: int, units: _Units) -> AliasTable:
        """The table of counts, whose memory it takes over."""
        aliases = np.frombuffer(_divide(units), dtype=np.intc)
        packed = np.frombuffer(units.high, dtype=np.int32)  # Of a share, b bits.
        np.left_shift(packed, units.column_bits, out=packed)
        for start in range(0, len(packed), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            packed[some] |= aliases[some] ^ np.arange(start, start + len(packed[some]), dtype=np.int32)
        return cls(size, units.column_bits, packed, np.frombuffer(units.low, dtype=np.uint64).reshape(-1, 2))

    def counts(self) -> list[int]:
        """Of 2¹⁵⁹ units, how many each value gets, read back from the tables of :meth:`draw`."""
        unit_bits = TOTAL_BITS - self.column_bits
        mask = (1 << self.column_bits) - 1
        counts = [0] * (mask + 1)
        for column, entry in enumerate(self.packed.tolist()):
            high, low = self.low[column].tolist()
            share = (entry >> self.column_bits) << _LOW_BITS | high << 64 | low
            counts[column] += share
            counts[column ^ entry & mask] += (1 << unit_bits) - share
        return counts[: self.size]

    def draw(self, count: int, entropy: Entropy, space: Workspace, *, signed: bool) -> NDArray[np.int32]:
        """``count`` independent values, 1 ≤ count ≤ :data:`BLOCK`.

        Args:
            count: how many.
            entropy: gives n uniform bytes for an argument n.
            space: of at least ``count`` places; the result is a view of it, valid until the next draw.
            signed: give each value an independent uniform sign.

        Returns:
            Shape (count,), in 0..size − 1, or in ±(size − 1) if signed.
        """
        data = random_bytes(_SPARE_BYTES + 4 * count, entropy)
        drawn = np.frombuffer(data, dtype="<i4", offset=_SPARE_BYTES)
        column, word, entry = space.column[:count], space.word[:count], space.entry[:count]
        value, tied = space.value[:count], space.tied[: count + 1]
        mask = np.int32((1 << self.column_bits) - 1)

        np.bitwise_and(drawn, mask, out=value)
        np.copyto(column, value)
        self.packed.take(column, out=entry, mode="wrap")  # always in range; "raise" would copy
        np.bitwise_and(drawn, np.int32(0x7FFFFFFF), out=word)
        np.less_equal(np.bitwise_xor(entry, word, out=value), mask, out=tied[:-1])
        # They are looked for up to the last: else its place, or that there is none, would show.
        tied[-1] = True
        ties = np.flatnonzero(tied)[:-1]

        # value = column ⊕ (column ⊕ alias, if the unit is above the share; else 0)
        np.subtract(entry, word, out=value)
        np.right_shift(value, np.int32(31), out=value)
        np.bitwise_and(value, entry, out=value)
        np.bitwise_xor(value, word, out=value)
        np.bitwise_and(value, mask, out=value)
        for start in range(0, max(1, ties.size), _SPARE):
            some = ties[start : start + _SPARE]
            low = data[:_SPARE_BYTES] if start == 0 else random_bytes(_SPARE_BYTES, entropy)
            value[some] = self._decide(some, column, entry, low)[: some.size]
        if signed:
            sign = np.right_shift(drawn, np.int32(31), out=word)
            np.bitwise_xor(value, sign, out=value)
            np.subtract(value, sign, out=value)
        return value

    def _decide(
        self, ties: NDArray[np.intp], column: NDArray[np.intp], entry: NDArray[np.int32], data: bytes
    ) -> NDArray[np.int32]:
        """The values at ``ties``, at most _SPARE places; always computes _SPARE of them."""
        places = np.zeros(_SPARE, dtype=np.intp)
        places[: ties.size] = ties
        own = column[places]
        share, unit = self.low[own], np.frombuffer(data, dtype="<u8").reshape(_SPARE, 2)
        below = (unit[:, 0] < share[:, 0]) | ((unit[:, 0] == share[:, 0]) & (unit[:, 1] < share[:, 1]))
        to_alias = entry[places] & np.int32((1 << self.column_bits) - 1)
        return np.asarray(own ^ to_alias * ~below, dtype=np.int32)


def table_distance(size: int) -> float:
    """The share of a table of ``size`` values in the total variation distance of one value."""
    return size * 2.0 ** -(TOTAL_BITS - 2)


def exponential(exponent: Fraction) -> int:
    """⌊2²⁰⁸·exp(−exponent)⌋, to one unit, for an exponent of at least 0."""
    # copy_negate and the explicit context: operators would round to the thread's own context
    quotient = _DECIMAL.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
    return int(_DECIMAL.multiply(_DECIMAL.exp(quotient.copy_negate()), Decimal(1 << WEIGHT_BITS)))


class _Units:
    """A whole number from 0 to 2¹⁵⁹ for each of 2ᵐ columns, in 20 bytes; all are 0 at first.

    Attributes:
        column_bits: m.
        low: 128 low bits of each, high word first.
        high: the other 32.
    """

    def __init__(self, column_bits: int) -> None:
        self.column_bits = column_bits
        self.low, self.high = array("Q", [0]) * (2 << column_bits), array("I", [0]) * (1 << column_bits)

    def __getitem__(self, column: int) -> int:
        return self.high[column] << _LOW_BITS | self.low[2 * column] << 64 | self.low[2 * column + 1]

    def __setitem__(self, column: int, units: int) -> None:
        self.high[column] = units >> _LOW_BITS
        self.low[2 * column], self.low[2 * column + 1] = units >> 64 & _WORD, units & _WORD

    def fill(self, numbers: Iterable[int]) -> int:
        """Take over the numbers of the first columns; returns their sum."""
        low, high = np.frombuffer(self.low, np.uint64).reshape(-1, 2), np.frombuffer(self.high, np.uint32)
        total, left = 0, iter(numbers)
        for start in range(0, len(high), _AT_ONCE):
            some = list(islice(left, _AT_ONCE))
            total += sum(some)
            raw = b"".join([number.to_bytes(20, "little") for number in some])
            parts = np.frombuffer(raw, dtype="<u4").reshape(-1, 5).astype(np.uint64)
            end = start + len(some)
            low[start:end, 0] = parts[:, 3] << 32 | parts[:, 2]
            low[start:end, 1] = parts[:, 1] << 32 | parts[:, 0]
            high[start:end] = parts[:, 4]
        return total


def _column_bits(size: int) -> int:
    """m of so many values."""
    return max(1, (size - 1).bit_length())


def _divide(units: _Units) -> array[int]:
    """Vose's division: in place of each count, the column's own share; returned, its alias.

    Values with less than a column fill up their column from a value with more; once that one has
    less than a column itself, it is filled up from the next. Since all adds up, the last is left
    with one whole column; it and every other value with one is its own alias, with share 0.
    """
    high, unit = units.high, 1 << TOTAL_BITS - units.column_bits
    whole = unit >> _LOW_BITS  # A count with these high bits is a column or more.
    columns = range(len(high))
    aliases = array("i", columns)
    givers = (value for value in columns if high[value] >= whole)
    giver = next(givers)
    left = units[giver]
    for value in columns:
        if high[value] >= whole or aliases[value] != value:  # It gives, or has given.
            continue
        aliases[value] = giver
        left -= unit - units[value]
        while left < unit:
            successor = next(givers)
            units[giver], aliases[giver] = left, successor
            left += units[successor] - unit
            giver = successor
    for value in columns:
        if high[value] >= whole:
            units[value] = 0
    return aliases
