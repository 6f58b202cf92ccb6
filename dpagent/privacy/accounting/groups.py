"""Group privacy: the guarantee for several units, such as all records of one person, from that for one.

Between data sets that differ in n units lie n steps of one, so for an event S,
P_0(S) ≤ e^ε·P_1(S) + δ ≤ … ≤ e^(nε)·P_n(S) + δ·(1 + e^ε + … + e^((n−1)ε)).

Rounded up by 2⁻⁴⁰ of the terms, a thousand times the rounding of these.
"""

from __future__ import annotations

import math
from typing import Final

from dpagent.errors import ParameterError, require_count
from dpagent.privacy.accounting.composition import exact_sum
from dpagent.privacy.events import MAX_COUNT, ApproximateEvent

_ROUNDING: Final = 2.0**-40


def group_event(event: ApproximateEvent, size: int) -> ApproximateEvent:
    """The event that stands for a group of ``size`` units, at least 1.

    >>> group_event(ApproximateEvent(0.5), 3)
    ApproximateEvent(epsilon=1.5, delta=0.0)

    Raises:
        ParameterError: ``size`` is no whole number of at least 1, or ε or δ leaves its range.
    """
    require_count("group size", size, maximum=MAX_COUNT)
    epsilon = exact_sum([(event.epsilon, size)])
    if event.delta == 0 or size == 1:
        return ApproximateEvent(epsilon, event.delta)
    # (e^(nε) − 1)/(e^ε − 1), by its logarithm; n where ε vanishes
    log_factor = _log_expm1(epsilon) - _log_expm1(event.epsilon) if event.epsilon > 0 else math.log(size)
    log_delta = math.log(event.delta) + log_factor
    if not log_delta < 0:
        raise ParameterError(
            f"group size is {size}; expected a group for which δ = {event.delta:g} stays below 1."
        )
    return ApproximateEvent(epsilon, math.exp(log_delta) * (1 + _ROUNDING))


def _log_expm1(x: float) -> float:
    """log(e^x − 1) for x > 0, without overflow."""
    return x + math.log(-math.expm1(-x))
