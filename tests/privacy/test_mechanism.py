"""The mechanism: an integer norm no gradient can break, and noise that does what it claims."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy import stats

from dpagent.errors import ParameterError
from dpagent.privacy import DiscretisedGaussian, running_epsilon
from dpagent.privacy.mechanism import shrink_to_norm

ANY_FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
BATCHES = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=ANY_FLOAT32)
)


def mechanism(dimension: int, **changes: float) -> DiscretisedGaussian:
    arguments: dict[str, float] = {"clip_norm": 1.0, "noise_multiplier": 2.25, "sampling_rate": 0.1}
    return DiscretisedGaussian(**{**arguments, **changes}, dimension=dimension)  # type: ignore[arg-type]


def square_norm(vector: NDArray[np.int64]) -> int:
    return sum(int(x) ** 2 for x in vector)


@given(batch=BATCHES, clip=st.floats(1e-9, 1e9), fine=st.sampled_from([1, 7, 65_536]))
@settings(deadline=None)
def test_no_record_exceeds_the_sensitivity(batch: NDArray[np.float32], clip: float, fine: int) -> None:
    m = mechanism(batch.shape[1], clip_norm=clip, fine_steps=fine, noise_multiplier=3.0)
    for row in batch:
        total, excluded = m.constrain(row[np.newaxis])
        assert square_norm(total) <= m.sensitivity_steps**2
        assert excluded == (not np.isfinite(row).all())
        if excluded:
            assert not total.any()


@given(batch=BATCHES, data=st.data())
@settings(deadline=None)
def test_removing_a_record_removes_its_own_vector(batch: NDArray[np.float32], data: st.DataObject) -> None:
    m = mechanism(batch.shape[1])
    removed = data.draw(st.integers(0, len(batch) - 1))
    difference = m.constrain(batch).total - m.constrain(np.delete(batch, removed, axis=0)).total
    assert square_norm(difference) <= m.sensitivity_steps**2
    np.testing.assert_array_equal(difference, m.constrain(batch[removed : removed + 1]).total)


@pytest.mark.parametrize("dimension", [1, 3, 127, 650, 26_010])
def test_the_sum_is_exact_in_any_order_and_split(dimension: int) -> None:
    rng = np.random.default_rng(dimension)
    batch = (rng.normal(size=(17, dimension)) * 10.0 ** rng.uniform(-6, 6, (17, 1))).astype(np.float32)
    batch[3, 0] = np.nan
    m = mechanism(dimension)
    expected = m.constrain(batch)
    assert expected.excluded == 1
    permuted = m.constrain(batch[rng.permutation(17)])
    np.testing.assert_array_equal(expected.total, permuted.total)
    np.testing.assert_array_equal(expected.total, m.constrain(batch[:5]).total + m.constrain(batch[5:]).total)
    # neither memory layout nor alignment may matter to a record's vector
    np.testing.assert_array_equal(expected.total, m.constrain(np.asfortranarray(batch)).total)
    raw = np.empty(batch.nbytes + 4, dtype=np.uint8)[4:].view(np.float32).reshape(batch.shape)
    raw[:] = batch
    np.testing.assert_array_equal(expected.total, m.constrain(raw).total)


def test_rounding_to_nearest_is_faithful_and_its_slack_is_small() -> None:
    m = mechanism(26_010)
    assert m.sensitivity_steps == 65_536 + 81 + 1
    gradient = np.random.default_rng(0).normal(size=(1, 26_010)).astype(np.float32)
    exact = gradient[0].astype(np.float64)
    for scale, norm in ((1.0, np.linalg.norm(exact)), (1e-3, 1.0)):
        wanted = exact * scale / norm / m.granularity
        got = m.constrain((gradient * np.float32(scale)).astype(np.float32)).total
        assert np.abs(got - wanted).max() <= 0.51


def test_a_half_step_everywhere_pays_the_full_slack() -> None:
    """All coordinates rounded up: the worst case √d/2 really is needed, and is enough."""
    dimension, fine = 10_000, 1000
    m = mechanism(dimension, fine_steps=fine, clip_norm=1.0)
    step = np.float32(0.5001 / fine)
    total = m.constrain(np.full((1, dimension), step)).total
    np.testing.assert_array_equal(total, np.ones(dimension))
    assert math.sqrt(square_norm(total)) > float(step) * fine * math.sqrt(dimension) + 49.9
    assert m.sensitivity_steps == fine + 50 + 1


@given(
    vector=hnp.arrays(np.float64, st.integers(1, 30), elements=st.integers(-(2**20), 2**20)),
    bound=st.integers(1, 2**20),
)
@settings(deadline=None)
def test_an_offender_is_shortened_to_whole_numbers_within_the_bound(
    vector: NDArray[np.float64], bound: int
) -> None:
    before = vector.copy()
    shrink_to_norm(vector, np.empty_like(vector), bound)
    as_integers = vector.astype(np.int64)
    np.testing.assert_array_equal(as_integers, vector)
    assert square_norm(as_integers) <= bound**2
    assert (np.abs(vector) <= np.abs(before)).all()
    if square_norm(before.astype(np.int64)) <= bound**2:
        np.testing.assert_array_equal(vector, before)


@pytest.mark.parametrize("dimension", [1, 2, 4, 5, 16, 17, 26_010, 2**28])
def test_sensitivity_rounds_the_slack_up(dimension: int) -> None:
    slack = mechanism(dimension).sensitivity_steps - 65_536 - 1
    assert (2 * slack) ** 2 >= dimension > (2 * slack - 2) ** 2


def test_the_record_states_the_maths() -> None:
    m = DiscretisedGaussian(0.5, 2.0, 0.1, 26_010, steps=3)
    assert (m.unit, m.adjacency) == ("record", "add-or-remove-one")
    assert m.trust.startswith("none")
    assert m.granularity == 0.5 / 65_536
    assert m.sigma_steps >= 2.0 * m.sensitivity_steps
    assert m.sigma_steps == pytest.approx(2.0 * m.sensitivity_steps, rel=1e-15)
    assert (m.event.noise_multiplier, m.event.sampling_rate, m.event.steps) == (2.0, 0.1, 3)
    assert 0 < m.statistical_distance < 1e-28


def test_noise_is_independent_per_coordinate_and_of_the_right_size() -> None:
    m = mechanism(100_000)
    total = np.arange(100_000, dtype=np.int64)
    noise = m.perturb(total) - total
    assert stats.kstest(noise / m.sigma_steps, "norm").pvalue > 1e-6
    assert not np.array_equal(noise, m.perturb(total) - total)


def test_an_attack_on_one_dimension_does_not_beat_the_claimed_epsilon() -> None:
    """Releases of two neighbouring inputs; no threshold test may reveal more than (ε, δ) allows.

    For each event S, P(S | with) ≤ e^ε·P(S | without) + δ must hold. Clopper–Pearson bounds at a
    joint level of 1e-6 give what the data prove against it.
    """
    draws, delta, thresholds = 200_000, 1e-5, np.linspace(-2, 4, 25)
    m = DiscretisedGaussian(1.0, 1.0, 1.0, dimension=1)
    # d coordinates of a one-dimensional release are as many independent releases
    noise = DiscretisedGaussian(
        1.0, m.sigma_steps / (65_536 + math.ceil(math.sqrt(draws) / 2) + 1), 1.0, dimension=draws
    )
    assert noise.sigma_steps == pytest.approx(m.sigma_steps, rel=1e-12)
    record = m.constrain(np.array([[5.0]], dtype=np.float32)).total[0]
    without = noise.perturb(np.zeros(draws, dtype=np.int64)) / m.sigma_steps
    present = noise.perturb(np.full(draws, record)) / m.sigma_steps

    level = 1e-6 / (4 * thresholds.size)
    proven = 0.0
    for more, less, sign in ((present, without, 1), (without, present, -1)):
        for threshold in thresholds:
            hits = int((sign * (more - threshold) > 0).sum())
            misses = int((sign * (less - threshold) > 0).sum())
            at_least = stats.beta.ppf(level, hits, draws - hits + 1) if hits else 0.0
            at_most = stats.beta.isf(level, misses + 1, draws - misses) if misses < draws else 1.0
            if at_least > delta:
                proven = max(proven, math.log((at_least - delta) / at_most))
    claimed = running_epsilon([m.event], delta)[0]
    assert 1.5 < proven < claimed  # strong enough to have caught noise of half the size


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"clip_norm": 0.0}, "clip norm"),
        ({"noise_multiplier": -1.0}, "noise multiplier"),
        ({"noise_multiplier": 1e4}, "noise multiplier"),
        ({"sampling_rate": 2.0}, "sampling rate"),
        ({"steps": 0}, "steps"),
        ({"fine_steps": 2**21}, "fine steps"),
    ],
)
def test_bad_parameters_are_named(changes: dict[str, float], name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        mechanism(10, **changes)
    with pytest.raises(ParameterError, match="dimension"):
        mechanism(0)


def test_bad_arrays_are_named() -> None:
    m = mechanism(3)
    assert m.constrain(np.zeros((0, 3), dtype=np.float32)).total.tolist() == [0, 0, 0]
    for wrong in (np.zeros(3, dtype=np.float32), np.zeros((2, 4), dtype=np.float32), np.zeros((2, 3))):
        with pytest.raises(ParameterError, match="gradients"):
            m.constrain(wrong)  # type: ignore[arg-type]
    for wrong_total in (np.zeros(2, dtype=np.int64), np.zeros(3)):
        with pytest.raises(ParameterError, match="total"):
            m.perturb(wrong_total)  # type: ignore[arg-type]
