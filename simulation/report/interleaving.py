"""How mixed the order of arrivals is, against a uniformly random order.

The measure is the share of consecutive arrivals in a round that come from different devices. For
a uniformly random order of the round's N arrivals, n_i of device i, the number S of consecutive
pairs of the *same* device has

- E[S] = (N−1)·p₂ with p₂ = Σ n_i(n_i−1) / N(N−1), and
- E[S²] = (N−1)·p₂ + 2(N−2)·p₃ + (N−2)(N−3)·p₂₂, where p₃ is the probability that three places
  have one device and p₂₂ that two disjoint pairs of places have one device each.

It shows the effect of the mixing on the *order* of arrivals, and nothing else. No privacy figure
rests on it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from simulation.record import Arrival


@dataclass(frozen=True, slots=True)
class Interleaving:
    """How mixed the order of arrivals is, over all rounds together.

    Attributes:
        pairs: consecutive arrivals in the same round, at least 1.
        mixed: those of them that come from different devices.
        expected_mixed: their mean number if each round's order were uniformly random.
        deviation: the standard deviation of that number.
    """

    pairs: int
    mixed: int
    expected_mixed: float
    deviation: float

    @property
    def share(self) -> float:
        """Measured share of mixed pairs, 0 to 1."""
        return self.mixed / self.pairs

    @property
    def expected_share(self) -> float:
        """The same for a uniformly random order."""
        return self.expected_mixed / self.pairs


def by_round(arrivals: Iterable[Arrival]) -> dict[int, list[Arrival]]:
    """The arrivals of each round that has any."""
    rounds: dict[int, list[Arrival]] = defaultdict(list)
    for arrival in arrivals:
        rounds[arrival.round].append(arrival)
    return rounds


def measure_interleaving(arrivals: Iterable[Arrival]) -> Interleaving | None:
    """The interleaving of all rounds; None if no round has two arrivals."""
    pairs, mixed, expected_same, variance = 0, 0, 0.0, 0.0
    for members in by_round(arrivals).values():
        if len(members) < 2:
            continue
        members.sort(key=lambda arrival: (arrival.arrived_at, arrival.sent_at))
        order = [arrival.device for arrival in members]
        pairs += len(order) - 1
        mixed += sum(one != other for one, other in itertools.pairwise(order))
        mean, spread = _same_device_pairs(Counter(order).values())
        expected_same += mean
        variance += spread
    if not pairs:
        return None
    return Interleaving(pairs, mixed, pairs - expected_same, math.sqrt(variance))


def _same_device_pairs(counts: Collection[int]) -> tuple[float, float]:
    """Mean and variance of S, see the head of this module."""
    total = sum(counts)
    twos = [math.perm(count, 2) for count in counts]
    mean = (total - 1) * (sum(twos) / math.perm(total, 2))
    square = mean
    if total >= 3:
        square += 2 * (total - 2) * sum(math.perm(count, 3) for count in counts) / math.perm(total, 3)
    if total >= 4:
        disjoint = sum(math.perm(count, 4) for count in counts) + sum(twos) ** 2 - sum(two**2 for two in twos)
        square += (total - 2) * (total - 3) * disjoint / math.perm(total, 4)
    return mean, max(square - mean**2, 0.0)
