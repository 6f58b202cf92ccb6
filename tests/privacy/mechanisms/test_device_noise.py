"""Noise of a device on its own update, with noise of the coordinator besides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import dp_accounting
import numpy as np
import pytest
from attacks import proven_epsilon
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.mechanisms.central import CentralLaplace
from dpagent.privacy.mechanisms.device_noise import DeviceGaussian, DeviceLaplace

Device = DeviceGaussian | DeviceLaplace


def gaussian(dimension: int = 650, noise: float = 2.0, rate: float = 1.0) -> DeviceGaussian:
    return DeviceGaussian(1.0, noise, rate, dimension)


def laplace(dimension: int = 650, noise: float = 1.0, rate: float = 1.0) -> DeviceLaplace:
    return DeviceLaplace(1.0, noise, rate, dimension)


both = pytest.mark.parametrize(("make", "order"), [(gaussian, 2), (laplace, 1)])


@both
def test_the_statement_is_on_the_whole_device_and_trusts_nobody(
    make: Callable[..., Device], order: int
) -> None:
    m = make()
    assert m.statement(1e-5).scope == ("device", "replace-one", "none")
    assert m.norm == f"L{order}"
    assert m.sensitivity_units == 2 * m.grid.sensitivity_units
    for rate in (0.5, 1.5):
        with pytest.raises(ParameterError, match="sampling rate is"):
            make(rate=rate)


def test_the_price_of_a_job_is_that_of_noise_over_twice_the_norm() -> None:
    """Noise of parameter zΔ costs what dp-accounting says of a Gaussian mechanism of multiplier z/2."""
    z, rounds, delta = 6.0, 12, 1e-5
    m = gaussian(noise=z / 2)
    assert m.sigma_units == pytest.approx(z * m.grid.sensitivity_units)
    theirs = PLDAccountant()
    theirs.compose(dp_accounting.GaussianDpEvent(z / 2), rounds)
    ours = PldAccountant().epsilon_after([m.event] * rounds, delta)
    assert ours == pytest.approx(theirs.get_epsilon(delta), rel=2e-3)
    of_laplace = laplace(noise=z / 2)
    assert of_laplace.scale_units == pytest.approx(z * of_laplace.grid.sensitivity_units)
    assert composed(of_laplace.event).epsilon == pytest.approx(2 / z)


def _ball(dimension: int, radius: int) -> Iterator[tuple[int, ...]]:
    """Whole vectors of an L1 norm of at most ``radius``."""
    axis = range(-radius, radius + 1)
    return (each for each in product(axis, repeat=dimension) if sum(map(abs, each)) <= radius)


def _law(scale: float, bound: int) -> NDArray[np.float64]:
    """Of clamped discrete Laplace noise, from −bound to bound."""
    ratio = math.exp(-1 / scale)
    law = (1 - ratio) / (1 + ratio) * ratio ** np.abs(np.arange(-bound, bound + 1, dtype=np.float64))
    law[[0, -1]] = ratio**bound / (1 + ratio)
    return law


def _clamped(x: int, scale: float, bound: int) -> NDArray[np.float64]:
    """The law of clamp(x + N)."""
    wide = _law(scale, 4 * bound)
    sent = np.clip(x + np.arange(-4 * bound, 4 * bound + 1), -bound, bound)
    return np.bincount(sent + bound, wide, 2 * bound + 1)


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_no_two_updates_are_told_apart_beyond_epsilon(noise: float) -> None:
    """All pairs of updates in one and two coordinates, by the exact law of what is sent. It is sharp."""
    for dimension in (1, 2):
        m = DeviceLaplace(1.0, noise, 1.0, dimension, resolution=2)
        bound = 12
        laws = {each: np.log(_clamped(each, m.scale_units, bound)) for each in range(-bound // 2, bound // 2)}
        worst = 0.0
        for x, other in product(_ball(dimension, m.grid.sensitivity_units), repeat=2):
            # Coordinates are independent: the greatest losses add up.
            loss = sum(float((laws[a] - laws[b]).max()) for a, b in zip(x, other, strict=True))
            worst = max(worst, loss)
        assert worst == pytest.approx(m.epsilon, rel=1e-9)


@pytest.mark.parametrize("own_noise", [0.5, 4.0])
def test_the_coordinators_price_is_the_same_beside_noise_of_devices(own_noise: float) -> None:
    """The exact law of the noisy sum, of a device with its update and of one without records, which adds its
    own noise too. Zeros in place of its message would cost more: the price is not for that."""
    central = CentralLaplace(1.0, 1.0, 1.0, 1, resolution=2)
    own = DeviceLaplace(1.0, own_noise, 1.0, 1, resolution=2)
    bound, wide = 6, 200
    noise = _law(central.scale_units, wide)

    def sum_of(sent: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.convolve(sent, noise)[wide:-wide]

    without = sum_of(_clamped(0, own.scale_units, bound))
    silent = sum_of(np.eye(2 * bound + 1)[bound])
    epsilon = central.epsilon
    for x in range(-central.sensitivity_units, central.sensitivity_units + 1):
        loss = np.abs(np.log(sum_of(_clamped(x, own.scale_units, bound)) / without)).max()
        assert loss <= epsilon * (1 + 1e-9)
    largest = sum_of(_clamped(central.sensitivity_units, own.scale_units, bound))
    assert np.abs(np.log(largest / silent)).max() > epsilon


@given(
    numbers=st.lists(st.tuples(st.integers(-(2**40), 2**40), st.integers(-(2**20), 2**20)), min_size=1),
    bound=st.integers(1, 2**36),
)
def test_clamping_moves_no_two_numbers_apart(numbers: list[tuple[int, int]], bound: int) -> None:
    """On which the coordinator's price rests."""
    noise, update = np.array(numbers, np.int64).T
    moved = np.clip(update + noise, -bound, bound) - np.clip(noise, -bound, bound)
    assert (np.abs(moved) <= np.abs(update)).all()


