"""One device's contribution: unbiased, with exactly the noise that was announced."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
from fleets import DIGITS, make_task, records, terms
from numpy.typing import NDArray

from agent.noisy_sums import _capped, noisy_gradients, noisy_step
from agent.noisy_sums import clipped_sum as sum_of_a_lot
from dpagent.errors import PlanError
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.privacy.mechanisms.wire import MAX_WIRE_VALUE
from dpagent.privacy.ranges import MAX_NORM, MIN_NORM
from dpagent.protocol.task import RoundTask
from dpagent.protocol.terms import MIN_EXPECTED_LOT

DATA = records(3)
WEIGHTS = DIGITS.initial_weights(1)
ENGINE = NumpyEngine(DIGITS, microbatch=4)


def task_for(
    noise: float, *, cap: dict[str, Any] | None = None, step: int | None = None, **changes: Any
) -> RoundTask:
    """A task whose wire step follows from the mechanism, as the coordinator makes it."""
    base = {"noise_multipliers": [noise], "rate": 1.0, "expected_lot": 3.0, "local_learning_rate": 0.0}
    sections = terms(**(base | changes)) | {"cap": cap or {}}
    mechanism = make_task(**sections).release.mechanism
    return make_task(**sections, step=step or mechanism.wire_step)


def clipped_sum(
    task: RoundTask, weights: NDArray[np.float32] = WEIGHTS, data: Dataset = DATA
) -> NDArray[np.float64]:
    """The sum of clipped gradients in wire units, in plain float64, a record at a time."""
    total = np.zeros(DIGITS.parameter_count)
    for index in range(len(data)):
        inputs, labels = data.batch(np.array([index]))
        gradient = ENGINE.clipped_sum(weights, inputs, labels, [1e9]).total
        total += gradient * min(1.0, clip_norm(task) / np.linalg.norm(gradient))
    return total * task.release.mechanism.grid.resolution / clip_norm(task) / task.release.terms.step


def clip_norm(task: RoundTask) -> float:
    (norm,) = task.release.clipping.norms
    return norm


def residuals(task: RoundTask, repeats: int, truth: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([noisy_gradients(task.release, WEIGHTS, DATA, ENGINE) - truth for _ in range(repeats)])


def expected_std(task: RoundTask) -> float:
    """σ of all steps, and rounding to the nearest of what is uniform within a wire unit: 1/12."""
    sigma = task.release.mechanism.deviation_units / task.release.terms.step
    rounding = (1 - task.release.terms.step**-2.0) / 12
    return math.sqrt(task.release.sampling.local_steps * sigma**2 + rounding)


@pytest.mark.parametrize("noise", [0.05, 1.3, 40.0])
@pytest.mark.parametrize("steps", [1, 3])
def test_an_update_has_the_length_and_range_of_the_wire(noise: float, steps: int) -> None:
    task = task_for(noise, local_steps=steps, local_learning_rate=0.5)
    update = noisy_gradients(task.release, WEIGHTS, DATA, ENGINE)
    assert update.shape == (DIGITS.parameter_count,)
    assert update.dtype == np.int64
    assert -MAX_WIRE_VALUE < update.min() < 0 < update.max() < MAX_WIRE_VALUE  # never saturated


@pytest.mark.parametrize(("noise", "steps", "clip"), [(0.4, 1, 1.0), (3.0, 1, 0.01), (0.7, 3, 1.0)])
def test_updates_scatter_around_the_clipped_sum_with_the_announced_noise(
    noise: float, steps: int, clip: float
) -> None:
    task = task_for(noise, local_steps=steps, clipping={"norms": [clip]})
    truth = steps * clipped_sum(task)
    repeats = 6
    scatter = residuals(task, repeats, truth)
    count, std = scatter.size, expected_std(task)
    assert abs(scatter.mean()) * math.sqrt(count) / std < 6, "biased"
    assert abs(scatter.std() / std - 1) < 5 / math.sqrt(2 * count), "another amount of noise"
    # What is left has nothing to do with the data, with its neighbour, or with the next update.
    signal = truth - truth.mean()
    assert abs((scatter * signal).sum()) / (std * math.sqrt(repeats) * np.linalg.norm(signal)) < 6
    assert abs((scatter[:, 1:] * scatter[:, :-1]).sum()) / std**2 / math.sqrt(count) < 6
    assert abs((scatter[1:] * scatter[:-1]).sum()) / std**2 / math.sqrt(count) < 6


def test_little_noise_shows_the_clipped_sum_itself() -> None:
    task = task_for(0.05, step=1)
    truth, std = clipped_sum(task), expected_std(task)
    update = noisy_gradients(task.release, WEIGHTS, DATA, ENGINE)
    assert np.abs(update - truth).max() < 8 * std
    slack = 6 * std / np.linalg.norm(truth)
    assert slack < 0.5
    assert abs(update @ truth / (truth @ truth) - 1) < slack


def test_local_steps_follow_the_noisy_gradients() -> None:
    task = task_for(0.05, local_steps=2, local_learning_rate=2.0, expected_lot=3.0)
    first = clipped_sum(task)
    moved = WEIGHTS - (
        2.0 * first * task.release.terms.step / task.release.mechanism.grid.resolution / 3.0
    ).astype(np.float32)
    followed, stayed = first + clipped_sum(task, moved), 2 * first
    update = noisy_gradients(task.release, WEIGHTS, DATA, ENGINE)
    # How far from the path that stays (0) to the path that follows (1); the noise moves it by 0.05.
    way = followed - stayed
    assert expected_std(task) / np.linalg.norm(way) < 0.07
    assert abs((update - stayed) @ way / (way @ way) - 1) < 0.5


@pytest.mark.parametrize("noise", [0.05, 40.0])
def test_local_weights_move_by_the_noisy_sum_and_by_nothing_else(noise: float) -> None:
    """Else the sums of later steps would tell what the noise of this one hides."""
    release = task_for(noise, local_steps=2, local_learning_rate=2.0).release
    local = WEIGHTS.copy()
    noisy = noisy_step(release, local, np.full(release.dimension, 0.01))
    moved = 2.0 / release.sampling.expected_lot * noisy * release.mechanism.granularity
    np.testing.assert_allclose(local, WEIGHTS - moved, rtol=0, atol=1e-6 * np.abs(moved).max() + 1e-6)


def test_a_lot_of_nobody_is_noise_all_the_same() -> None:
    task = task_for(1.0, rate=1e-9)
    update = noisy_gradients(task.release, WEIGHTS, DATA, ENGINE)
    assert abs(update.std() / expected_std(task) - 1) < 5 / math.sqrt(2 * update.size)


def test_sampling_takes_records_at_the_announced_rate() -> None:
    one = ArrayDataset(np.full((1, 8, 8, 1), 0.5, np.float32), np.array([3]), 10)
    task = task_for(0.05, rate=0.5, step=1)
    truth = clipped_sum(task, data=one)
    taken = sum(
        float(noisy_gradients(task.release, WEIGHTS, one, ENGINE) @ truth / (truth @ truth)) > 0.5
        for _ in range(60)
    )
    assert abs(taken - 30) < 6 * math.sqrt(15)


class Noting(ArrayDataset):
    """Records that note in which order they are read."""

    def _read(self, indices: NDArray[np.integer[Any]]) -> NDArray[Any]:
        self.order = [*getattr(self, "order", ()), *indices.tolist()]
        return super()._read(indices)


def test_a_lot_is_in_random_order() -> None:
    """The bound on float sums couples the orders of neighbouring lots. That 40 records are in their own order
    has a probability of 10⁻⁴⁸."""
    inputs, labels = records(40).batch(np.arange(40))
    noting = Noting(inputs, labels, 10)
    noisy_gradients(task_for(0.05).release, WEIGHTS, noting, ENGINE)
    assert noting.order != sorted(noting.order) == list(range(40))


def test_the_count_of_records_is_of_those_alone_that_add_something() -> None:
    """Else a record more, in a place that is nobody's, would move it by two of the half votes it may."""
    release = make_task(**terms(rate=1.0, clipping={"count_weight": 0.2})).release
    half = 0.2 * release.clipping.reference / 2
    inputs, labels = records(3).batch(np.arange(3))
    inputs[:2] = np.nan
    for count, votes in ((0, 0), (2, 0), (3, 1)):
        data = ArrayDataset(inputs[:count], labels[:count], 10)
        total = sum_of_a_lot(release, WEIGHTS, data, ENGINE, population=50)
        assert abs(total[-1]) == pytest.approx(votes * half), count


