"""Discrete Laplace, whole and cut off: the tables against mpmath, the draws by tests that can fail.

Statistical tests have fixed sample sizes and a level of 1e-6, and are shown to catch planted errors.
"""

from __future__ import annotations

import itertools
import math
import os
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from dpagent.errors import ParameterError
from dpagent.privacy.noise import discrete_laplace
from dpagent.privacy.noise.alias_table import AliasTable
from dpagent.privacy.noise.discrete_laplace import (
    MAX_BOUND,
    DiscreteLaplaceSampler,
    laplace_tables,
    lay_out,
    statistical_distance,
    usable_bound,
)

LEVEL = 1e-6
DRAWS = 400_000


def drawn_pmf(scale: float, bound: int | None) -> dict[int, mpmath.mpf]:
    """What the sampler draws, from its tables' integers, digit by digit."""
    layout = lay_out(scale, bound)
    *digits, last = (table.counts() for table in laplace_tables(scale, layout))
    zero, *highest = last
    magnitudes = {}
    for h, *low in itertools.product(range(len(highest)), *(range(len(d)) for d in digits)):
        magnitude, stride = 1, 1
        count = mpmath.mpf(highest[h]) / 2**160
        for digit, table in zip(low, digits, strict=True):
            magnitude += stride * digit
            stride *= len(table)
            count *= mpmath.mpf(table[digit]) / 2**159
        magnitudes[magnitude + stride * h] = count
    assert sorted(magnitudes) == list(range(1, layout.reach + 1))
    return {0: mpmath.mpf(zero) / 2**159, **magnitudes, **{-k: p for k, p in magnitudes.items()}}


def exact_pmf(scale: float, bound: int | None, reach: int) -> dict[int, mpmath.mpf]:
    """P(k) for |k| ≤ reach, by the definition; the normaliser is summed far beyond."""
    rate = 1 / mpmath.mpf(scale)
    half = [mpmath.exp(-k * rate) for k in range(1 + (3 * reach + 3 if bound is None else bound))]
    total = 2 * mpmath.fsum(half) - 1
    return {k: half[abs(k)] / total if abs(k) < len(half) else 0 for k in range(-reach, reach + 1)}


