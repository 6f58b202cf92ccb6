"""Which records take part, and in which order, from entropy that tests choose and from the system's."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpagent.errors import ParameterError
from dpagent.privacy.sampling import LOT_TAIL, largest_lot, poisson_lot, shuffled

LEVEL = 1e-6


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.97])
def test_poisson_lots_have_the_right_size_and_independent_records(rate: float) -> None:
    records, lots = 1000, 400
    drawn = np.zeros((lots, records), dtype=np.int64)
    for lot in drawn:
        indices = poisson_lot(records, rate)
        assert (np.diff(indices) > 0).all()
        lot[indices] = 1
    assert stats.binomtest(int(drawn.sum()), drawn.size, rate).pvalue > LEVEL
    sizes = drawn.sum(axis=1)
    dispersion = ((sizes - records * rate) ** 2).sum() / (records * rate * (1 - rate))
    assert LEVEL < stats.chi2.cdf(dispersion, lots) < 1 - LEVEL


def test_poisson_lot_compares_words_with_the_rate_exactly() -> None:
    threshold = 2**64 // 4
    words = b"".join(w.to_bytes(8, "little") for w in (threshold - 1, threshold, 0, 2**64 - 1))
    np.testing.assert_array_equal(poisson_lot(4, 0.25, entropy=lambda _: words), [0, 2])
    almost_one = math.nextafter(1.0, 0.0)
    assert poisson_lot(1, almost_one, entropy=lambda _: b"\xff" * 8).size == 0


def test_poisson_lot_at_its_limits() -> None:
    np.testing.assert_array_equal(poisson_lot(5, 1.0), np.arange(5))
    assert poisson_lot(0, 0.5).dtype == np.intp
    large = poisson_lot(200_000, 0.5)
    assert large.max() > 190_000
    with pytest.raises(ParameterError, match="records"):
        poisson_lot(-1, 0.5)
    with pytest.raises(ParameterError, match="sampling rate"):
        poisson_lot(5, 0.0)


def test_every_record_has_a_word_of_its_own_however_many_there_are() -> None:
    """More than a block of them: none is asked twice, and none is left out."""
    records, asked = 2 * 65_536 + 3, []

    def entropy(count: int) -> bytes:
        asked.append(count)
        return bytes(count)

    np.testing.assert_array_equal(poisson_lot(records, 2.0**-60, entropy=entropy), np.arange(records))
    assert sum(asked) == 8 * records


def test_no_rate_but_one_is_rounded_up() -> None:
    """At 2⁻⁶⁴ a record is drawn by one word of them all; at less, by none."""
    zero, one = bytes(8), (1).to_bytes(8, "little")
    assert poisson_lot(2, 2.0**-64, entropy=lambda _: one + zero).tolist() == [1]
    assert poisson_lot(1, 2.0**-65, entropy=lambda _: zero).size == 0
    for rate in (-0.1, math.nextafter(1.0, 2.0), math.nan):
        with pytest.raises(ParameterError, match="sampling rate"):
            poisson_lot(5, rate)


def test_every_order_of_a_lot_is_equally_likely() -> None:
    lot = np.array([2, 5, 7, 11])
    draws = 24_000
    seen = Counter(tuple(shuffled(lot).tolist()) for _ in range(draws))
    orders = list(itertools.permutations(lot.tolist()))
    assert set(seen) <= set(orders)
    _, p_value = stats.chisquare([seen[order] for order in orders])
    assert p_value > 1e-6


def test_equal_keys_are_drawn_anew() -> None:
    answers = iter([bytes(16), b"\x01" + bytes(15)])
    assert shuffled(np.array([3, 4]), entropy=lambda count: next(answers)).tolist() == [4, 3]
    with pytest.raises(RuntimeError, match="source of entropy is broken"):
        shuffled(np.array([3, 4]), entropy=bytes)
    assert shuffled(np.zeros(0, np.intp)).tolist() == []


# --- the largest lot ----------------------------------------------------------------------------


def exact_tail(records: int, rate: Fraction, size: int) -> Fraction:
    """P(lot > size), by its definition."""
    return sum(
        (
            math.comb(records, number) * rate**number * (1 - rate) ** (records - number)
            for number in range(size + 1, records + 1)
        ),
        Fraction(0),
    )


@pytest.mark.parametrize(
    ("records", "rate"), [(200, 0.25), (400, 0.0625), (1_000, 2.0**-10), (300, 1 - 2.0**-12)]
)
def test_a_lot_is_larger_than_its_bound_with_no_more_than_the_stated_probability(
    records: int, rate: float
) -> None:
    bound = largest_lot(records, rate)
    assert exact_tail(records, Fraction(rate), bound) <= Fraction(LOT_TAIL)
    # Chernoff is loose by a factor of some deviations: a bound a tenth of the way to the mean does not hold.
    lower = bound - max(1, round(0.1 * (bound - records * rate)))
    assert bound == records or exact_tail(records, Fraction(rate), lower) > Fraction(LOT_TAIL)


@given(st.integers(0, 10**6), st.floats(1e-12, 1.0))
def test_the_largest_lot_rises_with_the_records_and_lies_among_them(records: int, rate: float) -> None:
    bound = largest_lot(records, rate)
    assert min(records, math.floor(records * rate)) <= bound <= records
    assert bound <= largest_lot(records + 1, rate) <= bound + 1


def test_a_lot_of_everything_is_bounded_by_everything() -> None:
    assert largest_lot(12_345, 1.0) == 12_345
    assert largest_lot(0, 0.5) == 0
