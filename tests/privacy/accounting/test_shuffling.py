"""Shuffle amplification against enumeration of every input and output, and composition by brute force."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import reduce

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.finite_loss import FiniteLoss, compose
from dpagent.privacy.accounting.shuffling import (
    MAX_ENUMERATED,
    Bound,
    ShuffledBatch,
    _binomial_masses,
    _rounding,
    central_delta,
    central_epsilon,
    clones_closed_form,
    least_reports,
)

LEVEL = 1e-6
FRACTIONS = (0.0, 0.1, 0.3, 0.6, 0.95, 1.0)


def hockey_stick(p: NDArray[np.float64], q: NDArray[np.float64], epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


def ones_law(probabilities: tuple[float, ...]) -> NDArray[np.float64]:
    """The law of the number of ones among independent bits: all that is left of a shuffled batch."""
    return reduce(np.convolve, [np.array([1 - p, p]) for p in probabilities], np.ones(1))


def enumerated_delta(reports: int, local: float, epsilon: float, levels: int = 3) -> float:
    """The greatest H over all inputs of all devices, on a grid of bit probabilities."""
    grid = np.linspace(1 / (math.exp(local) + 1), 1 - 1 / (math.exp(local) + 1), levels)
    worst = 0.0
    for others in itertools.combinations_with_replacement(grid, reports - 1):
        for before, after in itertools.product(grid, repeat=2):
            p, q = ones_law((*others, before)), ones_law((*others, after))
            worst = max(worst, hockey_stick(p, q, epsilon))
    return worst


@pytest.mark.parametrize("local", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("reports", [1, 2, 3, 5])
def test_the_enumerated_bound_is_attained_and_never_exceeded(reports: int, local: float) -> None:
    batch = ShuffledBatch(reports, local, Bound.ENUMERATED)
    for fraction in FRACTIONS:
        truth = enumerated_delta(reports, local, fraction * local)
        assert batch.delta(fraction * local) == pytest.approx(truth, rel=1e-9, abs=1e-12)
        assert ShuffledBatch(reports, local).delta(fraction * local) >= truth - 1e-15


def exact_hockey_stick(p: list[Fraction], q: list[Fraction], ratio: Fraction) -> Fraction:
    return sum((max(x - ratio * y, Fraction()) for x, y in zip(p, q, strict=True)), Fraction())


def exact_ones_law(probabilities: tuple[Fraction, ...]) -> list[Fraction]:
    law = [Fraction(1)]
    for probability in probabilities:
        down, up = [x * (1 - probability) for x in law], [x * probability for x in law]
        law = [x + y for x, y in zip([*down, Fraction()], [Fraction(), *up], strict=True)]
    return law


@pytest.mark.parametrize("reports", [1, 2, 4, 6])
def test_all_bounds_against_all_inputs_in_fractions(reports: int) -> None:
    """e^ε₀ = 3, so that a is 1/4: devices at 1/4, 3/8, 1/2 or 3/4, and each world's series, exactly."""
    quarter = Fraction(1, 4)
    grid = [quarter, Fraction(3, 8), 2 * quarter, 3 * quarter]
    pairs = [
        tuple(exact_ones_law((*others, own)) for own in owns)
        for others in itertools.combinations_with_replacement(grid, reports - 1)
        for owns in itertools.permutations(grid, 2)
    ]
    for ratio in (Fraction(1), Fraction(9, 8), Fraction(3, 2), Fraction(2), Fraction(14, 5)):
        truth = max(exact_hockey_stick(p, q, ratio) for p, q in pairs)
        found = {b: ShuffledBatch(reports, math.log(3), b).delta(math.log(ratio)) for b in Bound}
        assert found[Bound.ENUMERATED] == pytest.approx(float(truth), rel=1e-12, abs=1e-13)
        for bound, coin in ((Bound.DECOMPOSED, Fraction(1, 2)), (Bound.CLONES, Fraction(1, 3))):
            series = Fraction()
            for c in range(reports):
                weight = math.comb(reports - 1, c) * coin**c * (1 - coin) ** (reports - 1 - c)
                p, q = (exact_ones_law((*(2 * quarter,) * c, own)) for own in (3 * quarter, quarter))
                series += weight * exact_hockey_stick(p, q, ratio)
            assert found[bound] == pytest.approx(float(series), rel=1e-12, abs=1e-15)
            assert series >= truth


