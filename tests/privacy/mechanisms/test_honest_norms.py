"""The norms of honest fragments against exact laws, exhaustive small cases, and noise as it is drawn."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.fft import next_fast_len

from dpagent.errors import ParameterError
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.honest_norms import (
    NormRange,
    SubGaussianLaw,
    capped_norms,
    largest_lot,
)
from dpagent.privacy.mechanisms.wire import round_to_wire

LEVEL = 1e-6


def gaussian(sigma: float) -> SubGaussianLaw:
    return SubGaussianLaw(sigma**2, sigma**2, 3 * sigma**4)


# --- against exact laws ---------------------------------------------------------------------------


@pytest.mark.parametrize("coordinates", [1, 30, 1_000, 26_010])
@pytest.mark.parametrize("signal", [0.0, 0.3, 5.0, 300.0])
@pytest.mark.parametrize("tail", [1e-2, 1e-9, 1e-15])
def test_the_range_holds_a_non_central_chi_square_and_is_not_much_wider(
    coordinates: int, signal: float, tail: float
) -> None:
    """Normal noise of deviation 5 that nothing rounds: ‖w‖²/25 is χ² with non-centrality (signal/5)²."""
    found = gaussian(5.0).norms(1, coordinates=coordinates, steps=1, signal_units=signal, tail=tail)
    law = stats.ncx2(coordinates, (signal / 5) ** 2) if signal else stats.chi2(coordinates)
    exact = 25 * float(law.isf(tail / 2))
    assert exact <= found.most <= exact * (1.2 if coordinates >= 1_000 else 2.2)
    assert found.least <= 25 * float(stats.chi2(coordinates).ppf(tail / 2))
    if coordinates >= 1_000:
        share = 1 - math.sqrt(6 * math.log(2 / tail) / coordinates)
        assert found.least == pytest.approx(25 * coordinates * share, rel=1e-9)


@pytest.mark.parametrize(("records", "rate"), [(10, 0.5), (1_000, 0.1), (6_000, 0.9), (70, 1.0), (5, 0.01)])
@pytest.mark.parametrize("tail", [1e-2, 1e-9, 1e-20])
def test_no_lot_is_larger_than_the_bound_but_with_its_probability(
    records: int, rate: float, tail: float
) -> None:
    bound = largest_lot(records * rate, rate, tail)
    assert stats.binom.sf(math.floor(bound), records, rate) <= tail
    assert bound == records or rate < 1
    # And a lot of twice the expectation is not covered for nothing, where lots are large.
    assert bound <= records * rate * (1 + 7 / math.sqrt(records * rate)) - math.log(tail)


# --- an exhaustive small case ---------------------------------------------------------------------


def wire_law(sigma: float, signal: int, step: int, level: int) -> dict[int, float]:
    """P(w = k) of one coordinate: discrete Gaussian noise, rounded to the nearest, then at random."""
    reach = math.ceil(12 * sigma)
    noise = np.arange(-reach, reach + 1)
    masses = np.exp(-(noise**2) / (2 * sigma**2))
    masses /= masses.sum()
    law: dict[int, float] = {}
    unit = 1 << level
    for value, mass in zip(round_to_wire(noise + signal, step).tolist(), masses.tolist(), strict=True):
        below, rest = divmod(value, unit)
        for outcome, share in ((below, 1 - rest / unit), (below + 1, rest / unit)):
            law[outcome * unit] = law.get(outcome * unit, 0.0) + mass * share
    return law


def square_law(
    first: dict[int, float], other: dict[int, float], others: int, most: int
) -> NDArray[np.float64]:
    """P(‖w‖² = k) of a coordinate and others alike, for k up to ``most``; the rest of the mass is above."""
    size = next_fast_len(2 * most + 1, real=True)

    def squares(law: dict[int, float]) -> NDArray[np.float64]:
        masses = np.zeros(most + 1)
        for value, mass in law.items():
            if value**2 <= most:
                masses[value**2] += mass
        return masses

    def convolved(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
        product = np.fft.rfft(left, size) * np.fft.rfft(right, size)
        return np.asarray(np.clip(np.fft.irfft(product, size)[: most + 1], 0.0, None))

    total, power = squares(first), squares(other)
    while others:
        if others & 1:
            total = convolved(total, power)
        others >>= 1
        if others:
            power = convolved(power, power)
    return total


TAILS = (0.2, 1e-2, 1e-4, 1e-7)


@pytest.mark.parametrize(
    ("sigma", "step"),
    [(4.5, 1), (33.0, 11), (32.0, 15)],
    ids=["not rounded", "three steps", "two steps"],
)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("coordinates", [2, 25])
def test_an_honest_fragment_is_outside_with_at_most_the_tail_exactly(
    sigma: float, step: int, level: int, coordinates: int
) -> None:
    """Every signal of the parameters, spread or in one coordinate; all probabilities by convolution."""
    law = DiscretisedGaussian(1.0, sigma / 258.0, 0.5, 25, 1, 256).noise_law
    assert law is not None
    law = SubGaussianLaw(sigma**2, law.variance / law.proxy * sigma**2, 3.00001 * sigma**4)
    for size in (0, round(sigma / 2), round(6 * sigma)):
        ranges = [
            law.norms(step, coordinates=coordinates, steps=1, signal_units=size, tail=tail, level=level)
            for tail in TAILS
        ]
        spread = math.floor(size / math.sqrt(coordinates))
        for signal in {(size, 0), (spread, spread), (0, 0)}:
            first, other = (wire_law(sigma, each, step, level) for each in signal)
            masses = square_law(first, other, coordinates - 1, max(math.floor(each.most) for each in ranges))
            for tail, found in zip(TAILS, ranges, strict=True):
                assert float(masses[: math.ceil(found.least)].sum()) <= tail / 2 + 1e-13
                assert 1 - float(masses[: math.floor(found.most) + 1].sum()) <= tail / 2 + 1e-12


@pytest.mark.parametrize("sigma", [0.3, 0.375, 0.7, 1.1, 3.0, 8.0])
def test_rounding_makes_no_noise_smaller(sigma: float) -> None:
    """E round(N)² ≥ σ², and E round(N)⁴ ≤ E(|N| + 1/2)⁴, for Gaussian noise of so many steps."""
    ends = np.arange(200) + 0.5
    beyond = 2 * stats.norm.sf(ends / sigma)
    places = np.arange(201)
    assert float(((places[1:] ** 2 - places[:-1] ** 2) * beyond).sum()) >= sigma**2
    fourth = float(((places[1:] ** 4 - places[:-1] ** 4) * beyond).sum())
    assert fourth <= (3**0.25 * sigma + 0.5) ** 4


@pytest.mark.parametrize(("step", "level"), [(1, 0), (7, 0), (7, 2)])
def test_a_capped_fragment_is_outside_with_at_most_the_tail_exactly(step: int, level: int) -> None:
    for tail, (first, second) in itertools.product((0.1, 1e-3), ((300, 0), (201, 222), (5, 3))):
        ball = math.hypot(first, second)
        found = capped_norms(step=step, coordinates=2, ball_units=ball, tail=tail, level=level)
        laws = []
        for value in (first, second):
            law: dict[int, float] = {}
            fine, rest = divmod(value, step)
            for middle, share in ((fine, 1 - rest / step), (fine + 1, rest / step)):
                coarse, left = divmod(middle, 1 << level)
                for end, part in ((coarse, 1 - left / (1 << level)), (coarse + 1, left / (1 << level))):
                    law[end << level] = law.get(end << level, 0.0) + share * part
            laws.append(law)
        outside = sum(
            one * other
            for (here, one), (there, other) in itertools.product(*(law.items() for law in laws))
            if not found.least <= here**2 + there**2 <= found.most
        )
        assert outside <= tail
        assert found.most <= ((ball + 1) / step + 3 + 4 * level) ** 2


# --- the noise as it is drawn ---------------------------------------------------------------------


def fragments(mechanism: DiscretisedGaussian, signal: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """That many honest fragments with one signal, by the mechanism's own sampler and the wire's rounding."""
    block, batch = len(signal), 500
    made = []
    for _ in range(count // batch):
        noise = mechanism.sampler().sample(batch * block)
        made.append(round_to_wire(noise + np.tile(signal, batch), mechanism.wire_step))
    return np.concatenate(made).reshape(-1, block)


LOT, RATE, BLOCK = 30.0, 0.1, 200
MECHANISM = DiscretisedGaussian(1.0, 1.1, RATE, 10_000, 1, 1 << 20, 0.00105)


def squares_outside(made: NDArray[np.int64], found: NormRange) -> int:
    squares = np.square(made.astype(np.float64)).sum(axis=1)
    return int(np.count_nonzero((squares < found.least) | (squares > found.most)))


@pytest.mark.parametrize("records", [0.0, LOT, 2 * LOT])
@pytest.mark.parametrize("is_spread", [False, True])
def test_of_many_honest_fragments_none_is_outside_and_as_few_as_asked_for_with_a_larger_tail(
    records: float, is_spread: bool
) -> None:
    """20,000 fragments: one outside at 1e-9 has a probability of 2e-5; at 1e-3, the count has to be one that
    a binomial of 1e-3 reaches with probability 1e-6."""
    size = records * MECHANISM.sensitivity_units
    signal = np.zeros(BLOCK, np.int64)
    signal[:] = math.floor(size / math.sqrt(BLOCK)) if is_spread else 0
    signal[0] = signal[0] if is_spread else math.floor(size)
    made = fragments(MECHANISM, signal, 20_000)
    law = MECHANISM.noise_law
    assert law is not None
    for tail, most in ((1e-9, 0), (1e-3, int(stats.binom.isf(LEVEL, 20_000, 1e-3)))):
        found = law.norms(MECHANISM.wire_step, coordinates=BLOCK, steps=1, signal_units=size, tail=tail)
        assert squares_outside(made, found) <= most
    # The statistic can fail: a narrower range, of a tail that is not asked for, loses many.
    narrow = law.norms(MECHANISM.wire_step, coordinates=BLOCK, steps=1, signal_units=0.9 * size, tail=0.9)
    assert records == 0.0 or squares_outside(made, narrow) > 1_000


def test_a_signal_that_follows_the_noise_of_the_step_before_is_within_the_range() -> None:
    """Three steps; each signal but the first is as long as it may be, and points where the noise does."""
    law, steps, each = MECHANISM.noise_law, 3, LOT * MECHANISM.sensitivity_units
    assert law is not None
    step = DiscretisedGaussian(1.0, 1.1, RATE, 10_000, steps, 1 << 20, 0.00105).wire_step
    for sign in (1, -1):
        total = np.zeros((2_000, BLOCK), np.int64)
        for _ in range(steps):
            norms = np.maximum(np.linalg.norm(total, axis=1, keepdims=True), 1.0)
            signals = np.trunc(sign * total / norms * each * (1 - 1e-6)).astype(np.int64)
            total += signals + MECHANISM.sampler().sample(total.size).reshape(total.shape)
        made = round_to_wire(total.ravel(), step).reshape(total.shape)
        for tail in (1e-9, 1e-3):
            found = law.norms(step, coordinates=BLOCK, steps=steps, signal_units=steps * each, tail=tail)
            assert squares_outside(made, found) <= (0 if tail < 1e-6 else 2_000 * tail + 12)


def test_the_noise_of_the_mechanism_has_the_law_that_it_states() -> None:
    law = MECHANISM.noise_law
    assert law is not None
    noise = MECHANISM.sampler().sample(1_000_000).astype(np.float64) / MECHANISM.sigma_units
    # Deviations of the sample's moments: √2 and √96 over 1,000.
    assert abs(float((noise**2).mean()) * MECHANISM.sigma_units**2 / law.variance - 1) < 6 * 1.42e-3
    assert abs(float((noise**4).mean()) * MECHANISM.sigma_units**4 / law.fourth_moment - 1) < 6 * 3.3e-3
    for theta in (0.3, 1.0, 2.0):
        exact = _log_moment_generating(5.0, theta / 5.0)
        assert exact <= theta**2 / 2 + 1e-12


def _log_moment_generating(sigma: float, theta: float) -> float:
    points = np.arange(-200, 201)
    masses = np.exp(-(points**2) / (2 * sigma**2))
    return math.log(float((masses * np.exp(theta * points)).sum() / masses.sum()))


@pytest.mark.parametrize("sigma", [1.0, 1.7, 30.0])
def test_the_moments_of_a_discrete_gaussian_are_within_the_bounds_of_the_law(sigma: float) -> None:
    points = np.arange(-40 * math.ceil(sigma), 40 * math.ceil(sigma) + 1).astype(np.float64)
    masses = np.exp(-(points**2) / (2 * sigma**2))
    masses /= masses.sum()
    assert (masses * points**2).sum() >= sigma**2 * (1 - 1e-6)
    assert (masses * points**4).sum() <= sigma**4 * (3 + 1e-5)


def test_noise_finer_than_the_grid_has_no_law() -> None:
    assert DiscretisedGaussian(1.0, 0.5 / 4, 0.5, 4, 1, 1).noise_law is None


# --- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{"coordinates": 0}, {"steps": 0}, {"tail": 0.0}, {"tail": 2.0}, {"tail": math.nan}]
)
def test_parameters_out_of_range_are_named(changes: dict[str, float]) -> None:
    values = {"coordinates": 5, "steps": 1, "signal_units": 1.0, "tail": 0.1} | changes
    with pytest.raises(ParameterError) as caught:
        gaussian(5.0).norms(1, **values)
    assert next(iter(changes)) in str(caught.value)
