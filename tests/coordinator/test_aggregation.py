"""From integer sums to the next model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import DIGITS, make_task, model_section, records, terms
from numpy.typing import NDArray
from stores import open_store

from agent.noisy_sums import noisy_gradients
from coordinator.aggregation import fleet_mean, median_of_means, take_step
from coordinator.model_state import ModelState
from coordinator.seats import OpenedFragment
from dpagent.learning.models.description import from_description
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.optimiser import Adam, Sgd
from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import cut, read_block
from dpagent.protocol.sealing import Opener, new_sealing_secret, seal
from dpagent.protocol.task import RoundTask

DIMENSION = DIGITS.parameter_count


def task_with(block: int, **changes: Any) -> RoundTask:
    return make_task(wire={"block": block}, step=8_193, **changes)


def sums_of(task: RoundTask, updates: NDArray[np.int64]) -> dict[int, tuple[int, NDArray[np.int64]]]:
    block = task.plan.wire.block
    padded = np.zeros(task.release.blocks * block, np.int64)
    padded[:DIMENSION] = updates.sum(axis=0)
    return {
        position: (len(updates), padded[position * block :][:block])
        for position in range(task.release.blocks)
    }


UPDATES = np.random.default_rng(0).integers(-20_000, 20_000, (3, DIMENSION))


def test_the_mean_is_in_gradient_units() -> None:
    task = task_with(1_000, **terms(clipping={"norms": [2.0]}, expected_lot=10.0, local_steps=4))
    mean = fleet_mean(task.release, sums_of(task, UPDATES))
    wire_unit = 2.0 / 65_536 * 8_193
    assert mean.shape == (DIMENSION,)
    np.testing.assert_allclose(mean, UPDATES.mean(axis=0) * wire_unit / 10.0 / 4, rtol=1e-12)


@pytest.mark.parametrize("block", [1, 33, 9_929, 9_930, 9_931, 20_000])
def test_the_mean_does_not_depend_on_how_the_update_is_cut(block: int) -> None:
    whole = task_with(DIMENSION)
    expected = fleet_mean(whole.release, sums_of(whole, UPDATES))
    task = task_with(block)
    assert fleet_mean(task.release, sums_of(task, UPDATES)).tobytes() == expected.tobytes()


def test_the_mean_does_not_depend_on_the_order_of_the_positions() -> None:
    task = task_with(1_000)
    sums = sums_of(task, UPDATES)
    turned = dict(reversed(list(sums.items())))
    assert fleet_mean(task.release, turned).tobytes() == fleet_mean(task.release, sums).tobytes()


def test_missing_positions_are_zero_and_others_the_mean_of_those_that_came() -> None:
    task = task_with(1_000)
    full = fleet_mean(task.release, sums_of(task, UPDATES))
    sums = sums_of(task, UPDATES)
    del sums[3]
    sums[4] = (1, sums_of(task, UPDATES[:1])[4][1])
    del sums[9]  # the last, shorter one
    mean = fleet_mean(task.release, sums)
    alone = fleet_mean(task.release, sums_of(task, UPDATES[:1]))
    assert not mean[3_000:4_000].any()
    assert not mean[9_000:].any()
    assert np.array_equal(mean[4_000:5_000], alone[4_000:5_000])
    assert np.array_equal(mean[:3_000], full[:3_000])
    assert np.array_equal(mean[5_000:9_000], full[5_000:9_000])


def test_nothing_at_all_is_a_step_of_the_velocity_alone() -> None:
    task = task_with(1_000)
    gradient = fleet_mean(task.release, {})
    assert not gradient.any()
    weights = DIGITS.initial_weights(0)
    model = ModelState(weights, np.ones((1, DIMENSION)), 1.0, ())
    step = take_step(task.release, gradient, model, Sgd(0.9), 0.5)
    np.testing.assert_allclose(step.model.weights, weights - 0.45, rtol=1e-5, atol=1e-6)
    assert (step.clamped, step.kept) == (0, 1.0)


def groups_of(task: RoundTask, updates: NDArray[np.int64], groups: int) -> list[Any]:
    return [sums_of(task, updates[start::groups]) for start in range(groups)]


def test_the_median_is_taken_coordinate_by_coordinate_of_the_means_of_groups() -> None:
    task = task_with(1_000)
    updates = np.random.default_rng(5).integers(-20_000, 20_000, (10, DIMENSION))
    expected = np.median(
        [fleet_mean(task.release, sums_of(task, updates[start::3])) for start in range(3)], axis=0
    )
    assert median_of_means(task.release, groups_of(task, updates, 3)).tobytes() == expected.tobytes()
    one = median_of_means(task.release, groups_of(task, updates, 1))
    assert one.tobytes() == fleet_mean(task.release, sums_of(task, updates)).tobytes()


def test_a_block_that_only_some_groups_have_is_the_median_of_those() -> None:
    task = task_with(1_000)
    groups = groups_of(task, UPDATES, 3)
    del groups[0][4], groups[1][4]
    for group in groups:
        del group[7]
    median = median_of_means(task.release, groups)
    assert np.array_equal(median[4_000:5_000], fleet_mean(task.release, groups[2])[4_000:5_000])
    assert not median[7_000:8_000].any()
    assert median[8_000:].any()


@pytest.mark.parametrize(("hostile", "is_held"), [(2, True), (3, False)])
def test_hostile_fragments_in_less_than_half_of_the_groups_do_not_leave_the_range_of_the_others(
    hostile: int, is_held: bool
) -> None:
    """No randomness in the attack: 2 of 5 groups cannot, 3 of 5 can."""
    task = task_with(1_000)
    updates = np.random.default_rng(6).integers(-200, 200, (10, DIMENSION))
    honest = [fleet_mean(task.release, group) for group in groups_of(task, updates, 5)[hostile:]]
    updates[np.arange(10) % 5 < hostile] = 2**20
    median = median_of_means(task.release, groups_of(task, updates, 5))
    within = (median >= np.min(honest, axis=0)) & (median <= np.max(honest, axis=0))
    assert bool(within.all()) == is_held


@pytest.mark.parametrize(("groups", "factor"), [(3, 1.346), (5, 1.434), (15, 1.522)])
def test_the_median_costs_the_variance_that_its_text_says_and_no_bias(groups: int, factor: float) -> None:
    """Noise alone, 9,930 coordinates; six deviations of a sample's variance are 8.5 %."""
    task = task_with(1_000)
    updates = np.rint(np.random.default_rng(7).normal(0, 5_000, (30, DIMENSION))).astype(np.int64)
    median, mean = (
        median_of_means(task.release, groups_of(task, updates, groups)),
        fleet_mean(task.release, sums_of(task, updates)),
    )
    assert median.var() / mean.var() == pytest.approx(factor, rel=0.085)
    assert abs(median.mean()) <= 6 * median.std() / np.sqrt(DIMENSION)


