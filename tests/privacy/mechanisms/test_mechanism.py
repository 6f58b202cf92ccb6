"""The grid: an integer norm no vector can break. The Gaussian: noise that does what it claims."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attacks import proven_epsilon
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy import stats

from dpagent.errors import ParameterError
from dpagent.norm import Norm
from dpagent.privacy.accounting.gaussian_loss import MIN_SIGMA_UNITS
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.events import GaussianEvent, poisson_sampled
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.grid import MAX_RESOLUTION, Grid, l1_resolution, shrink_to_norm
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE, Parameter, Query
from dpagent.privacy.mechanisms.wire import round_at_random
from dpagent.privacy.noise.entropy import NoisePool

ANY_FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
BATCHES = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=ANY_FLOAT32)
)
NORMS = st.sampled_from(Norm)
both_norms = pytest.mark.parametrize("norm", list(Norm))


def mechanism(dimension: int, **changes: Any) -> DiscretisedGaussian:
    arguments: dict[str, Any] = {"clip_norm": 1.0, "noise_multiplier": 2.25, "sampling_rate": 0.1}
    return DiscretisedGaussian(**arguments | changes, dimension=dimension)


def measure(vector: NDArray[np.int64], norm: Norm) -> int:
    """The squared L2 norm, or the L1 norm, in Python's integers."""
    return sum(int(x) ** 2 if norm is Norm.L2 else abs(int(x)) for x in vector)


def limit(bound: int, norm: Norm) -> int:
    return bound**2 if norm is Norm.L2 else bound


@given(batch=BATCHES, clip=st.floats(1e-9, 1e9), fine=st.sampled_from([1, 7, 65_536, 2**20]), norm=NORMS)
def test_no_record_exceeds_the_sensitivity(
    batch: NDArray[np.float32], clip: float, fine: int, norm: Norm
) -> None:
    grid = Grid(norm, clip, batch.shape[1], fine)
    for row in batch:
        total, excluded = grid.constrain(row[np.newaxis])
        assert measure(total, norm) <= limit(grid.sensitivity_units, norm)
        assert excluded == (not np.isfinite(row).all())
        if excluded:
            assert not total.any()


@given(batch=BATCHES, data=st.data(), norm=NORMS)
def test_removing_a_record_removes_its_own_vector(
    batch: NDArray[np.float32], data: st.DataObject, norm: Norm
) -> None:
    grid = Grid(norm, 1.0, batch.shape[1], MAX_RESOLUTION[norm])
    removed = data.draw(st.integers(0, len(batch) - 1))
    difference = grid.constrain(batch).total - grid.constrain(np.delete(batch, removed, axis=0)).total
    assert measure(difference, norm) <= limit(grid.sensitivity_units, norm)
    np.testing.assert_array_equal(difference, grid.constrain(batch[removed : removed + 1]).total)


@both_norms
@pytest.mark.parametrize("dimension", [1, 3, 127, 650, 26_010])
def test_the_sum_is_exact_in_any_order_and_split(dimension: int, norm: Norm) -> None:
    rng = np.random.default_rng(dimension)
    batch = (rng.normal(size=(17, dimension)) * 10.0 ** rng.uniform(-6, 6, (17, 1))).astype(np.float32)
    batch[3, 0] = np.nan
    m = Grid(norm, 1.0, dimension, 65_536 if norm is Norm.L2 else l1_resolution(dimension))
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
    gradient = np.random.default_rng(0).normal(size=(1, 26_010)).astype(np.float32)
    exact = gradient[0].astype(np.float64)
    for norm, fine, order in ((Norm.L2, 65_536, 2), (Norm.L1, l1_resolution(26_010), 1)):
        m = Grid(norm, 1.0, 26_010, fine)
        assert 1 < m.sensitivity_units / fine < 1.0013
        for scale, length in ((1.0, np.linalg.norm(exact, order)), (1e-6, 1.0)):
            wanted = exact * scale / length / m.granularity
            got = m.constrain((gradient * np.float32(scale)).astype(np.float32)).total
            assert np.abs(got - wanted).max() <= 0.51
    # what the module's text says of the L1 grid
    assert l1_resolution(26_010) == 2**24
    assert Grid(Norm.L1, 1.0, 26_010, 2**24).sensitivity_units == 2**24 + 13_005 + 1
    assert [l1_resolution(d) for d in (1, 128, 129, 2**19, 2**28)] == [2**16, 2**16, 2**17, 2**28, 2**28]


