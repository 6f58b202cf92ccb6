"""The price of the best of several runs on the same records, where the number of runs is drawn at random.

A run Q has an output with a score: a model, and its accuracy. A *selection* A draws a number of runs K,
independently of the records, runs Q so often, each time with fresh randomness, and gives the best run's
output alone; the others, and K, stay secret. Which setting a run has is part of Q: it is drawn, independently
of the records, from settings that were fixed before (:func:`worst_of`). Papernot and Steinke, *Hyperparameter
tuning with Rényi differential privacy*, ICLR 2022, bound the Rényi divergences of A by those of Q. What
follows is their argument, with our constants.

**One lemma.** Let outputs be ordered by score, ties broken by any fixed order, and let f(x) = E[x^K]. Then
A is at most y with probability f(Q(≤ y)), so A(y) = Q(y)·E[f′(X)] for X uniform between Q(< y) and Q(≤ y).
Write Q′, X′, A′ for a neighbouring data set, X and X′ at the same place of their intervals. As
(a, b) ↦ a^λ·b^(1−λ) is convex, for each order λ > 1

    Σ_y A(y)^λ·A′(y)^(1−λ) ≤ Σ_y Q(y)^λ·Q′(y)^(1−λ) · E[f′(X)^λ·f′(X′)^(1−λ)],

and what K = 0 leaves adds P(K = 0). X and X′ are the probabilities of one event under Q and Q′ (of
outputs below y, and of y with a coin), so they are as close as Q and Q′ make any event's.

**Truncated negative binomial** with η > −1 and γ in (0, 1): K ≥ 1, f(x) ∝ (1−(1−γ)x)^(−η) − 1, for η = 0 its
limit, the logarithmic law, and for η = 1 the geometric one. Let S = 1 − (1−γ)X, the probability of an event
under Q as well, which is at least γ. f′(X) = E[K]·(γ/S)^(η+1), so the last factor is
E[K]·(γ·S′^(λ−1)/S^λ)^(η+1). If Q has D_λ̂ ≤ ε̂ in both directions, then S′ ≤ (e^ε̂·S)^(1−1/λ̂), and the power
of S that is left is −1 − (λ−1)/λ̂, greatest at S = γ. Together, for any λ̂ > 1,

    D_λ(A‖A′) ≤ D_λ(Q‖Q′) + (1+η)·((1−1/λ̂)·ε̂ + log(1/γ)/λ̂) + log(E[K])/(λ−1).

**Poisson** with mean μ: f′(x) = μ·e^(μ(x−1)), so the last factor is μ·exp(μ((λ−1)R′ − λR)) for R = 1 − X.
If Q is (ε̂, δ̂)-DP for e^ε̂ = λ/(λ−1), then R′ ≤ e^ε̂·R + δ̂, and what is left of R cancels:

    D_λ(A‖A′) ≤ log(e^−μ + μ·e^((λ−1)(D_λ(Q‖Q′) + μδ̂)))/(λ−1).

**A number of runs that is fixed saves nothing.** For K = k the last factor is k·(X^λ·X′^(1−λ))^(k−1), which
the divergence of Q bounds by k·e^((k−1)(λ−1)D_λ): more than that of all k runs together, k·D_λ. So whoever
chooses the best of k runs, k fixed, or shows more than the best one, has to pay for all of them: their events
compose as any others do (:func:`~dpagent.privacy.accounting.choice.priced`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dpagent.errors import ParameterError, require_between
from dpagent.privacy.accounting.accountant import FloatArray
from dpagent.privacy.accounting.divergences import ORDERS
from dpagent.privacy.accounting.normal_form import canonical, counted
from dpagent.privacy.accounting.rdp import epsilon_from_rdp, renyi_divergences
from dpagent.privacy.events import Event

_MOST_RUNS: Final = 1e6
_MOST_ETA: Final = 100.0
_HALVINGS: Final = 200
_ORDERS: Final = np.array(ORDERS)


class NumberOfRuns(ABC):
    """A law of K, independent of all records."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """E[K]."""

    @abstractmethod
    def selection_rdp(self, rdp: FloatArray) -> FloatArray:
        """Bounds on D_λ of the selection, in either direction.

        Args:
            rdp: bounds on those of one run, in both directions, at
                :data:`~dpagent.privacy.accounting.divergences.ORDERS`, shape (len(ORDERS),).

        Returns:
            Likewise; infinite where nothing is proven.
        """


@dataclass(frozen=True, slots=True)
class TruncatedNegativeBinomial(NumberOfRuns):
    """P(K = k) ∝ (1−γ)^k·∏_{l<k} (l+η)/(l+1), k ≥ 1; geometric for η = 1, logarithmic for η = 0.

    Attributes:
        eta: η, in (−1, 100].
        gamma: γ, in (0, 1).

    >>> law = TruncatedNegativeBinomial.with_mean(1.0, 10.0)
    >>> round(law.gamma, 6), round(law.mean, 6)
    (0.1, 10.0)
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        require_between("eta", self.eta, -1.0, _MOST_ETA, low_open=True)
        require_between("gamma", self.gamma, 0.0, 1.0, low_open=True, high_open=True)

    @classmethod
    def with_mean(cls, eta: float, mean: float) -> TruncatedNegativeBinomial:
        """The law with this η, and at most this mean.

        Args:
            eta: η.
            mean: in (1, 10⁶].

        Raises:
            ParameterError: it is out of its range, or no γ in double precision gives it.
        """
        require_between("mean number of runs", mean, 1.0, _MOST_RUNS, low_open=True)
        low, high = 1e-300, 1 - 2.0**-52  # The mean falls as γ rises.
        if cls(eta, low).mean < mean:
            raise ParameterError(f"mean number of runs is {mean:g}; no law with eta {eta:g} has so many.")
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            if not low < middle < high:
                break
            low, high = (middle, high) if cls(eta, middle).mean > mean else (low, middle)
        return cls(eta, high)

    @property
    def mean(self) -> float:
        """E[K]: η(1−γ)/(γ(1−γ^η)), or its limit."""
        log_gamma = math.log(self.gamma)
        odds = (1 - self.gamma) / self.gamma
        return odds / -log_gamma if self.eta == 0 else odds * self.eta / -math.expm1(self.eta * log_gamma)

    def selection_rdp(self, rdp: FloatArray) -> FloatArray:
        """As of :class:`NumberOfRuns`; see the module's text."""
        runs = _checked(rdp)
        share = (1 - 1 / _ORDERS) * runs + math.log(1 / self.gamma) / _ORDERS
        return _falling(runs + (1 + self.eta) * share.min() + math.log(self.mean) / (_ORDERS - 1))


