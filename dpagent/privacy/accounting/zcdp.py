"""Zero-concentrated differential privacy (zCDP): one number ρ a mechanism, which adds up.

Not wired: no program imports this yet.

ρ-zCDP says D_α ≤ ρα for all real α > 1 (Bun, Steinke, *Concentrated differential privacy*, TCC 2016). For the
Gaussian, discrete or not, ρ = 1/(2σ²) (Canonne, Kamath, Steinke, NeurIPS 2020, Thm 14).

*Pure mechanisms.* With the cumulant K of :func:`~dpagent.privacy.accounting.divergences.pure_cumulants`:
u ↦ log cosh √u is concave, for its derivative tanh(√u)/(2√u) falls.
Its tangent at u = ε²/4 is above it at u = (α−½)²ε², further right by α(α−1)ε²:

    K(α) ≤ α(α−1)·ε·tanh(ε/2),   so   ρ = ε·tanh(ε/2) ≤ ε²/2.

Departure: Bun and Steinke's Prop. 1.4 has ε²/2; this is less, and the least possible, as for
randomised response D_α tends to ε·tanh(ε/2) when α falls to 1.

*Conversion to (ε, δ).* For any α, Prop. 12 of Canonne, Kamath and Steinke gives

    log δ = (α−1)(ρα − ε) − log(α−1) + α·log(1 − 1/α).

As every α gives a valid δ, how well the best one is searched for affects no guarantee. The right
side is convex in α (its second derivative is 2ρ + 1/(α(α−1))), so the ε and ρ
that it is solved for rise or fall to a single peak, and golden-section search finds it.

*Rounding.* Conversions are moved to the safe side by 2⁻⁴⁰ of the terms that they are made of, a thousand
times the rounding of these.

>>> round(zcdp_epsilon(gaussian_rho(2.0), delta=1e-5), 2)
2.17
>>> round(zcdp_rho(epsilon=2.0, delta=1e-5), 3)
0.108
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from dpagent.errors import require_between, require_positive
from dpagent.privacy.events import MAX_EVENT_EPSILON, SIGMA_RANGE

#: Values of ρ that are converted; the greatest is that of the least noise multiplier.
MAX_RHO: Final = 1e12

# Where log(α−1) is searched: at either end α·ρ or log(δ)/(α−1) is out of all proportion.
_LOG_ALPHA_LESS_1: Final = (-45.0, 45.0)
_GOLDEN: Final = (math.sqrt(5) - 1) / 2
_SEARCH_STEPS: Final = 80  # narrows the interval to 90·0.618^80, about 2e-15
_ROUNDING: Final = 2.0**-40


def gaussian_rho(noise_multiplier: float) -> float:
    """ρ of the discrete or continuous Gaussian without sampling, σ in [1e-6, 1e12]: 1/(2σ²)."""
    require_between("noise multiplier", noise_multiplier, *SIGMA_RANGE)
    return 0.5 / noise_multiplier**2


def pure_rho(epsilon: float) -> float:
    """The least ρ that covers every (ε, 0)-DP mechanism, ε in [0, 1000]: ε·tanh(ε/2) ≤ ε²/2."""
    require_between("epsilon", epsilon, 0.0, MAX_EVENT_EPSILON)
    return epsilon * math.tanh(epsilon / 2)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """The least ε at which ρ-zCDP is proven to give (ε, δ)-DP; 0 for ρ = 0.

    Args:
        rho: in [0, 1e12].
        delta: in (0, 1).
    """
    require_between("rho", rho, 0.0, MAX_RHO)
    log_delta = math.log(require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True))
    if rho == 0:
        return 0.0

    def epsilon(u: float) -> float:
        less_1, log_alpha = math.exp(u), math.log1p(math.exp(u))
        divergence, gain = (1 + less_1) * rho, math.log1p(1 / less_1)
        rounding = _ROUNDING * (divergence + gain + (log_alpha - log_delta) / less_1)
        return divergence - gain - (log_delta + log_alpha) / less_1 + rounding

    return max(0.0, epsilon(_argmin(epsilon)))


def zcdp_rho(epsilon: float, delta: float) -> float:
    """The greatest ρ that is proven to give (ε, δ)-DP: the inverse of :func:`zcdp_epsilon`.

    Args:
        epsilon: in (0, 1e12].
        delta: in (0, 1).
    """
    require_positive("epsilon", epsilon, maximum=MAX_RHO)
    log_delta = math.log(require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True))

    def negative_rho(u: float) -> float:
        less_1, log_alpha = math.exp(u), math.log1p(math.exp(u))
        gain = epsilon + math.log1p(1 / less_1)
        rounding = _ROUNDING * (gain + (log_alpha - log_delta) / less_1)
        return (rounding - gain - (log_delta + log_alpha) / less_1) / (1 + less_1)

    return -negative_rho(_argmin(negative_rho))


def _argmin(f: Callable[[float], float]) -> float:
    """Where a function of log(α−1) that falls and then rises is least, by golden-section search."""
    low, high = _LOG_ALPHA_LESS_1
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = f(left), f(right)
    for _ in range(_SEARCH_STEPS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = f(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = f(right)
    return left if at_left <= at_right else right
