"""Basic composition, by exact sums.

ε and δ add up, also when mechanisms and parameters are chosen in the light of earlier outputs (Dwork,
Rothblum, Vadhan, FOCS 2010; Rogers, Roth, Ullman, Vadhan, *Privacy odometers and filters*, NeurIPS 2016), and
whatever adjacency the mechanisms have. Sums are computed exactly, and then rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.normal_form import runs_of
from dpagent.privacy.events import ApproximateEvent, Event

_PARTS: Final = 2**1074  # every double is a whole number of such parts of 1


def composed(*events: Event) -> ApproximateEvent:
    """Basic composition of (ε, δ)-DP events, sampled or not, as one event.

    >>> from dpagent.privacy.events import SelfComposedEvent
    >>> composed(SelfComposedEvent(ApproximateEvent(0.25), 4), ApproximateEvent(0.5, 1e-6))
    ApproximateEvent(epsilon=1.5, delta=1e-06)

    Raises:
        ParameterError: there is none, one is a Gaussian, or a sum leaves the range of an event's ε or δ.
    """
    charges = [runs_of(event) for event in events]
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
