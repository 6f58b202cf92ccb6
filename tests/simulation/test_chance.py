"""Better than the commonest class, or luck: against scipy's binomial distribution."""

from __future__ import annotations

import math

import pytest
from scipy.stats import binom

from simulation.chance import beats_by_more_than_chance


@pytest.mark.parametrize("records", [1, 2, 20, 400, 10_000])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.998])
def test_the_limit_is_the_upper_twentieth_of_the_binomial_distribution(records: int, share: float) -> None:
    # The fewest right answers that are rarer than one in twenty.
    least = int(binom.isf(0.05, records, share)) + 1
    assert not beats_by_more_than_chance((least - 1) / records, share, records)
    if least <= records:
        assert beats_by_more_than_chance(least / records, share, records)


def test_edges() -> None:
    assert not beats_by_more_than_chance(math.nan, 0.5, 100)
    assert not beats_by_more_than_chance(1.0, 1.0, 100)
    assert not beats_by_more_than_chance(0.5, 0.5, 100)
    assert beats_by_more_than_chance(0.01, 0.0, 100)
    # Two records of a rare class among 600: all right is what the commonest class gets by luck too.
    assert not beats_by_more_than_chance(1.0, 598 / 600, 600)