@pytest.mark.parametrize("dimension", [1, 100, 650, 26_010, 2**19])
def test_l1_slack_is_below_a_thousandth(dimension: int) -> None:
    fine = l1_resolution(dimension)
    assert Grid(Norm.L1, 1.0, dimension, fine).sensitivity_units <= fine * 1.001 + 1


@both_norms
def test_a_half_step_everywhere_pays_the_full_slack(norm: Norm) -> None:
    """All coordinates rounded up: the worst case √d/2, or d/2, really is needed, and is enough."""
    dimension, fine = 10_000, 1000 if norm is Norm.L2 else 2**20
    grid = Grid(norm, 1.0, dimension, fine)
    step = np.float32(0.5001 / fine)
    total = grid.constrain(np.full((1, dimension), step)).total
    np.testing.assert_array_equal(total, np.ones(dimension))
    half = 50 if norm is Norm.L2 else 5000
    added = measure(total, norm) ** (1 / 2 if norm is Norm.L2 else 1) - 0.5001 * 2 * half
    assert half - 2 < added <= half
    assert grid.sensitivity_units == fine + half + 1


def test_rounding_never_more_than_doubles_an_l1_norm() -> None:
    """On a grid too coarse for the model the slack stops at F."""
    grid = Grid(Norm.L1, 1.0, 1000, 8)
    assert grid.sensitivity_units == 8 + 8 + 1
    total = grid.constrain(np.full((1, 1000), 0.5001 / 8, dtype=np.float32)).total
    assert total.sum() == 0  # clipped to 8/1000 of a step each
    few = np.zeros((1, 1000), dtype=np.float32)
    few[0, :15] = 0.5001 / 8
    assert grid.constrain(few).total.sum() == 15


@given(
    vector=hnp.arrays(np.float64, st.integers(1, 30), elements=st.integers(-(2**20), 2**20)),
    bound=st.integers(1, 2**20),
    norm=NORMS,
)
def test_an_offender_is_shortened_to_whole_numbers_within_the_bound(
    vector: NDArray[np.float64], bound: int, norm: Norm
) -> None:
    before = vector.copy()
    shrink_to_norm(vector, np.empty_like(vector), bound, norm)
    as_integers = vector.astype(np.int64)
    np.testing.assert_array_equal(as_integers, vector)
    assert measure(as_integers, norm) <= limit(bound, norm)
    assert (np.abs(vector) <= np.abs(before)).all()
    if measure(before.astype(np.int64), norm) <= limit(bound, norm):
        np.testing.assert_array_equal(vector, before)


@pytest.mark.parametrize("dimension", [1, 2, 4, 5, 16, 17, 26_010, 2**28])
def test_sensitivity_rounds_the_slack_up(dimension: int) -> None:
    slack = mechanism(dimension).sensitivity_units - 65_536 - 1
    assert (2 * slack) ** 2 >= dimension > (2 * slack - 2) ** 2


