"""Whether an accuracy is better than always giving the same answer, or only luck.

Without any knowledge of the inputs, the best answer is the commonest class, which is right for a share p of
the test records. A model that has learned nothing more is right for about as many. It beats that share by
more than chance if as many right answers, or more, would come by luck in fewer than one of twenty such
tests: if the upper tail of the binomial distribution with n records and probability p is below 5 %.
"""

from __future__ import annotations

import math
from typing import Final

_CHANCE: Final = 0.05


def beats_by_more_than_chance(accuracy: float, share: float, records: int) -> bool:
    """Whether ``accuracy`` on so many records is beyond the luck of a known ``share``.

    Args:
        accuracy: In [0, 1]; NaN beats nothing.
        share: Of records that one answer gets right, in [0, 1].
        records: That both were measured on.

    >>> beats_by_more_than_chance(0.60, 0.50, 20), beats_by_more_than_chance(0.60, 0.50, 200)
    (False, True)
    """
    if math.isnan(accuracy) or accuracy <= share:
        return False
    return _upper_tail(round(accuracy * records), records, share) < _CHANCE


def _upper_tail(least: int, count: int, probability: float) -> float:
    """P[X ≥ least] for X binomial."""
    if probability <= 0 or probability >= 1:
        return float(least <= count * probability)
    odds, rest = math.log(probability), math.log1p(-probability)
    return math.fsum(
        math.exp(
            math.lgamma(count + 1) - math.lgamma(hits + 1) - math.lgamma(count - hits + 1)
            + hits * odds + (count - hits) * rest
        )
        for hits in range(least, count + 1)
    )  # fmt: skip