def test_one_more_honest_report_never_hurts_in_fractions() -> None:
    """Whatever the bits of all others, and of the one that joins: H of the same two worlds falls."""
    grid = [Fraction(1, 4), Fraction(2, 5), Fraction(3, 4)]
    for others in itertools.product(grid, repeat=3):
        p, q = (exact_ones_law((*others, own)) for own in (grid[2], grid[0]))
        for joins in grid:
            p1, q1 = (exact_ones_law((*others, joins, own)) for own in (grid[2], grid[0]))
            for ratio in (Fraction(1), Fraction(5, 4), Fraction(2)):
                assert exact_hockey_stick(p1, q1, ratio) <= exact_hockey_stick(p, q, ratio)


def test_clones_need_the_same_randomiser_on_all_devices() -> None:
    """Devices that sign their bits hide nobody, and the clones bound says otherwise: it is not theirs."""
    local = 1.0
    own = (math.e - 1) / (math.e + 1)  # δ at ε = 0 of a bit whose sender is known
    assert ShuffledBatch(50, local, Bound.CLONES).delta(0.0) < own / 2
    # of bits without signature, each device's law may be another: the two-point bounds ask no more
    probabilities = np.random.default_rng(5).uniform(0.27, 0.73, 49)
    p, q = (ones_law((*probabilities, x)) for x in (1 / (1 + math.exp(-local)), 1 / (1 + math.e)))
    for epsilon in (0.0, 0.1, 0.3):
        assert hockey_stick(p, q, epsilon) <= ShuffledBatch(50, local, Bound.ENUMERATED).delta(epsilon)


