"""Noise at the coordinator: clipped sums of whole updates."""

from __future__ import annotations

import math
from collections.abc import Callable

import dp_accounting
import numpy as np
import pytest
from attacks import proven_epsilon
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.mechanisms.central import CentralGaussian, CentralLaplace

Central = CentralGaussian | CentralLaplace


def gaussian(dimension: int = 650, *, rate: float = 1.0, noise: float = 2.0) -> Central:
    return CentralGaussian(1.0, noise, rate, dimension)


def laplace(dimension: int = 650, *, rate: float = 1.0, epsilon: float = 1.0) -> Central:
    return CentralLaplace(1.0, 1 / epsilon, rate, dimension)


both = pytest.mark.parametrize(("make", "order"), [(gaussian, 2), (laplace, 1)])


@both
def test_updates_are_clipped_as_published(make: Callable[..., Central], order: int) -> None:
    """Δ/max(1, ‖Δ‖/C) in plain float64, a device at a time."""
    rng = np.random.default_rng(3)
    updates = (rng.normal(size=(7, 650)) * 10.0 ** rng.uniform(-5, 2, (7, 1))).astype(np.float32)
    m = make()
    expected = sum(u / max(1.0, np.linalg.norm(u, order)) for u in updates.astype(np.float64))
    got = m.constrain(updates).total * m.granularity
    assert np.abs(got - expected).max() <= 7 * 0.51 * m.granularity


@both
@given(
    updates=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.just(5)),
        elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
    )
)
def test_a_device_adds_its_own_bounded_vector(
    make: Callable[..., Central], order: int, updates: NDArray[np.float32]
) -> None:
    m = make(5)
    whole = m.constrain(updates).total
    parts = [m.constrain(update[np.newaxis]).total for update in updates]
    np.testing.assert_array_equal(whole, sum(parts))
    for part in parts:
        assert sum(abs(int(x)) ** order for x in part) <= m.sensitivity_units**order


@both
def test_the_statement_is_on_devices_and_trusts_the_coordinator(
    make: Callable[..., Central], order: int
) -> None:
    m = make(rate=0.2)
    statement = m.statement(1e-5) if order == 2 else m.statement()
    assert statement.scope == ("device", "zero-out", "coordinator")
    assert (m.unit, m.adjacency, m.trust) == statement.scope
    assert statement.mechanism == m.name == ("central-gaussian" if order == 2 else "central-laplace")
    assert m.norm == ("L2" if order == 2 else "L1")
    assert "probability 0.2, in secret" in statement.assumptions[0]
    assert make().statement(1e-5).assumptions == ()
    assert m.steps == 1
    if order == 2:
        assert statement.epsilon == PldAccountant().epsilon_after([m.event], 1e-5)
    else:
        assert (
            statement.epsilon == composed(m.event).epsilon == pytest.approx(math.log1p(0.2 * math.expm1(1.0)))
        )
        assert statement.delta < 1e-20


@both
@pytest.mark.parametrize("dimension", [650, 26_010])
def test_that_an_honest_fragment_may_be_refused_is_part_of_the_distance_from_the_ideal(
    make: Callable[..., Central], order: int, dimension: int
) -> None:
    """With noise of devices, one whose norm is beyond that of all honest ones but 2⁻¹²⁸ of them; and each
    number of that noise is 2⁻¹¹⁹ from exact at the most."""
    m = make(dimension)
    assert m.inexactness == pytest.approx(m.statistical_distance + 2.0**-128 + dimension * 2.0**-119)


@both
def test_noise_is_that_of_the_sum_and_drawn_once(make: Callable[..., Central], order: int) -> None:
    m = make(50_000)
    total = np.arange(50_000, dtype=np.int64)
    noise = m.add_noise(total) - total
    assert noise.std() == pytest.approx(m.deviation_units, rel=0.04)
    assert 0 < m.statistical_distance < 1e-20


@both
def test_an_attack_on_one_device_proves_no_more_than_claimed(
    make: Callable[..., Central], order: int
) -> None:
    draws, delta = 200_000, 1e-5 if order == 2 else 0.0
    m = gaussian(1, noise=1.0) if order == 2 else laplace(1)
    device = m.constrain(np.array([[4.0]], dtype=np.float32)).total[0]
    sampler = m.sampler()
    others = m.constrain(np.array([[0.3], [-2.0]], dtype=np.float32)).total[0]
    without, present = others + sampler.sample(draws), others + device + sampler.sample(draws)
    thresholds = others + np.linspace(-2, 4, 25) * m.deviation_units
    claimed = m.statement(1e-5).epsilon if order == 2 else composed(m.event).epsilon
    assert (1.5 if order == 2 else 0.9) < proven_epsilon(present, without, thresholds, delta) <= claimed


@both
def test_bad_values_are_named(make: Callable[..., Central], order: int) -> None:
    with pytest.raises(ParameterError, match="sampling rate"):
        make(rate=1.5)
    with pytest.raises(ParameterError, match=r"noise multiplier|epsilon"):
        make(**({"noise": 0.0} if order == 2 else {"epsilon": -1.0}))
    m = make(3)
    with pytest.raises(ParameterError, match="updates have shape"):
        m.constrain(np.zeros((1, 4), dtype=np.float32))
    with pytest.raises(ParameterError, match="total"):
        m.add_noise(np.zeros(4, dtype=np.int64))


@both
def test_the_price_of_a_job_is_no_less_than_that_of_dp_accounting(
    make: Callable[..., Central], order: int
) -> None:
    """Twelve rounds in which every device takes part. Of Laplace noise in many coordinates the ε alone is
    claimed, which is dearer than noise in one."""
    rounds, delta = 12, 1e-5
    m = gaussian(noise=3.0) if order == 2 else laplace(epsilon=1 / 3)
    theirs = PLDAccountant()
    one = dp_accounting.GaussianDpEvent(3.0) if order == 2 else dp_accounting.LaplaceDpEvent(3.0)
    theirs.compose(one, rounds)
    ours, least = PldAccountant().epsilon_after([m.event] * rounds, delta), theirs.get_epsilon(delta)
    assert ours == pytest.approx(least, rel=2e-3) if order == 2 else least < ours <= rounds / 3
