"""Rényi divergences of one run: of the sampled Gaussian mechanism as shipped, and of pure mechanisms.

The Gaussian mechanism: Poisson-sample each record with probability q, add up integer vectors of L2 norm
at most Δ, add the discrete Gaussian N_ℤ(0, σ²Δ²) to every coordinate (σ is the noise
multiplier). Adjacency: add or remove one record. Notation: P0 is the output without the record,
P1 the output shifted by its vector, D_α the Rényi divergence, K(α) = (α−1)·D_α the cumulant.

*Reduction.* The other records' lot and all random rounding is drawn alike in both worlds, and exp(K)
is jointly convex, so it is enough to bound D_α((1−q)P0 + qP1 ‖ P0) and D_α(P0 ‖ (1−q)P0 + qP1) for
one lot and one rounding.

*Record added, integer α ≥ 2.* By the binomial theorem

    exp K(α) = E_P0[((1−q) + q·P1/P0)^α] = Σ_k C(α,k) (1−q)^(α−k) q^k · E_P0[(P1/P0)^k],

and E_P0[(P1/P0)^k] = exp((k−1)·D_k(P1‖P0)) ≤ exp(k(k−1)/(2σ²)) for discrete Gaussians on ℤ^d
shifted by an integer vector of norm at most Δ (Canonne, Kamath, Steinke, *The discrete Gaussian
for differential privacy*, NeurIPS 2020, Prop. 5). So the formula that is exact for continuous
noise (Mironov, Talwar, Zhang, *Rényi differential privacy of the sampled Gaussian mechanism*,
2019) is an upper bound for ours. As the binomial weights add up to 1 and k = 0, 1 contribute
nothing beyond them, it is evaluated as log(1 + Σ_{k≥2} C(α,k)(1−q)^(α−k) q^k (e^(k(k−1)/2σ²) − 1)):
positive terms only, so no cancellation when q is small or σ large.

*Record removed.* The other direction is no larger, for any real α > 1 (for continuous noise: Mironov,
Talwar and Zhang's Theorem 5). With s the (integer) shift, x ↦ s − x swaps P0 and P1. Where it leaves
x alone, P0 = P1. Of any other two points swapped, let a and b be the probabilities under P0, so b
and a under P1, and u and v those of the mixture: u + v = a + b, and u lies between a and b. Scaled
to a + b = 2 and with a the greater, a, b = 1 ± tanh i and u, v = 1 ± tanh j, where |j| ≤ i; the claim for
these two, u^α·a^(1−α) + v^α·b^(1−α) ≥ a^α·u^(1−α) + b^α·v^(1−α), becomes, as 1 ± tanh i = e^±i/cosh i,

    cosh(m − βw)·cosh^β(m + w) ≥ cosh(m + βw)·cosh^β(m − w),   β = 2α−1, m = (i+j)/2, w = (i−j)/2.

That is h(β) ≤ β·h(1) for h(β) = log cosh(m + βw) − log cosh(m − βw), which holds for β ≥ 1 as h(0) = 0
and h is concave: m, w ≥ 0, so h″ = w²·(cosh^−2(m + βw) − cosh^−2(m − βw)) ≤ 0.

*Between the integers.* For α = n + f with n whole and 0 < f < 1, expand only the n-th power. Under
P0 weighted by (P1/P0)^k, the mean of the remaining factor's f-th power is at most the f-th power
of its mean (Jensen), and with m_k = exp(k(k−1)/(2σ²)) in place of the moments,

    exp K(α) ≤ Σ_k C(n,k) (1−q)^(n−k) q^k · m_k · (1−q + q·m_{k+1}/m_k)^f,   m_{k+1}/m_k = exp(k/σ²).

This may be evaluated with the bounds m_k because it rises in each. It joins the formula above at
f = 0 and f = 1, is never worse than interpolating K (by Hölder), and, unlike the series that
accountants for continuous noise use at fractional orders, it holds for the discrete Gaussian.

*No sampling.* At q = 1, D_α ≤ α/(2σ²) for all real α > 1 (same Prop. 5); as D_α does not fall
with q, this caps the bounds for all q.

*Pure mechanisms.* If e^−ε ≤ P/Q ≤ e^ε, then X = P/Q has mean 1 under Q, and
by convexity of x^α, E_Q[X^α] is greatest when X is e^ε with probability 1/(1+e^ε) and e^−ε
otherwise, which is randomised response. So, exactly for that mechanism and as a bound for any,

    K(α) = (α−1)·D_α = log[(e^(αε) + e^((1−α)ε))/(1+e^ε)] = log[cosh((α−½)ε)/cosh(ε/2)]

(the bound of Bun and Steinke's Prop. 3.3, in another form). It is evaluated as
log(1 + (e^(αε) − 1)·(1 − e^(−(α−1)ε))/(1+e^ε)), free of cancellation.

*Evaluation.* In the sums over k, the order enters through C(n,k) and a factor (1−q)^n only, and σ
and q through the rest; so all orders for all rounds are one product of two matrices, and no
exponential is taken for a pair of both. Entries are scaled by the middle of a block of rounds,
kept so small that within it no entry is beyond e^±300, and weights below e^−700 of the greatest
are raised to that, which adds less than e^−90 of the sum; so is K itself, that nothing is free. Values
are double precision: relative rounding is below 1e-10, and conversion allows for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpagent.errors import require_between, require_positive
from dpagent.privacy.events import MAX_EVENT_EPSILON

FloatArray = NDArray[np.float64]

#: Integer orders at which the bound is evaluated.
INTEGER_ORDERS: Final[tuple[int, ...]] = (*range(2, 257), 320, 384, 512, 768, 1024)

_TENTHS_UP_TO: Final = 12
#: All orders, rising: the integer ones, and tenths between the integers up to 12.
ORDERS: Final[tuple[float, ...]] = tuple(
    sorted({*map(float, INTEGER_ORDERS), *(i / 10 for i in range(11, 10 * _TENTHS_UP_TO))})
)

_BLOCK: Final = 128  # distinct (σ, q) pairs at a time: keeps temporaries in the cache
_REACH: Final = 300.0  # greatest exponent of a scaled entry
_FLOOR: Final = -700.0  # least exponent of a weight or K: below it, e^x takes long, and then vanishes
_UNTHREADED: Final = 2**18  # multiplications in one product of matrices
_TERMS_PER_BLOCK: Final = 30_000  # how many terms are added up in the time that one more block costs


def cumulants(sigmas: FloatArray, rate: float | FloatArray, orders: Sequence[float]) -> FloatArray:
    """Bounds on K(α) = (α−1)·D_α for noise multipliers (n,): shape (n, len(orders)).

    The building block of the accountant and of the calibration; arguments are taken as valid.

    Args:
        sigmas: noise multipliers, shape (n,).
        rate: sampling rate, one for all or shape (n,).
        orders: real, in [1.01, 1024].
    """
    alphas = np.array(orders, dtype=np.float64)
    rates = np.broadcast_to(np.asarray(rate, dtype=np.float64), sigmas.shape)
    bounds = (alphas * (alphas - 1) / 2) * (sigmas**-2.0)[:, np.newaxis]
    sampled = np.flatnonzero(rates < 1.0)
    if sampled.size:
        sums = np.empty((sampled.size, alphas.size))
        pairs = _Pairs(sigmas[sampled] ** -2.0, rates[sampled])
        for groups in _grouped(tuple(orders)):
            for rows, log_sums in pairs.blocks(groups):
                for group in groups:
                    sums[rows[:, np.newaxis], group.columns] = log_sums(group)
        # log(1 + e^x); beyond 40 that is x
        np.maximum(sums, _FLOOR, out=sums)
        logs = np.minimum(sums, 40.0)
        sums -= logs
        sums += np.log1p(np.exp(logs, out=logs), out=logs)
        bounds[sampled] = np.minimum(bounds[sampled], sums)
    return np.asarray(bounds)


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
    rows = np.maximum(values, 1e-300)[:, np.newaxis]  # for logarithms of 0
    log_excess = (
        alphas * rows
        + np.log(-np.expm1(-alphas * rows))
        + np.log(-np.expm1(-(alphas - 1) * rows))
        - np.logaddexp(0.0, rows)
    )
    cumulants = np.maximum(np.logaddexp(0.0, log_excess), 1e-300)  # a small cost is never none
    return np.asarray(np.where(values[:, np.newaxis] > 0, cumulants, 0.0))


class _Group(NamedTuple):
    """Orders n + f that differ in n only."""

    columns: NDArray[np.intp]  # their places among all
    whole: FloatArray  # n, shape (orders,)
    fraction: float  # f
    log_binomials: FloatArray  # log C(n,k) for k = 1..largest, −∞ beyond n, shape (orders, largest)


@lru_cache(maxsize=32)
def _grouped(orders: tuple[float, ...]) -> tuple[tuple[_Group, ...], ...]:
    """Groups of orders of one size: up to 32, then from one power of two to the next."""
    bands: dict[int, dict[float, list[int]]] = {}
    for place, order in enumerate(orders):
        band = max(int(order) - 1, 31).bit_length()
        bands.setdefault(band, {}).setdefault(round(order % 1.0, 12), []).append(place)
    return tuple(
        tuple(_group(places, orders) for places in fractions.values()) for fractions in bands.values()
    )


def _group(places: list[int], orders: tuple[float, ...]) -> _Group:
    whole = [int(orders[place]) for place in places]
    fraction = max(orders[place] - int(orders[place]) for place in places)  # alike but for rounding
    factorials = _log_factorials(max(whole))
    n, k = np.array(whole)[:, np.newaxis], np.arange(1, max(whole) + 1)
    logs = factorials[n] - factorials[k] - factorials[np.maximum(n - k, 0)]
    logs[k > n] = -np.inf
    return _Group(np.array(places), np.array(whole, dtype=np.float64), fraction, logs)


class _Pairs:
    """Pairs of 1/σ² and q < 1. With x = 1/σ² and y_k = k(k−1)x/2 + f·log(1−q + q·e^(kx)), a sum is

    e^K − 1 = (1−q)^n · Σ_k C(n,k) · (q/(1−q))^k · (e^(y_k) − 1),  for k from 1 to n.
    """

    def __init__(self, precisions: FloatArray, rates: FloatArray) -> None:
        self._precisions = precisions
        self._rates = rates
        self._log_odds = np.log(rates) - np.log1p(-rates)

    def blocks(
        self, groups: tuple[_Group, ...]
    ) -> Iterator[tuple[NDArray[np.intp], Callable[[_Group], FloatArray]]]:
        """Places of some pairs, and a function from a group of orders to the logarithms of their sums.

        Pairs are cut into blocks in which no scaled entry is beyond e^±_REACH: as (e^b − 1)/(e^a − 1)
        ≤ (b/a)·e^(b−a) for b ≥ a, the spreads below bound its exponent for all k up to ``largest``
        and all f < 1. Where that would take many blocks for few orders, terms are added one by one.
        """
        largest = max(group.log_binomials.shape[1] for group in groups)
        terms = sum(group.log_binomials.size for group in groups)
        stack = [np.arange(self._rates.size)]
        while stack:
            rows = stack.pop()
            block = _Pairs(self._precisions[rows], self._rates[rows])
            low, high = float(block._precisions.min()), float(block._precisions.max())
            by_noise = (largest + 3) ** 2 / 4 * (high - low) + math.log(high / low)
            by_rate = (largest + 3) / 2 * float(np.ptp(block._log_odds))
            blocks = min((by_noise + by_rate) / _REACH, rows.size)
            if rows.size == 1 or (rows.size <= _BLOCK and rows.size * terms <= blocks * _TERMS_PER_BLOCK):
                yield rows, block._single_sums
            elif rows.size <= _BLOCK and blocks <= 1:
                yield rows, block._scaled_sums
            else:
                by = block._precisions if by_noise >= by_rate else block._log_odds
                rows = rows[np.argsort(by, kind="stable")]
                stack += [rows[rows.size // 2 :], rows[: rows.size // 2]]

    def _scaled_sums(self, group: _Group) -> FloatArray:
        """For pairs that are alike: a product of matrices, scaled by the middle of the log odds and y."""
        k, y = self._exponents(group)
        middle = (y.min(axis=0) + y.max(axis=0)) / 2
        # Beyond 40, e^y − 1 is e^y in double precision; y rises with k.
        plain = int(np.searchsorted(y.min(axis=0), 40.0))
        y[:, plain:] -= middle[plain:]
        np.exp(y[:, plain:], out=y[:, plain:])
        np.expm1(y[:, :plain], out=y[:, :plain])
        y[:, :plain] *= 1 / np.expm1(middle[:plain])
        log_odds = (self._log_odds.min() + self._log_odds.max()) / 2
        if (shift := self._log_odds - log_odds).any():
            y *= np.exp(k * shift[:, np.newaxis])
        weights = group.log_binomials + (middle + np.log(-np.expm1(-middle)) + k * log_odds)
        top = weights.max(axis=1)
        weights -= top[:, np.newaxis]
        np.exp(np.maximum(weights, _FLOOR, out=weights), out=weights)
        return np.asarray(np.log(_product(y, weights)) + top + self._log_scale(group))

    def _single_sums(self, group: _Group) -> FloatArray:
        """For any pairs: term by term."""
        k, y = self._exponents(group)
        y += np.log(-np.expm1(-y)) + k * self._log_odds[:, np.newaxis]
        terms = y[:, np.newaxis] + group.log_binomials
        top = terms.max(axis=-1)
        terms -= top[..., np.newaxis]
        np.exp(np.maximum(terms, _FLOOR, out=terms), out=terms)
        return np.asarray(np.log(terms.sum(axis=-1)) + top + self._log_scale(group))

    def _exponents(self, group: _Group) -> tuple[FloatArray, FloatArray]:
        """k from 1, and y_k, shape (pairs, largest n)."""
        k, precisions = np.arange(1.0, group.log_binomials.shape[1] + 1), self._precisions[:, np.newaxis]
        y = (k * (k - 1) / 2) * precisions
        if group.fraction:
            y += group.fraction * _log_mixture(self._rates[:, np.newaxis], k * precisions)
        return k, np.maximum(y, 1e-300, out=y)  # for what vanished

    def _log_scale(self, group: _Group) -> FloatArray:
        return np.asarray(group.whole * np.log1p(-self._rates)[:, np.newaxis])


def _product(left: FloatArray, right: FloatArray) -> FloatArray:
    """left @ right.T, in pieces below the size at which OpenBLAS takes threads.

    Threads gain nothing here, and where the cores are busy they wait for each other.
    """
    if len(right) == 1:
        return np.asarray((left * right).sum(axis=1, keepdims=True))
    rows = max(4, _UNTHREADED // right.size)
    pieces = np.array_split(left, math.ceil(len(left) / rows))
    return np.concatenate([piece @ right.T for piece in pieces])


def _log_mixture(rate: FloatArray, z: FloatArray) -> FloatArray:
    """log(1−q + q·e^z) for z ≥ 0, without overflow, and without cancellation for small z."""
    small = np.log1p(rate * np.expm1(np.minimum(z, 1.0)))
    large = np.logaddexp(np.log1p(-rate), np.log(rate) + z)
    return np.asarray(np.where(z < 1.0, small, large))


@lru_cache(maxsize=32)
def _log_factorials(largest: int) -> FloatArray:
    return np.array([math.lgamma(n + 1) for n in range(largest + 1)])