@both
def test_noise_as_it_is_drawn(make: Callable[..., Device], order: int) -> None:
    m = make(50_000)
    update = np.zeros(50_000, np.int64)
    update[::2] = m.grid.sensitivity_units // 50_000
    noise = m.add_clamped(update) - update
    error = 6 * m.deviation_units / math.sqrt(50_000)
    assert abs(noise.mean()) < error
    assert noise.std() == pytest.approx(m.deviation_units, rel=0.05)
    assert (m.add_clamped(update) != m.add_clamped(update)).mean() > 0.99
    assert 0 < m.statistical_distance < 1e-20
    beyond = np.full(50_000, 3 * m.largest_units)
    assert (m.add_clamped(beyond) == m.largest_units).all()


@both
def test_an_attack_on_opposite_updates_proves_no_more_than_claimed(
    make: Callable[..., Device], order: int
) -> None:
    draws, delta = 200_000, 1e-5 if order == 2 else 0.0
    m = make(1, noise=1.0)
    largest, sampler = m.grid.sensitivity_units, m.sampler()
    one, other = largest + sampler.sample(draws), -largest + sampler.sample(draws)
    thresholds = np.linspace(-4, 4, 33) * m.deviation_units
    claimed = m.statement(1e-5).epsilon if order == 2 else composed(m.event).epsilon
    assert (1.5 if order == 2 else 0.9) < proven_epsilon(one, other, thresholds, delta) <= claimed


def test_noise_that_is_not_as_priced_is_refused() -> None:
    """A grid too coarse for the price, and an ε at which the sampler is too far from exact."""
    coarse = DeviceGaussian(1.0, 2.0, 1.0, 650, resolution=256)
    with pytest.raises(ParameterError, match="grid units"):
        coarse.require_noise_as_priced(1, 1.0, 1e-5)
    fine = gaussian(26_010)
    fine.require_noise_as_priced(10, 40.0, 1e-5)
    with pytest.raises(ParameterError, match="noise as it is drawn"):
        fine.require_noise_as_priced(10, 50.0, 1e-5)


@pytest.mark.parametrize("noise", [8.0, 15.0, 9_999.0])
def test_the_grid_is_the_finest_on_which_the_noise_can_be_drawn(noise: float) -> None:
    """For a sensitivity of two clip norms, not one."""
    resolution = int(DeviceGaussian.chosen_parameters([noise])["resolution"])
    DeviceGaussian(1.0, noise, 1.0, 650, resolution=resolution)
    with pytest.raises(ParameterError, match=r"noise can be drawn for|resolution is"):
        DeviceGaussian(1.0, noise, 1.0, 650, resolution=4 * resolution)
