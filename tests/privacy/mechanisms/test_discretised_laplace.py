"""Discretised Laplace: pure ε for vectors, by enumeration and by attack."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from attacks import proven_epsilon
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.calibration import laplace_family
from dpagent.privacy.events import ApproximateEvent, PoissonSampledEvent, SelfComposedEvent, poisson_sampled
from dpagent.privacy.mechanisms.discretised_laplace import (
    DiscretisedLaplace,
    multiplier_for,
    noise_scale,
)
from dpagent.privacy.mechanisms.mechanism import Query
from dpagent.privacy.noise.entropy import NoisePool


def test_the_record_states_the_maths() -> None:
    m = DiscretisedLaplace(0.5, 0.5, 0.1, 26_010, steps=3)
    assert (m.name, m.unit, m.adjacency) == ("discrete-laplace", "record", "add-or-remove-one")
    assert (m.trust, m.norm) == ("none", "L1")
    assert m.sensitivity_units == 2**24 + 13_005 + 1
    assert m.granularity == 0.5 / 2**24
    assert m.sensitivity_units / m.scale_units <= 2.0
    assert m.scale_units == pytest.approx(m.sensitivity_units / 2, rel=1e-15)
    assert m.deviation_units == pytest.approx(m.scale_units * math.sqrt(2))
    assert m.event == poisson_sampled(ApproximateEvent(m.epsilon), m.sampling_rate, 3)
    total = composed(m.event).epsilon
    assert total == pytest.approx(3 * math.log1p(0.1 * math.expm1(2.0)))
    assert total >= 3 * math.log1p(0.1 * math.expm1(2.0))
    statement = m.statement()
    assert statement.scope == ("record", "add-or-remove-one", "none")
    assert statement.epsilon == total
    assert 0 < statement.delta < 1e-20  # imperfect noise, and nothing else
    assert DiscretisedLaplace(0.5, 0.5, 0.1, 26_010, resolution=2**20).sensitivity_units == 2**20 + 13_006


@given(noise=st.floats(1e-3, 1e5), sensitivity=st.integers(1, 2**31))
def test_the_scale_covers_the_epsilon_that_is_charged(noise: float, sensitivity: int) -> None:
    """Δ/λ, exactly, is at most the ε of the event, whose float is a rounded 1/multiplier."""
    round_ = laplace_family(1.0).event(noise)
    assert isinstance(round_, SelfComposedEvent)
    event = round_.event
    assert isinstance(event, PoissonSampledEvent)
    assert isinstance(event.event, ApproximateEvent)
    scale = noise_scale(event.event.epsilon, sensitivity)
    assert Fraction(sensitivity) / Fraction(scale) <= Fraction(event.event.epsilon)


@given(epsilon=st.floats(1e-6, 1000))
def test_a_multiplier_for_an_epsilon_costs_no_less(epsilon: float) -> None:
    assert 1 / multiplier_for(epsilon) >= epsilon
    assert multiplier_for(epsilon) == pytest.approx(1 / epsilon, rel=1e-15)


@given(epsilon=st.floats(1e-6, 1000), sensitivity=st.integers(1, 2**31))
def test_the_scale_is_rounded_up(epsilon: float, sensitivity: int) -> None:
    scale = noise_scale(epsilon, sensitivity)
    assert Fraction(sensitivity) / Fraction(scale) <= Fraction(epsilon)
    assert scale == pytest.approx(sensitivity / epsilon, rel=1e-15)


def test_two_coordinates_never_differ_by_more_than_the_factor() -> None:
    """Log-probabilities of all outputs near the origin, for every shift of L1 norm Δ."""
    epsilon, sensitivity = 0.7, 5
    rate = 1 / noise_scale(epsilon, sensitivity)
    points = np.abs(np.arange(-12, 13))
    log_without = -rate * (points[:, np.newaxis] + points)
    worst = 0.0
    for s in itertools.product(range(-sensitivity, sensitivity + 1), repeat=2):
        if sum(map(abs, s)) > sensitivity:
            continue
        shifted = [np.abs(np.arange(-12, 13) - shift) for shift in s]
        loss = -rate * (shifted[0][:, np.newaxis] + shifted[1]) - log_without
        worst = max(worst, float(np.abs(loss).max()))
    assert worst == pytest.approx(epsilon, rel=1e-12)
    assert worst <= epsilon * (1 + 1e-15)


def neighbours(dimension: int, clip_norm: float, slack: float, granularity: float) -> list[np.ndarray]:
    """Pairs of sums, (pairs, 2, d), whose difference is as long as the engine's slack lets it be, at places
    from which rounding takes it furthest."""
    most, generator = clip_norm * (1 + slack), np.random.default_rng(5)
    pairs = []
    for _ in range(40):
        record = generator.normal(size=dimension) * (generator.random(dimension) < 0.7)
        record[0] += 1e-9
        record *= most / np.abs(record).sum()
        total = np.rint(generator.normal(size=dimension) * 3 * clip_norm / granularity) + 0.5
        total = (total - 1e-7 * np.sign(record)) * granularity
        pairs.append(np.array([total, total + record]))
    return pairs


@pytest.mark.parametrize("noise", [0.05, 0.4, 3.0])
@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_rounded_sums_of_neighbouring_lots_never_differ_by_more_than_the_factor(
    dimension: int, noise: float
) -> None:
    """The mechanism of a plan, whole: float sums apart by a record, its grid, its scale, all outputs.

    log P(x | one) − log P(x | other) is (Σ|x_j − b_j| − Σ|x_j − a_j|)/λ, and by the triangle inequality its
    largest value over all x is taken at the corners of the box of a and b, enumerated here, in fractions.
    """
    m = DiscretisedLaplace.build(
        Query(clip_norm=0.3, accumulation_slack=0.01, dimension=dimension, sampling_rate=1.0),
        noise,
        {"resolution": 256},
    )
    scale, worst = Fraction(m.scale_units), Fraction(0)
    for pair in neighbours(dimension, 0.3, 0.01, m.granularity):
        without, present = (m.quantize(total).tolist() for total in pair)
        for corner in itertools.product(*zip(without, present, strict=True)):
            loss = sum(abs(x - a) - abs(x - b) for x, a, b in zip(corner, without, present, strict=True))
            worst = max(worst, abs(Fraction(loss)) / scale)
    assert worst <= Fraction(m.epsilon)
    assert worst > Fraction(m.epsilon) * Fraction(98, 100)


def test_rounding_a_sum_costs_a_unit_for_each_coordinate() -> None:
    m = DiscretisedLaplace(1.0, 2.0, 0.1, 26_010, resolution=2**20, accumulation_slack=0.001)
    assert m.sensitivity_units == 2**20 + 1049 + 26_010 + 1
    assert m.quantize(np.full(26_010, 2.0**-20)).tolist() == [1] * 26_010
    with pytest.raises(ParameterError, match="accumulation slack is None"):
        DiscretisedLaplace(1.0, 2.0, 0.1, 3).quantize(np.zeros(3))


@pytest.mark.parametrize("noise", [0.05, 1.0, 8.0, 100.0, 10_000.0])
def test_the_chosen_grid_is_as_fine_as_the_wire_takes(noise: float) -> None:
    parameters = DiscretisedLaplace.chosen_parameters([noise / 2, noise])
    fine = int(parameters["resolution"])
    assert fine & (fine - 1) == 0
    assert fine == 2**28 or 2**30 < noise * fine <= 2**31
    query = Query(clip_norm=1.0, accumulation_slack=0.001, dimension=26_010, sampling_rate=0.1)
    m = DiscretisedLaplace.build(query, noise, parameters)
    assert m.deviation_units / m.wire_step == pytest.approx(3, rel=1e-6)
    if noise <= 100:
        assert m.sensitivity_units < 1.003 * fine


def test_noise_is_laplace_independent_and_of_the_right_size() -> None:
    m = DiscretisedLaplace(1.0, 2.0, 1.0, 100_000)
    total = np.arange(100_000, dtype=np.int64)
    noise = m.add_noise(total) - total
    assert stats.kstest(noise / m.scale_units, "laplace").pvalue > 1e-6
    assert noise.std() == pytest.approx(m.deviation_units, rel=0.03)
    assert not np.array_equal(noise, m.add_noise(total) - total)
    pool = NoisePool(m.sampler())
    pool.prepare(100_000)
    pooled = m.add_noise(total, noise=pool, entropy=lambda _: b"") - total
    assert stats.kstest(pooled / m.scale_units, "laplace").pvalue > 1e-6


def test_an_attack_on_one_dimension_proves_no_more_than_claimed() -> None:
    draws, epsilon = 200_000, 1.0
    m = DiscretisedLaplace(2.0, 1 / epsilon, 1.0, 1)
    record = m.constrain(np.array([[7.0]], dtype=np.float32)).total[0]
    assert record == m.grid.resolution
    sampler = m.sampler()
    without, present = sampler.sample(draws), record + sampler.sample(draws)
    thresholds = np.linspace(-2, 3, 26) * m.sensitivity_units
    assert 0.93 < proven_epsilon(present, without, thresholds) <= epsilon
    # noise of nine tenths the size is caught
    assert proven_epsilon(record + 0.9 * (present - record), 0.9 * without, thresholds) > epsilon


def test_an_attack_on_a_sampled_lot_proves_no_more_than_the_amplified_cost() -> None:
    draws, q = 200_000, 0.3
    m = DiscretisedLaplace(1.0, 0.5, q, 1)
    sampler = m.sampler()
    drawn = np.random.default_rng(1).random(draws) < q
    record = m.constrain(np.array([[1.0]], dtype=np.float32)).total[0]
    without, present = sampler.sample(draws), record * drawn + sampler.sample(draws)
    thresholds = np.linspace(-1, 2, 16) * m.sensitivity_units
    claimed = composed(m.event).epsilon
    assert 0.85 * claimed < proven_epsilon(present, without, thresholds) <= claimed


def test_an_attack_on_a_vector_gains_nothing_from_its_dimension() -> None:
    """A record spread evenly over 8 coordinates: the likelihood ratio of the whole release."""
    draws, epsilon, dimension = 200_000, 1.5, 8
    m = DiscretisedLaplace(1.0, 1 / epsilon, 1.0, dimension)
    record = m.constrain(np.full((1, dimension), 3.0, dtype=np.float32)).total
    assert 0.999 * m.sensitivity_units < np.abs(record).sum() <= m.sensitivity_units
    noise = m.sampler().sample(2 * draws * dimension).reshape(2, draws, dimension)

    def log_ratio(released: np.ndarray) -> np.ndarray:
        return (np.abs(released) - np.abs(released - record)).sum(axis=1) / m.scale_units

    without, present = log_ratio(noise[0]), log_ratio(noise[1] + record)
    assert max(np.abs(without).max(), np.abs(present).max()) <= epsilon
    proven = proven_epsilon(present, without, np.linspace(-epsilon, epsilon, 21))
    assert 0.5 * epsilon < proven <= epsilon


def test_bad_values_are_named() -> None:
    for changes, name in (
        ({"noise_multiplier": 0.0}, "noise multiplier"),
        ({"noise_multiplier": math.nan}, "noise multiplier"),
        ({"noise_multiplier": 0.000999}, "noise multiplier"),
        ({"noise_multiplier": 1e7}, "noise multiplier is 10000000.0; with a sensitivity"),
        ({"clip_norm": math.inf}, "clip norm"),
        ({"sampling_rate": 0.0}, "sampling rate"),
        ({"dimension": 0}, "dimension"),
        ({"steps": 0}, "steps"),
        ({"resolution": 2**31}, "resolution"),
        ({"resolution": 0}, "resolution"),
    ):
        arguments: dict[str, Any] = {
            "clip_norm": 1.0,
            "noise_multiplier": 1.0,
            "sampling_rate": 1.0,
            "dimension": 650,
        }
        with pytest.raises(ParameterError, match=name):
            DiscretisedLaplace(**arguments | changes)
    m = DiscretisedLaplace(1.0, 1.0, 1.0, 3)
    with pytest.raises(ParameterError, match="total"):
        m.add_noise(np.zeros(2, dtype=np.int64))
    with pytest.raises(ParameterError, match="gradients"):
        m.constrain(np.zeros((2, 3)))  # type: ignore[arg-type]
