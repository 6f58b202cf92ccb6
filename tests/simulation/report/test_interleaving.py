"""How mixed arrivals are, against all orders."""

from __future__ import annotations

import itertools
import math
from statistics import fmean, pvariance

import pytest

from simulation.record import Arrival
from simulation.report.interleaving import measure_interleaving


@pytest.mark.parametrize("counts", [(2, 3), (1, 1, 1), (4,), (2,), (1, 1), (3, 2, 2), (1, 2)])
def test_interleaving_of_a_random_order_against_all_orders(counts: tuple[int, ...]) -> None:
    devices = [device for device, count in enumerate(counts) for _ in range(count)]
    mixed = [
        sum(a != b for a, b in itertools.pairwise(order)) for order in itertools.permutations(devices)
    ]  # fmt: skip
    measured = measure_interleaving(
        Arrival(device, 1, 0.0, float(place)) for place, device in enumerate(devices)
    )
    assert measured is not None
    assert measured.pairs == len(devices) - 1
    assert measured.mixed == len(counts) - 1
    assert measured.expected_mixed == pytest.approx(fmean(mixed))
    assert measured.deviation == pytest.approx(math.sqrt(pvariance(mixed)), abs=1e-6)


def test_interleaving_adds_rounds_up_and_does_not_pair_across_them() -> None:
    arrivals = [
        Arrival(1, 1, 0.0, 0.0),
        Arrival(2, 1, 0.0, 1.0),
        Arrival(1, 2, 0.0, 2.0),
        Arrival(1, 2, 0.0, 3.0),
    ]
    measured = measure_interleaving(arrivals)
    assert measured is not None
    assert (measured.pairs, measured.mixed) == (2, 1)
    assert measured.expected_mixed == pytest.approx(1.0)
    assert measure_interleaving([Arrival(1, 1, 0.0, 0.0), Arrival(1, 2, 0.0, 1.0)]) is None
    assert measure_interleaving([]) is None
