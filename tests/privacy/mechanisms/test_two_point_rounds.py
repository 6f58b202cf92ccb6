"""The price of a job of two-point reports, against exact enumeration of what a device sends."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.accounting.choice import priced
from dpagent.privacy.events import ApproximateEvent, SelfComposedEvent
from dpagent.privacy.mechanisms.layer_ranges import LayerRange
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE
from dpagent.privacy.mechanisms.two_point import TwoPoint
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRound, TwoPointRounds, calibrated_reports
from dpagent.privacy.schedules import Schedule
from dpagent.privacy.statement import Adjacency, Trust, Unit

LAYERS = (LayerRange("first", 2, 0.0, 1.0), LayerRange("second", 3, 0.5, 2.0))
DIMENSION = 5


def probabilities(mechanism: TwoPoint, weights: np.ndarray[Any, Any]) -> dict[Any, Fraction]:
    """Of every report that a device with these weights may send, exactly, from the thresholds of the code."""
    ends = mechanism.block_edges()
    groups = [range(start, stop) for start, stop in itertools.pairwise(ends.tolist())]
    found = {}
    for positions in itertools.product(*groups):
        thresholds = mechanism._thresholds(weights, np.array(positions))
        for bits in itertools.product((0, 1), repeat=len(groups)):
            chance = Fraction(1)
            for group, threshold, bit in zip(groups, thresholds.tolist(), bits, strict=True):
                share = Fraction(threshold, 2**64)
                chance *= (share if bit else 1 - share) / len(group)
            found[positions, bits] = chance
    return found


WORST = [
    np.array(values)
    for values in (
        [-1.0, 1.0, -1.5, 2.5, -1.5], [1.0, -1.0, 2.5, -1.5, 2.5],
        [np.nan, np.inf, -np.inf, 1e300, 0.1], [0.0] * 5,
    )
]  # fmt: skip


@pytest.mark.parametrize("coordinates", [1, 2, 3, 5])
@pytest.mark.parametrize("bit_epsilon", [0.01, 1.0, 3.0])
def test_no_report_is_likelier_by_more_than_the_round_costs(coordinates: int, bit_epsilon: float) -> None:
    """δ = 0, for every pair of weights, whatever they are."""
    round_ = TwoPointRound(1 / bit_epsilon, coordinates, DIMENSION)
    mechanism = round_.mechanism(LAYERS)
    assert mechanism.epsilon == round_.bit_epsilon
    cost, delta = round_.round_cost(1e-5)
    assert delta == 0
    most = Fraction(math.exp(cost) * (1 + 1e-14))
    worlds = [probabilities(mechanism, weights) for weights in WORST]
    for one, other in itertools.permutations(worlds, 2):
        assert sum(one.values()) == 1
        assert all(chance <= most * other[report] for report, chance in one.items())
    # The bound is met by those two whose weights all lie at opposite ends.
    ratio = max(float(chance / worlds[1][report]) for report, chance in worlds[0].items())
    assert math.log(ratio) == pytest.approx(cost, rel=1e-6)


def exact_delta(bits: int, bit_epsilon: float, epsilon: float) -> float:
    """δ at ε of that many randomised responses (Kairouz, Oh, Viswanath, Theorem 3.3), term by term."""
    rare = 1 / (math.exp(bit_epsilon) + 1)
    total = 0.0
    for ones in range(bits + 1):
        count = math.comb(bits, ones)
        p = count * (1 - rare) ** ones * rare ** (bits - ones)
        q = count * rare**ones * (1 - rare) ** (bits - ones)
        total += max(0.0, p - math.exp(epsilon) * q)
    return total


@pytest.mark.parametrize(("epsilon", "rounds", "coordinates"), [(2.0, 4, 3), (8.0, 10, 2), (30.0, 6, 25)])
def test_what_a_job_is_said_to_cost_is_no_less_than_what_its_bits_cost(
    epsilon: float, rounds: int, coordinates: int
) -> None:
    delta = 1e-5
    reports, budget = calibrated_reports(
        Schedule("uniform"),
        epsilon=epsilon,
        delta=delta,
        rounds=rounds,
        dimension=1_000,
        coordinates=coordinates,
    )
    bit_epsilon, bits = reports.at(1, 1_000).bit_epsilon, rounds * coordinates
    assert exact_delta(bits, bit_epsilon, budget.epsilon_by_round[-1]) <= delta * (1 + 1e-9)
    assert exact_delta(bits, bit_epsilon, 0.98 * budget.epsilon_by_round[-1]) > delta
    events = [reports.at(number, 1_000).event for number in range(1, rounds + 1)]
    assert priced(tuple(events), delta)[1] <= epsilon


@pytest.mark.parametrize(("epsilon", "delta"), [(2.0, 1e-5), (0.02, 1e-3)])
def test_a_job_is_said_to_cost_what_devices_charge_for_it(epsilon: float, delta: float) -> None:
    """They leave a millionth of δ out of any price, for what a sampler lacks, though bits are exact."""
    reports, plan = calibrated_reports(
        Schedule("uniform"), epsilon=epsilon, delta=delta, rounds=10, dimension=DIMENSION, coordinates=2
    )
    events = [reports.at(number, DIMENSION).event for number in range(1, 11)]
    charged = priced(events, delta * (1 - NOISE_SHARE))[1]
    assert plan.delta == delta
    assert charged == pytest.approx(plan.epsilon_by_round[-1], rel=1e-9)
    assert priced(events, delta)[1] < charged * (1 - 1e-9) <= charged <= epsilon


def test_a_round_is_so_many_runs_of_one_mechanism_and_hides_a_device() -> None:
    round_ = TwoPointRound(0.5, 40, 1_000)
    assert round_.event == SelfComposedEvent(ApproximateEvent(2.0), 40)
    assert round_.round_cost(1e-5) == (80.0, 0.0)
    assert (round_.unit, round_.adjacency, round_.trust) == (Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.NONE)
    assert round_.inexactness == round_.statistical_distance == 0


def test_by_default_the_fewest_bits_are_sent_that_are_nearly_as_exact_as_any_number() -> None:
    def variance(coordinates: int | None) -> tuple[float, int]:
        reports, _ = calibrated_reports(
            Schedule("uniform"), epsilon=100.0, delta=1e-5, rounds=20, dimension=650, coordinates=coordinates
        )
        return 1 / math.tanh(0.5 / reports.multipliers[0]) ** 2 / reports.coordinates, reports.coordinates

    chosen, count = variance(None)
    assert chosen <= 1.05 * min(variance(other)[0] for other in (1, 2, 3, 5, 10, 20, 40))
    assert count == 1 or variance(count - 1)[0] > chosen


def test_an_epsilon_for_which_no_bit_is_left_is_refused() -> None:
    with pytest.raises(PlanError, match=r"less than 0\.0001 for each of 650 bits a round"):
        calibrated_reports(
            Schedule("uniform"), epsilon=1e-3, delta=1e-9, rounds=1000, dimension=650, coordinates=650
        )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0.01, 1, 5), "noise multiplier is 0.01"), ((1e5, 1, 5), "noise multiplier is 1"),
        ((1.0, 0, 5), "coordinates is 0"), ((1.0, 6, 5), "coordinates is 6"),
        ((1.0, 1, 2**28 + 1), "dimension"),
        ((math.nan, 1, 5), "noise multiplier is nan"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        TwoPointRound(*arguments)


def test_a_job_has_its_rounds_and_no_others() -> None:
    rounds = TwoPointRounds((0.5, 0.25), 3)
    assert rounds.at(2, 10) == TwoPointRound(0.25, 3, 10)
    for number in (0, 3):
        with pytest.raises(ParameterError, match="round"):
            rounds.at(number, 10)
    with pytest.raises(ParameterError, match="5 weights; expected 6"):
        TwoPointRound(1.0, 1, 6).mechanism(LAYERS)
    with pytest.raises(ParameterError, match="empty"):
        TwoPointRounds((), 1)
