"""From integer sums to the next model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from agent.update import make_update
from fleets import DIGITS, make_plan, records
from numpy.typing import NDArray

from coordinator.aggregation import mean_release, take_step
from coordinator.store import OpenedFragment, Store
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.optimiser import Adam, Sgd
from dpagent.protocol.fragments import block_count, cut, read_block
from dpagent.protocol.messages import Plan
from dpagent.protocol.sealing import Opener, new_sealing_secret, seal

DIMENSION = DIGITS.parameter_count


def plan_with(block: int, **changes: object) -> Plan:
    return make_plan(wire={"block": block, "width": 16, "shift": 13}, **changes)


def sums_of(plan: Plan, updates: NDArray[np.int64]) -> dict[int, tuple[int, NDArray[np.int64]]]:
    blocks, block = block_count(DIMENSION, plan.wire.block), plan.wire.block
    padded = np.zeros(blocks * block, np.int64)
    padded[:DIMENSION] = updates.sum(axis=0)
    return {position: (len(updates), padded[position * block :][:block]) for position in range(blocks)}


def mean_of(plan: Plan, sums: dict[int, tuple[int, NDArray[np.int64]]]) -> NDArray[np.float64]:
    return mean_release(plan, sums, plan.clipping(DIGITS.layer_sizes).radius)


UPDATES = np.random.default_rng(0).integers(-20_000, 20_000, (3, DIMENSION))


def test_the_mean_is_in_gradient_units() -> None:
    plan = plan_with(1_000, mechanism={"clipping": {"norms": [2.0]}, "expected_lot": 10.0, "local_steps": 4})
    mean = mean_of(plan, sums_of(plan, UPDATES))
    wire_step = 2.0 / 65_536 * 2**13
    assert mean.shape == (DIMENSION,)
    np.testing.assert_allclose(mean, UPDATES.mean(axis=0) * wire_step / 10.0 / 4, rtol=1e-12)


@pytest.mark.parametrize("block", [1, 33, 9_929, 9_930, 9_931, 20_000])
def test_the_mean_does_not_depend_on_how_the_update_is_cut(block: int) -> None:
    whole = plan_with(DIMENSION)
    expected = mean_of(whole, sums_of(whole, UPDATES))
    plan = plan_with(block)
    assert mean_of(plan, sums_of(plan, UPDATES)).tobytes() == expected.tobytes()


def test_the_mean_does_not_depend_on_the_order_of_the_positions() -> None:
    plan = plan_with(1_000)
    sums = sums_of(plan, UPDATES)
    turned = dict(reversed(list(sums.items())))
    assert mean_of(plan, turned).tobytes() == mean_of(plan, sums).tobytes()


def test_missing_positions_are_zero_and_others_the_mean_of_those_that_came() -> None:
    plan = plan_with(1_000)
    full = mean_of(plan, sums_of(plan, UPDATES))
    sums = sums_of(plan, UPDATES)
    del sums[3]
    sums[4] = (1, sums_of(plan, UPDATES[:1])[4][1])
    del sums[9]  # the last, shorter one
    mean = mean_of(plan, sums)
    alone = mean_of(plan, sums_of(plan, UPDATES[:1]))
    assert not mean[3_000:4_000].any()
    assert not mean[9_000:].any()
    assert np.array_equal(mean[4_000:5_000], alone[4_000:5_000])
    assert np.array_equal(mean[:3_000], full[:3_000])
    assert np.array_equal(mean[5_000:9_000], full[5_000:9_000])


def test_nothing_at_all_is_a_step_of_the_velocity_alone() -> None:
    plan = plan_with(1_000)
    gradient = mean_of(plan, {})
    assert not gradient.any()
    weights, state = DIGITS.initial_weights(0), np.ones((1, DIMENSION))
    step = take_step(plan, gradient, weights, state, Sgd(0.9), 0.5)
    np.testing.assert_allclose(step.weights, weights - 0.45, rtol=1e-5, atol=1e-6)
    assert (step.clamped, step.kept) == (0, 1.0)


@pytest.mark.parametrize(("projection", "first"), [(None, 1), ({"values": 64, "record_norm": 1.0}, 2)])
def test_adams_first_step_is_as_long_as_the_learning_rate(projection: object, first: int) -> None:
    """Kingma and Ba, section 2.1: with its bias corrected, the first step is η times the gradient's sign."""
    weights = DIGITS.initial_weights(0)
    gradient = np.random.default_rng(4).normal(size=DIMENSION)
    plan = plan_with(1_000, projection=projection, round=first)
    step = take_step(plan, gradient, weights, np.zeros((2, DIMENSION)), Adam(), 0.01)
    np.testing.assert_allclose(step.weights, weights - 0.01 * np.sign(gradient), rtol=0, atol=2e-6)
    # The second, on the same gradient, is as long again.
    plan = plan_with(1_000, projection=projection, round=first + 1)
    again = take_step(plan, gradient, step.weights, step.state, Adam(), 0.01)
    np.testing.assert_allclose(again.weights, weights - 0.02 * np.sign(gradient), rtol=0, atol=4e-6)


def test_the_cap_acts_at_the_coordinator_only_when_asked() -> None:
    weights, state = DIGITS.initial_weights(0), np.zeros((1, DIMENSION))
    gradient = np.full(DIMENSION, 5.0)
    for kind, where, clamped in (
        ("none", "coordinator", 0),
        ("clamp", "device", 0),
        ("clamp", "coordinator", DIMENSION),
    ):
        plan = plan_with(1_000, cap={"kind": kind, "where": where, "floor": 0.01, "regularisation": 0.5})
        step = take_step(plan, gradient, weights, state, Sgd(), 1.0)
        assert step.clamped == clamped
        assert step.kept < 0.1 if clamped else step.kept == 1.0
        moved = np.linalg.norm(step.weights.astype(np.float64) - weights)
        assert moved <= 1.001 if clamped else moved > 100


def test_what_devices_make_is_what_the_store_sums_to_the_last_bit() -> None:
    opener = Opener(new_sealing_secret(), "testers")
    plan = make_plan(wire={"block": 999, "width": 14, "shift": 14}, sealing_key=opener.public_key)
    engine, weights = NumpyEngine(DIGITS, microbatch=4), DIGITS.initial_weights(0)
    updates = np.stack([make_update(plan, weights, records(5), engine) for _ in range(3)])
    messages = [
        seal(piece, plan.fleet, plan.sealing_key) for update in updates for piece in cut(update, plan)
    ]
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for message in sorted(messages + messages[::3]):
            piece = opener.open(message)
            position, values = read_block(piece, plan.wire, DIMENSION)
            store.count([OpenedFragment(piece.id, piece.round, position, values, 0.0)], plan.round)
        sums = store.sums(plan.round)
        store.close()
    assert {count for count, _ in sums.values()} == {3}
    total = np.concatenate([sums[position][1] for position in sorted(sums)])[:DIMENSION]
    assert np.array_equal(total, updates.sum(axis=0))
    np.testing.assert_allclose(mean_of(plan, sums), updates.mean(axis=0) * 2**14 / 65_536 / 10.0, rtol=1e-12)