def test_the_record_states_the_maths() -> None:
    m = DiscretisedGaussian(0.5, 2.0, 0.1, 26_010, steps=3)
    assert (m.unit, m.adjacency) == ("record", "add-or-remove-one")
    assert (m.name, m.trust, m.norm) == ("discrete-gaussian", "none", "L2")
    assert m.granularity == 0.5 / 65_536
    assert m.sigma_units >= 2.0 * m.sensitivity_units
    assert m.sigma_units == pytest.approx(2.0 * m.sensitivity_units, rel=1e-15)
    assert m.event == poisson_sampled(GaussianEvent(2.0), 0.1, 3)
    assert 0 < m.statistical_distance < 1e-28
    assert m.deviation_units == m.sigma_units
    statement = m.statement(1e-5)
    assert statement.scope == ("record", "add-or-remove-one", "none")
    assert statement.epsilon == PldAccountant().epsilon_after([m.event], 1e-5)
    assert 1e-5 <= statement.delta < 1.000001e-5


def test_noise_too_coarse_for_the_tight_price_is_priced_by_renyi_divergence() -> None:
    m = replace(mechanism(10), resolution=64)
    assert m.sigma_units < MIN_SIGMA_UNITS
    assert m.statement(1e-5).epsilon == RdpAccountant().epsilon_after([m.event], 1e-5)


def test_a_job_says_what_it_rests_on() -> None:
    statement = DiscretisedGaussian.job_statement(2.0, 1e-5, "It rains.")
    assert statement.scope == ("record", "add-or-remove-one", "none")
    assert (statement.epsilon, statement.delta, statement.mechanism) == (2.0, 1e-5, "discrete-gaussian")
    assert len(statement.assumptions) == 3
    assert "fixed before its first round" in statement.assumptions[0]
    assert statement.assumptions[-1] == "It rains."


def test_noise_is_independent_per_coordinate_and_of_the_right_size() -> None:
    m = mechanism(100_000)
    total = np.arange(100_000, dtype=np.int64)
    noise = m.add_noise(total) - total
    assert stats.kstest(noise / m.sigma_units, "norm").pvalue > 1e-6
    assert not np.array_equal(noise, m.add_noise(total) - total)
    pool = NoisePool(m.sampler())
    pool.prepare(100_000)
    pooled = m.add_noise(total, noise=pool, entropy=lambda _: b"") - total
    assert pool.available == 0
    assert stats.kstest(pooled / m.sigma_units, "norm").pvalue > 1e-6


def test_an_attack_on_one_dimension_does_not_beat_the_claimed_epsilon() -> None:
    """Releases of two neighbouring inputs; no threshold test may reveal more than (ε, δ) allows.

    For each event S, P(S | with) ≤ e^ε·P(S | without) + δ must hold. Clopper–Pearson bounds at a
    joint level of 1e-6 give what the data prove against it.
    """
    draws, delta, thresholds = 200_000, 1e-5, np.linspace(-2, 4, 25)
    m = DiscretisedGaussian(1.0, 1.0, 1.0, dimension=1)
    # d coordinates of a one-dimensional release are as many independent releases
    noise = DiscretisedGaussian(
        1.0, m.sigma_units / (65_536 + math.ceil(math.sqrt(draws) / 2) + 1), 1.0, dimension=draws
    )
    assert noise.sigma_units == pytest.approx(m.sigma_units, rel=1e-12)
    record = m.constrain(np.array([[5.0]], dtype=np.float32)).total[0]
    without = noise.add_noise(np.zeros(draws, dtype=np.int64)) / m.sigma_units
    present = noise.add_noise(np.full(draws, record)) / m.sigma_units

    proven = proven_epsilon(present, without, thresholds, delta)
    claimed = m.statement(delta).epsilon
    assert 1.5 < proven < claimed  # strong enough to have caught noise of half the size


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"clip_norm": 0.0}, "clip norm"),
        ({"noise_multiplier": -1.0}, "noise multiplier"),
        ({"noise_multiplier": 1e4}, "noise multiplier"),
        ({"sampling_rate": 2.0}, "sampling rate"),
        ({"steps": 0}, "steps"),
        ({"resolution": 2**21}, "resolution"),
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
            m.add_noise(wrong_total)  # type: ignore[arg-type]
    many = np.broadcast_to(np.zeros((1, 1), dtype=np.float32), (2**23, 1))
    with pytest.raises(ParameterError, match="at most 8388607 at a time"):
        Grid(Norm.L1, 1.0, 1, 2**30).constrain(many)


