"""What a sequence of noisy releases costs: Rényi accounting for the mechanism as shipped.

The mechanism: Poisson-sample each record with probability q, add up integer vectors of L2 norm
at most Δ, add the discrete Gaussian N_ℤ(0, σ²Δ²) to every coordinate (σ is the noise
multiplier). Adjacency: add or remove one record. Notation: P0 is the output without the record,
P1 the output shifted by its vector, D_α the Rényi divergence, K(α) = (α−1)·D_α the cumulant.

*Reduction.* The other records' lot is drawn alike in both worlds, and exp(K) is jointly convex,
so it is enough to bound D_α((1−q)P0 + qP1 ‖ P0) and D_α(P0 ‖ (1−q)P0 + qP1) for one lot.

*Record added, integer α ≥ 2.* By the binomial theorem

    exp K(α) = E_P0[((1−q) + q·P1/P0)^α] = Σ_k C(α,k) (1−q)^(α−k) q^k · E_P0[(P1/P0)^k],

and E_P0[(P1/P0)^k] = exp((k−1)·D_k(P1‖P0)) ≤ exp(k(k−1)/(2σ²)) for discrete Gaussians on ℤ^d
shifted by an integer vector of norm at most Δ (Canonne, Kamath, Steinke, *The discrete Gaussian
for differential privacy*, NeurIPS 2020, Prop. 5). So the formula that is exact for continuous
noise (Mironov, Talwar, Zhang, *Rényi differential privacy of the sampled Gaussian mechanism*,
2019) is an upper bound for ours. As the binomial weights add up to 1 and k = 0, 1 contribute
nothing beyond them, it is evaluated as log(1 + Σ_{k≥2} C(α,k)(1−q)^(α−k) q^k (e^(k(k−1)/2σ²) − 1)):
positive terms only, so no cancellation when q is small or σ large.

*Record removed.* Mironov, Talwar and Zhang's Theorem 5 shows the other direction to be no
larger whenever an involution that keeps the base measure swaps P0 and P1; x ↦ s − x, with s the
(integer) shift, is such an involution of ℤ^d with the counting measure.

*Between the integers.* For α = n + f with n whole and 0 < f < 1, expand only the n-th power. Under
P0 weighted by (P1/P0)^k, the mean of the remaining factor's f-th power is at most the f-th power
of its mean (Jensen), and with m_k = exp(k(k−1)/(2σ²)) in place of the moments,

    exp K(α) ≤ Σ_k C(n,k) (1−q)^(n−k) q^k · m_k · (1−q + q·m_{k+1}/m_k)^f,   m_{k+1}/m_k = exp(k/σ²).

This may be evaluated with the bounds m_k because it rises in each. It joins the formula above at
f = 0 and f = 1, is never worse than interpolating K (by Hölder), and, unlike the series that
accountants for continuous noise use at fractional orders, it holds for the discrete Gaussian.

*No sampling.* At q = 1, D_α ≤ α/(2σ²) for all real α > 1 (same Prop. 5); as D_α does not fall
with q, this caps the bounds for all q.

*Composition and conversion.* D_α adds up over rounds, each with its own σ and q, when these are
fixed in advance (Mironov 2017). Then, for any α,

    ε = D_α + log((α−1)/α) − (log δ + log α)/(α−1)

(Balle et al., *Hypothesis testing interpretations and Rényi differential privacy*, AISTATS 2020,
Thm 21; Canonne, Kamath, Steinke 2020, Prop. 12); the least over :data:`ORDERS` is reported.
Values are double precision: relative rounding is below 1e-10.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpagent.errors import ParameterError, require_between
from dpagent.privacy.events import SIGMA_RANGE, PrivacyLossEvent

FloatArray = NDArray[np.float64]

#: Integer orders at which the bound is evaluated.
INTEGER_ORDERS: Final[tuple[int, ...]] = (*range(2, 257), 320, 384, 512, 768, 1024)

_TENTHS_UP_TO: Final = 12
#: All orders, rising: the integer ones, and tenths between the integers up to 12.
ORDERS: Final[tuple[float, ...]] = tuple(
    sorted({*map(float, INTEGER_ORDERS), *(i / 10 for i in range(11, 10 * _TENTHS_UP_TO))})
)

_BLOCK: Final = 128  # distinct (σ, q) pairs at a time: keeps temporaries in the cache


class RdpAccountant:
    """Adds up the Rényi divergences of charges, and converts the total to (ε, δ).

    Adjacency: add or remove one record. The state is one number per order.
    """

    def __init__(self) -> None:
        self._rdp: FloatArray = np.zeros(len(ORDERS))

    def compose(self, event: PrivacyLossEvent, *more: PrivacyLossEvent) -> None:
        """Charge the events. Everything is computed before anything is charged."""
        self._rdp = self._rdp + _rdp_of((event, *more)).sum(axis=0)

    def epsilon(self, delta: float) -> float:
        """The ε spent so far, at ``delta`` in (0, 1). 0.0 if nothing was composed."""
        return float(epsilon_from_rdp(self._rdp, delta))

    def epsilon_after(self, events: Sequence[PrivacyLossEvent], delta: float) -> float:
        """What :meth:`epsilon` would become with ``events`` charged as well. Charges nothing."""
        rdp = self._rdp + _rdp_of(events).sum(axis=0) if events else self._rdp
        return float(epsilon_from_rdp(rdp, delta))


def running_epsilon(events: Sequence[PrivacyLossEvent], delta: float) -> FloatArray:
    """The ε spent after each of the events, in order: shape (len(events),), never falling."""
    require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    if not events:
        return np.zeros(0)
    return np.atleast_1d(epsilon_from_rdp(np.cumsum(_rdp_of(events), axis=0), delta))


def epsilon_from_rdp(rdp: FloatArray, delta: float) -> FloatArray | np.float64:
    """Convert Rényi divergences at :data:`ORDERS` to the least ε at ``delta``.

    Args:
        rdp: non-negative, shape (len(ORDERS),) or (T, len(ORDERS)).
        delta: in (0, 1).

    Returns:
        A scalar, or shape (T,); never negative, and 0 where all divergences are 0.

    Raises:
        ParameterError: ``delta`` is out of range, or ``rdp`` has another last axis.
    """
    require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    divergences = np.asarray(rdp, dtype=np.float64)
    if divergences.ndim not in (1, 2) or divergences.shape[-1] != len(ORDERS):
        raise ParameterError(
            f"rdp has shape {divergences.shape}; expected ({len(ORDERS)},) or (T, {len(ORDERS)})."
        )
    if not np.all(divergences >= 0):
        raise ParameterError("rdp has a negative or undefined entry; expected divergences of at least 0.")
    epsilon = np.maximum((divergences + conversion_offsets(np.array(ORDERS), delta)).min(axis=-1), 0.0)
    released = divergences.any(axis=-1)
    return np.where(released, epsilon, 0.0)[()]


def conversion_offsets(orders: FloatArray, delta: float) -> FloatArray:
    """What turns D_α into ε at ``delta``, for each order: log((α−1)/α) − (log δ + log α)/(α−1)."""
    return np.asarray(np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1))


def subsampled_gaussian_rdp(noise_multipliers: ArrayLike, sampling_rates: ArrayLike) -> FloatArray:
    """Rényi divergence bounds of one composition, for each pair of σ and q.

    Args:
        noise_multipliers: scalar or shape (T,), in [1e-6, 1e12].
        sampling_rates: scalar or shape (T,), in (0, 1]; broadcast against the former.

    Returns:
        Shape (T, len(ORDERS)); T is 1 for two scalars.

    Raises:
        ParameterError: a value is out of its range, or the shapes do not broadcast to (T,).
    """
    sigmas = np.asarray(noise_multipliers, dtype=np.float64)
    rates = np.asarray(sampling_rates, dtype=np.float64)
    for sigma in np.unique(sigmas):
        require_between("noise multiplier", float(sigma), *SIGMA_RANGE)
    for rate in np.unique(rates):
        require_between("sampling rate", float(rate), 0.0, 1.0, low_open=True)
    if sigmas.ndim > 1 or rates.ndim > 1 or (sigmas.ndim and rates.ndim and sigmas.shape != rates.shape):
        raise ParameterError(
            f"noise multipliers have shape {sigmas.shape} and sampling rates {rates.shape}; "
            "expected scalars or vectors of one length."
        )
    pairs = np.stack(np.broadcast_arrays(np.atleast_1d(sigmas), np.atleast_1d(rates)), axis=1)
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    rdp = np.empty((len(distinct), len(ORDERS)))
    for rate in np.unique(distinct[:, 1]):
        rows = distinct[:, 1] == rate
        rdp[rows] = cumulants(distinct[rows, 0], float(rate), ORDERS) / (np.array(ORDERS) - 1)
    return rdp[inverse.reshape(-1)]


def cumulants(sigmas: FloatArray, rate: float, orders: Sequence[float]) -> FloatArray:
    """Bounds on K(α) = (α−1)·D_α for noise multipliers (n,) and one q: shape (n, len(orders)).

    The building block of the accountant and of the calibration; arguments are taken as valid.
    """
    unsampled = np.array(orders) * (np.array(orders) - 1) / (2 * sigmas[:, np.newaxis] ** 2)
    if rate == 1.0:
        return np.asarray(unsampled)
    k = np.arange(1, int(max(orders)) + 1, dtype=np.float64)
    sampled = np.empty_like(unsampled)
    for start in range(0, len(sigmas), _BLOCK):
        block = slice(start, start + _BLOCK)
        inverse_variance = sigmas[block, np.newaxis] ** -2.0
        log_moments = (k * (k - 1) / 2) * inverse_variance
        log_excess = _log_expm1(log_moments[:, 1:])
        for column, order in enumerate(orders):
            whole = int(order)
            weights = _log_binomial_weights(whole, rate)
            if order == whole:
                terms = log_excess[:, : whole - 1] + weights[1:]
            else:
                steps = _log_mixture(rate, k[:whole] * inverse_variance)
                terms = _log_expm1(log_moments[:, :whole] + (order - whole) * steps) + weights
            top = terms.max(axis=1, keepdims=True)
            terms -= top
            np.exp(terms, out=terms)
            sampled[block, column] = np.logaddexp(0.0, top[:, 0] + np.log(terms.sum(axis=1)))
    return np.asarray(np.minimum(sampled, unsampled))


def _log_expm1(y: FloatArray) -> FloatArray:
    """log(e^y − 1) for y ≥ 0, without overflow; a y that vanished is replaced by 1e-300."""
    y = np.maximum(y, 1e-300)
    return np.asarray(y + np.log(-np.expm1(-y)))


def _log_mixture(rate: float, z: FloatArray) -> FloatArray:
    """log(1−q + q·e^z) for z ≥ 0, without overflow, and without cancellation for small z."""
    small = np.log1p(rate * np.expm1(np.minimum(z, 1.0)))
    large = np.logaddexp(math.log1p(-rate), math.log(rate) + z)
    return np.asarray(np.where(z < 1.0, small, large))


@lru_cache(maxsize=4 * len(INTEGER_ORDERS))
def _log_binomial_weights(order: int, rate: float) -> FloatArray:
    """log(C(n,k) (1−q)^(n−k) q^k) for k = 1..n; read-only, for it is shared."""
    k = np.arange(1, order + 1)
    factorials = _log_factorials(max(INTEGER_ORDERS))
    weights = (
        factorials[order]
        - factorials[k]
        - factorials[order - k]
        + k * math.log(rate)
        + (order - k) * math.log1p(-rate)
    )
    weights.flags.writeable = False
    return np.asarray(weights)


@lru_cache(maxsize=1)
def _log_factorials(largest: int) -> FloatArray:
    return np.array([math.lgamma(n + 1) for n in range(largest + 1)])


def _rdp_of(events: Iterable[PrivacyLossEvent]) -> FloatArray:
    """Divergences of each event, all its steps together: shape (len(events), len(ORDERS))."""
    charges = tuple(events)
    rdp = subsampled_gaussian_rdp(
        [event.noise_multiplier for event in charges], [event.sampling_rate for event in charges]
    )
    return np.asarray(rdp * np.array([event.steps for event in charges], dtype=np.float64)[:, np.newaxis])
