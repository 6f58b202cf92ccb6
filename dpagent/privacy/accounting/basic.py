"""Basic composition: the ε of (ε, δ)-DP mechanisms add up, and so do their δ.

Exact, valid for any mechanisms, and also where parameters are chosen in the light of earlier outputs (Rogers,
Roth, Ullman, Vadhan, *Privacy odometers and filters*, NeurIPS 2016). The only accountant that proves δ = 0.

>>> from dpagent.privacy.events import ApproximateEvent, SelfComposedEvent
>>> accountant = BasicAccountant()
>>> accountant.compose(SelfComposedEvent(ApproximateEvent(0.25), 4), ApproximateEvent(0.5, 1e-6))
>>> accountant.epsilon(1e-6), accountant.epsilon(0.0)
(1.5, inf)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from dpagent.privacy.accounting.accountant import Accountant, FloatArray
from dpagent.privacy.accounting.composition import running_sums
from dpagent.privacy.accounting.normal_form import Component, Runs, SampledGaussian, UnsupportedEventError
from dpagent.privacy.events import ApproximateEvent, NonPrivateEvent
from dpagent.privacy.ranges import AccountantName


class BasicAccountant(Accountant):
    """Adds up ε and δ, rounded up from their exact sums."""

    name: ClassVar[AccountantName] = "basic"
    least_delta: ClassVar[float] = 0.0

    def _require_supported(self, mechanism: Component) -> None:
        if not isinstance(mechanism, ApproximateEvent | NonPrivateEvent):
            raise UnsupportedEventError(
                "an event is a GaussianEvent; expected ApproximateEvents, sampled or not, for basic "
                "composition. Use the PLD accountant for it."
            )

    def _epsilon(self, charges: Sequence[Runs], delta: float) -> float:
        return float(basic_composition(charges, delta)[-1])

    def _running_epsilon(self, charges: Sequence[Runs], delta: float) -> FloatArray:
        return basic_composition(charges, delta)


def basic_composition(charges: Sequence[Runs], delta: float) -> FloatArray:
    """The sum of ε after each of the charges; infinite where their δ add up to more, and from the first on of
    which nothing is proven."""
    parts = [
        (part if isinstance(part, ApproximateEvent) else ApproximateEvent(0.0), count)
        for part, count in charges
        if not isinstance(part, SampledGaussian)
    ]
    epsilons = np.array([*running_sums((part.epsilon, count) for part, count in parts)])
    deltas = np.array([*running_sums((part.delta, count) for part, count in parts)])
    is_none = np.array([isinstance(part, NonPrivateEvent) for part, _ in charges], dtype=bool)
    return np.where((deltas <= delta) & ~np.logical_or.accumulate(is_none), epsilons, math.inf)
