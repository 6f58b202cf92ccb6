"""The two-point mechanism: its exact probabilities and its draws."""

from __future__ import annotations

import decimal
import itertools
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from privacy.mechanisms.scripted_words import one_layer, ones_of_all_words, scripted
from scipy import stats

from dpagent.errors import ParameterError
from dpagent.privacy.mechanisms import two_point
from dpagent.privacy.mechanisms.layer_ranges import LayerRange
from dpagent.privacy.mechanisms.two_point import BEST_EPSILON, TwoPoint, TwoPointReport

LEVEL = 1e-6


EPSILONS = (1e-6, 0.01, 0.3, 1.0, math.log(3), BEST_EPSILON, 8.0, 20.0, 32.0)


def coins(weights: NDArray[np.float64], epsilon: float) -> NDArray[np.float64]:
    """The paper's probability of the upper value, for a range [−1, 1]."""
    return 0.5 + np.clip(weights, -1, 1) * math.tanh(epsilon / 2) / 2


# ---- exact probabilities -------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_ratio_of_probabilities_never_exceeds_e_to_the_epsilon(epsilon: float) -> None:
    """Counts of words, as fractions, for the extremes and for what a float can do to break them."""
    mechanism = TwoPoint(one_layer(1, centre=0.1, radius=0.3), epsilon, 1)
    weights = [-0.2, 0.4, 0.1, -1e308, 1e308, math.inf, -math.inf, math.nan, 0.4000000001, 5e-324, -0.0]
    ones = [ones_of_all_words(mechanism, weight) for weight in weights]
    with mpmath.workdps(60):
        limit = mpmath.exp(mpmath.mpf(epsilon))
        for numbers in (ones, [2**64 - count for count in ones]):
            ratio = Fraction(max(numbers), min(numbers))
            assert mpmath.mpf(ratio.numerator) / ratio.denominator <= limit
        # tight: no more words are given away than half's rounding to a float, and one, take
        low = min(ones) - 2**9 - 1
        assert mpmath.mpf(2**64 - low) / low > limit
    assert ones[0] + ones[1] == 2**64
    assert ones[2] == ones[5] == ones[6] == ones[7] == 2**63  # the centre, and what is not finite
    assert ones[3] == ones[0]  # beyond the range
    assert ones[4] == ones[1] == ones[8]


@settings(max_examples=150)
@given(
    st.floats(1e-6, 32.0),
    st.floats(-1e30, 1e30),
    st.floats(1e-6, 1e6),
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.data(),
)
def test_no_weight_leaves_the_bounds(
    epsilon: float, centre: float, radius: float, dtype: type[np.floating], data: st.DataObject
) -> None:
    floats = {np.float16: st.floats(width=16), np.float32: st.floats(width=32), np.float64: st.floats()}
    weight = data.draw(floats[dtype])
    mechanism = TwoPoint(one_layer(1, centre, radius), epsilon, 1)
    threshold = mechanism._thresholds(np.array([weight], dtype=dtype), np.zeros(1, dtype=np.int64))
    with decimal.localcontext(decimal.Context(prec=80)):
        low = math.ceil(decimal.Decimal(2**64) / (decimal.Decimal(epsilon).exp() + 1))
    assert low <= int(threshold[0]) <= 2**64 - low
    if math.isfinite(weight):
        centred = Fraction(weight) - Fraction(centre)
        x = max(Fraction(-1), min(Fraction(1), centred / Fraction(radius)))
        half = 2**63 - low
        error = int(threshold[0]) - 2**63 - x * half
        assert abs(error) <= Fraction(1, 2) + half * Fraction(4, 2**53)


def test_the_threads_decimal_context_does_not_matter() -> None:
    expected = TwoPoint(one_layer(1), 1.2345, 1).amplitude
    two_point._half_range.cache_clear()
    with decimal.localcontext(decimal.Context(prec=3, rounding=decimal.ROUND_UP)):
        assert TwoPoint(one_layer(1), 1.2345, 1).amplitude == expected


