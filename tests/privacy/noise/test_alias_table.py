"""The alias table: it holds the integers it was made from exactly, and draws what it holds."""

from __future__ import annotations

import itertools
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.privacy.noise.alias_table import (
    BLOCK,
    AliasTable,
    Workspace,
    table_distance,
)

TOTAL = 1 << 159
SPARE = 64


def complete(counts: list[int]) -> list[int]:
    """Scaled to add up to 2¹⁵⁹."""
    scaled = [count * TOTAL // sum(counts) for count in counts]
    scaled[-1] += TOTAL - sum(scaled)
    return scaled


@given(st.lists(st.integers(0, 2**70), min_size=1, max_size=70).filter(any))
@settings(max_examples=150)
def test_any_counts_are_kept_to_the_unit(counts: list[int]) -> None:
    counts = complete(counts)
    assert AliasTable.from_counts(counts).counts() == counts


@pytest.mark.parametrize(
    "counts",
    [
        [TOTAL],
        [TOTAL, 0],
        [0, TOTAL],
        [1, TOTAL - 1],
        [TOTAL - 2, 1, 1],
        [TOTAL // 8] * 8,
        [*[TOTAL // 8] * 6, TOTAL // 8 - 1, TOTAL // 8 + 1],
        [TOTAL // 8 + 1, *[TOTAL // 8] * 6, TOTAL // 8 - 1],
        [0, 0, 0, TOTAL // 2, TOTAL // 2],
        complete([2**i for i in range(300)]),
        complete([1] * 5000),
    ],
)
def test_awkward_counts_are_kept_to_the_unit(counts: list[int]) -> None:
    table = AliasTable.from_counts(counts)
    assert table.counts() == counts
    assert table.packed.min() >= 0


class Tape:
    """Entropy from a list of (word, low bits) and, for further batches of ties, of low bits."""

    def __init__(self, words: list[int], *batches: list[int]) -> None:
        first, self._rest = batches[0] if batches else [], list(batches[1:])
        self._data = self._spare(first) + b"".join(word.to_bytes(4, "little") for word in words)

    @staticmethod
    def _spare(low: list[int]) -> bytes:
        padded = low + [0] * (SPARE - len(low))
        return b"".join(
            (number >> 64).to_bytes(8, "little") + (number % 2**64).to_bytes(8, "little") for number in padded
        )

    def __call__(self, count: int) -> bytes:
        data, self._data = self._data, b""
        if not data:
            data = self._spare(self._rest.pop(0))
        assert count == len(data)
        return data

    @property
    def used_up(self) -> bool:
        return not self._data and not self._rest


def columns(table: AliasTable) -> list[tuple[int, int]]:
    """Each column's share and alias, read from the packed form."""
    m = table.column_bits
    low = [int(a) << 64 | int(b) for a, b in table.low]
    return [(int(e) >> m << 128 | low[i], i ^ int(e) % 2**m) for i, e in enumerate(table.packed)]


@pytest.mark.parametrize("counts", [[5, 1, 3], [1, 2, 4, 8, 16], [7, 7, 7, 7, 1], list(range(1, 40))])
def test_every_column_is_divided_at_its_share(counts: list[int]) -> None:
    """Unit by unit around the division, in every column: the value, or the alias."""
    table = AliasTable.from_counts(complete(counts))
    m = table.column_bits
    words, low, expected = [], [], []
    for column, (share, alias) in enumerate(columns(table)):
        for unit in {
            0,
            share - 1,
            share,
            share + 1,
            share - 2**100,
            share - 2**128,
            share + 2**128,
            share ^ 1,
        }:
            if 0 <= unit < 1 << 159 - m:
                words.append((unit >> 128) << m | column)
                low.append(unit % 2**128)
                expected.append(column if unit < share else alias)
    for word, bits, value in zip(words, low, expected, strict=True):
        tape = Tape([word], [bits])
        assert table.draw(1, tape, Workspace(1), signed=False).tolist() == [value]
        assert tape.used_up
        negative = Tape([word | 1 << 31], [bits])
        assert table.draw(1, negative, Workspace(1), signed=True).tolist() == [-value]


@pytest.mark.parametrize("ties", [0, 1, 63, 64, 65, 200])
def test_ties_are_decided_one_by_one_by_their_own_low_bits(ties: int) -> None:
    """Also when there are more than the low bits drawn with the block suffice for."""
    table = AliasTable.from_counts(complete([5, 1, 3]))
    column, (share, alias) = next((i, c) for i, c in enumerate(columns(table)) if c[0] and c[1] != i)
    other = next(i for i, _ in enumerate(columns(table)) if i != column)
    tied = (share >> 128) << table.column_bits | column
    clear = ((share >> 128) ^ 1 << 20) << table.column_bits | other  # far from any division
    rng = np.random.default_rng(5)
    pattern = [1] * ties + [0] * 50
    rng.shuffle(pattern)
    threshold = share % 2**128
    lows = [int(x) for x in rng.integers(0, 2, ties)]
    batches = [[threshold - 1 + bit for bit in lows[i : i + SPARE]] for i in range(0, max(ties, 1), SPARE)]
    words = [tied if tie else clear for tie in pattern]
    tape = Tape(words, *batches)
    values = table.draw(len(words), tape, Workspace(len(words)), signed=False)
    assert tape.used_up
    assert [int(v) for v, tie in zip(values, pattern, strict=True) if tie] == [
        alias if bit else column for bit in lows
    ]
    assert len({int(v) for v, tie in zip(values, pattern, strict=True) if not tie}) == 1


def test_all_words_of_one_high_byte_give_the_counts() -> None:
    """A coarse table whose divisions fall on 12 bits: every word of 12 high bits and column, once."""
    counts = [TOTAL // 4096 * share for share in (1000, 96, 2000, 1000)]
    table = AliasTable.from_counts(counts)
    fractions, low = range(4096), [2**127] * SPARE
    words = [f << 17 + table.column_bits | c for f, c in itertools.product(fractions, range(4))]
    drawn: Counter[int] = Counter()
    for start in range(0, len(words), 4096):
        tape = Tape(words[start : start + 4096], low, low, low)
        drawn.update(table.draw(4096, tape, Workspace(4096), signed=False).tolist())
    assert [drawn[value] * TOTAL // len(words) for value in range(4)] == counts


def test_signs_are_independent_of_values() -> None:
    table = AliasTable.from_counts(complete([1, 1]))
    values = table.draw(BLOCK, os.urandom, Workspace(BLOCK), signed=True)
    counts = Counter(values.tolist())
    assert set(counts) == {-1, 0, 1}
    for value, share in ((-1, 0.25), (0, 0.5), (1, 0.25)):
        assert abs(counts[value] - share * BLOCK) < 5 * (share * (1 - share) * BLOCK) ** 0.5


@given(st.lists(st.integers(0, 1 << 208), min_size=1, max_size=40).filter(lambda w: sum(w) >= 1 << 208))
@settings(max_examples=100)
def test_counts_are_within_the_bound_of_the_weights(weights: list[int]) -> None:
    counts = AliasTable.from_weights(lambda: weights).counts()
    assert sum(counts) == TOTAL
    total = sum(weights)
    # in units of 1/total, so that the comparison is exact
    distance = sum(abs(c * total - w * TOTAL) for c, w in zip(counts, weights, strict=True))
    assert distance <= 2 * table_distance(len(weights)) * TOTAL * total
    assert min(counts) >= 0