PROJECTED = from_description(
    DIGITS.describe() | {"front_end": [{"projection": 6}], "layers": [{"dense": 10}]}
)
MODELS = {False: model_section(DIGITS), True: model_section(PROJECTED)}


@pytest.mark.parametrize(("projection", "first"), [(None, 1), ({"values": 64, "record_norm": 1.0}, 2)])
def test_adams_first_step_is_as_long_as_the_learning_rate(projection: object, first: int) -> None:
    """Kingma and Ba, section 2.1: with its bias corrected, the first step is η times the gradient's sign."""
    size = task_with(
        1_000, round=2, model=MODELS[projection is not None], projection=projection
    ).release.dimension
    weights = np.zeros(size, np.float32)
    gradient = np.random.default_rng(4).normal(size=size)
    changes = {"projection": projection, "model": MODELS[projection is not None]}
    task = task_with(1_000, round=first, **changes)
    model = ModelState(weights, np.zeros((2, size)), 1.0, ())
    model = take_step(task.release, gradient, model, Adam(), 0.01).model
    np.testing.assert_allclose(model.weights, weights - 0.01 * np.sign(gradient), rtol=0, atol=2e-6)
    # The second, on the same gradient, is as long again.
    task = task_with(1_000, round=first + 1, **changes)
    model = take_step(task.release, gradient, model, Adam(), 0.01).model
    np.testing.assert_allclose(model.weights, weights - 0.02 * np.sign(gradient), rtol=0, atol=4e-6)


def test_the_cap_acts_at_the_coordinator_only_when_asked() -> None:
    weights = DIGITS.initial_weights(0)
    model = ModelState(weights, np.zeros((1, DIMENSION)), 1.0, ())
    gradient = np.full(DIMENSION, 5.0)
    for kind, where, clamped in (
        ("none", "coordinator", 0),
        ("clamp", "device", 0),
        ("clamp", "coordinator", DIMENSION),
    ):
        task = task_with(1_000, cap={"kind": kind, "where": where, "floor": 0.01, "regularisation": 0.5})
        step = take_step(task.release, gradient, model, Sgd(), 1.0)
        assert step.clamped == clamped
        assert step.kept < 0.1 if clamped else step.kept == 1.0
        moved = np.linalg.norm(step.model.weights.astype(np.float64) - weights)
        assert moved <= 1.001 if clamped else moved > 100


def test_what_devices_make_is_what_the_store_sums_to_the_last_bit() -> None:
    opener = Opener(new_sealing_secret(), "testers")
    task = make_task(wire={"block": 999}, step=16_385, sealing_key=opener.public_key)
    plan = task.plan
    engine, weights = NumpyEngine(DIGITS, microbatch=4), DIGITS.initial_weights(0)
    updates = np.stack([noisy_gradients(task.release, weights, records(5), engine) for _ in range(3)])
    messages = [seal(encode(piece), plan) for update in updates for piece in cut(update, plan)]
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(Path(directory))
        for message in sorted(messages + messages[::3]):
            piece = opener.open(message, plan.job)
            values, _ = read_block(piece, plan.wire, task.release.blocks)
            opened = OpenedFragment(piece.id, piece.round, piece.position, values, 0.0)
            store.count([opened], plan.round, seats=3)
        (sums,) = store.sums(plan.round)
        store.database.close()
    assert {count for count, _ in sums.values()} == {3}
    total = np.concatenate([sums[position][1] for position in sorted(sums)])[:DIMENSION]
    assert np.array_equal(total, updates.sum(axis=0))
    np.testing.assert_allclose(
        fleet_mean(task.release, sums), updates.mean(axis=0) * 16_385 / 65_536 / 10.0, rtol=1e-12
    )