@pytest.mark.parametrize(("reports", "local"), [(2, 32.0), (25, 14.0), (30, 1.0), (30, 0.05)])
def test_rounding_is_on_the_safe_side(reports: int, local: float) -> None:
    """Against sums in 60 digits: never below, and above by next to nothing."""
    with mpmath.workdps(60):
        power = mpmath.exp(mpmath.mpf(local))
        rare = 1 / (power + 1)

        def law(trials: int, p: mpmath.mpf) -> list[mpmath.mpf]:
            return [mpmath.binomial(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(trials + 1)]

        def worlds(others: list[mpmath.mpf]) -> list[tuple[mpmath.mpf, mpmath.mpf]]:
            up, down = [mpmath.mpf(0), *others], [*others, mpmath.mpf(0)]
            return [
                ((1 - rare) * u + rare * d, rare * u + (1 - rare) * d) for u, d in zip(up, down, strict=True)
            ]

        bits = []
        for ups in range(reports):
            high, low = law(ups, 1 - rare), law(reports - 1 - ups, rare)
            others = [
                mpmath.fsum(high[j] * low[s - j] for j in range(s + 1) if j < len(high) and s - j < len(low))
                for s in range(reports)
            ]
            bits.append(worlds(others))
        for fraction in (0.0, 0.2, 0.7, 0.97):
            epsilon = fraction * local
            factor = mpmath.exp(mpmath.mpf(epsilon))
            exact = max(mpmath.fsum(max(p - factor * q, 0) for p, q in view) for view in bits)
            batch = ShuffledBatch(reports, local, Bound.ENUMERATED)
            assert exact <= batch.delta(epsilon) <= exact * (1 + 1e-9) + 1e-12
            assert exact <= batch.loss.delta(epsilon)
            for bound, coin in ((Bound.DECOMPOSED, 2 * rare), (Bound.CLONES, 1 / power)):
                exact = mpmath.fsum(
                    mass * max(p - factor * q, 0)
                    for c, mass in enumerate(law(reports - 1, coin))
                    for p, q in worlds(law(c, mpmath.mpf("0.5")))
                )
                batch = ShuffledBatch(reports, local, bound)
                assert exact <= compose([(batch.loss, 1)]).delta(epsilon)
                assert exact * (1 - 1e-12) - 1e-15 <= batch.delta(epsilon) <= exact * (1 + 1e-9) + 1e-15


@pytest.mark.parametrize(
    ("trials", "probability", "first", "last"),
    [(1023, 0.27, 0, 1023), (40, 1e-14, 0, 40), (10**8, 0.5, 49_950_000, 50_050_000), (10**6, 1e-5, 0, 200)],
)
def test_binomial_masses_are_as_exact_as_the_text_says(
    trials: int, probability: float, first: int, last: int
) -> None:
    masses = _binomial_masses(trials, probability, first, last)
    p = mpmath.mpf(probability)
    with mpmath.workdps(40):
        chosen = np.unique(np.linspace(0, last - first, 60).astype(int))
        logs = [
            mpmath.loggamma(trials + 1)
            - mpmath.loggamma(first + int(k) + 1)
            - mpmath.loggamma(trials - first - int(k) + 1)
            + (first + int(k)) * mpmath.log(p)
            + (trials - first - int(k)) * mpmath.log1p(-p)
            for k in chosen
        ]
        for k, log in zip(chosen, logs, strict=True):
            exact = mpmath.exp(log)
            if exact > mpmath.mpf(10) ** -290:
                # the window's own share of the whole is less than 1 by next to nothing
                assert abs(masses[k] / exact - 1) < _rounding(masses.size) + 1e-14


def test_the_decomposition_is_attained_by_nothing() -> None:
    """It is an upper bound for bits, not their worst case: 12 % above it here."""
    decomposed, exact = (ShuffledBatch(20, 1.0, bound) for bound in (Bound.DECOMPOSED, Bound.ENUMERATED))
    assert decomposed.delta(0.1) > 1.12 * exact.delta(0.1)


@pytest.mark.parametrize("local", [0.3, 2.0])
def test_the_series_agree_with_the_definition_in_high_precision(local: float) -> None:
    """Sum over C, A and Δ as the text defines them, nothing simplified."""
    reports = 7
    with mpmath.workdps(40):
        power = mpmath.exp(mpmath.mpf(local))
        often = power / (power + 1)
        for bound, coin in (
            (Bound.DECOMPOSED, 2 / (power + 1)),
            (Bound.CLONES, 1 / power),
        ):
            view: dict[tuple[int, int], list[mpmath.mpf]] = {}
            for c in range(reports):
                for a, own in itertools.product(range(c + 1), (0, 1)):
                    mass = mpmath.binomial(reports - 1, c) * coin**c * (1 - coin) ** (reports - 1 - c)
                    mass *= mpmath.binomial(c, a) / mpmath.mpf(2) ** c
                    cell = view.setdefault((a + own, c - a + 1 - own), [mpmath.mpf(0), mpmath.mpf(0)])
                    cell[0] += mass * (often if own else 1 - often)
                    cell[1] += mass * (1 - often if own else often)
            for fraction in FRACTIONS:
                factor = mpmath.exp(mpmath.mpf(fraction * local))
                forth = mpmath.fsum(max(p - factor * q, 0) for p, q in view.values())
                back = mpmath.fsum(max(q - factor * p, 0) for p, q in view.values())
                assert abs(forth - back) < mpmath.mpf(10) ** -35  # one direction is enough
                ours = ShuffledBatch(reports, local, bound).delta(fraction * local)
                assert ours == pytest.approx(float(forth), rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("local", [0.5, 1.5])
def test_clones_hold_for_bits_at_secret_positions(local: float) -> None:
    """The randomiser "draw one of two positions, then its bit", enumerated with all multisets of outputs.

    The decomposition's 2/(e^ε₀+1) is proven for one position only; e^(−ε₀) holds here.
    """
    rare = 1 / (math.exp(local) + 1)
    values = list(itertools.product((rare, 1 - rare), repeat=2))  # a bit probability for each position
    laws = {v: {(j, b): 0.5 * (v[j] if b else 1 - v[j]) for j in (0, 1) for b in (0, 1)} for v in values}
    reports = 3

    def view(devices: tuple[tuple[float, float], ...]) -> dict[tuple[tuple[int, int], ...], float]:
        result: dict[tuple[tuple[int, int], ...], float] = {}
        for outputs in itertools.product(*(laws[value] for value in devices)):
            key = tuple(sorted(outputs))
            mass = math.prod(laws[value][output] for value, output in zip(devices, outputs, strict=True))
            result[key] = result.get(key, 0.0) + mass
        return result

    clones = ShuffledBatch(reports, local, Bound.CLONES)
    worst = dict.fromkeys(FRACTIONS, 0.0)
    for others in itertools.combinations_with_replacement(values, reports - 1):
        views = [view((*others, value)) for value in values]
        for p, q in itertools.permutations(views, 2):
            for fraction in FRACTIONS:
                factor = math.exp(fraction * local)
                delta = sum(max(p[key] - factor * q[key], 0.0) for key in p)
                worst[fraction] = max(worst[fraction], delta)
    for fraction, delta in worst.items():
        assert delta <= clones.delta(fraction * local) + 1e-15
    assert worst[0.0] > 0.6 * clones.delta(0.0)  # and the enumeration does find something


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.floats(0.05, 4.0), st.floats(0.0, 1.0), st.sampled_from(list(Bound)))
def test_bounds_are_ordered_and_monotone(reports: int, local: float, fraction: float, bound: Bound) -> None:
    epsilon = fraction * local
    delta = ShuffledBatch(reports, local, bound).delta(epsilon)
    slack = 1e-13
    assert ShuffledBatch(reports + 1, local, bound).delta(epsilon) <= delta + slack
    assert ShuffledBatch(reports, 1.1 * local, bound).delta(epsilon) >= delta - slack
    assert ShuffledBatch(reports, local, bound).delta(epsilon + 0.1) <= delta + slack
    in_order = [ShuffledBatch(reports, local, b).delta(epsilon) for b in Bound]
    assert in_order[0] <= in_order[1] + slack <= in_order[2] + 2 * slack
    # never worse than the device's own perturbation
    own = max(0.0, (1 - math.exp(epsilon - local)) / (1 + math.exp(-local)))
    assert delta <= own + slack


@pytest.mark.parametrize("bound", list(Bound))
@pytest.mark.parametrize(("reports", "local"), [(1, 2.0), (4, 0.7), (40, 2.5), (300, 0.2)])
def test_the_pair_to_be_composed_dominates_and_is_close(bound: Bound, reports: int, local: float) -> None:
    batch = ShuffledBatch(reports, local, bound)
    for epsilon in np.linspace(-local, local, 31):
        if epsilon >= 0:
            exact = batch.delta(float(epsilon))
        else:  # the other direction of the same symmetric pair
            exact = 1 - math.exp(epsilon) + math.exp(epsilon) * batch.delta(-float(epsilon))
        step = batch.loss.size / 128  # what a kink between two grid points may add, at most
        assert exact - 1e-12 <= batch.loss.delta(float(epsilon)) <= exact + step / 4 + 1e-9


@pytest.mark.parametrize("reports", [2, 9])
def test_composition_against_all_outcomes(reports: int) -> None:
    """Two positions twice and a third once, in a second round with another ε₀: every view enumerated."""
    local, other = 1.0, 0.4
    rare, rarer = 1 / (math.exp(local) + 1), 1 / (math.exp(other) + 1)
    low = (rare,) * (reports - 1)
    p, q = ones_law((*low, 1 - rare)), ones_law((*low, rare))
    p2, q2 = (ones_law(((rarer,) * (reports - 1)) + (x,)) for x in (1 - rarer, rarer))
    for epsilon in (0.0, 0.2, 0.9, 2.0):
        joint_p = np.multiply.outer(np.multiply.outer(p, p), p2)
        joint_q = np.multiply.outer(np.multiply.outer(q, q), q2)
        truth = hockey_stick(joint_p, joint_q, epsilon)
        pair = FiniteLoss(np.log(p / q), p)
        composed = compose([(pair, 2), (FiniteLoss(np.log(p2 / q2), p2), 1)])
        # The finite pairs themselves, composed: an upper bound, and a close one.
        assert truth - 1e-12 <= composed.delta(epsilon) <= truth * 1.01 + 1e-6
        # The batches, whose other devices may have any inputs: an upper bound.
        batches = [(ShuffledBatch.at_position(reports, e), n) for e, n in ((local, 2), (other, 1))]
        assert truth <= central_delta(batches, epsilon) + 1e-12


def test_one_report_alone_is_randomised_response_composed() -> None:
    """No amplification with n = 1: the exact curve of k-fold randomised response, at most kε₀."""
    local, times = 0.5, 12
    often = 1 / (1 + math.exp(-local))
    truths = stats.binom(times, often).pmf(np.arange(times + 1))
    losses = (2 * np.arange(times + 1) - times) * local
    batch = ShuffledBatch(1, local)
    for epsilon in (0.0, 0.7, 2.0, 4.5):
        exact = float(truths @ np.maximum(-np.expm1(epsilon - losses), 0.0))
        assert exact - 1e-12 <= central_delta([(batch, times)], epsilon) <= 1.01 * exact
    assert central_epsilon([(batch, times)], 1e-12) <= times * local
    assert central_delta([(batch, times)], times * local) == 0.0


def test_composition_is_monotone_and_delta_and_epsilon_are_inverse() -> None:
    batch, weaker = ShuffledBatch(200, 1.0), ShuffledBatch(100, 1.0)
    small = central_epsilon([(batch, 50)], 1e-6)
    assert small < central_epsilon([(batch, 51)], 1e-6)  # more positions, or rounds
    assert small < central_epsilon([(batch, 50)], 1e-7)
    assert small < central_epsilon([(weaker, 50)], 1e-6)
    assert small < central_epsilon([(batch, 50), (weaker, 1)], 1e-6)
    assert central_delta([(batch, 50)], small) == pytest.approx(1e-6, rel=1e-3)
    split = central_epsilon([(batch, 20), (batch, 30)], 1e-6)
    assert split == pytest.approx(small, rel=1e-4)


def test_the_tightest_bound_at_a_position_is_monotone_where_enumeration_ends() -> None:
    sizes = (1023, 1024, 1025, 1300, 1497, 1498, 1600)
    batches = [ShuffledBatch.at_position(n, 1.0) for n in sizes]
    assert [b.bound is Bound.ENUMERATED for b in batches] == [True] * 5 + [False] * 2
    assert max(b.reports for b in batches[:5]) == 1024
    figures = [central_epsilon([(b, 26_010)], 1e-5) for b in batches]
    assert figures == sorted(figures, reverse=True)
    assert ShuffledBatch.at_position(1000, 0.04).bound is Bound.DECOMPOSED


def test_compositions_of_many_millions_stay_within_memory() -> None:
    batch = ShuffledBatch(500, 1.0)
    times = 2_601_000  # the whole model, in 100 rounds
    figure = central_epsilon([(batch, times)], 1e-5)
    spread = math.sqrt(times) * batch.loss.size
    assert figure == pytest.approx(spread**2 / 2 + spread * stats.norm.isf(1e-5), rel=2e-3)
    assert 0 < central_delta([(batch, times)], 0.9 * times) < 1e-15  # far out in the tail


def test_a_rise_in_epsilon_over_rounds_lies_between_its_ends() -> None:
    rounds = [(ShuffledBatch(500, local), 10) for local in np.linspace(0.5, 1.5, 11)]
    epsilons = [central_epsilon([(ShuffledBatch(500, local), 110)], 1e-5) for local in (0.5, 1.5)]
    assert epsilons[0] < central_epsilon(rounds, 1e-5) < epsilons[1]


def test_the_figure_for_a_whole_model() -> None:
    """500 devices, ε₀ = 1, 26,010 weights, one round, δ = 1e-5: not 63, as our notes had it."""
    figures = {b: central_epsilon([(ShuffledBatch(500, 1.0, b), 26_010)], 1e-5) for b in Bound}
    assert figures[Bound.ENUMERATED] == pytest.approx(60.7, abs=0.05)
    assert figures[Bound.DECOMPOSED] == pytest.approx(79.3, abs=0.05)
    assert figures[Bound.CLONES] == pytest.approx(106.5, abs=0.05)
    # A lower bound on the truth: at every position all others have the greatest weight.
    rare = 1 / (math.e + 1)
    others = stats.binom(499, 1 - rare).pmf(np.arange(500))
    p, q = np.convolve(others, [rare, 1 - rare]), np.convolve(others, [1 - rare, rare])
    seen = (p > 0) & (q > 0)
    attained = compose([(FiniteLoss(np.log(p[seen] / q[seen]), p[seen]), 26_010)]).epsilon(1e-5)
    assert attained == pytest.approx(59.6, abs=0.05)


@pytest.mark.parametrize("local", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("reports", [10_000, 1_000_000])
@pytest.mark.parametrize("delta", [1e-6, 1e-9])
def test_the_closed_form_is_above_the_numbers(reports: int, local: float, delta: float) -> None:
    closed = clones_closed_form(reports, local, delta)
    numbers = ShuffledBatch(reports, local, Bound.CLONES)
    assert numbers.delta(min(closed, 2 * local)) <= delta
    assert central_epsilon([(numbers, 1)], delta) <= closed
    assert numbers.delta(closed / 8) > delta  # the two are not worlds apart


def test_a_large_batch_loses_little_to_grouping() -> None:
    """At n = 10⁶ the clones bound follows the normal approximation of its loss."""
    reports, local = 10**6, 1.0
    batch = ShuffledBatch(reports, local, Bound.CLONES)
    shift = math.tanh(local / 2) / math.sqrt(reports * math.exp(-local) / 4)
    assert batch.loss.size == pytest.approx(shift, rel=1e-3)


@pytest.mark.parametrize("bound", list(Bound))
def test_huge_epsilons_come_out_finite_and_below_the_local_guarantee(bound: Bound) -> None:
    batch = ShuffledBatch(100, 8.0, bound)
    assert 1000 < central_epsilon([(batch, 1000)], 1e-5) <= 8000
    tiny = ShuffledBatch(100, 1e-6, bound)
    assert 0 <= central_epsilon([(tiny, 1000)], 1e-9) <= 1e-3


@pytest.mark.parametrize(
    ("devices", "probability", "batches", "failure"),
    [(500, 0.1, 1, 1e-6), (500, 0.1, 26_010, 1e-6), (40, 0.5, 3, 0.01), (10_000, 0.004, 2_600, 1e-9)],
)
def test_least_reports_is_a_quantile(devices: int, probability: float, batches: int, failure: float) -> None:
    least = least_reports(devices, probability, batches, failure)
    law = stats.binom(devices - 1, probability)
    assert batches * law.cdf(least - 2) <= failure
    assert batches * law.cdf(least - 1) > 0.99 * failure  # and one more would fail too often


def test_least_reports_at_the_ends() -> None:
    assert least_reports(500, 0.5, 10, 1e-300) == 1
    assert least_reports(70, 1.0, 10, 1e-9) == 70
    assert least_reports(1, 0.3, 10, 1e-9) == 1
    assert least_reports(10, 1e-9, 10, 1e-9) == 1


def test_an_attack_on_a_shuffled_batch_stays_within_the_bound() -> None:
    """Count the ones, as an observer would, and tell apart two weights of one device in 60."""
    reports, local, trials = 60, 1.0, 200_000
    rng = np.random.default_rng(7)
    rare = 1 / (math.e + 1)
    others = rng.binomial(reports - 1, 1 - rare, trials)
    high, low = others + rng.binomial(1, 1 - rare, trials), others + rng.binomial(1, rare, trials)
    batch = ShuffledBatch(reports, local, Bound.ENUMERATED)
    slack = 5 * math.sqrt(2 / trials)
    for threshold in range(30, 61):
        hits, alarms = float((high >= threshold).mean()), float((low >= threshold).mean())
        for epsilon in (0.0, 0.05, 0.2):
            assert hits <= math.exp(epsilon) * alarms + batch.delta(epsilon) + slack
    advantage = max(float((high >= t).mean() - (low >= t).mean()) for t in range(30, 61))
    assert advantage > 0.8 * batch.delta(0.0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ShuffledBatch(0, 1.0), "honest reports is 0"),
        (lambda: ShuffledBatch(10**9, 1.0), "honest reports is 1000000000"),
        (lambda: ShuffledBatch(MAX_ENUMERATED + 1, 1.0, Bound.ENUMERATED), "honest reports is 1025"),
        (lambda: ShuffledBatch(10, 0.0), "local epsilon is 0.0"),
        (lambda: ShuffledBatch(10, 33.0), "local epsilon is 33.0"),
        (lambda: ShuffledBatch(10, math.nan), "local epsilon is nan"),
        (lambda: ShuffledBatch(10, 1.0, "exact"), "bound is 'exact'"),  # type: ignore[arg-type]
        (lambda: ShuffledBatch(10, 1.0).delta(-0.1), "epsilon is -0.1"),
        (lambda: ShuffledBatch(10, 1.0).delta(math.inf), "epsilon is inf"),
        (lambda: central_epsilon([], 1e-5), "no privacy losses"),
        (lambda: central_epsilon([(ShuffledBatch(10, 1.0), 0)], 1e-5), "number of compositions is 0"),
        (lambda: central_epsilon([(ShuffledBatch(10, 1.0), 1)], 1.0), "delta is 1.0"),
        (lambda: central_delta([(ShuffledBatch(10, 1.0), 1)], math.nan), "epsilon is nan"),
        (lambda: clones_closed_form(100, 2.0, 1e-6), "local epsilon is 2.0"),
        (lambda: clones_closed_form(10_000, 1.0, 0.0), "delta is 0.0"),
        (lambda: least_reports(0, 0.5, 1, 0.1), "honest devices is 0"),
        (lambda: least_reports(10, 0.0, 1, 0.1), "reporting probability is 0.0"),
        (lambda: least_reports(10, 0.5, 0, 0.1), "batches is 0"),
        (lambda: least_reports(10, 0.5, 1, 1.0), "failure probability is 1.0"),
    ],
)
def test_bad_input_is_named(make: object, text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        make()  # type: ignore[operator]
