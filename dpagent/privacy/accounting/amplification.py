"""Privacy amplification by Poisson sampling of an (ε, δ)-DP mechanism, with its proof.

Adjacency is add-or-remove-one. P0 is the output's distribution without the record, P1 with it, and a
mechanism is (ε, δ)-DP if P(S) ≤ e^ε·P'(S) + δ for all S and both orders.

If the mechanism is (ε, δ)-DP for every lot of the others, drawing each record with probability q makes it
(ε', qδ)-DP with e^ε' = 1 + q(e^ε − 1) (Balle, Barthe, Gaboardi, NeurIPS 2018, Thm 8; sharp in general).
Proof, for one lot of the others (the smallest δ is jointly convex in the pair, so mixing over their lots
changes nothing). With M = (1−q)P0 + qP1,

- M(S) ≤ (1−q)P0(S) + q(e^ε·P0(S) + δ) = e^ε'·P0(S) + qδ;
- P1(S) ≥ e^−ε(P0(S) − δ), hence e^ε'·M(S) ≥ (1−q+q·e^ε)(1−q+q·e^−ε)·P0(S) − e^ε'·q·e^−ε·δ. The
  first factor is 1 + q(1−q)(e^ε + e^−ε − 2) ≥ 1 and e^(ε'−ε) = (1−q)e^−ε + q ≤ 1, so
  P0(S) ≤ e^ε'·M(S) + qδ.

Results are rounded up, by more than the relative errors of the few operations behind them.
"""

from __future__ import annotations

import math
from typing import Final

from dpagent.errors import ParameterError, require_between
from dpagent.privacy.events import MAX_EVENT_EPSILON

# Relative amount by which results are rounded up (or down, where that is the safe side).
_ROUNDING: Final = 2.0**-40

_MIN_SAMPLING_RATE: Final = 1e-300
_LOG_LARGEST: Final = 709.0


def amplified_epsilon(epsilon: float, sampling_rate: float) -> float:
    """ε' of an ε-DP mechanism (any δ, which becomes qδ) on a Poisson sample, rounded up.

    >>> round(amplified_epsilon(1.0, 0.1), 4)
    0.1586

    Args:
        epsilon: in [0, 1000].
        sampling_rate: q, in [1e-300, 1].

    Raises:
        ParameterError: a value is out of its range.
    """
    require_between("epsilon", epsilon, 0.0, MAX_EVENT_EPSILON)
    require_between("sampling rate", sampling_rate, _MIN_SAMPLING_RATE, 1.0)
    if sampling_rate == 1:
        return float(epsilon)
    amplified = _log_mixture(epsilon, sampling_rate) * (1 + _ROUNDING)
    return min(float(epsilon), math.nextafter(amplified, math.inf))


def unamplified_epsilon(epsilon: float, sampling_rate: float) -> float:
    """The ε of a mechanism that costs ``epsilon`` on a Poisson sample, rounded down.

    :func:`amplified_epsilon` of the result is at most ``epsilon``.

    >>> round(unamplified_epsilon(0.1586, 0.1), 4)
    1.0002

    Args:
        epsilon: after sampling, in (0, 1000].
        sampling_rate: q, in [1e-300, 1].

    Raises:
        ParameterError: a value is out of its range, or ε is so small that it is lost in rounding.
    """
    require_between("epsilon", epsilon, 0.0, MAX_EVENT_EPSILON, low_open=True)
    require_between("sampling rate", sampling_rate, _MIN_SAMPLING_RATE, 1.0)
    if sampling_rate == 1:
        return float(epsilon)
    # e^x = 1 + (e^ε − 1)/q is the same mixture with 1/q in place of q.
    base = _log_mixture(epsilon, 1 / sampling_rate)
    for _ in range(64):
        base *= 1 - 2 * _ROUNDING
        if base <= MAX_EVENT_EPSILON and amplified_epsilon(base, sampling_rate) <= epsilon:
            return base
        base = min(base, MAX_EVENT_EPSILON)
    raise ParameterError(f"epsilon is {epsilon!r}; expected one that rounding does not turn into 0.")


def _log_mixture(epsilon: float, weight: float) -> float:
    """log(1 + w(e^ε − 1)) for w in [1e-300, 1e300], without overflow and without cancellation."""
    if max(epsilon, epsilon + math.log(weight)) < _LOG_LARGEST:
        return math.log1p(weight * math.expm1(epsilon))
    # here w·e^ε is large, for w is at least 1e-300
    return epsilon + math.log(weight) + math.log1p((1 / weight - 1) * math.exp(-epsilon))
