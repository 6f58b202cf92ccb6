"""Sums rounded to the grid: what one record more can change, with the errors of float32 sums included."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.learning.training.engine import MAX_MICROBATCH, accumulation_slack
from dpagent.norm import Norm
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian, finest_resolution
from dpagent.privacy.mechanisms.grid import MAX_RESOLUTION, Grid
from dpagent.privacy.noise.discrete_gaussian import MAX_SIGMA


@given(
    dimension=st.integers(1, 400),
    fine=st.sampled_from([1, 7, 65_536, 2**20, 2**30]),
    slack=st.floats(0, 0.01),
    seed=st.integers(0, 2**32 - 1),
    norm=st.sampled_from(Norm),
)
def test_sums_apart_by_one_record_stay_within_the_sensitivity(
    dimension: int, fine: int, slack: float, seed: int, norm: Norm
) -> None:
    grid = Grid(norm, 0.7, dimension, min(fine, MAX_RESOLUTION[norm]))
    generator = np.random.default_rng(seed)
    total = generator.normal(size=dimension) * 50
    record = generator.normal(size=dimension)
    # As far away as is allowed, and from the middle between grid points, where rounding does most.
    total = (np.rint(total / grid.granularity) + 0.5 - 1e-9 * np.sign(record)) * grid.granularity
    record *= 0.7 * (1 + slack) / np.linalg.norm(record, norm.power)
    change = (grid.quantize(total + record) - grid.quantize(total)).tolist()
    moved = sum(abs(step) ** norm.power for step in change)
    assert moved <= grid.sum_sensitivity_units(slack) ** norm.power


@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("dimension", [1, 4, 900, 26_010])
def test_rounding_alone_can_use_up_its_part(dimension: int, norm: Norm) -> None:
    grid = Grid(norm, 1.0, dimension, 65_536)
    low = np.full(dimension, 0.499999) * grid.granularity
    step = np.full(dimension, 2e-6) * grid.granularity
    moved = np.linalg.norm(grid.quantize(low + step) - grid.quantize(low), norm.power)
    assert moved == pytest.approx(dimension ** (1 / norm.power))
    paid = grid.sum_sensitivity_units(0.0) - grid.resolution
    assert moved <= paid <= moved + 2


def test_the_slack_is_rounded_up_and_its_range_named() -> None:
    grid = Grid(Norm.L2, 1.0, 9, 1000)
    assert grid.sum_sensitivity_units(0.0) == 1000 + 3 + 1
    assert grid.sum_sensitivity_units(0.0005) == 1000 + 1 + 3 + 1
    assert Grid(Norm.L1, 1.0, 9, 1000).sum_sensitivity_units(0.0005) == 1000 + 1 + 9 + 1
    for bad in (-1e-9, 0.02, math.nan):
        with pytest.raises(ParameterError, match="accumulation slack"):
            grid.sum_sensitivity_units(bad)


@pytest.mark.parametrize(
    "total",
    [
        np.zeros(3), np.zeros(4, np.float32), np.array([0, np.nan, 0, 0]), np.array([0, np.inf, 0, 0]),
        np.full(4, 1e300),
    ],
    ids=["shape", "type", "nan", "infinite", "huge"],
)  # fmt: skip
def test_a_sum_that_cannot_be_rounded_is_refused(total: NDArray[np.float64]) -> None:
    with pytest.raises(ParameterError, match="total has"):
        Grid(Norm.L2, 1.0, 4, 65_536).quantize(total)


def float32_sum(vectors: NDArray[np.float32], microbatch: int) -> NDArray[np.float64]:
    """As an engine adds: float32 within a microbatch, in the worst order, and float64 across."""
    total = np.zeros(vectors.shape[1])
    for start in range(0, len(vectors), microbatch):
        part = np.zeros(vectors.shape[1], np.float32)
        for vector in vectors[start : start + microbatch]:
            part += vector
        total += part
    return total


@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("microbatch", [1, 8, 32, MAX_MICROBATCH])
def test_coupled_orders_of_neighbouring_lots_differ_within_the_slack(microbatch: int, norm: Norm) -> None:
    """The coupling in the proof, played through: a record comes in, the one it displaces goes last."""
    generator = np.random.default_rng(3)
    records, dimension = 200, 50
    vectors = generator.normal(size=(records, dimension)).astype(np.float32) + 0.3
    vectors /= np.linalg.norm(vectors, norm.power, axis=1, keepdims=True)
    newcomer = vectors[0] * np.float32(0.999)
    for place in range(0, records, 17):
        coupled = np.concatenate([vectors, vectors[place : place + 1]])
        coupled[place] = newcomer
        difference = float32_sum(coupled, microbatch) - float32_sum(vectors, microbatch)
        error = np.linalg.norm(difference - newcomer, norm.power)
        # Norms here are computed in float64: only the sums' share of the slack may be used.
        assert error <= accumulation_slack(microbatch)


def test_the_slack_grows_with_the_microbatch_and_stays_small() -> None:
    slacks = [accumulation_slack(microbatch) for microbatch in range(1, MAX_MICROBATCH + 1)]
    assert slacks == sorted(slacks)
    assert slacks[31] == pytest.approx(3.14e-4, rel=0.01)
    assert slacks[-1] < 0.0011


@pytest.mark.parametrize("noise_multiplier", [1e-3, 0.5, 2.25, 7.9, 8.1, 300.0, 1e6])
def test_the_finest_grid_can_be_drawn_on_and_no_finer_one(noise_multiplier: float) -> None:
    steps = finest_resolution(noise_multiplier)
    assert steps & (steps - 1) == 0
    DiscretisedGaussian(1.0, noise_multiplier, 0.1, 2, resolution=steps, accumulation_slack=0.01)
    assert steps == 2**20 or 2 * steps * noise_multiplier > MAX_SIGMA / 2
    with pytest.raises(ParameterError, match="noise multiplier"):
        finest_resolution(1e8)


def test_noise_is_made_for_the_rounded_sum() -> None:
    alone = DiscretisedGaussian(1.0, 2.0, 0.1, 100)
    summed = DiscretisedGaussian(1.0, 2.0, 0.1, 100, accumulation_slack=0.001)
    assert alone.sensitivity_units == 65_536 + 5 + 1
    assert summed.sensitivity_units == 65_536 + 66 + 10 + 1
    assert summed.sigma_units == pytest.approx(2 * summed.sensitivity_units)
    assert summed.quantize(np.full(100, 0.5)).tolist() == [32_768] * 100
    with pytest.raises(ParameterError, match="accumulation slack is None"):
        alone.quantize(np.zeros(100))