def test_as_many_random_numbers_are_drawn_however_many_records_there_are() -> None:
    release, taken = make_task(**terms(rate=1.0)).release, []
    for count in (0, 1, 50):
        asked: list[int] = []

        def entropy(size: int, asked: list[int] = asked) -> bytes:
            asked.append(size)
            return os.urandom(size)

        sum_of_a_lot(release, WEIGHTS, records(count), ENGINE, population=50, entropy=entropy)
        taken.append(asked)
    assert taken[0] == taken[1] == taken[2]


def test_records_that_are_not_finite_are_left_out() -> None:
    inputs = DATA.inputs.copy()
    inputs[1] = np.nan
    broken = ArrayDataset(inputs, DATA.labels, 10)
    rest = ArrayDataset(DATA.inputs[[0, 2]], DATA.labels[[0, 2]], 10)
    task = task_for(0.05, step=1)
    update = noisy_gradients(task.release, WEIGHTS, broken, ENGINE)
    truth, all_of_it = clipped_sum(task, data=rest), clipped_sum(task)
    assert np.abs(update - truth).max() < 8 * expected_std(task)
    way = all_of_it - truth
    assert abs((update - truth) @ way / (way @ way)) < 6 * expected_std(task) / np.linalg.norm(way) < 0.6


def test_the_clamp_on_the_device_holds_each_coordinate_and_the_norm() -> None:
    cap = {"kind": "clamp", "where": "device", "regularisation": 0.5, "floor": 0.001}
    task = task_for(5.0, cap=cap)
    mechanism = task.release.mechanism
    update = noisy_gradients(task.release, WEIGHTS, DATA, ENGINE)
    unit = task.release.sampling.expected_lot / mechanism.granularity / task.release.terms.step
    bound = np.maximum(0.5 * np.abs(WEIGHTS.astype(np.float64)), 0.001) * unit
    assert np.all(np.abs(update) <= bound + 1.01)
    free = noisy_gradients(task_for(5.0).release, WEIGHTS, DATA, ENGINE)
    assert np.mean(np.abs(free) > bound + 1.01) > 0.5, "the clamp had nothing to do"
    slack = math.sqrt(update.size)
    assert np.linalg.norm(update) <= clip_norm(task) * unit + slack


