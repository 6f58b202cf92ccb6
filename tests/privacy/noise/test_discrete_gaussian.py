"""The sampler: its tables against mpmath, its draws by tests that can fail.

All statistical tests have fixed sample sizes and a level of 1e-6, and are shown to
catch planted errors: one value in a hundred wrong, one hundredth of a table's probability in the
wrong place, or σ off by 2 % (chi-square) or 4 % (KS).
"""

from __future__ import annotations

import decimal
import math
import os
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dpagent.errors import ParameterError
from dpagent.privacy.noise import discrete_gaussian
from dpagent.privacy.noise.alias_table import AliasTable
from dpagent.privacy.noise.discrete_gaussian import (
    DiscreteGaussianSampler,
    decompose,
    distance_of_parts,
    fixed_point_weights,
    gaussian_table,
    smoothing_distance,
    split,
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


def table_pmf(table: AliasTable) -> list[mpmath.mpf]:
    """What the signed draws of a table have as probabilities of −R..R, from the arrays it draws with."""
    zero, *rest = table.counts()
    half = [mpmath.mpf(count) / (1 << 160) for count in rest]
    return [*reversed(half), mpmath.mpf(zero) / (1 << 159), *half]


@pytest.mark.parametrize("sigma", [2.0**-6, 0.1, 0.5, 1.0, 3.7, 17.3, 50.0])
def test_every_table_probability_is_within_the_certified_distance(sigma: float) -> None:
    variance = Fraction(sigma) ** 2
    with mpmath.workdps(60):
        table, radius = gaussian_table(variance), table_radius(variance)
        assert table.size == radius + 1
        exact, ours = exact_pmf(variance, radius), table_pmf(table)
        differences = [abs(a - b) for a, b in zip(exact, ours, strict=True)]
        outside = 1 - mpmath.fsum(exact)
        assert (mpmath.fsum(differences) + outside) / 2 <= statistical_distance(sigma) < 1e-35
        # a weight is rounded by two units at most, and the largest takes up what is missing
        differences.sort()
        assert differences[-2] <= mpmath.mpf(2) ** -157 + outside
        assert differences[-1] <= 2 * table.size * mpmath.mpf(2) ** -159 + outside


def test_the_largest_direct_table_is_right_at_both_ends_and_in_the_middle() -> None:
    variance = Fraction(1024) ** 2
    radius = table_radius(variance)
    with mpmath.workdps(60):
        exact = exact_pmf(variance, radius)
        ours = table_pmf(gaussian_table(variance))
        for x in (-radius, -5000, -1, 0, 1, 777, radius):
            assert abs(exact[x + radius] - ours[x + radius]) <= mpmath.mpf(2) ** -120


def test_weights_of_the_largest_tables_keep_their_bound() -> None:
    variance = decompose(2.0**24)[-1][1]
    radius = table_radius(variance)
    weights = list(fixed_point_weights(variance, radius))
    assert len(weights) == radius + 1
    with mpmath.workdps(80):
        scale = mpmath.mpf(2 * variance.numerator) / variance.denominator
        for j in (0, 1, 2, 100, 1860, 9000, radius):
            error = abs(weights[j] - mpmath.exp(-(mpmath.mpf(j) ** 2) / scale) * 2**208)
            assert error <= 2 * (j + 1) ** 2


@pytest.mark.parametrize(
    "sigma",
    [1024.5, 1500.0, 22_050.0, 22_051.0, 147_640.5, 354_690.0, 354_691.0, 1e6, 3_087_001.0, 1e7, 2.0**24],
)
def test_wide_decomposition_is_exact_and_smooth(sigma: float) -> None:
    parts = decompose(sigma)
    assert parts[0][0] == 1
    assert sum(factor**2 * variance for factor, variance in parts) == Fraction(sigma) ** 2
    for (factor, variance), (next_factor, _) in pairwise(parts):
        stride = next_factor // factor
        assert factor * stride == next_factor
        assert variance == 5 * stride**2
        # Of Y, what is left over; σ2 ≥ 20, as the proof says.
        rest = (Fraction(sigma) ** 2 - sum(f**2 * v for f, v in parts if f <= factor)) / next_factor**2
        assert rest >= 400
        assert smoothing_distance(float(1 / (1 / rest + stride**2 / variance))) < 1e-41
        columns = table_radius(variance).bit_length()
        assert table_radius(variance) + 1 > 0.98 * 2**columns  # the shared table wastes no columns
        assert columns <= 14
    assert statistical_distance(sigma) < 2e-36
    assert table_radius(parts[-1][1]) < 2 ** (13 if sigma < 1.2e7 else 14)


def test_sigmas_a_little_apart_share_the_first_table() -> None:
    assert decompose(100_000.0)[0] == decompose(147_000.0)[0] == decompose(350_000.0)[0]
    assert decompose(400_000.0)[:2] == decompose(3e6)[:2]


@pytest.mark.parametrize("strides", [(2,), (3,), (4,), (2, 3), (4, 3)])
@pytest.mark.parametrize("last", [16, 400])
def test_the_sum_of_tables_is_a_discrete_gaussian(strides: tuple[int, ...], last: int) -> None:
    """The wide sampler's identity, at sizes where the whole convolution can be enumerated.

    At σ2 ≥ 20 of the last table the distance is that of the tables; below, smoothing can be seen.
    """
    variance = Fraction(last)
    for stride in reversed(strides):
        variance = stride**2 * (5 + variance)
    parts = split(variance, strides)
    assert parts[-1][1] == last
    with mpmath.workdps(60):
        summed, reach = [mpmath.mpf(1)], 0
        for factor, part in parts:
            pmf, radius = table_pmf(gaussian_table(part)), table_radius(part)
            summed = _spread_sum(summed, pmf, factor)
            reach += factor * radius
        exact = exact_pmf(variance, reach)
        distance = mpmath.fsum(abs(a - b) for a, b in zip(summed, exact, strict=True)) / 2
        bound = distance_of_parts(parts)
        assert distance <= bound
        assert bound < (1e-36 if last == 400 else 1e-31)
        # Factors that are off, or a table of another variance, are far from it.
        wrong = exact_pmf(variance + 1, reach)
        assert mpmath.fsum(abs(a - b) for a, b in zip(summed, wrong, strict=True)) / 2 > 1e-6


def _spread_sum(near: list[mpmath.mpf], far: list[mpmath.mpf], factor: int) -> list[mpmath.mpf]:
    """Probabilities of X + factor·Y, from those of X and Y."""
    scale = 1 << 200  # Whole numbers add up a hundred times as fast.
    whole = [int(p * scale) for p in near]
    summed = [0] * (len(near) + factor * (len(far) - 1))
    for j, q in enumerate(int(p * scale) for p in far):
        for i, p in enumerate(whole, start=factor * j):
            summed[i] += p * q
    return [mpmath.mpf(number) / scale**2 for number in summed]


def chi_square_p(values: NDArray[np.int64], sigma: float) -> float:
    """P value of a chi-square test on up to 61 cells of nearly equal width over ±5σ."""
    reach = max(1, math.ceil(5 * sigma))
    width = max(1, round(2 * reach / 60))
    cells = 2 * reach // width

    def cell(x: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.clip((x + reach) // width, 0, cells)

    if sigma < 2000:
        support = np.arange(-3 * reach, 3 * reach + 1)
        pmf = np.exp(-(support.astype(float) ** 2) / (2 * sigma**2))
        expected = np.bincount(cell(support), weights=pmf / pmf.sum()) * values.size
    else:  # the normal integral from half to half; a sum differs by less than 1e-6 of it
        edges = np.arange(1, cells + 1) * width - reach - 0.5
        below = stats.norm.cdf(np.concatenate([[-np.inf], edges, [np.inf]]) / sigma)
        expected = np.diff(below) * values.size
    observed = np.bincount(cell(values), minlength=expected.size)
    enough = expected >= 5
    observed_rest, expected_rest = observed[~enough].sum(), expected[~enough].sum()
    statistic = float((((observed - expected) ** 2)[enough] / expected[enough]).sum())
    if expected_rest >= 5:
        statistic += (observed_rest - expected_rest) ** 2 / expected_rest
    return float(stats.chi2.sf(statistic, enough.sum() - (expected_rest < 5)))


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.7, 50.0, 1500.0, 30_000.0, 1e5, 1e6])
def test_draws_pass_a_chi_square_test_that_catches_planted_errors(sigma: float) -> None:
    values = DiscreteGaussianSampler(sigma).sample(DRAWS)
    assert chi_square_p(values, sigma) > LEVEL
    planted = DiscreteGaussianSampler(sigma * 1.02).sample(DRAWS)
    assert chi_square_p(planted, sigma) < LEVEL
    if sigma > 3:  # below, many values are 0 anyway
        stuck = values.copy()
        stuck[: DRAWS // 100] = 0
        assert chi_square_p(stuck, sigma) < LEVEL
    shifted = values.copy()
    shifted[: DRAWS // 100] += max(1, round(3 * sigma))
    assert chi_square_p(shifted, sigma) < LEVEL


@pytest.mark.parametrize("sigma", [1500.0, 147_640.5, 1e6, 2.0**24])
def test_wide_draws_pass_kolmogorov_smirnov(sigma: float) -> None:
    values = DiscreteGaussianSampler(sigma).sample(DRAWS)
    # half a step of jitter turns integers into a continuous variable; at this σ it is invisible
    jitter = np.random.default_rng(1).uniform(-0.5, 0.5, DRAWS)
    assert stats.kstest((values + jitter) / sigma, "norm").pvalue > LEVEL
    assert stats.kstest((values + jitter) / (sigma * 1.04), "norm").pvalue < LEVEL
    residues = np.bincount(values % 16, minlength=16)
    assert stats.chisquare(residues).pvalue > LEVEL  # no trace of the stride in the low bits


def misplace(table: AliasTable) -> AliasTable:
    """The table with one hundredth of all its probability moved from the middle to where |x| ≈ 2σ."""
    counts = table.counts()
    sigma = table.size // 13
    moved = (1 << 159) // 100
    near = sum(counts[: sigma // 2])
    for x in range(sigma // 2):
        counts[x] -= counts[x] * moved // near
    missing = (1 << 159) - sum(counts)
    assert 0.99 * moved < missing < 1.01 * moved
    counts[2 * sigma] += missing
    return AliasTable.from_counts(counts)


@pytest.mark.parametrize("sigma", [8.0, 50.0, 1000.0])
def test_one_hundredth_of_a_table_in_the_wrong_place_is_caught(
    sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = DiscreteGaussianSampler(sigma)
    assert chi_square_p(sampler.sample(DRAWS), sigma) > LEVEL
    wrong = misplace(gaussian_table(Fraction(sigma) ** 2))
    monkeypatch.setattr(discrete_gaussian, "gaussian_table", lambda variance: wrong)
    assert chi_square_p(sampler.sample(DRAWS), sigma) < LEVEL


@pytest.mark.parametrize("sigma", [0.5, 1.0, 50.0, 1500.0, 147_640.5, 1e6])
def test_tails_have_the_right_weight_on_both_sides(sigma: float) -> None:
    values = DiscreteGaussianSampler(sigma).sample(DRAWS)
    pmf = np.exp(-(np.arange(math.ceil(14 * sigma) + 1.0) ** 2) / (2 * sigma**2))
    pmf /= 2 * pmf.sum() - 1
    for deviations in (2, 3, 4):
        beyond = math.ceil(deviations * sigma)
        expected = float(pmf[beyond:].sum())
        for side in (values, -values):
            assert stats.binomtest(int((side >= beyond).sum()), DRAWS, expected).pvalue > LEVEL
        if expected > 2e-3:  # and a tail that is a fifth too heavy would be seen
            both = int((abs(values) >= beyond).sum())
            assert stats.binomtest(both, DRAWS, 2.4 * expected).pvalue < LEVEL


@pytest.mark.parametrize("sigma", [1.0, 50.0, 147_640.5, 1e6])
def test_moments(sigma: float) -> None:
    scaled = DiscreteGaussianSampler(sigma).sample(DRAWS) / sigma
    bound = -stats.norm.ppf(LEVEL / 2) / math.sqrt(DRAWS)
    assert abs(scaled.mean()) < bound
    assert abs((scaled**2).mean() - 1) < bound * math.sqrt(2)
    assert abs((scaled**3).mean()) < bound * math.sqrt(15)
    assert abs((scaled[1:] * scaled[:-1]).mean()) < bound * 1.01


@pytest.mark.parametrize(("sigma", "tables"), [(0.1, 1), (3.7, 1), (1000.0, 1), (147_640.5, 2), (1e6, 3)])
@pytest.mark.parametrize("byte", [None, 0x00, 0x55, 0xFF])
def test_bytes_read_do_not_depend_on_the_values(sigma: float, tables: int, byte: int | None) -> None:
    """Four bytes a value and table, and 1,024 for ties a block and table."""
    read = []

    def entropy(count: int) -> bytes:
        read.append(count)
        data = bytearray(os.urandom(count))
        if byte is not None:  # one column over and over: no more than a few values come up
            data[1024::4] = data[1025::4] = bytes([byte]) * ((count - 1024) // 4)
        return bytes(data)

    sampler = DiscreteGaussianSampler(sigma, entropy=entropy)
    assert sampler.sample(100_000).shape == (100_000,)
    assert sum(read) == tables * (4 * 100_000 + 4 * 1024)
    assert max(read) == 4 * 32_768 + 1024
    assert sampler.sample(0).shape == (0,)
    assert len(read) == 4 * tables
    sampler.sample(1)
    assert read[-tables:] == [1028] * tables


LARGEST_TABLE = """
from pathlib import Path
from dpagent.privacy.noise.discrete_gaussian import decompose, gaussian_table

def mib(key):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(key)]
    return int(line.split()[1]) / 1024

variance = decompose(354_690.0)[0][1]
gaussian_table(variance / 2**12)  # What is made once for all tables.
Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
before = mib("VmRSS")
table = gaussian_table(variance)
print(mib("VmHWM") - before, (table.packed.nbytes + table.low.nbytes) / 2**20)
"""


def test_the_largest_table_is_built_in_the_memory_that_it_keeps() -> None:
    """A training process keeps what it once had. As Python's integers, weights and counts are 1.7 MiB."""
    said = subprocess.run(
        [sys.executable, "-c", LARGEST_TABLE], check=True, capture_output=True, text=True, timeout=60
    )
    most, kept = map(float, said.stdout.split())
    assert kept == 20 * 2**14 / 2**20
    assert most < kept + 0.75


def test_samplers_do_not_share_or_repeat_values() -> None:
    sampler = DiscreteGaussianSampler(1e6)
    drawn = np.concatenate(
        [sampler.sample(1000), sampler.sample(1000), DiscreteGaussianSampler(1e6).sample(1000)]
    )
    assert np.unique(drawn).size > 2950  # some chance repeats: about 1.3 expected


def test_a_thread_s_decimal_context_does_not_matter() -> None:
    variance = Fraction(7.25) ** 2
    expected = gaussian_table.__wrapped__(variance)
    with decimal.localcontext(prec=3):
        again = gaussian_table.__wrapped__(variance)
    assert expected.counts() == again.counts()


@pytest.mark.parametrize("sigma", [0.0, -1.0, 1e-3, 2.0**24 + 4, math.nan, math.inf])
def test_sigma_out_of_range_is_named(sigma: float) -> None:
    with pytest.raises(ParameterError, match="sigma"):
        DiscreteGaussianSampler(sigma)


def test_short_entropy_is_refused() -> None:
    with pytest.raises(ParameterError, match="entropy gave 8 bytes; expected the 1036"):
        DiscreteGaussianSampler(1.0, entropy=lambda _: bytes(8)).sample(3)