@pytest.mark.parametrize(
    ("scale", "bound"),
    [(2.0**-6, None), (0.1, None), (0.5, None), (1.0, None), (3.7, None), (50.0, None), (2.0**-6, 1),
     (0.5, 2), (1.0, 1), (1.0, 5000), (3.7, 10), (3.7, 313), (50.0, 40), (1e6, 7), (2.0**40, 1),
     (2.0**40, 100)],
)  # fmt: skip
@pytest.mark.parametrize("small_digits", [False, True])
def test_every_probability_is_within_the_certified_distance(
    scale: float, bound: int | None, small_digits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With digits of 2 bits, the sums of up to five tables can be enumerated."""
    if small_digits:
        monkeypatch.setattr(discrete_laplace, "_LAST_BITS", 3)
        monkeypatch.setattr(discrete_laplace, "_DIGIT_BITS", 2)
    used = usable_bound(scale, bound)
    layout = lay_out(scale, bound)
    assert small_digits or not layout.digit_bits
    with mpmath.workdps(70):
        ours = drawn_pmf(scale, bound)
        exact = exact_pmf(scale, used, layout.reach)
        assert ours.keys() == exact.keys()
        inside = mpmath.fsum(abs(ours[k] - exact[k]) for k in ours)
        outside = 1 - mpmath.fsum(exact.values())
        assert (inside + outside) / 2 <= statistical_distance(scale, bound) < 1e-35
        if not layout.cut:
            assert outside < 1e-60
            assert statistical_distance(scale, bound) < 1e-42


@pytest.mark.parametrize(
    ("scale", "bound"),
    [(1500.0, None), (147_000.0, 500_001), (1.6e6, None), (2.0**40, None), (2.0**40, 2**40 + 5)],
)
def test_digits_of_large_scales_are_geometric(scale: float, bound: int | None) -> None:
    layout = lay_out(scale, bound)
    *digits, last = laplace_tables(scale, layout)
    with mpmath.workdps(70):
        rate, stride = 1 / mpmath.mpf(scale), 1
        for table, bits in zip(digits, layout.digit_bits, strict=True):
            counts = table.counts()
            assert len(counts) == 2**bits
            total = mpmath.expm1(-rate * stride * len(counts)) / mpmath.expm1(-rate * stride)
            for d in (0, 1, 2, len(counts) // 3, len(counts) - 1):
                assert abs(mpmath.mpf(counts[d]) / 2**159 - mpmath.exp(-rate * stride * d) / total) < 1e-42
            stride *= len(counts)
        counts = last.counts()
        assert len(counts) == layout.last + 1
        q = mpmath.exp(-rate)
        beyond = 0 if layout.cut else mpmath.exp(-rate * layout.reach)
        total = 1 + 2 * q * (1 - beyond) / (1 - q)
        assert abs(mpmath.mpf(counts[0]) / 2**159 - 1 / total) < 1e-35
        for h in (0, 1, 2, layout.last // 3, layout.last - 1):
            block = 2 * q * mpmath.exp(-rate * stride * h) * (1 - mpmath.exp(-rate * stride)) / (1 - q)
            assert abs(mpmath.mpf(counts[1 + h]) / 2**159 - block / total) < 1e-35


def within(magnitude: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """Σ_{|k| ≤ magnitude} exp(−|k|/scale), times (1 − q)/q for numbers of a good size."""
    q_inverse_less_1 = math.expm1(1 / scale)
    return np.asarray(q_inverse_less_1 + 2 * -np.expm1(-magnitude / scale))


def chi_square_p(values: NDArray[np.int64], scale: float, bound: int | None) -> float:
    """P value of a chi-square test on zero and up to 30 magnitudes' cells on either side."""
    reach = math.ceil(40 * scale) if bound is None else bound
    quantiles = -scale * np.log1p(np.linspace(0, 1, 31)[:-1] * np.expm1(-min(reach / scale, 40.0)))
    edges = np.unique(np.concatenate([[0], np.ceil(quantiles), [reach]]))  # the last magnitude of a cell
    total = float(within(np.array(float(reach)), scale)) if bound else math.expm1(1 / scale) + 2
    half = np.diff(within(edges, scale)) / 2 / total * values.size
    zero = math.expm1(1 / scale) / total * values.size
    cell = np.searchsorted(edges, np.minimum(abs(values), reach))  # 0 for zero
    observed = np.bincount(np.where(values < 0, cell + half.size, cell), minlength=2 * half.size + 1)
    expected = np.concatenate([[zero], half, half])
    if zero < 5:  # too rare for a cell of its own
        observed[1] += observed[0]
        expected[1] += zero
        observed, expected = observed[1:], expected[1:]
    enough = expected >= 5
    statistic = float(((observed - expected) ** 2 / np.maximum(expected, 5))[enough].sum())
    if (rest := float(expected[~enough].sum())) >= 5:
        statistic += (observed[~enough].sum() - rest) ** 2 / rest
    return float(stats.chi2.sf(statistic, enough.sum() - (rest < 5)))


CASES = [
    (0.5, None), (1.0, None), (3.7, None), (97.0, None), (98.0, None), (1500.0, None), (147_000.0, None),
    (1e6, None), (3e6, None), (2.0**40, None), (1.0, 1), (3.7, 5), (50.0, 100), (1e6, 12), (2000.0, 16_384),
    (1e5, 100_001), (1e6, 3_000_001), (2.0**40, 2**40), (2.0**40, 2**50),
]  # fmt: skip


@pytest.mark.parametrize(("scale", "bound"), CASES)
def test_draws_pass_a_chi_square_test_that_catches_planted_errors(scale: float, bound: int | None) -> None:
    sampler = DiscreteLaplaceSampler(scale, bound=bound)
    values = sampler.sample(DRAWS)
    assert values.dtype == np.int64
    assert chi_square_p(values, scale, sampler.bound) > LEVEL
    if sampler.bound is not None:
        assert abs(values).max() <= sampler.bound
    if bound is None:
        planted = DiscreteLaplaceSampler(scale * 0.97).sample(DRAWS)
        assert chi_square_p(planted, scale, None) < LEVEL
    wrong_sign = values.copy()
    wrong_sign[: DRAWS // 25] = abs(wrong_sign[: DRAWS // 25])
    assert chi_square_p(wrong_sign, scale, sampler.bound) < LEVEL
    stuck = values.copy()
    stuck[: DRAWS // 100] = min(max(1, round(2 * scale)), sampler.bound or 2**60)
    assert chi_square_p(stuck, scale, sampler.bound) < LEVEL


@pytest.mark.parametrize(("scale", "bound"), [(50.0, None), (50.0, 60), (147_000.0, None), (1e5, 100_001)])
def test_one_hundredth_of_a_table_in_the_wrong_place_is_caught(
    scale: float, bound: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = DiscreteLaplaceSampler(scale, bound=bound)
    *digits, last = laplace_tables(scale, lay_out(scale, bound))
    counts, moved = last.counts(), (1 << 159) // 100
    median = next(j for j in range(last.size) if sum(counts[: j + 1]) > 1 << 158)
    near = sum(counts[: median // 4 + 1])
    for j in range(median // 4 + 1):
        counts[j] -= counts[j] * moved // near
    counts[median] += (1 << 159) - sum(counts)
    wrong = (*digits, AliasTable.from_counts(counts))
    assert chi_square_p(sampler.sample(DRAWS), scale, sampler.bound) > LEVEL
    monkeypatch.setattr(discrete_laplace, "laplace_tables", lambda scale, layout: wrong)
    assert chi_square_p(sampler.sample(DRAWS), scale, sampler.bound) < LEVEL


@pytest.mark.parametrize("scale", [1500.0, 147_000.0, 3e6, 2.0**40])
def test_large_scales_pass_kolmogorov_smirnov(scale: float) -> None:
    values = DiscreteLaplaceSampler(scale).sample(DRAWS)
    # half a step of jitter turns integers into a continuous variable
    jitter = np.random.default_rng(1).uniform(-0.5, 0.5, DRAWS)
    assert stats.kstest((values + jitter) / scale, "laplace").pvalue > LEVEL
    assert stats.kstest((values + jitter) / (scale * 1.04), "laplace").pvalue < LEVEL
    residues = np.bincount(abs(values) % 16, minlength=16)
    assert stats.chisquare(residues).pvalue > LEVEL  # no trace of the step in the low bits


@pytest.mark.parametrize("scale", [0.5, 3.7, 1500.0, 1e6, 2.0**40])
def test_tails_have_the_right_weight_on_both_sides(scale: float) -> None:
    values = DiscreteLaplaceSampler(scale).sample(DRAWS)
    for times in (1, 3, 7):
        beyond = math.ceil(times * scale)
        expected = math.exp(-beyond / scale) / (1 + math.exp(-1 / scale))
        for side in (values, -values):
            assert stats.binomtest(int((side >= beyond).sum()), DRAWS, expected).pvalue > LEVEL


@pytest.mark.parametrize("scale", [1.0, 50.0, 147_000.0, 2.0**40])
def test_moments_and_independence(scale: float) -> None:
    q = math.exp(-1 / scale)
    variance = 2 * q / math.expm1(-1 / scale) ** 2
    scaled = DiscreteLaplaceSampler(scale).sample(DRAWS) / math.sqrt(variance)
    bound = -stats.norm.ppf(LEVEL / 2) / math.sqrt(DRAWS)
    kurtosis = 6 if scale > 10 else 6 + 1 / variance
    assert abs(scaled.mean()) < bound
    assert abs((scaled**2).mean() - 1) < 1.02 * bound * math.sqrt(kurtosis - 1)
    assert abs((scaled[1:] * scaled[:-1]).mean()) < 1.05 * bound
    assert abs((scaled[2:] * scaled[:-2]).mean()) < 1.05 * bound


def test_digits_of_one_value_are_independent() -> None:
    magnitude = abs(DiscreteLaplaceSampler(2.0**40).sample(DRAWS)) - 1
    layout = lay_out(2.0**40)
    parts, rest = [], magnitude
    for bits in (*layout.digit_bits, 20):
        parts.append(rest % 2**bits)
        rest = rest >> bits
    bound = -stats.norm.ppf(LEVEL / 2) / math.sqrt(DRAWS)
    for a, b in itertools.combinations(parts, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < bound


@pytest.mark.parametrize(
    ("scale", "bound", "tables"),
    [(1.0, None, 1), (97.0, None, 1), (1e6, 5000, 1), (1e5, None, 2), (1e5, 20_000, 2), (3e6, None, 3),
     (2.0**40, None, 4)],
)  # fmt: skip
def test_bytes_read_do_not_depend_on_the_values(scale: float, bound: int | None, tables: int) -> None:
    read = []

    def entropy(count: int) -> bytes:
        read.append(count)
        return os.urandom(count)

    sampler = DiscreteLaplaceSampler(scale, bound=bound, entropy=entropy)
    for _ in range(3):
        read.clear()
        assert sampler.sample(40_000).shape == (40_000,)
        assert read == [4 * 32_768 + 1024] * tables + [4 * (40_000 - 32_768) + 1024] * tables
    read.clear()
    assert sampler.sample(0).shape == (0,)
    assert not read


@given(st.floats(2.0**-6, 2.0**40), st.integers(1, MAX_BOUND))
@settings(max_examples=300)
def test_the_bound_is_rounded_down_by_little(scale: float, bound: int) -> None:
    used = usable_bound(scale, bound)
    assert used is not None
    assert bound * (1 - 2.0**-13) < used <= bound
    if bound < 2**14:
        assert used == bound
    layout = lay_out(scale, bound)
    assert layout.reach <= used
    assert 1 <= layout.last < 2**14
    assert all(1 <= bits <= 14 for bits in layout.digit_bits)
    assert layout.cut or layout.reach == used
    assert not layout.cut or layout.reach >= 84 * Fraction(scale)
    assert 0 < statistical_distance(scale, bound) < 1e-35


def test_small_bounds_are_reached_and_never_passed() -> None:
    sampler = DiscreteLaplaceSampler(1e9, bound=3)
    assert sampler.bound == 3
    assert sampler.statistical_distance == statistical_distance(1e9, 3)
    assert set(sampler.sample(10_000).tolist()) == {-3, -2, -1, 0, 1, 2, 3}
    assert DiscreteLaplaceSampler(1e5, bound=100_001).bound == 100_000
    assert DiscreteLaplaceSampler(1.0).bound is None


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-3, 2.0**40 + 1, math.nan, math.inf])
def test_scale_out_of_range_is_named(scale: float) -> None:
    with pytest.raises(ParameterError, match="discrete Laplace scale"):
        DiscreteLaplaceSampler(scale)


@pytest.mark.parametrize("bound", [0, -5, 2**50 + 1, 2.5, True])
def test_bound_out_of_range_is_named(bound: int) -> None:
    with pytest.raises(ParameterError, match="discrete Laplace bound"):
        DiscreteLaplaceSampler(1.0, bound=bound)
    with pytest.raises(ParameterError, match="discrete Laplace bound"):
        usable_bound(1.0, bound)


def test_nothing_is_drawn_for_a_bad_count_or_from_short_entropy() -> None:
    with pytest.raises(ParameterError, match="count"):
        DiscreteLaplaceSampler(1.0).sample(-1)
    with pytest.raises(ParameterError, match="entropy gave 8 bytes; expected the 1036"):
        DiscreteLaplaceSampler(1.0, entropy=lambda _: bytes(8)).sample(3)