@pytest.mark.parametrize("steps", [1, 4])
def test_the_clamp_works_on_the_mean_of_all_steps(steps: int) -> None:
    """A sum far beyond the clip norm is brought to just that; one within all bounds comes as it is."""
    loose = {"kind": "clamp", "where": "device", "regularisation": 1e-6, "floor": 1e6}
    task = task_for(40.0, cap=loose, local_steps=steps)
    large = (np.arange(task.release.dimension) % 7 - 3) * 10**9
    to_mean = task.release.mechanism.granularity / (task.release.sampling.expected_lot * steps)
    length = np.linalg.norm(_capped(task.release, large, WEIGHTS) * to_mean)
    assert length == pytest.approx(clip_norm(task), rel=0.001)
    small = np.arange(task.release.dimension) % 7 - 3
    np.testing.assert_array_equal(_capped(task.release, small, WEIGHTS), small)


@pytest.mark.parametrize("where", ["coordinator", "device"])
def test_no_clamp_is_applied_where_none_was_asked_for(where: str) -> None:
    cap = {
        "kind": "none" if where == "device" else "clamp",
        "where": where,
        "floor": 1e-6,
        "regularisation": 1e-6,
    }
    task = task_for(1.0, cap=cap)
    truth = clipped_sum(task)
    scatter = residuals(task, 1, truth)
    assert abs(scatter.std() / expected_std(task) - 1) < 5 / math.sqrt(2 * scatter.size)


def test_weights_and_data_are_left_alone() -> None:
    weights, inputs = WEIGHTS.copy(), DATA.inputs.copy()
    noisy_gradients(task_for(1.0, local_steps=3, local_learning_rate=1.0).release, weights, DATA, ENGINE)
    assert np.array_equal(weights, WEIGHTS)
    assert np.array_equal(DATA.inputs, inputs)


def test_noise_beyond_the_sampler_is_refused() -> None:
    with pytest.raises(PlanError, match="noise"):
        make_task(**terms(noise_multipliers=[10_000.0], resolution=65_536))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("cap", [None, {"kind": "clamp", "where": "device"}])
@pytest.mark.parametrize("norm", [MIN_NORM, MAX_NORM])
def test_no_lot_that_a_plan_may_expect_keeps_an_update_back(
    norm: float, cap: dict[str, Any] | None, steps: int
) -> None:
    """Were a sum too large for floating point over the lot, a device would fall silent and charge nothing."""
    task = make_task(
        clipping={"norms": [norm]},
        sampling={"expected_lot": MIN_EXPECTED_LOT, "local_steps": steps, "local_learning_rate": 1e3},
        cap=cap or {},
    )
    update = noisy_gradients(task.release, WEIGHTS, DATA, ENGINE)
    assert update.shape == (DIGITS.parameter_count,)