def test_the_mechanism_is_the_papers() -> None:
    """Probability and values as Sun, Qian, Chen write them, range [c−r, c+r]."""
    centre, radius, epsilon = -0.7, 0.25, 1.3
    mechanism = TwoPoint(one_layer(1, centre, radius), epsilon, 1)
    power = math.exp(epsilon)
    assert mechanism.amplitude == pytest.approx((power + 1) / (power - 1), rel=1e-14)
    for weight in (-0.95, -0.8, -0.7, -0.5, -0.45):
        up = ((weight - centre) * (power - 1) + radius * (power + 1)) / (2 * radius * (power + 1))
        ones = ones_of_all_words(mechanism, weight)
        assert ones / 2**64 == pytest.approx(up, rel=1e-13)
        high, low = (
            mechanism.estimate(np.array([bit]), np.array([1])).mean[0] for bit in (1, 0)
        )  # what a single report is taken for
        share = Fraction(ones, 2**64)
        mean = float(share * Fraction(high) + (1 - share) * Fraction(low))
        assert mean == pytest.approx(weight, abs=4e-16)
        variance = ones / 2**64 * (high - mean) ** 2 + (1 - ones / 2**64) * (low - mean) ** 2
        assert mechanism.variance(weight - centre, radius) == pytest.approx(variance, rel=1e-12)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_bias_is_what_the_text_says(epsilon: float) -> None:
    mechanism = TwoPoint(one_layer(1), epsilon, 1)
    half = Fraction(2**63) / Fraction(mechanism.amplitude)
    for weight in np.linspace(-1, 1, 9):
        ones = ones_of_all_words(mechanism, float(weight))
        mean = Fraction(mechanism.amplitude) * (2 * Fraction(ones, 2**64) - 1)
        # 2⁻⁵³ more for the amplitude as a float
        assert abs(mean - Fraction(float(weight))) <= 1 / (2 * half) + Fraction(6, 2**53)
    assert mechanism.amplitude == pytest.approx(1 / math.tanh(epsilon / 2), rel=1e-12)


# ---- draws ---------------------------------------------------------------------------------------


