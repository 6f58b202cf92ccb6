"""Adding up privacy by hand: pure ε, zero-concentrated ρ, and groups.

For mechanisms that state one number, and for checking by hand what the accountants say. Costs
hold for whatever adjacency their mechanisms have.

*Basic composition.* ε and δ add up, also when mechanisms and parameters are chosen in the light
of earlier outputs (Dwork, Rothblum, Vadhan, FOCS 2010; Rogers, Roth, Ullman, Vadhan, NeurIPS 2016).

*Groups.* Between data sets that differ in n units lie n steps of one, so for an event S,
P_0(S) ≤ e^ε·P_1(S) + δ ≤ … ≤ e^(nε)·P_n(S) + δ·(1 + e^ε + … + e^((n−1)ε)); for ρ-zCDP it is n²·ρ
(Bun, Steinke, *Concentrated differential privacy*, TCC 2016, Prop. 1.9).

*Pure mechanisms in Rényi divergence.* If e^−ε ≤ P/Q ≤ e^ε, then X = P/Q has mean 1 under Q, and
by convexity of x^α, E_Q[X^α] is greatest when X is e^ε with probability 1/(1+e^ε) and e^−ε
otherwise, which is randomised response. So, exactly for that mechanism and as a bound for any,

    K(α) = (α−1)·D_α = log[(e^(αε) + e^((1−α)ε))/(1+e^ε)] = log[cosh((α−½)ε)/cosh(ε/2)]

(the bound of Bun and Steinke's Prop. 3.3, in another form). It is evaluated as
log(1 + (e^(αε) − 1)·(1 − e^(−(α−1)ε))/(1+e^ε)), free of cancellation.

*Pure mechanisms in zCDP.* u ↦ log cosh √u is concave, for its derivative tanh(√u)/(2√u) falls.
Its tangent at u = ε²/4 is above it at u = (α−½)²ε², further right by α(α−1)ε²:

    K(α) ≤ α(α−1)·ε·tanh(ε/2),   so   ρ = ε·tanh(ε/2) ≤ ε²/2.

Departure: Bun and Steinke's Prop. 1.4 has ε²/2; this is less, and the least possible, as for
randomised response D_α tends to ε·tanh(ε/2) when α falls to 1.

*zCDP to (ε, δ).* ρ-zCDP says D_α ≤ ρα for all real α > 1 (for the Gaussian, discrete or not,
ρ = 1/(2σ²); Canonne, Kamath, Steinke, NeurIPS 2020, Thm 14). For any α, their Prop. 12 gives

    log δ = (α−1)(ρα − ε) − log(α−1) + α·log(1 − 1/α).

As every α gives a valid δ, how well the best one is searched for affects no guarantee. The right
side is convex in α (its second derivative is 2ρ + 1/(α(α−1))), so the ε and ρ
that it is solved for rise or fall to a single peak, and golden-section search finds it.

*Sampling:* see :mod:`~dpagent.privacy.accounting.amplification`.

*Rounding.* Sums of ε, δ and ρ are exact, and then rounded up. Conversions and group δ are moved to the
safe side by 2⁻⁴⁰ of the terms that they are made of, a thousand times the rounding of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpagent.errors import ParameterError, require_between, require_count, require_positive
from dpagent.privacy.accounting.normal_form import charge_of
from dpagent.privacy.events import MAX_COUNT, MAX_EVENT_EPSILON, SIGMA_RANGE, ApproximateEvent, Event

#: Values of ρ that are converted; the greatest is that of the least noise multiplier.
MAX_RHO: Final = 1e12

# Where log(α−1) is searched: at either end α·ρ or log(δ)/(α−1) is out of all proportion.
_LOG_ALPHA_LESS_1: Final = (-45.0, 45.0)
_GOLDEN: Final = (math.sqrt(5) - 1) / 2
_SEARCH_STEPS: Final = 80  # narrows the interval to 90·0.618^80, about 2e-15
_ROUNDING: Final = 2.0**-40
_PARTS: Final = 2**1074  # every double is a whole number of such parts of 1


def composed(*events: Event) -> ApproximateEvent:
    """Basic composition of (ε, δ)-DP events, sampled or not, as one event.

    >>> from dpagent.privacy.events import SelfComposedEvent
    >>> composed(SelfComposedEvent(ApproximateEvent(0.25), 4), ApproximateEvent(0.5, 1e-6))
    ApproximateEvent(epsilon=1.5, delta=1e-06)

    Raises:
        ParameterError: there is none, one is a Gaussian, or a sum leaves the range of an event's ε or δ.
    """
    charges = [charge_of(event) for event in events]
    parts = [(part, count) for part, count in charges if isinstance(part, ApproximateEvent)]
    if not parts or len(parts) < len(charges):
        raise ParameterError(f"events are {events!r}; expected at least one, all of them (ε, δ)-DP.")
    return ApproximateEvent(
        exact_sum((part.epsilon, count) for part, count in parts),
        exact_sum((part.delta, count) for part, count in parts),
    )


def exact_sum(terms: Iterable[tuple[float, int]]) -> float:
    """Σ value·count of values and counts of at least 0: the least double not below the exact sum."""
    return max(running_sums(terms), default=0.0)  # the last, as no term is negative


def running_sums(terms: Iterable[tuple[float, int]]) -> Iterator[float]:
    """The sums Σ value·count after each term: the least doubles not below the exact sums."""
    parts = 0
    for value, count in terms:
        numerator, denominator = value.as_integer_ratio()
        parts += numerator * count * (_PARTS // denominator)
        nearest = parts / _PARTS
        numerator, denominator = nearest.as_integer_ratio()
        below = numerator * (_PARTS // denominator) < parts
        yield math.nextafter(nearest, math.inf) if below else nearest


def group_event(event: ApproximateEvent, size: int) -> ApproximateEvent:
    """What an event means for a group of ``size`` units, at least 1.

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


