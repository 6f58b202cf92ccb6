"""Whether what was sampled stays flat: a robust line through the samples, and what is certain of its slope.

The slope is the median of the slopes between any two samples (Theil 1950, Sen 1968), which a few outliers do
not move; its confidence interval is Sen's, by Kendall's rank correlation (``scipy.stats.theilslopes``).
Samples that follow each other are alike, so each is the median of a part of the run: ``PARTS`` of them, of
what is left once the first fifth, in which caches fill, is taken away. Of what comes and goes with the work,
it is the least of a part: how often samples meet a helper that runs for a moment follows from how busy the
machine is, while each that stays is there in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.stats import theilslopes

PARTS: Final = 24
_WARM_UP: Final = 0.2
_CONFIDENCE: Final = 0.999
"""Both sides: a series that grows as much as it may fails once in 2,000 runs, and so does a leak pass."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one series.

    Attributes:
        name: of the series.
        allowed: growth a round, in the unit of the series.
        growth: the most probable growth a round.
        least, most: between which it is, at 99.9 %.
    """

    name: str
    allowed: float
    growth: float
    least: float
    most: float

    @property
    def is_flat(self) -> bool:
        """Whether it is certain that the series grows by no more than it may. A series that is too noisy, or
        too short, to tell is not flat."""
        return self.most <= self.allowed

    @property
    def is_leak(self) -> bool:
        """Whether it is certain that it grows by more."""
        return self.least > self.allowed

    def __str__(self) -> str:
        word = "flat" if self.is_flat else "GROWS" if self.is_leak else "unclear: run longer"
        between = f"{self.least:+,.3g} to {self.most:+,.3g}"
        return (
            f"{self.name:32} {self.growth:+12,.3g} a round ({between}); at most {self.allowed:,.3g}: {word}"
        )


def verdict(
    name: str,
    rounds: Sequence[float],
    values: Sequence[float],
    allowed: float,
    *,
    comes_and_goes: bool = False,
) -> Verdict:
    """What is certain of a series.

    Args:
        name: of it.
        rounds: closed by the time of each sample, at least ``2 * PARTS`` of them, growing.
        values: the samples.
        allowed: growth a round.
        comes_and_goes: whether only what stays counts.
    """
    assert len(rounds) == len(values) >= 2 * PARTS
    begin = int(_WARM_UP * len(rounds))
    x, y = np.asarray(rounds[begin:], float), np.asarray(values[begin:], float)
    parts = np.array_split(np.arange(len(x)), PARTS)
    places = [float(np.median(x[part])) for part in parts]
    level = np.min if comes_and_goes else np.median
    levels = [float(level(y[part])) for part in parts]
    if min(levels) == max(levels):
        return Verdict(name, allowed, 0.0, 0.0, 0.0)
    with np.errstate(invalid="ignore"):  # Of ranks that are nearly all tied, nothing is certain: NaN.
        slope, _, least, most = theilslopes(levels, places, _CONFIDENCE)
    return Verdict(name, allowed, float(slope), float(least), float(most))