def chi_square(ones: NDArray[np.int64], counts: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """p-value of bits against their probabilities."""
    statistic = float(((ones - counts * p) ** 2 / (counts * p * (1 - p))).sum())
    return float(stats.chi2.sf(statistic, p.size))


def test_bits_of_the_shipped_code_have_their_probabilities() -> None:
    """200,000 bits for each of 11 weights; a probability off by 1 % would be seen."""
    epsilon, repeats = 1.0, 200_000
    grid = np.linspace(-1.2, 1.2, 11)
    mechanism = TwoPoint(one_layer(11 * repeats), epsilon, 11 * repeats)
    report = mechanism.report(np.repeat(grid, repeats))
    np.testing.assert_array_equal(report.positions, np.arange(11 * repeats))
    ones = report.bits.reshape(11, repeats).sum(axis=1)
    counts = np.full(11, repeats)
    assert chi_square(ones, counts, coins(grid, epsilon)) > LEVEL
    # and the test can fail
    for wrong in (coins(grid, epsilon) * 1.01, coins(grid, epsilon * 1.05), coins(grid * 1.05, epsilon)):
        assert chi_square(ones, counts, wrong) < LEVEL
    # bits of neighbours do not go together
    joint = report.bits.reshape(11, repeats // 2, 2)
    for weight, pairs in zip(grid, joint, strict=True):
        p = float(coins(np.array([weight]), epsilon)[0])
        observed = np.bincount(pairs @ np.array([2, 1]), minlength=4)
        expected = repeats // 2 * np.array([(1 - p) ** 2, p * (1 - p), p * (1 - p), p * p])
        assert stats.chisquare(observed, expected).pvalue > LEVEL


def test_a_planted_bug_of_one_per_cent_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By counts of words a bug of a millionth, by chi-square one of a hundredth of a probability."""
    grid, repeats = np.linspace(-1.2, 1.2, 11), 200_000
    mechanism = TwoPoint(one_layer(11 * repeats), 1.0, 11 * repeats)
    right = TwoPoint._thresholds

    def wrong(
        self: TwoPoint, weights: NDArray[np.float64], positions: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        return right(self, weights, positions) // np.uint64(100) * np.uint64(101)

    half_range = two_point._half_range
    monkeypatch.setattr(TwoPoint, "_thresholds", wrong)
    ones = mechanism.report(np.repeat(grid, repeats)).bits.reshape(11, repeats).sum(axis=1)
    assert chi_square(ones, np.full(11, repeats), coins(grid, 1.0)) < LEVEL
    monkeypatch.setattr(TwoPoint, "_thresholds", right)
    monkeypatch.setattr(
        two_point, "_half_range", lambda epsilon: half_range(epsilon) + half_range(epsilon) // 10**6
    )
    single = TwoPoint(one_layer(1), 1.0, 1)
    assert ones_of_all_words(single, 1.0) / ones_of_all_words(single, -1.0) > math.exp(1.0) * (1 + 1e-7)


@pytest.mark.parametrize(("size", "coordinates"), [(3, 1), (3, 2), (5, 2), (6, 3), (7, 3), (4, 4)])
def test_every_set_with_one_position_of_each_block_is_equally_likely(size: int, coordinates: int) -> None:
    mechanism = TwoPoint(one_layer(size), 1.0, coordinates)
    edges = mechanism.block_edges()
    assert set(np.diff(edges)) <= {size // coordinates, -(-size // coordinates)}
    assert (edges[0], edges[-1]) == (0, size)
    blocks = [range(*pair) for pair in itertools.pairwise(edges.tolist())]
    sets = list(itertools.product(*blocks))
    draws = 2_000 * len(sets)
    weights = np.zeros(size)
    seen = Counter(tuple(mechanism.report(weights).positions.tolist()) for _ in range(draws))
    assert set(seen) == set(sets)
    if len(sets) > 1:
        assert stats.chisquare([seen[chosen] for chosen in sets]).pvalue > LEVEL


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 26_010, 2**28 - 1])
def test_a_position_is_the_floor_of_the_word_times_the_size(size: int) -> None:
    """Exactly, also where a product of halves carries; so words are shared out to one word."""
    mechanism = TwoPoint(one_layer(size), 1.0, 1)
    words = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    for number in (1, size // 2, size - 1):
        edge = -(-(number << 64) // size)
        words += [w for w in (edge - 1, edge, edge + 1) if 0 <= w < 2**64]
    for word in words:
        assert mechanism._draw_positions(scripted(word)).tolist() == [word * size >> 64]


@settings(max_examples=40)
@given(st.integers(1, 40), st.data())
def test_the_bytes_read_depend_on_nothing_but_the_number_of_coordinates(
    size: int, data: st.DataObject
) -> None:
    coordinates = data.draw(st.integers(1, size))
    weights = np.array(data.draw(st.lists(st.floats(), min_size=size, max_size=size)))
    mechanism = TwoPoint(one_layer(size), data.draw(st.floats(1e-6, 32)), coordinates)
    asked: list[int] = []

    def entropy(count: int) -> bytes:
        asked.append(count)
        return data.draw(st.binary(min_size=count, max_size=count))

    report = mechanism.report(weights, entropy=entropy)
    assert asked == [8 * coordinates, 8 * coordinates]
    assert report.positions.shape == report.bits.shape == (coordinates,)
    assert (np.diff(report.positions) > 0).all()


def test_positions_do_not_depend_on_weights() -> None:
    mechanism = TwoPoint(one_layer(50), 1.0, 7)
    data = np.random.default_rng(1).bytes(112)
    for weights in (np.zeros(50), np.full(50, 9.0), np.full(50, math.nan)):
        first = mechanism.report(weights, entropy=scripted(*np.frombuffer(data, "<u8").tolist())).positions
        words = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(7)]
        edges = mechanism.block_edges()
        np.testing.assert_array_equal(
            first, [edges[i] + (words[i] * int(edges[i + 1] - edges[i]) >> 64) for i in range(7)]
        )


def test_a_fleets_estimate_is_unbiased_and_its_error_as_stated() -> None:
    """2,000 devices send 6 of 20 weights of two layers of unlike width."""
    layers = (LayerRange("wide", 12, 0.5, 2.0), LayerRange("narrow", 8, -0.1, 0.05))
    mechanism = TwoPoint.for_device(layers, 12.0, 6)
    rng = np.random.default_rng(3)
    devices = 2_000
    weights = np.concatenate(
        (rng.uniform(-1.5, 2.5, (devices, 12)), rng.uniform(-0.15, -0.05, (devices, 8))), axis=1
    )
    ones, counts = mechanism.tally([mechanism.report(row) for row in weights])
    assert counts.sum() == 6 * devices
    estimate = mechanism.estimate(ones, counts)
    scores = (estimate.mean - weights.mean(axis=0)) / estimate.standard_error
    assert float(np.abs(scores).max()) < stats.norm.isf(LEVEL / 40)
    assert (scores**2).sum() < stats.chi2.isf(LEVEL, 20)
    assert (scores**2).sum() > 1.0  # the error is stated, not exaggerated
    assert (estimate.standard_error[:12] > 30 * estimate.standard_error[12:].max()).all()


def test_where_nobody_reported_the_estimate_is_the_centre_and_says_so() -> None:
    mechanism = TwoPoint(one_layer(3, centre=0.2, radius=0.5), 1.0, 1)
    estimate = mechanism.estimate(np.array([0, 4, 1]), np.array([0, 4, 2]))
    b = mechanism.amplitude
    np.testing.assert_allclose(estimate.mean, [0.2, 0.2 + 0.5 * b, 0.2])
    np.testing.assert_allclose(estimate.standard_error, [np.inf, 0.5 * b / 2, 0.5 * b / math.sqrt(2)])


# ---- the default number of coordinates -----------------------------------------------------------


@settings(max_examples=200)
@given(st.floats(1e-5, 200.0), st.integers(1, 60))
def test_the_default_number_of_coordinates_is_the_best(epsilon: float, dimension: int) -> None:
    chosen = TwoPoint.for_device(one_layer(dimension), epsilon) if epsilon / dimension <= 32 else None
    if chosen is None:
        return
    variances = {k: 1 / (math.tanh(epsilon / (2 * k)) ** 2 * k) for k in range(1, dimension + 1)}
    assert variances[chosen.coordinates] <= min(variances.values()) * (1 + 1e-12)


@settings(max_examples=300)
@given(st.floats(1e-2, 100.0), st.integers(4, 3000))
def test_a_devices_shares_never_add_up_to_more_than_its_budget(epsilon: float, coordinates: int) -> None:
    mechanism = TwoPoint.for_device(one_layer(3000), epsilon, coordinates)
    assert (
        Fraction(mechanism.epsilon) * coordinates <= Fraction(mechanism.device_epsilon) <= Fraction(epsilon)
    )
    assert mechanism.device_epsilon == pytest.approx(epsilon, rel=1e-15)
    assert mechanism.rescale == 3000 / coordinates


# ---- bad input -----------------------------------------------------------------------------------


def never(count: int) -> bytes:
    raise AssertionError("drawn before the input was checked")


GOOD = TwoPoint(one_layer(3), 1.0, 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: TwoPoint((), 1.0, 1), "layers is empty"),
        (lambda: TwoPoint.for_device((), 1.0), "layers is empty"),
        (lambda: TwoPoint(one_layer(3), 0.0, 1), r"epsilon of a coordinate is 0.0; expected .*\[1e-06, 32\]"),
        (lambda: TwoPoint(one_layer(3), 32.1, 1), "epsilon of a coordinate is 32.1"),
        (lambda: TwoPoint(one_layer(3), math.nan, 1), "epsilon of a coordinate is nan"),
        (lambda: TwoPoint(one_layer(3), math.inf, 1), "epsilon of a coordinate is inf"),
        (lambda: TwoPoint(one_layer(3), 1.0, 4), "coordinates is 4; .* at most 3"),
        (lambda: TwoPoint(one_layer(3), 1.0, 0), "coordinates is 0"),
        (lambda: TwoPoint(one_layer(3), 1.0, 1.5), "coordinates is 1.5"),  # type: ignore[arg-type]
        (lambda: TwoPoint((*one_layer(2**28), *one_layer(1)), 1.0, 1), "dimension is 268435457"),
        (lambda: TwoPoint.for_device(one_layer(3), -1.0), "epsilon of a device is -1.0"),
        (lambda: TwoPoint.for_device(one_layer(3), math.nan), "epsilon of a device is nan"),
        (lambda: TwoPoint.for_device(one_layer(3), 1.0, 0), "coordinates is 0"),
        (lambda: TwoPoint.for_device(one_layer(3), 1.0, 4), "coordinates is 4"),
        (lambda: TwoPoint.for_device(one_layer(3), 1e4), "epsilon of a coordinate is 3333"),
        (lambda: TwoPoint.for_device(one_layer(3), 1e-9), "epsilon of a coordinate is 1e-09"),
        (lambda: GOOD.report(np.zeros(4), entropy=never), r"weights have shape \(4,\)"),
        (lambda: GOOD.report(np.zeros(0), entropy=never), r"weights have shape \(0,\)"),
        (lambda: GOOD.report(np.zeros((3, 1)), entropy=never), r"weights have shape \(3, 1\)"),
        (lambda: GOOD.report(np.zeros(3, dtype=int), entropy=never), "type int64"),
        (lambda: GOOD.report(np.zeros(3, dtype=np.longdouble), entropy=never), "up to 64 bits"),
        (lambda: GOOD.report(np.zeros(3), entropy=lambda n: b"x"), "entropy gave 1 bytes"),
        (lambda: GOOD.variance(1.1, 1.0), "offset is 1.1"),
        (lambda: GOOD.variance(0.0, 0.0), "radius is 0.0"),
        (lambda: GOOD.estimate(np.array([1, 1, 3]), np.array([1, 1, 2])), "below 0 or above reports"),
        (lambda: GOOD.estimate(np.array([-1, 1, 1]), np.array([1, 1, 2])), "ones are below 0"),
        (lambda: GOOD.estimate(np.array([1, 1]), np.array([1, 1])), r"ones have shape \(2,\)"),
        (lambda: GOOD.estimate(np.ones(3), np.ones(3)), "integers each"),  # type: ignore[arg-type]
        (lambda: GOOD.tally([report([0, 3], [1, 0])]), r"a position outside \[0, 3\)"),
        (lambda: GOOD.tally([report([-1], [1])]), r"a position outside \[0, 3\)"),
        (lambda: GOOD.tally([report([0, 1], [1])]), "one boolean a position"),
        (lambda: GOOD.tally([TwoPointReport(np.array([0]), np.array([1]))]), "one boolean"),
        (lambda: GOOD.tally([TwoPointReport(np.array([0.5]), np.array([True]))]), "expected integers"),
    ],
)  # fmt: skip
def test_bad_input_is_named_before_anything_is_drawn(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        make()


def report(positions: list[int], bits: list[int]) -> TwoPointReport:
    return TwoPointReport(np.array(positions), np.array(bits, dtype=bool))
