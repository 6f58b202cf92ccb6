"""One device's contribution: unbiased, with exactly the noise that was announced."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from agent.update import make_update, mechanism_of
from fleets import DIGITS, make_plan, records
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.privacy.mechanisms.wire import wire_shift, wire_width
from dpagent.protocol.messages import Plan

DATA = records(3)
WEIGHTS = DIGITS.initial_weights(1)
ENGINE = NumpyEngine(DIGITS, microbatch=4)


def plan_for(
    noise: float, *, cap: dict[str, Any] | None = None, shift: int | None = None, **mechanism: Any
) -> Plan:
    """A plan whose wire format follows from the mechanism, as the coordinator makes it."""
    terms = {
        "noise_multipliers": [noise],
        "sampling_rate": 1.0,
        "expected_lot": 3.0,
        "local_learning_rate": 0.0,
    }
    plan = make_plan(mechanism=terms | mechanism, cap=cap or {})
    made = mechanism_of(plan, DIGITS)
    shift = wire_shift(made.sigma_units) if shift is None else shift
    width = wire_width(made, plan.mechanism.expected_lot, shift)
    return make_plan(mechanism=terms | mechanism, cap=cap or {}, wire={"shift": shift, "width": width})


def clipped_sum(
    plan: Plan, weights: NDArray[np.float32] = WEIGHTS, data: Dataset = DATA
) -> NDArray[np.float64]:
    """The sum of clipped gradients in wire units, in plain float64, a record at a time."""
    total = np.zeros(DIGITS.parameter_count)
    for index in range(len(data)):
        inputs, labels = data.batch(np.array([index]))
        gradient = ENGINE.clipped_sum(weights, inputs, labels, [1e9]).total
        total += gradient * min(1.0, clip_norm(plan) / np.linalg.norm(gradient))
    return total * plan.mechanism.resolution / clip_norm(plan) / 2**plan.wire.shift


def clip_norm(plan: Plan) -> float:
    (norm,) = plan.mechanism.clipping.norms
    return norm


def residuals(plan: Plan, repeats: int, truth: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([make_update(plan, WEIGHTS, DATA, ENGINE) - truth for _ in range(repeats)])


def expected_std(plan: Plan) -> float:
    """σ of all steps, and random rounding of what is uniform within a wire unit: 1/6."""
    sigma = mechanism_of(plan, DIGITS).sigma_units / 2**plan.wire.shift
    rounding = (1 - 4.0**-plan.wire.shift) / 6
    return math.sqrt(plan.mechanism.local_steps * sigma**2 + rounding)


@pytest.mark.parametrize("noise", [0.05, 1.3, 40.0])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_release_has_the_length_and_range_of_the_wire(noise: float, steps: int) -> None:
    plan = plan_for(noise, local_steps=steps, local_learning_rate=0.5)
    update = make_update(plan, WEIGHTS, DATA, ENGINE)
    assert update.shape == (DIGITS.parameter_count,)
    assert update.dtype == np.int64
    half = 2 ** (plan.wire.width - 1)
    assert -half < update.min() < 0 < update.max() < half - 1  # in range, and never saturated


@pytest.mark.parametrize(("noise", "steps", "clip"), [(0.4, 1, 1.0), (3.0, 1, 0.01), (0.7, 3, 1.0)])
def test_releases_scatter_around_the_clipped_sum_with_the_announced_noise(
    noise: float, steps: int, clip: float
) -> None:
    plan = plan_for(noise, local_steps=steps, clipping={"norms": [clip]})
    truth = steps * clipped_sum(plan)
    repeats = 6
    scatter = residuals(plan, repeats, truth)
    count, std = scatter.size, expected_std(plan)
    assert abs(scatter.mean()) * math.sqrt(count) / std < 6, "biased"
    assert abs(scatter.std() / std - 1) < 5 / math.sqrt(2 * count), "another amount of noise"
    # What is left has nothing to do with the data, with its neighbour, or with the next release.
    signal = truth - truth.mean()
    assert abs((scatter * signal).sum()) / (std * math.sqrt(repeats) * np.linalg.norm(signal)) < 6
    assert abs((scatter[:, 1:] * scatter[:, :-1]).sum()) / std**2 / math.sqrt(count) < 6
    assert abs((scatter[1:] * scatter[:-1]).sum()) / std**2 / math.sqrt(count) < 6


def test_little_noise_shows_the_clipped_sum_itself() -> None:
    plan = plan_for(0.05, shift=0)
    truth, std = clipped_sum(plan), expected_std(plan)
    release = make_update(plan, WEIGHTS, DATA, ENGINE)
    assert np.abs(release - truth).max() < 8 * std
    slack = 6 * std / np.linalg.norm(truth)
    assert slack < 0.5
    assert abs(release @ truth / (truth @ truth) - 1) < slack


def test_local_steps_follow_the_released_gradients() -> None:
    plan = plan_for(0.05, local_steps=2, local_learning_rate=2.0, expected_lot=3.0)
    first = clipped_sum(plan)
    moved = WEIGHTS - (2.0 * first * 2**plan.wire.shift / plan.mechanism.resolution / 3.0).astype(np.float32)
    followed, stayed = first + clipped_sum(plan, moved), 2 * first
    release = make_update(plan, WEIGHTS, DATA, ENGINE)
    # How far from the path that stays (0) to the path that follows (1); the noise moves it by 0.05.
    way = followed - stayed
    assert expected_std(plan) / np.linalg.norm(way) < 0.07
    assert abs((release - stayed) @ way / (way @ way) - 1) < 0.5


def test_a_lot_of_nobody_is_noise_all_the_same() -> None:
    plan = plan_for(1.0, sampling_rate=1e-9)
    release = make_update(plan, WEIGHTS, DATA, ENGINE)
    assert abs(release.std() / expected_std(plan) - 1) < 5 / math.sqrt(2 * release.size)


def test_sampling_takes_records_at_the_announced_rate() -> None:
    one = ArrayDataset(np.full((1, 8, 8, 1), 0.5, np.float32), np.array([3]), 10)
    plan = plan_for(0.05, sampling_rate=0.5, shift=0)
    truth = clipped_sum(plan, data=one)
    taken = sum(
        float(make_update(plan, WEIGHTS, one, ENGINE) @ truth / (truth @ truth)) > 0.5 for _ in range(60)
    )
    assert abs(taken - 30) < 6 * math.sqrt(15)


def test_records_that_are_not_finite_are_left_out() -> None:
    inputs = DATA.inputs.copy()
    inputs[1] = np.nan
    broken = ArrayDataset(inputs, DATA.labels, 10)
    rest = ArrayDataset(DATA.inputs[[0, 2]], DATA.labels[[0, 2]], 10)
    plan = plan_for(0.05, shift=0)
    release = make_update(plan, WEIGHTS, broken, ENGINE)
    truth, all_of_it = clipped_sum(plan, data=rest), clipped_sum(plan)
    assert np.abs(release - truth).max() < 8 * expected_std(plan)
    way = all_of_it - truth
    assert abs((release - truth) @ way / (way @ way)) < 6 * expected_std(plan) / np.linalg.norm(way) < 0.6


def test_the_clamp_on_the_device_holds_each_coordinate_and_the_norm() -> None:
    cap = {"kind": "clamp", "where": "device", "regularisation": 0.5, "floor": 0.001}
    plan = plan_for(5.0, cap=cap)
    mechanism = mechanism_of(plan, DIGITS)
    release = make_update(plan, WEIGHTS, DATA, ENGINE)
    unit = plan.mechanism.expected_lot / mechanism.granularity / 2**plan.wire.shift
    bound = np.maximum(0.5 * np.abs(WEIGHTS.astype(np.float64)), 0.001) * unit
    assert np.all(np.abs(release) <= bound + 1.01)
    free = make_update(plan_for(5.0), WEIGHTS, DATA, ENGINE)
    assert np.mean(np.abs(free) > bound + 1.01) > 0.5, "the clamp had nothing to do"
    slack = math.sqrt(release.size)
    assert np.linalg.norm(release) <= clip_norm(plan) * unit + slack


@pytest.mark.parametrize("where", ["coordinator", "device"])
def test_no_clamp_is_applied_where_none_was_asked_for(where: str) -> None:
    cap = {
        "kind": "none" if where == "device" else "clamp",
        "where": where,
        "floor": 1e-6,
        "regularisation": 1e-6,
    }
    plan = plan_for(1.0, cap=cap)
    truth = clipped_sum(plan)
    scatter = residuals(plan, 1, truth)
    assert abs(scatter.std() / expected_std(plan) - 1) < 5 / math.sqrt(2 * scatter.size)


def test_weights_and_data_are_left_alone() -> None:
    weights, inputs = WEIGHTS.copy(), DATA.inputs.copy()
    make_update(plan_for(1.0, local_steps=3, local_learning_rate=1.0), weights, DATA, ENGINE)
    assert np.array_equal(weights, WEIGHTS)
    assert np.array_equal(DATA.inputs, inputs)


def test_noise_beyond_the_sampler_is_refused() -> None:
    plan = make_plan(mechanism={"noise_multipliers": [10_000.0], "resolution": 65_536})
    with pytest.raises(ParameterError, match="noise"):
        make_update(plan, WEIGHTS, DATA, ENGINE)
