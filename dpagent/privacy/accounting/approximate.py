"""What Poisson sampling and imperfect noise do to an (ε, δ); basic facts, with their proofs.

Adjacency is add-or-remove-one throughout. P0 is the output's distribution without the record, P1
with it, and a mechanism is (ε, δ)-DP if P(S) ≤ e^ε·P'(S) + δ for all S and both orders.

*Poisson sampling.* If the mechanism is (ε, δ)-DP for every lot of the others, drawing each record
with probability q makes it (ε', qδ)-DP with e^ε' = 1 + q(e^ε − 1) (Balle, Barthe, Gaboardi,
NeurIPS 2018, Thm 8; sharp in general). Proof, for one lot of the others (the smallest δ is jointly
convex in the pair, so mixing over their lots changes nothing). With M = (1−q)P0 + qP1,

- M(S) ≤ (1−q)P0(S) + q(e^ε·P0(S) + δ) = e^ε'·P0(S) + qδ;
- P1(S) ≥ e^−ε(P0(S) − δ), hence e^ε'·M(S) ≥ (1−q+q·e^ε)(1−q+q·e^−ε)·P0(S) − e^ε'·q·e^−ε·δ. The
  first factor is 1 + q(1−q)(e^ε + e^−ε − 2) ≥ 1 and e^(ε'−ε) = (1−q)e^−ε + q ≤ 1, so
  P0(S) ≤ e^ε'·M(S) + qδ.

*Imperfect noise.* If both outputs are within total variation distance η of those of an (ε, δ)-DP
mechanism, P(S) ≤ P*(S) + η ≤ e^ε·(P'(S) + η) + δ + η: (ε, δ + (1 + e^ε)·η)-DP.

Results are rounded up: by more than the relative errors of the few operations behind them.
"""

from __future__ import annotations

import math
from typing import Final

from dpagent.errors import ParameterError, require_between

#: Relative amount by which results are rounded up (or down, where that is the safe side).
ROUNDING: Final = 2.0**-40

_MAX_EPSILON: Final = 1000.0
_MIN_SAMPLING_RATE: Final = 1e-300
_LOG_LARGEST: Final = 709.0


def amplified_epsilon(epsilon: float, sampling_rate: float) -> float:
    """ε' of an ε-DP mechanism (any δ, which becomes qδ) on a Poisson sample, rounded up.

    Args:
        epsilon: in [0, 1000].
        sampling_rate: q, in [1e-300, 1].

    Raises:
        ParameterError: a value is out of its range.
    """
    require_between("epsilon", epsilon, 0.0, _MAX_EPSILON)
    require_between("sampling rate", sampling_rate, _MIN_SAMPLING_RATE, 1.0)
    if sampling_rate == 1:
        return float(epsilon)
    amplified = _log_mixture(epsilon, sampling_rate) * (1 + ROUNDING)
    return min(float(epsilon), math.nextafter(amplified, math.inf))


def unamplified_epsilon(epsilon: float, sampling_rate: float) -> float:
    """The ε of a mechanism that costs ``epsilon`` on a Poisson sample, rounded down.

    :func:`amplified_epsilon` of the result is at most ``epsilon``.

    Args:
        epsilon: after sampling, in (0, 1000].
        sampling_rate: q, in [1e-300, 1].

    Raises:
        ParameterError: a value is out of its range.
    """
    require_between("epsilon", epsilon, 0.0, _MAX_EPSILON, low_open=True)
    require_between("sampling rate", sampling_rate, _MIN_SAMPLING_RATE, 1.0)
    if sampling_rate == 1:
        return float(epsilon)
    # e^x = 1 + (e^ε − 1)/q is the same mixture with 1/q in place of q.
    base = _log_mixture(epsilon, 1 / sampling_rate)
    for _ in range(64):
        base *= 1 - 2 * ROUNDING
        if base <= _MAX_EPSILON and amplified_epsilon(base, sampling_rate) <= epsilon:
            return base
        base = min(base, _MAX_EPSILON)
    raise ParameterError(f"epsilon is {epsilon!r}; expected one that can be told from 0 in rounding.")


def imperfect_delta(epsilon: float, delta: float, distance: float) -> float:
    """δ of an (ε, δ)-DP mechanism whose output is off by a total variation ``distance``; at most 1.

    Args:
        epsilon: in [0, 1000].
        delta: in [0, 1].
        distance: η, at least 0.
    """
    require_between("epsilon", epsilon, 0.0, math.inf)
    require_between("delta", delta, 0.0, 1.0)
    require_between("distance", distance, 0.0, math.inf)
    if distance == 0:
        return delta
    log_error = math.log(distance) + math.log1p(math.exp(-epsilon)) + epsilon
    return min(1.0, math.nextafter(delta + math.exp(min(log_error, 1.0)) * (1 + ROUNDING), 1.0))


def _log_mixture(epsilon: float, weight: float) -> float:
    """log(1 + w(e^ε − 1)) for w in [1e-300, 1e300], without overflow and without cancellation."""
    if max(epsilon, epsilon + math.log(weight)) < _LOG_LARGEST:
        return math.log1p(weight * math.expm1(epsilon))
    # here w·e^ε is large, for w is at least 1e-300
    return epsilon + math.log(weight) + math.log1p((1 / weight - 1) * math.exp(-epsilon))
