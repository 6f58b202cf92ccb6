"""The cost of noise that is not drawn exactly from the distribution that was proven private.

If both outputs are within total variation distance η of those of an (ε, δ)-DP mechanism, then
P(S) ≤ P*(S) + η ≤ e^ε·(P'(S) + η) + δ + η: the mechanism is (ε, δ + (1 + e^ε)·η)-DP. Rounded up.
"""

from __future__ import annotations

import math
from typing import Final

from dpagent.errors import require_between

_ROUNDING: Final = 2.0**-40  # more than the relative error of the few operations below


def imperfect_delta(epsilon: float, delta: float, distance: float) -> float:
    """δ of an (ε, δ)-DP mechanism whose output is off by a total variation ``distance``; at most 1.

    >>> f"{imperfect_delta(2.0, 1e-5, 2.0e-32):.1e}"
    '1.0e-05'

    Args:
        epsilon: at least 0.
        delta: in [0, 1].
        distance: η, at least 0.

    Raises:
        ParameterError: a value is out of its range.
    """
    require_between("epsilon", epsilon, 0.0, math.inf)
    require_between("delta", delta, 0.0, 1.0)
    require_between("distance", distance, 0.0, math.inf)
    if distance == 0:
        return delta
    log_error = math.log(distance) + math.log1p(math.exp(-epsilon)) + epsilon
    return min(1.0, math.nextafter(delta + math.exp(min(log_error, 1.0)) * (1 + _ROUNDING), 1.0))
