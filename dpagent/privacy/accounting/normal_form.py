"""Normal form of nested events: basic mechanisms, and how often each of them runs.

Accountants price two kinds of mechanism: the Gaussian on a Poisson sample, and any that is (ε, δ)-DP. Of a
third, nothing is proven, and its ε is infinite. Here each event is brought into that form.

- A :class:`~dpagent.privacy.events.SelfComposedEvent` multiplies the count of the event in it.
- A sampled (ε, δ)-DP mechanism is (ε', qδ)-DP with e^ε' = 1 + q(e^ε − 1)
  (:mod:`dpagent.privacy.accounting.amplification`); both are rounded up.
- Sampling a composition is refused: all runs would share one sample, which is another mechanism than the
  composition of sampled runs, and costs more. So is sampling a sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from dpagent.errors import ParameterError, require_count
from dpagent.privacy.accounting.amplification import amplified_epsilon
from dpagent.privacy.events import (
    MAX_COUNT,
    ApproximateEvent,
    Event,
    GaussianEvent,
    NonPrivateEvent,
    PoissonSampledEvent,
    SelfComposedEvent,
)

# Prices never fall with the rate. A smaller one, whose inverse may overflow, is priced like this one.
_LEAST_RATE: Final = 1e-300


class UnsupportedEventError(ParameterError):
    """An accountant has no price for an event, or for a part of it, which the text names."""


@dataclass(frozen=True, slots=True)
class SampledGaussian:
    """A :class:`~dpagent.privacy.events.GaussianEvent` on a Poisson sample; of all units where q is 1."""

    noise_multiplier: float
    sampling_rate: float


#: A mechanism that accountants price as a whole.
Component: TypeAlias = SampledGaussian | ApproximateEvent | NonPrivateEvent
#: A mechanism and the number of its runs.
Runs: TypeAlias = tuple[Component, int]


def runs_of(event: Event) -> Runs:
    """The mechanism that ``event`` runs, and how often.

    >>> from dpagent.privacy.events import poisson_sampled
    >>> runs_of(SelfComposedEvent(poisson_sampled(GaussianEvent(2.0), 0.1, count=3), count=4))
    (SampledGaussian(noise_multiplier=2.0, sampling_rate=0.1), 12)

    Raises:
        UnsupportedEventError: it is no event, or a sampled event holds neither kind of mechanism.
        ParameterError: the counts multiply to more than 2⁵³.
    """
    match event:
        case GaussianEvent(noise_multiplier):
            return SampledGaussian(float(noise_multiplier), 1.0), 1
        case ApproximateEvent(epsilon, delta):
            return _approximate(epsilon, delta), 1
        case NonPrivateEvent():
            return event, 1
        case SelfComposedEvent(part, count):
            mechanism, inner = runs_of(part)
            return mechanism, require_count("count", inner * count, maximum=MAX_COUNT)
        case PoissonSampledEvent(rate, part):
            return _sampled(float(rate), part), 1
        case _:
            raise UnsupportedEventError(f"an event is a {type(event).__name__}; expected a privacy event.")


def counted(events: Iterable[Event], before: Mapping[Component, int] | None = None) -> Counter[Component]:
    """How often each mechanism runs in ``events``, and in those ``before``, together.

    Raises:
        UnsupportedEventError: as for :func:`runs_of`.
        ParameterError: a count exceeds 2⁵³.
    """
    counts = Counter(before)
    for event in events:
        mechanism, count = runs_of(event)
        counts[mechanism] = require_count("count", counts[mechanism] + count, maximum=MAX_COUNT)
    return counts


def canonical(counts: Mapping[Component, int]) -> list[Runs]:
    """The charges in an order that depends on nothing but them: Gaussian ones first, by their parameters."""

    def key(charge: Runs) -> tuple[int, float, float]:
        match charge[0]:
            case SampledGaussian(noise_multiplier, rate):
                return 0, noise_multiplier, rate
            case ApproximateEvent(epsilon, delta):
                return 1, epsilon, delta
            case NonPrivateEvent():
                return 2, 0.0, 0.0
            case _ as unreachable:
                assert_never(unreachable)

    return sorted(counts.items(), key=key)


def event_of(mechanism: Component, count: int) -> Event:
    """The event that :func:`runs_of` brings to this charge."""
    event: Event
    match mechanism:
        case SampledGaussian(noise_multiplier, rate):
            event = GaussianEvent(noise_multiplier)
            event = event if rate == 1 else PoissonSampledEvent(rate, event)
        case ApproximateEvent() | NonPrivateEvent():
            event = mechanism
    return event if count == 1 else SelfComposedEvent(event, count)


def _sampled(rate: float, event: Event) -> Component:
    match event:
        case GaussianEvent(noise_multiplier):
            return SampledGaussian(float(noise_multiplier), max(rate, _LEAST_RATE))
        case ApproximateEvent(epsilon, delta) if rate == 1:
            return _approximate(epsilon, delta)
        case ApproximateEvent(epsilon, delta):
            amplified = math.nextafter(rate * delta, 1.0) if delta > 0 else 0.0
            return _approximate(amplified_epsilon(epsilon, max(rate, _LEAST_RATE)), amplified)
        case _:
            raise UnsupportedEventError(
                f"a PoissonSampledEvent holds a {type(event).__name__}; expected a GaussianEvent or an "
                "ApproximateEvent. Compose sampled events rather than sample composed ones."
            )


def _approximate(epsilon: float, delta: float) -> ApproximateEvent:
    return ApproximateEvent(float(epsilon) + 0.0, float(delta) + 0.0)  # 0 for −0
