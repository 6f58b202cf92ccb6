"""What an observer can prove from many releases of two neighbouring inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 1e-6


def proven_epsilon(
    present: NDArray[np.floating] | NDArray[np.int64],
    without: NDArray[np.floating] | NDArray[np.int64],
    thresholds: Sequence[float] | NDArray[np.float64],
    delta: float = 0.0,
) -> float:
    """The largest ε that the releases prove to be exceeded at ``delta``, at a joint level of 1e-6.

    For each event S, here that a value is above or below a threshold, (ε, δ)-DP demands
    P(S | one) ≤ e^ε·P(S | other) + δ, both ways. Clopper–Pearson bounds on either side are what the
    data prove against it. 0 if they prove nothing.
    """
    level = LEVEL / (8 * len(thresholds))
    proven = 0.0
    for (more, less), sign in product(permutations((present, without)), (1, -1)):
        for threshold in thresholds:
            hits, misses = (int((sign * (side - threshold) > 0).sum()) for side in (more, less))
            at_least = stats.beta.ppf(level, hits, more.size - hits + 1) if hits else 0.0
            at_most = stats.beta.isf(level, misses + 1, less.size - misses) if misses < less.size else 1.0
            if at_least > delta:
                proven = max(proven, math.log((at_least - delta) / at_most))
    return proven
