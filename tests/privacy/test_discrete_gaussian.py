"""The sampler: its tables against mpmath, its draws by tests that can fail.

All statistical tests have fixed sample sizes and a level of 1e-6, and are shown to
catch planted errors: one value in a hundred wrong, or σ off by 2 % (chi-square) or 4 % (KS).
"""

from __future__ import annotations

import decimal
import itertools
import math
import os
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dpagent.errors import ParameterError
from dpagent.privacy import DiscreteGaussianSampler, poisson_lot
from dpagent.privacy.discrete_gaussian import (
    GaussianTable,
    decompose,
    gaussian_table,
    smoothing_distance,
    statistical_distance,
    table_radius,
)

LEVEL = 1e-6
DRAWS = 400_000


def exact_pmf(variance: Fraction, radius: int) -> list[mpmath.mpf]:
    """P(X = x) for x = −radius..radius; the normaliser runs far beyond the radius."""
    scale = mpmath.mpf(2 * variance.numerator) / variance.denominator
    half = [mpmath.exp(-(mpmath.mpf(x) ** 2) / scale) for x in range(3 * radius)]
    total = 2 * mpmath.fsum(half) - half[0]
    return [half[abs(x)] / total for x in range(-radius, radius + 1)]


def table_pmf(table: GaussianTable) -> list[mpmath.mpf]:
    edges = [0, *(table.threshold(i) for i in range(table.high.size)), 1 << 128]
    return [mpmath.mpf(b - a) / (1 << 128) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("sigma", [2.0**-6, 0.1, 0.5, 1.0, 3.7, 17.3, 50.0])
def test_every_table_probability_is_within_the_certified_distance(sigma: float) -> None:
    variance = Fraction(sigma) ** 2
    with mpmath.workdps(60):
        table = gaussian_table(variance)
        exact, ours = exact_pmf(variance, table.radius), table_pmf(table)
        assert len(exact) == len(ours)
        differences = [abs(a - b) for a, b in zip(exact, ours, strict=True)]
        outside = 1 - mpmath.fsum(exact)
        assert (mpmath.fsum(differences) + outside) / 2 <= statistical_distance(sigma) < 1e-33
        # each threshold is rounded down by at most 2^-128, so a probability is off by no more
        assert max(differences) <= mpmath.mpf(2) ** -128 + outside


def test_the_largest_direct_table_is_right_at_both_ends_and_in_the_middle() -> None:
    table = gaussian_table(Fraction(1024) ** 2)
    with mpmath.workdps(60):
        exact = exact_pmf(Fraction(1024) ** 2, table.radius)
        ours = table_pmf(table)
        for x in (-table.radius, -5000, -1, 0, 1, 777, table.radius):
            difference = abs(exact[x + table.radius] - ours[x + table.radius])
            assert difference <= mpmath.mpf(2) ** -127


@pytest.mark.parametrize("sigma", [1024.5, 1500.0, 147_640.5, 3e6, 2.0**24])
def test_wide_decomposition_is_exact_and_smooth(sigma: float) -> None:
    (one, first), (stride, second) = decompose(sigma)
    assert one == 1
    assert first + stride**2 * second == Fraction(sigma) ** 2
    assert first == 9 * stride**2
    assert second >= 400  # σ2 ≥ 20, as the proof says
    tau_squared = 1 / (1 / second + stride**2 / first)
    assert smoothing_distance(float(tau_squared)) < 1e-74
    assert max(table_radius(first), table_radius(second)) < 2**17


@pytest.mark.parametrize(("stride", "ratio"), [(2, 3.0), (3, 2.5), (4, 3.0)])
def test_the_sum_of_two_tables_is_a_discrete_gaussian(stride: int, ratio: float) -> None:
    """The wide sampler's identity, at a size where the whole convolution can be enumerated."""
    first, second = Fraction(ratio) ** 2 * stride**2, Fraction(16)
    tables = gaussian_table(first), gaussian_table(second)
    with mpmath.workdps(60):
        near, far = table_pmf(tables[0]), table_pmf(tables[1])
        reach = tables[0].radius + stride * tables[1].radius
        summed = [mpmath.mpf(0)] * (2 * reach + 1)
        for i, p in enumerate(near):
            for j, q in enumerate(far):
                x = (i - tables[0].radius) + stride * (j - tables[1].radius)
                summed[x + reach] += p * q
        exact = exact_pmf(first + stride**2 * second, reach)
        distance = mpmath.fsum(abs(a - b) for a, b in zip(summed, exact, strict=True)) / 2
        tau_squared = 1 / (1 / second + stride**2 / first)
        assert distance <= smoothing_distance(float(tau_squared)) + 1e-33


def chi_square_p(values: NDArray[np.int64], sigma: float) -> float:
    """P value of a chi-square test on up to 61 cells of nearly equal width over ±5σ."""
    reach = max(1, math.ceil(5 * sigma))
    width = max(1, round(2 * reach / 60))
    support = np.arange(-13 * reach, 13 * reach + 1)
    pmf = np.exp(-(support.astype(float) ** 2) / (2 * sigma**2))
    pmf /= pmf.sum()

    def cell(x: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.clip((x + reach) // width, 0, 2 * reach // width)

    expected = np.bincount(cell(support), weights=pmf) * values.size
    observed = np.bincount(cell(values), minlength=expected.size)
    enough = expected >= 5
    observed_rest, expected_rest = observed[~enough].sum(), expected[~enough].sum()
    statistic = float((((observed - expected) ** 2)[enough] / expected[enough]).sum())
    if expected_rest >= 5:
        statistic += (observed_rest - expected_rest) ** 2 / expected_rest
    return float(stats.chi2.sf(statistic, enough.sum() - (expected_rest < 5)))


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.7, 50.0, 1500.0, 1e5])
def test_draws_pass_a_chi_square_test_that_catches_planted_errors(sigma: float) -> None:
    values = DiscreteGaussianSampler(sigma).sample(DRAWS)
    assert chi_square_p(values, sigma) > LEVEL
    planted = DiscreteGaussianSampler(sigma * 1.02).sample(DRAWS)
    assert chi_square_p(planted, sigma) < LEVEL
    stuck = values.copy()
    stuck[: DRAWS // 100] = 0
    assert chi_square_p(stuck, sigma) < LEVEL or sigma < 1  # at σ = 0.5 most values are 0 anyway
    shifted = values.copy()
    shifted[: DRAWS // 100] += max(1, round(3 * sigma))
    assert chi_square_p(shifted, sigma) < LEVEL


@pytest.mark.parametrize("sigma", [1500.0, 147_640.5, 2.0**24])
def test_wide_draws_pass_kolmogorov_smirnov(sigma: float) -> None:
    values = DiscreteGaussianSampler(sigma).sample(DRAWS)
    # half a step of jitter turns integers into a continuous variable; at this σ it is invisible
    jitter = np.random.default_rng(1).uniform(-0.5, 0.5, DRAWS)
    assert stats.kstest((values + jitter) / sigma, "norm").pvalue > LEVEL
    assert stats.kstest((values + jitter) / (sigma * 1.04), "norm").pvalue < LEVEL
    residues = np.bincount(values % 16, minlength=16)
    assert stats.chisquare(residues).pvalue > LEVEL  # no trace of the stride in the low bits


@pytest.mark.parametrize("sigma", [1.0, 50.0, 147_640.5])
def test_moments(sigma: float) -> None:
    scaled = DiscreteGaussianSampler(sigma).sample(DRAWS) / sigma
    bound = -stats.norm.ppf(LEVEL / 2) / math.sqrt(DRAWS)
    assert abs(scaled.mean()) < bound
    assert abs((scaled**2).mean() - 1) < bound * math.sqrt(2)
    assert abs((scaled**3).mean()) < bound * math.sqrt(15)
    assert abs((scaled[1:] * scaled[:-1]).mean()) < bound * 1.01


def test_a_word_that_meets_a_threshold_is_decided_by_a_second_word() -> None:
    table = gaussian_table(Fraction(1))
    index = table.radius  # the threshold between 0 and 1
    high, low = int(table.high[index]), int(table.low[index])
    assert 0 < low < 2**64 - 1

    def draw(*words: int) -> int:
        queue = list(words)

        def entropy(count: int) -> bytes:
            assert count == 8
            return queue.pop(0).to_bytes(8, "little")

        value = int(table.draw(1, entropy)[0])
        assert not queue, "a word was not asked for"
        return value

    assert draw(high - 1) == 0
    assert draw(high + 1) == 1
    assert draw(high, low - 1) == 0
    assert draw(high, low) == 1
    assert draw(high, 2**64 - 1) == 1
    # in the far tails many thresholds share one high word
    assert draw(0, 0) == 1 - table.radius  # P(X = -14) is below 2^-128
    assert draw(2**64 - 1, 2**64 - 1) == table.radius
    ties = int((table.high == 0).sum())
    assert ties > 1
    for i in range(ties):
        assert draw(0, int(table.low[i])) == i + 1 - table.radius


@pytest.mark.parametrize(("sigma", "bytes_per_value"), [(3.7, 8), (147_640.5, 16)])
def test_bytes_read_do_not_depend_on_the_values(sigma: float, bytes_per_value: int) -> None:
    read = []

    def entropy(count: int) -> bytes:
        read.append(count)
        return os.urandom(count)

    sampler = DiscreteGaussianSampler(sigma, entropy=entropy)
    assert sampler.sample(100_000).shape == (100_000,)
    assert sum(read) == bytes_per_value * 100_000
    assert max(read) <= 8 * 65_536
    assert sampler.sample(0).shape == (0,)


def test_a_thread_s_decimal_context_does_not_matter() -> None:
    variance = Fraction(7.25) ** 2
    expected = gaussian_table.__wrapped__(variance)
    with decimal.localcontext(prec=3):
        again = gaussian_table.__wrapped__(variance)
    np.testing.assert_array_equal(expected.low, again.low)


@pytest.mark.parametrize("sigma", [0.0, -1.0, 1e-3, 2.0**24 + 4, math.nan, math.inf])
def test_sigma_out_of_range_is_named(sigma: float) -> None:
    with pytest.raises(ParameterError, match="sigma"):
        DiscreteGaussianSampler(sigma)


def test_short_entropy_is_refused() -> None:
    with pytest.raises(ParameterError, match="entropy gave 8 bytes; expected the 24"):
        DiscreteGaussianSampler(1.0, entropy=lambda _: bytes(8)).sample(3)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.97])
def test_poisson_lots_have_the_right_size_and_independent_records(rate: float) -> None:
    records, lots = 1000, 400
    drawn = np.zeros((lots, records), dtype=np.int64)
    for lot in drawn:
        indices = poisson_lot(records, rate)
        assert (np.diff(indices) > 0).all()
        lot[indices] = 1
    assert stats.binomtest(int(drawn.sum()), drawn.size, rate).pvalue > LEVEL
    sizes = drawn.sum(axis=1)
    dispersion = ((sizes - records * rate) ** 2).sum() / (records * rate * (1 - rate))
    assert LEVEL < stats.chi2.cdf(dispersion, lots) < 1 - LEVEL


def test_poisson_lot_compares_words_with_the_rate_exactly() -> None:
    threshold = 2**64 // 4
    words = b"".join(w.to_bytes(8, "little") for w in (threshold - 1, threshold, 0, 2**64 - 1))
    np.testing.assert_array_equal(poisson_lot(4, 0.25, entropy=lambda _: words), [0, 2])
    almost_one = math.nextafter(1.0, 0.0)
    assert poisson_lot(1, almost_one, entropy=lambda _: b"\xff" * 8).size == 0


def test_poisson_lot_at_its_limits() -> None:
    np.testing.assert_array_equal(poisson_lot(5, 1.0), np.arange(5))
    assert poisson_lot(0, 0.5).dtype == np.intp
    large = poisson_lot(200_000, 0.5)
    assert large.max() > 190_000
    with pytest.raises(ParameterError, match="records"):
        poisson_lot(-1, 0.5)
    with pytest.raises(ParameterError, match="sampling rate"):
        poisson_lot(5, 0.0)
