"""The L1 norms of honest fragments with Laplace noise against exact laws, and noise as it is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.fft import next_fast_len

from dpagent.norm import Norm
from dpagent.privacy.mechanisms.discretised_laplace import DiscretisedLaplace
from dpagent.privacy.mechanisms.laplace_law import LaplaceLaw
from dpagent.privacy.mechanisms.wire import round_to_wire, wire_step

LEVEL = 1e-6


def noise_law(
    scale: float, steps: int = 1, bound: float = math.inf
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Values and masses of the sum of so many discrete Laplace variables, cut off at the bound."""
    reach = math.ceil(min(45 * scale, bound))
    one = np.exp(-np.abs(np.arange(-reach, reach + 1)) / scale)
    one /= one.sum()
    masses = one
    for _ in range(steps - 1):
        masses = np.convolve(masses, one)
    return np.arange(-steps * reach, steps * reach + 1), masses


def magnitude_law(
    scale: float, signal: int, step: int, level: int, steps: int = 1, bound: float = math.inf
) -> NDArray[np.float64]:
    """P(|w| = k) of one coordinate: noise on a signal, rounded to the nearest, then at random."""
    points, noise = noise_law(scale, steps, bound)
    values = np.abs(round_to_wire(points + signal, step))
    unit = 1 << level
    below, rest = values // unit * unit, values % unit
    masses = np.zeros(int(values.max()) + unit + 1)
    np.add.at(masses, below, noise * (1 - rest / unit))
    np.add.at(masses, below + unit, noise * (rest / unit))
    return masses


