"""The three prices of the two-point mechanism."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest
from privacy.mechanisms.scripted_words import one_layer, ones_of_all_words

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.shuffling import Bound, ShuffledBatch, central_epsilon, least_reports
from dpagent.privacy.mechanisms.two_point import TwoPoint
from dpagent.privacy.mechanisms.two_point_budget import (
    bit_statement,
    device_statement,
    fragments_statement,
    shuffled_statement,
)
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRound
from dpagent.privacy.statement import Adjacency, Trust, Unit

Law = dict[tuple[tuple[int, ...], tuple[int, ...]], Fraction]


def report_law(mechanism: TwoPoint, weights: tuple[float, ...]) -> Law:
    """Exact law of a device's report, by all positions and bits, from counts of words."""
    single = TwoPoint(one_layer(1), mechanism.epsilon, 1)
    ones = {weight: Fraction(ones_of_all_words(single, weight), 2**64) for weight in set(weights)}
    edges = mechanism.block_edges().tolist()
    law: Law = {}
    for positions in itertools.product(*(range(*pair) for pair in itertools.pairwise(edges))):
        for bits in itertools.product((0, 1), repeat=len(positions)):
            mass = Fraction(1)
            for position, bit, (first, last) in zip(positions, bits, itertools.pairwise(edges), strict=True):
                words = -(-((position - first + 1) << 64) // (last - first))
                words -= -(-((position - first) << 64) // (last - first))
                mass *= Fraction(words, 2**64)
                mass *= ones[weights[position]] if bit else 1 - ones[weights[position]]
            law[positions, bits] = mass
    assert sum(law.values()) == 1
    return law


def test_a_devices_price_is_k_epsilon_and_no_less() -> None:
    """d = 3, k = 2: the greatest ratio over all inputs at the ends and centre, and all reports."""
    mechanism = TwoPoint(one_layer(3), math.log(3), 2)
    laws = [report_law(mechanism, w) for w in itertools.product((-1.0, 0.0, 1.0), repeat=3)]
    worst = max(p[key] / q[key] for p, q in itertools.permutations(laws, 2) for key in p)
    stated = device_statement(mechanism)
    with mpmath.workdps(40):
        log_worst = mpmath.log(mpmath.mpf(worst.numerator) / worst.denominator)
        assert log_worst <= mpmath.mpf(stated.epsilon)
        assert log_worst > mpmath.mpf(stated.epsilon) * (1 - mpmath.mpf(10) ** -15)
    # one coordinate's figure is not enough for a device
    assert worst > Fraction(8.9) > Fraction(math.exp(bit_statement(mechanism.epsilon).epsilon))


def shuffled_view(laws: list[Law]) -> dict[object, Fraction]:
    """What an observer sees of all blocks when nobody's pieces can be linked."""
    view: dict[object, Fraction] = {}
    for outcome in itertools.product(*(law.items() for law in laws)):
        reports = [key for key, _ in outcome]
        blocks = len(reports[0][0])
        key = tuple(
            tuple(sorted((positions[b], bits[b]) for positions, bits in reports)) for b in range(blocks)
        )
        view[key] = view.get(key, Fraction()) + math.prod((mass for _, mass in outcome), start=Fraction(1))
    return view


def test_the_shuffled_price_holds_for_every_input_of_a_tiny_fleet() -> None:
    """3 devices, d = 3, k = 2, shipped mechanism: H of the whole view, block by block shuffled."""
    mechanism = TwoPoint(one_layer(3), 1.0, 2)
    law = {w: report_law(mechanism, w) for w in itertools.product((-1.0, 1.0), repeat=3)}
    stated = {delta: shuffled_statement([(mechanism, 3, 1)], delta) for delta in (0.3, 0.1, 0.02)}
    greatest = dict.fromkeys(stated, 0.0)
    ends = [law[-1.0, -1.0, -1.0], law[1.0, 1.0, 1.0]]
    for others in itertools.combinations_with_replacement([*ends, law[-1.0, 1.0, 1.0]], 2):
        p, q = (shuffled_view([*others, own]) for own in ends)
        for delta, statement in stated.items():
            factor = Fraction(math.exp(statement.epsilon))
            found = sum((max(p[key] - factor * q[key], Fraction()) for key in p), Fraction())
            greatest[delta] = max(greatest[delta], float(found))
    for delta, found in greatest.items():
        assert 0.05 * delta < found <= delta
    assert [s.epsilon for s in stated.values()] == sorted(s.epsilon for s in stated.values())
    assert all(0 < s.epsilon <= 2.0 for s in stated.values())


def test_statements_say_what_they_are_for() -> None:
    mechanism = TwoPoint(one_layer(100), 0.5, 10)
    coordinate = bit_statement(mechanism.epsilon)
    device = device_statement(mechanism, 20)
    shuffled = shuffled_statement([(mechanism, 500, 20)], 1e-5)
    assert coordinate.scope == (Unit.COORDINATE, Adjacency.REPLACE_ONE, Trust.NONE)
    assert device.scope == (Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.NONE)
    assert shuffled.scope == (Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.SHUFFLER)
    assert (coordinate.epsilon, coordinate.delta) == (0.5, 0.0)
    assert (device.epsilon, device.delta) == (100.0, 0.0)
    assert shuffled.delta == 1e-5
    assert coordinate.epsilon < shuffled.epsilon < device.epsilon
    assert "500 devices" in shuffled.assumptions[0]
    assert {s.mechanism for s in (coordinate, device, shuffled)} == {"LDP-FL two-point"}


def test_the_shuffled_figure_uses_the_bound_that_fits() -> None:
    full = TwoPoint(one_layer(60), 1.0, 60)
    some = TwoPoint(one_layer(60), 1.0, 6)
    assert shuffled_statement([(full, 500, 1)], 1e-5).epsilon == central_epsilon(
        [(ShuffledBatch(500, 1.0, Bound.ENUMERATED), 60)], 1e-5
    )
    assert shuffled_statement([(some, 500, 2)], 1e-5).epsilon == central_epsilon(
        [(ShuffledBatch(500, 1.0, Bound.CLONES), 12)], 1e-5
    )
    known = shuffled_statement([(some, 500, 2)], 1e-5, positions_known=True)
    least = least_reports(500, 0.1, 12, 1e-6)
    assert known.epsilon == central_epsilon([(ShuffledBatch.at_position(least, 1.0), 12)], 0.9e-5)
    assert known.delta == 1e-5
    assert known.assumptions != shuffled_statement([(some, 500, 2)], 1e-5).assumptions
    # of blocks of unlike sizes, positions in the greatest have the fewest reports
    uneven = TwoPoint(one_layer(15), 1.0, 2)
    least = least_reports(500, 1 / 8, 2, 1e-6)
    assert least < least_reports(500, 1 / 7, 2, 1e-6)
    assert shuffled_statement([(uneven, 500, 1)], 1e-5, positions_known=True).epsilon == central_epsilon(
        [(ShuffledBatch.at_position(least, 1.0), 2)], 0.9e-5
    )
    # without sampling positions are no secret, and no share of δ is set aside
    assert (
        shuffled_statement([(full, 500, 1)], 1e-5, positions_known=True).epsilon
        == shuffled_statement([(full, 500, 1)], 1e-5).epsilon
    )


def test_the_shuffled_figure_is_monotone_and_never_above_the_local_one() -> None:
    def epsilon(devices: int, local: float, rounds: int, delta: float) -> float:
        return shuffled_statement([(TwoPoint(one_layer(40), local, 4), devices, rounds)], delta).epsilon

    base = epsilon(200, 1.0, 3, 1e-5)
    assert epsilon(300, 1.0, 3, 1e-5) < base < epsilon(100, 1.0, 3, 1e-5)
    assert epsilon(200, 0.8, 3, 1e-5) < base < epsilon(200, 1.2, 3, 1e-5)
    assert epsilon(200, 1.0, 2, 1e-5) < base < epsilon(200, 1.0, 4, 1e-5)
    assert epsilon(200, 1.0, 3, 1e-4) < base < epsilon(200, 1.0, 3, 1e-6)
    assert epsilon(1, 1.0, 3, 1e-9) <= 12.0
    crossing = [shuffled_statement([(TwoPoint(one_layer(9), 1.0, 9), n, 1)], 1e-5).epsilon for n in
                (1000, 1024, 1025, 1200, 1497, 1498, 1600)]  # fmt: skip
    assert crossing == sorted(crossing, reverse=True)


GOOD = TwoPoint(one_layer(3), 1.0, 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: device_statement(GOOD, 0), "rounds is 0"),
        (lambda: shuffled_statement([], 1e-5), "rounds is empty"),
        (lambda: shuffled_statement([(GOOD, 0, 1)], 1e-5), "honest devices is 0"),
        (lambda: shuffled_statement([(GOOD, 10, 0)], 1e-5), "rounds is 0"),
        (lambda: shuffled_statement([(GOOD, 10, 1)], 0.0), "delta is 0.0"),
        (lambda: shuffled_statement([(GOOD, 10, 1)], math.nan), "delta is nan"),
        (lambda: shuffled_statement([(GOOD, 10, 1)], 1e-5, failure_share=1.0), "failure share is 1.0"),
    ],
)  # fmt: skip
def test_bad_input_is_named(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        make()


def test_the_price_of_shuffled_fragments_holds_for_every_input_of_a_tiny_fleet() -> None:
    """3 devices, d = 3, k = 2, both reports of a device in one fragment: H of the fragments, shuffled."""
    mechanism = TwoPoint(one_layer(3), 0.5, 2)
    ends = [report_law(mechanism, w) for w in itertools.product((-1.0, 1.0), repeat=3)]
    rounds = [TwoPointRound(2.0, 2, 3)]

    def view_of(laws: list[Law]) -> dict[object, Fraction]:
        view: dict[object, Fraction] = {}
        for outcome in itertools.product(*(law.items() for law in laws)):
            key = tuple(sorted(report for report, _ in outcome))
            view[key] = view.get(key, Fraction()) + math.prod(
                (mass for _, mass in outcome), start=Fraction(1)
            )
        return view

    for delta in (0.3, 0.05):
        stated = fragments_statement(rounds, block=2, devices=3, local_epsilon=1.0, delta=delta)
        factor = Fraction(math.exp(stated.epsilon))
        for others in ([ends[0], ends[0]], [ends[0], ends[-1]], [ends[2], ends[5]]):
            first, second = view_of([ends[0], *others]), view_of([ends[-1], *others])
            for p, q in ((first, second), (second, first)):
                assert sum(max(mass - factor * q.get(key, 0), 0) for key, mass in p.items()) <= delta


def test_fragments_of_one_report_are_the_clones_and_larger_ones_hide_less() -> None:
    rounds = [TwoPointRound(2.0, 12, 600)] * 3
    epsilons = [
        fragments_statement(rounds, block=block, devices=500, local_epsilon=18.0, delta=1e-5).epsilon
        for block in (1, 2, 4, 12)
    ]
    assert epsilons[0] == central_epsilon([(ShuffledBatch(500, 0.5, Bound.CLONES), 36)], 1e-5)
    assert epsilons == sorted(epsilons)
    assert epsilons[0] < 3 < epsilons[-1] <= 18.0


@pytest.mark.parametrize(
    ("devices", "block", "bit"), [(1, 1, 0.5), (500, 12, 4.0)], ids=["nobody to hide among", "too long"]
)
def test_where_nothing_hides_the_figure_is_that_without_a_shuffler(
    devices: int, block: int, bit: float
) -> None:
    rounds = [TwoPointRound(1 / bit, 12, 600)]
    stated = fragments_statement(rounds, block=block, devices=devices, local_epsilon=5.5, delta=1e-5)
    assert (stated.epsilon, stated.trust, stated.unit) == (5.5, Trust.SHUFFLER, Unit.DEVICE)
    assert f"at least {devices} device" in stated.assumptions[0]
