"""Accounting by Rényi divergences.

Adjacency: add or remove one record. D_α is the Rényi divergence of order α between the outputs
with and without it, in either direction.

*Gaussian mechanisms.* :mod:`~dpagent.privacy.accounting.divergences` bounds D_α of one run, sampling
included.

*Pure mechanisms.* Those known to be (ε, 0)-DP are covered by
:func:`~dpagent.privacy.accounting.divergences.pure_cumulants`. With δ > 0 no D_α of order above 1 need be
finite, so such mechanisms are refused here.

*Composition and conversion.* D_α adds up over runs, each of its own mechanism, when these are
fixed in advance (Mironov 2017; if not, see :mod:`~dpagent.privacy.accounting.filters`). Then, for any α,

    ε = D_α + log((α−1)/α) − (log δ + log α)/(α−1)

(Balle et al., *Hypothesis testing interpretations and Rényi differential privacy*, AISTATS 2020,
Thm 21; Canonne, Kamath, Steinke 2020, Prop. 12); the least over
:data:`~dpagent.privacy.accounting.divergences.ORDERS` is reported and, where all mechanisms are pure, at most
the sum of their ε (basic composition, the order ∞).

*Rounding.* Before conversion, sums are raised by a relative 2⁻³², which covers the rounding of the bounds
(1e-10) and of adding up a million (1.1e-10), and offsets by 2⁻⁴⁸ of their terms. Sums of pure ε are
rounded up.

>>> from dpagent.privacy.events import GaussianEvent, poisson_sampled
>>> accountant = RdpAccountant()
>>> accountant.compose(poisson_sampled(GaussianEvent(2.25), 0.1, count=100))
>>> round(accountant.epsilon(delta=1e-5), 3)
2.205
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from dpagent.errors import ParameterError, require_between
from dpagent.privacy.accounting.accountant import Accountant, FloatArray
from dpagent.privacy.accounting.composition import running_sums
from dpagent.privacy.accounting.divergences import ORDERS, cumulants, pure_cumulants
from dpagent.privacy.accounting.normal_form import Component, Runs, SampledGaussian, UnsupportedEventError
from dpagent.privacy.events import ApproximateEvent, NonPrivateEvent
from dpagent.privacy.ranges import AccountantName

_CHUNK: Final = 4096  # charges priced at a time
_ORDER_RANGE: Final = (1.01, 1024.0)
_ROUNDING: Final = 2.0**-32
_OFFSET_ROUNDING: Final = 2.0**-48


class RdpAccountant(Accountant):
    """Adds up Rényi divergences of the Gaussian mechanism and of pure ones, at all orders."""

    name: ClassVar[AccountantName] = "rdp"
    least_delta: ClassVar[float] = sys.float_info.min

    def _require_supported(self, mechanism: Component) -> None:
        require_divergence(mechanism)

    def _epsilon(self, charges: Sequence[Runs], delta: float) -> float:
        return float(rdp_composition(charges, delta)[-1])

    def _running_epsilon(self, charges: Sequence[Runs], delta: float) -> FloatArray:
        return rdp_composition(charges, delta)


def rdp_composition(charges: Sequence[Runs], delta: float) -> FloatArray:
    """The ε after each of the charges, in order: shape (len(charges),).

    Raises:
        UnsupportedEventError: a mechanism has δ > 0.
        ParameterError: ``delta`` is not in (0, 1).
    """
    spent, so_far = np.zeros(len(charges)), np.zeros(len(ORDERS))
    for start in range(0, len(charges), _CHUNK):
        rdp = renyi_divergences(charges[start : start + _CHUNK])
        rdp[0] += so_far
        np.cumsum(rdp, axis=0, out=rdp)
        spent[start : start + _CHUNK] = epsilon_from_rdp(rdp, delta)
        so_far = rdp[-1]
    pure = [(part.epsilon, count) for part, count in charges if isinstance(part, ApproximateEvent)]
    return np.minimum(spent, [*running_sums(pure)]) if len(pure) == len(charges) else spent


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
    offsets = conversion_offsets(np.array(ORDERS), delta)
    epsilon = np.maximum((divergences * (1 + _ROUNDING) + offsets).min(axis=-1), 0.0)
    released = divergences.any(axis=-1)
    return np.where(released, epsilon, 0.0)[()]


def conversion_offsets(orders: FloatArray, delta: float) -> FloatArray:
    """Offsets from D_α to ε at ``delta``: log((α−1)/α) − (log δ + log α)/(α−1), rounded up. For α > 1."""
    log_delta, log_orders = math.log(delta), np.log(orders)
    terms = 1 + (log_orders - log_delta) / (orders - 1)  # log(α/(α−1)) < 1 + log(α)/(α−1)
    return np.asarray(
        np.log1p(-1 / orders) - (log_delta + log_orders) / (orders - 1) + _OFFSET_ROUNDING * terms
    )


def renyi_divergences(charges: Sequence[Runs], orders: Sequence[float] = ORDERS) -> FloatArray:
    """Bounds on D_α of each charge, all its runs together: shape (len(charges), len(orders)).

    Args:
        charges: mechanisms and the numbers of their runs.
        orders: real, in [1.01, 1024].

    Raises:
        UnsupportedEventError: a mechanism has δ > 0.
        ParameterError: an order is out of range.
    """
    for order in orders:
        require_between("order", order, *_ORDER_RANGE)
    gaussian: dict[int, tuple[float, float]] = {}
    pure: dict[int, float] = {}
    for row, (mechanism, _) in enumerate(charges):
        require_divergence(mechanism)
        if isinstance(mechanism, SampledGaussian):
            gaussian[row] = (mechanism.noise_multiplier, mechanism.sampling_rate)
        elif isinstance(mechanism, ApproximateEvent):
            pure[row] = mechanism.epsilon
    bounds = np.empty((len(charges), len(orders)))
    if gaussian:
        pairs = np.array([*gaussian.values()], dtype=np.float64)
        distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
        bounds[list(gaussian)] = cumulants(distinct[:, 0], distinct[:, 1], orders)[inverse.reshape(-1)]
    if pure:
        bounds[list(pure)] = pure_cumulants([*pure.values()], orders)
    bounds *= np.array([count for _, count in charges], dtype=np.float64)[:, np.newaxis]
    bounds /= np.array(orders) - 1
    return bounds


def require_divergence(mechanism: Component) -> None:
    """Raise :class:`UnsupportedEventError` if a mechanism need not have any Rényi divergence."""
    if isinstance(mechanism, NonPrivateEvent):
        raise UnsupportedEventError("an event is a NonPrivateEvent; it has no Rényi divergence.")
    if isinstance(mechanism, ApproximateEvent) and mechanism.delta > 0:
        raise UnsupportedEventError(
            f"delta of an ApproximateEvent is {mechanism.delta!r}; expected 0, as a mechanism with δ > 0 may "
            "have no Rényi divergence. Use the PLD accountant for it."
        )