def test_an_l1_grid_has_the_dimensions_of_any_grid() -> None:
    assert l1_resolution(2**28) == 2**28
    for dimension in (0, 2**28 + 1):
        with pytest.raises(ParameterError, match="dimension"):
            l1_resolution(dimension)


def test_totals_are_taken_up_to_the_last_exact_number() -> None:
    grid = Grid(Norm.L2, 1.0, 2, 65_536)
    grid.require_total(np.array([2**53, -(2**53)]))
    for beyond in (2**53 + 1, -(2**53) - 1):
        with pytest.raises(ParameterError, match="total"):
            grid.require_total(np.array([0, beyond]))


# --- parameters, noise and wire form of any mechanism ---------------------------------------------


def test_a_parameter_takes_its_range_and_nothing_else() -> None:
    share = Parameter("noise_share", 0.25, 0.5, "a share")
    assert [share.check(value) for value in (0.25, 0.3, 0.5)] == [0.25, 0.3, 0.5]
    for wrong in (math.nextafter(0.25, 0), math.nextafter(0.5, 1), math.nan, True):
        with pytest.raises(ParameterError, match=r"^noise share is "):
            share.check(wrong)
    bins = Parameter("number_of_bins", 2, 4, "bins", whole=True)
    assert [bins.check(value) for value in (2, 3, 4)] == [2, 3, 4]
    for wrong in (1, 5, 3.0, True):
        with pytest.raises(ParameterError, match=r"^number of bins is "):
            bins.check(wrong)


@pytest.mark.parametrize("parameters", [{}, {"resolution": 1024, "colour": 1}])
def test_parameters_that_are_given_and_wanted_are_named(parameters: dict[str, float]) -> None:
    query = Query(clip_norm=1.0, accumulation_slack=0.0, dimension=3, sampling_rate=0.1)
    with pytest.raises(ParameterError) as caught:
        DiscretisedGaussian.build(query, 2.0, parameters)
    given = ", ".join(sorted(parameters)) or "none"
    assert f"are {given}; expected resolution." in str(caught.value)


class Alike:
    """Endless bytes from a seed; two with one seed give the same."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def __call__(self, count: int) -> bytes:
        return self._generator.bytes(count)


def test_noise_and_rounding_come_from_the_entropy_that_is_given() -> None:
    m = mechanism(500)
    total = np.arange(500, dtype=np.int64) * 1_000
    noisy = m.add_noise(total, entropy=Alike(1))
    np.testing.assert_array_equal(noisy, total + m.sampler(entropy=Alike(1)).sample(500))
    once, again = (round_at_random(noisy, 1_001, entropy=Alike(2)) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert (once != round_at_random(noisy, 1_001, entropy=Alike(3))).any()


@pytest.mark.parametrize("delta", [1e-5, 1e-12])
def test_inexact_noise_may_use_its_share_of_delta_and_no_more(delta: float) -> None:
    """(1 + e^ε)·η for all rounds, against the share: by the formula of the module's proof."""
    m, rounds = mechanism(1000), 30
    assert m.inexactness == m.statistical_distance + m.steps * 2.0**-128  # of the noise, and of the lots
    most = math.log(NOISE_SHARE * delta / (rounds * m.inexactness) - 1)
    m.require_noise_as_priced(rounds, most - 1e-6, delta)
    with pytest.raises(ParameterError, match=f"{NOISE_SHARE * delta:.3g}"):
        m.require_noise_as_priced(rounds, most + 1e-6, delta)


def test_an_expected_lot_of_nothing_is_refused() -> None:
    for lot in (0.0, -1.0, math.inf):
        with pytest.raises(ParameterError, match="expected lot"):
            mechanism(10).wire_bits(lot)