def pure_cumulants(epsilons: ArrayLike, orders: Sequence[float]) -> NDArray[np.float64]:
    """Bounds on K(α) = (α−1)·D_α of (ε, 0)-DP mechanisms: shape (n, len(orders)).

    Args:
        epsilons: shape (n,), each in [0, 1000].
        orders: real, above 1.

    Raises:
        ParameterError: a value is out of its range.
    """
    values = np.atleast_1d(np.asarray(epsilons, dtype=np.float64))
    alphas = np.asarray(orders, dtype=np.float64)
    for value in values:
        require_between("epsilon", float(value), 0.0, MAX_EVENT_EPSILON)
    for order in alphas:
        require_positive("order less 1", float(order) - 1)
    rows = np.maximum(values, 1e-300)[:, np.newaxis]  # logarithms of what vanishes
    log_excess = (
        alphas * rows
        + np.log(-np.expm1(-alphas * rows))
        + np.log(-np.expm1(-(alphas - 1) * rows))
        - np.logaddexp(0.0, rows)
    )
    cumulants = np.maximum(np.logaddexp(0.0, log_excess), 1e-300)  # what costs little costs something
    return np.asarray(np.where(values[:, np.newaxis] > 0, cumulants, 0.0))


def gaussian_rho(noise_multiplier: float) -> float:
    """ρ of the discrete or continuous Gaussian without sampling, σ in [1e-6, 1e12]: 1/(2σ²)."""
    require_between("noise multiplier", noise_multiplier, *SIGMA_RANGE)
    return 0.5 / noise_multiplier**2


def pure_rho(epsilon: float) -> float:
    """The least ρ that covers every (ε, 0)-DP mechanism, ε in [0, 1000]: ε·tanh(ε/2) ≤ ε²/2."""
    require_between("epsilon", epsilon, 0.0, MAX_EVENT_EPSILON)
    return epsilon * math.tanh(epsilon / 2)


def composed_rho(rhos: Iterable[float]) -> float:
    """ρ of the composition, also of mechanisms chosen adaptively: the sum.

    Raises:
        ParameterError: a ρ, or the sum, is not in [0, 1e12].
    """
    total = exact_sum((require_between("rho", rho, 0.0, MAX_RHO), 1) for rho in rhos)
    return require_between("sum of rho", total, 0.0, MAX_RHO)


def group_rho(rho: float, size: int) -> float:
    """ρ for a group of ``size`` units, at least 1: n²·ρ."""
    require_between("rho", rho, 0.0, MAX_RHO)
    squared = require_count("group size", size, maximum=MAX_COUNT) ** 2
    return require_between("rho of the group", rho * squared, 0.0, MAX_RHO)


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


def zcdp_delta(rho: float, epsilon: float) -> float:
    """The least δ at which ρ-zCDP is proven to give (ε, δ)-DP, at most 1; 0 for ρ = 0.

    Args:
        rho: in [0, 1e12].
        epsilon: in [0, 1e12].
    """
    require_between("rho", rho, 0.0, MAX_RHO)
    require_between("epsilon", epsilon, 0.0, MAX_RHO)
    if rho == 0:
        return 0.0

    def log_delta(u: float) -> float:
        less_1 = math.exp(u)
        divergence, gain = (1 + less_1) * rho, (1 + less_1) * math.log1p(1 / less_1)
        rounding = _ROUNDING * (less_1 * (divergence + epsilon) + abs(u) + gain)
        return less_1 * (divergence - epsilon) - u - gain + rounding

    return math.nextafter(math.exp(min(0.0, log_delta(_argmin(log_delta)))), 1.0)  # not 0


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


def _log_expm1(x: float) -> float:
    """log(e^x − 1) for x > 0, without overflow."""
    return x + math.log(-math.expm1(-x))