@dataclass(frozen=True, slots=True)
class PoissonRuns(NumberOfRuns):
    """K of a Poisson law; where it is 0, the selection says that there was no run.

    Attributes:
        expected: μ, in (0, 10⁶].
    """

    expected: float

    def __post_init__(self) -> None:
        require_between("mean number of runs", self.expected, 0.0, _MOST_RUNS, low_open=True)

    @property
    def mean(self) -> float:
        """μ."""
        return self.expected

    def selection_rdp(self, rdp: FloatArray) -> FloatArray:
        """As of :class:`NumberOfRuns`; see the module's text."""
        runs = _checked(rdp)
        at = np.log1p(1 / (_ORDERS - 1))
        exponents = (_ORDERS - 1) * (runs + self.expected * delta_from_rdp(runs, at))
        logs = np.logaddexp(-self.expected, math.log(self.expected) + exponents)
        return _falling(np.maximum(logs, 0.0) / (_ORDERS - 1))


def delta_from_rdp(rdp: FloatArray, epsilons: FloatArray) -> FloatArray:
    """δ that Rényi divergences prove for each ε: the conversion of
    :func:`~dpagent.privacy.accounting.rdp.epsilon_from_rdp`, solved for δ.

    Args:
        rdp: shape (len(ORDERS),).
        epsilons: at least 0, shape (n,).

    Returns:
        Shape (n,), at most 1.
    """
    logs = (_ORDERS - 1) * (rdp - epsilons[:, np.newaxis] + np.log1p(-1 / _ORDERS)) - np.log(_ORDERS)
    return np.asarray(np.exp(np.minimum(logs.min(axis=1), 0.0)))


def worst_of(settings: Iterable[Sequence[Event]]) -> FloatArray:
    """Divergences of a run whose setting is drawn independently of the records: at each order, at most those
    of the worst setting, since the setting's law is the same for neighbouring data sets and exp((λ−1)·D_λ) is
    the mean over settings.

    Args:
        settings: for each, all events of a run with it; at least one setting.

    Raises:
        UnsupportedEventError: a mechanism has no Rényi divergence.
        ParameterError: there is no setting.
    """
    curves = [renyi_divergences(canonical(counted(events))).sum(axis=0) for events in settings]
    if not curves:
        raise ParameterError("settings are none; expected at least one.")
    return np.asarray(np.max(curves, axis=0))


def selection_epsilon(rdp: FloatArray, law: NumberOfRuns, delta: float) -> float:
    """ε of a selection at ``delta``, by the divergences of one run.

    Args:
        rdp: of one run, as of :meth:`NumberOfRuns.selection_rdp`.
        law: of the number of runs.
        delta: in (0, 1).

    >>> from dpagent.privacy.events import GaussianEvent, poisson_sampled
    >>> run = worst_of([[poisson_sampled(GaussianEvent(2.25), 0.1, count=100)]])
    >>> round(selection_epsilon(run, TruncatedNegativeBinomial.with_mean(0.0, 10.0), 1e-5), 2)
    3.68
    """
    return float(epsilon_from_rdp(law.selection_rdp(rdp), delta))


def _falling(bounds: FloatArray) -> FloatArray:
    """Bounds where each is at most those at greater orders: D_λ does not fall with λ."""
    return np.asarray(np.minimum.accumulate(bounds[::-1])[::-1])


def _checked(rdp: FloatArray) -> FloatArray:
    values = np.asarray(rdp, np.float64)
    if values.shape != _ORDERS.shape or not np.all(values >= 0):
        raise ParameterError(
            f"rdp has shape {values.shape}; expected {len(ORDERS)} divergences of at least 0, one an order."
        )
    return values