def sum_law(first: NDArray[np.float64], other: NDArray[np.float64], others: int) -> NDArray[np.float64]:
    """P(‖w‖₁ = k) of a coordinate and others alike, all independent, by convolution without wrapping."""

    def convolved(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
        size = len(left) + len(right) - 1
        room = next_fast_len(size, real=True)
        product = np.fft.rfft(left, room) * np.fft.rfft(right, room)
        return np.asarray(np.clip(np.fft.irfft(product, room)[:size], 0.0, None))

    total, power = first, other
    while others:
        if others & 1:
            total = convolved(total, power)
        others >>= 1
        if others:
            power = convolved(power, power)
    return total


@pytest.mark.parametrize(
    ("scale", "step", "steps", "bound"),
    [
        (4.5, 1, 1, math.inf),
        (23.3, 11, 1, math.inf),
        (21.3, 15, 1, math.inf),
        (10.0, 15, 1, math.inf),
        (9.0, 5, 2, math.inf),
        (7.0, 1, 3, math.inf),
        (23.3, 11, 1, 150),
        (23.3, 11, 1, 20),
        (9.0, 5, 2, 30),
    ],
    ids=[
        "not rounded", "three steps", "two steps", "one step", "two sums", "three sums, not rounded",
        "cut off", "nearly uniform", "two sums cut off",
    ],
)  # fmt: skip
@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("coordinates", [1, 25])
def test_an_honest_fragment_is_outside_with_at_most_the_tail_exactly(
    scale: float, step: int, steps: int, bound: float, level: int, coordinates: int
) -> None:
    """Signals in one coordinate, spread, and none, of both signs of the part that rounding removes."""
    for size in (0, round(0.4 * step), round(0.6 * step), round(6 * scale)):
        spread = size // coordinates
        for signal in {(size, 0), (spread, spread)}:
            first, other = (magnitude_law(scale, each, step, level, steps, bound) for each in signal)
            masses = sum_law(first, other, coordinates - 1)
            for tail in (0.2, 1e-2, 1e-4, 1e-7):
                found = LaplaceLaw(scale, bound).norms(
                    step, coordinates=coordinates, steps=steps, signal_units=size, tail=tail, level=level
                )
                assert float(masses[: math.ceil(found.least)].sum()) <= tail / 2 + 1e-13
                assert float(masses[math.floor(found.most) + 1 :].sum()) <= tail / 2 + 1e-13


@pytest.mark.parametrize("coordinates", [300, 1_626])
@pytest.mark.parametrize(("steps", "wider"), [(1, 1.05), (4, 1.3)])
@pytest.mark.parametrize("tail", [1e-3, 1e-9])
def test_the_range_is_not_much_wider_than_the_exact_quantiles(
    coordinates: int, steps: int, wider: float, tail: float
) -> None:
    """Without signal; one sum costs little, several cost half a wire unit a coordinate."""
    scale = 21.0
    step = wire_step(scale * math.sqrt(2 * steps))
    found = LaplaceLaw(scale).norms(step, coordinates=coordinates, steps=steps, signal_units=0.0, tail=tail)
    size = 1 << 15  # more than ten times the mean of ‖w‖₁: what wraps around is beyond all digits
    masses = np.fft.irfft(np.fft.rfft(magnitude_law(scale, 0, step, 0, steps), size) ** coordinates, size)
    distribution = np.cumsum(masses)
    low, high = (int(np.searchsorted(distribution, each)) for each in (tail / 2, 1 - tail / 2))
    assert high <= found.most <= wider * high
    assert (0.95 if steps == 1 else 0.3) * low <= found.least <= low


@pytest.mark.parametrize("ratio", [0.35, 0.47, math.log(2)])
def test_no_signal_makes_a_coordinate_larger_than_its_magnitude_and_noise_alone(ratio: float) -> None:
    """E e^(t|w|) ≤ e^(t|s|)·(1 + K(t)), by sums over the exact law, for every signal of two steps."""
    step = 9
    scale = step / ratio * (1 + 1e-12)
    points, masses = noise_law(scale)
    for t in (0.05, 0.3, 0.6, 0.8, 0.9) * np.array(step / scale):
        rho = math.exp(-step / scale)
        bound = 1 + math.expm1(t) * math.sqrt(rho) / (1 - rho * math.exp(t))
        for signal in range(2 * step + 1):
            values = np.abs(round_to_wire(points + signal, step))
            mean = float(masses @ np.exp(t * values))
            assert mean <= math.exp(t * signal / step) * bound * (1 + 1e-9)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_sum_of_laplace_variables_is_the_mixture_that_the_derivation_takes(steps: int) -> None:
    drawn = np.abs(np.random.default_rng(3).laplace(size=(steps, 200_000)).sum(axis=0))
    weights = [
        math.comb(2 * steps - 1 - k, steps - k) / 2 ** (2 * steps - k - 1) for k in range(1, steps + 1)
    ]
    assert sum(weights) == 1.0
    found = stats.kstest(drawn, lambda at: sum(w * stats.gamma.cdf(at, k) for k, w in enumerate(weights, 1)))
    assert found.pvalue > LEVEL


# --- the noise as it is drawn ---------------------------------------------------------------------

LOT, RATE, BLOCK = 30.0, 0.1, 200
MECHANISM = DiscretisedLaplace(1.0, 2.0, RATE, 10_000, 1, 1 << 28, 0.00105)


def outside(made: NDArray[np.int64], least: float, most: float) -> int:
    norms = np.abs(made).sum(axis=1)
    return int(np.count_nonzero((norms < least) | (norms > most)))


@pytest.mark.parametrize("records", [0.0, LOT, 2 * LOT])
@pytest.mark.parametrize("is_spread", [False, True])
def test_of_many_honest_fragments_none_is_outside_and_as_few_as_asked_for_with_a_larger_tail(
    records: float, is_spread: bool
) -> None:
    """20,000 fragments: one outside at 1e-9 has a probability of 2e-5; at 1e-3, the count has to be one that
    a binomial of 1e-3 reaches with probability 1e-6."""
    size, law = records * MECHANISM.sensitivity_units, MECHANISM.noise_law
    signal = np.zeros(BLOCK, np.int64)
    signal[: BLOCK if is_spread else 1] = math.floor(size / (BLOCK if is_spread else 1))
    noise = MECHANISM.sampler().sample(20_000 * BLOCK).reshape(-1, BLOCK)
    made = round_to_wire((noise + signal).ravel(), MECHANISM.wire_step).reshape(-1, BLOCK)

    def range_of(tail: float, signal_units: float) -> tuple[float, float]:
        found = law.norms(
            MECHANISM.wire_step, coordinates=BLOCK, steps=1, signal_units=signal_units, tail=tail
        )
        assert found.norm is Norm.L1
        return found.least, found.most

    for tail, most in ((1e-9, 0), (1e-3, int(stats.binom.isf(LEVEL, 20_000, 1e-3)))):
        assert outside(made, *range_of(tail, size)) <= most
    # The statistic can fail: a narrower range, of a tail that is not asked for, loses many.
    assert outside(made, *range_of(0.9, 0.0)) > 1_000


def test_a_signal_that_follows_the_noise_of_the_step_before_is_within_the_range() -> None:
    """Three steps; each signal but the first is as long as it may be, and points where the noise does, or
    against it."""
    law, steps, each = MECHANISM.noise_law, 3, LOT * MECHANISM.sensitivity_units
    step = wire_step(MECHANISM.deviation_units * math.sqrt(steps))
    for sign in (1, -1):
        total = np.zeros((2_000, BLOCK), np.int64)
        for _ in range(steps):
            norms = np.maximum(np.abs(total).sum(axis=1, keepdims=True), 1.0)
            total += np.trunc(sign * total / norms * each * (1 - 1e-6)).astype(np.int64)
            total += MECHANISM.sampler().sample(total.size).reshape(total.shape)
        made = round_to_wire(total.ravel(), step).reshape(total.shape)
        for tail in (1e-9, 1e-3):
            found = law.norms(step, coordinates=BLOCK, steps=steps, signal_units=steps * each, tail=tail)
            assert outside(made, found.least, found.most) <= (0 if tail < 1e-6 else 2_000 * tail + 12)
