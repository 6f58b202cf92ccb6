"""Which fragments are taken for honest, in every kind of round, and how far the others can pull."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
from examples.l2_laplace import L2Laplace
from fleets import DIGITS, honest_update, make_task, merged, records, terms, update_plan, write_fleet
from numpy.typing import NDArray
from planted import plant

from agent.noisy_sums import noisy_gradients, noisy_sum, sum_of_moments
from coordinator.aggregation import fleet_mean
from coordinator.influence import HonestNorms, UpdateNorms
from coordinator.settings import FleetSettings, load_fleet_settings
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.models.description import from_description
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.privacy.clipping import Clipping
from dpagent.privacy.mechanisms.wire import MAX_WIRE_VALUE
from dpagent.protocol.codec import MessageError
from dpagent.protocol.task import RoundTask
from dpagent.protocol.updates import Updates

LOT, RATE = 20.0, 0.5
PROJECTED = from_description(
    DIGITS.describe() | {"front_end": [{"projection": 6}], "layers": [{"dense": 10}]}
)
SECOND_MOMENTS: dict[str, Any] = {
    "projection": {"values": 64, "record_norm": 1.0},
    "model": {
        "description": cbor2.dumps(PROJECTED.describe(), canonical=True),
        "parameters": PROJECTED.parameter_count,
        "architecture": PROJECTED.digest(),
    },
}
WEIGHTS = DIGITS.initial_weights(0)
LAPLACE: dict[str, Any] = {
    "method": "incrementing",
    "mechanism": {
        "name": "discrete-laplace", "noise_multipliers": [1.0], "parameters": {"resolution": 1 << 24},
    }
}  # fmt: skip
ROUNDS: dict[str, dict[str, Any]] = {
    "gradients": {},
    "three steps": terms(local_steps=3),
    "Laplace noise": LAPLACE,
    "Laplace noise, three steps": merged(LAPLACE, terms(local_steps=3)),
    "a norm for each layer": {
        "clipping": {
            key: list(getattr(Clipping.layers(DIGITS.layer_sizes, [1.0] * len(DIGITS.layer_sizes)), key))
            for key in ("norms", "shares")
        }
    },
    "a norm that follows a quantile": {"clipping": {"count_weight": 0.2}},
    "a cap on the device": {"cap": {"kind": "clamp", "where": "device", "floor": 0.05}},
    "second moments": SECOND_MOMENTS,
    "second moments, and a cap on the device later": SECOND_MOMENTS
    | {"cap": {"kind": "clamp", "where": "device", "floor": 0.05}},
}


def settings_of(directory: Path, **changes: Any) -> FleetSettings:
    return load_fleet_settings(write_fleet(directory, None, devices=10, **changes))


@pytest.fixture
def settings(tmp_path: Path) -> FleetSettings:
    return settings_of(tmp_path)


def task_of(block: int = 1_000, **changes: Any) -> RoundTask:
    """A task with the wire form that its mechanism has."""
    sampling = {"expected_lot": LOT, "rate": RATE} | changes.pop("sampling", {})
    wanted = changes | {"sampling": sampling}
    return make_task(**wanted, wire={"block": block}, step=make_task(**wanted).release.mechanism.wire_step)


def refused(norms: HonestNorms, task: RoundTask, update: NDArray[np.int64]) -> list[int]:
    """Positions of the fragments that are rejected."""
    block, found = task.plan.wire.block, []
    padded = np.zeros(task.release.blocks * block, np.int64)
    padded[: len(update)] = update
    for position, values in enumerate(padded.reshape(-1, block)):
        try:
            norms.require(position, values)
        except MessageError as error:
            found += [position] if error.reason == "improbable norm" else []
    return found


NOBODY = ArrayDataset(np.full((1, 8, 8, 1), np.nan, np.float32), np.zeros(1, np.int64), 10)
"""One record that does not count."""


def alike(count: int) -> ArrayDataset:
    """Records that are all the same: their gradients lie in one direction."""
    one = records(1).batch(np.zeros(1, np.int64))[0]
    return ArrayDataset(np.repeat(one, count, axis=0), np.zeros(count, np.int64), 10)


@pytest.mark.parametrize("kind", ROUNDS)
def test_fragments_of_agents_are_honest_whatever_their_records(kind: str, settings: FleetSettings) -> None:
    """The agent's own code on no record, on different ones, on 40 alike; it fails by chance once in 10⁹."""
    task = task_of(**ROUNDS[kind])
    release = task.release
    norms = HonestNorms(release, settings)
    engine = NumpyEngine(DIGITS, microbatch=4, norm=release.mechanism.norm)
    for data in (NOBODY, records(40), alike(40)):
        for _ in range(3):
            if task.release.second_moments is not None:
                update = noisy_sum(
                    task.release, WEIGHTS, lambda _, data=data: sum_of_moments(task.release, data)
                )
            else:
                update = noisy_gradients(task.release, WEIGHTS, data, engine)
            assert refused(norms, task, update) == []


@pytest.mark.parametrize("kind", ROUNDS)
def test_fragments_with_the_wires_largest_values_are_refused(kind: str, settings: FleetSettings) -> None:
    task = task_of(**ROUNDS[kind])
    end = MAX_WIRE_VALUE
    update = np.full(task.release.dimension, end, np.int64)
    assert refused(HonestNorms(task.release, settings), task, update) == list(range(task.release.blocks))


def test_fragments_without_noise_are_refused(settings: FleetSettings) -> None:
    task = task_of()
    assert refused(HonestNorms(task.release, settings), task, np.zeros(task.release.dimension, np.int64)) == [
        *range(10)
    ]
    # Below some 100 coordinates even noise is too irregular for a bound from below.
    assert (
        refused(
            HonestNorms(task_of(50).release, settings), task_of(50), np.zeros(DIGITS.parameter_count, int)
        )
        == []
    )


def test_the_last_block_is_judged_without_its_padding(settings: FleetSettings) -> None:
    task = task_of(9_000)
    norms, size = HonestNorms(task.release, settings), DIGITS.parameter_count - 9_000
    last = np.zeros(9_000, np.int64)
    last[:size] = honest_update(task)[9_000:]
    norms.require(1, last)
    last[size:] = MAX_WIRE_VALUE  # nobody reads it
    norms.require(1, last)
    with pytest.raises(MessageError):
        norms.require(0, last)
    last[size:], last[:size] = last[:1], 0
    with pytest.raises(MessageError):
        norms.require(1, last)


def test_a_device_with_more_records_than_stated_is_at_risk_only_if_all_say_the_same(tmp_path: Path) -> None:
    """Five expected lots in one coordinate are refused; spread over ten blocks they are not."""
    task = task_of(**terms(noise_multipliers=[0.3, 0.3, 0.3]))
    lot = 5 * round(LOT)
    one_way = honest_update(task, lot)
    spread = honest_update(task)
    share = (
        lot
        * task.release.mechanism.sensitivity_units
        / task.release.terms.step
        / math.sqrt(task.release.dimension)
    )
    spread += round(share)
    normal, large = (
        settings_of(tmp_path / "1"),
        settings_of(tmp_path / "5", aggregation={"largest_signal": 5.0}),
    )
    assert refused(HonestNorms(task.release, normal), task, one_way) == [0]
    assert refused(HonestNorms(task.release, normal), task, spread) == []
    assert refused(HonestNorms(task.release, large), task, one_way) == []
    assert HonestNorms(task.release, large).pull > 2 * HonestNorms(task.release, normal).pull


def test_the_pull_is_what_the_strongest_fragment_moves_the_mean_by(settings: FleetSettings) -> None:
    task = task_of()
    norms, block = HonestNorms(task.release, settings), 1_000
    low, high = 0, MAX_WIRE_VALUE
    while high - low > 1:
        middle = (low + high) // 2
        strongest = np.full(block, middle, np.int64)
        low, high = (low, middle) if _is_refused(norms, strongest) else (middle, high)
    moved = fleet_mean(task.release, {0: (settings.devices, np.full(block, low, np.int64))})
    with pytest.raises(MessageError):  # Its values would count for twice as much at each level more.
        norms.require(0, np.full(block, 3, np.int64), norms.highest_level + 1)
    # In clip norms; a wire unit more in each coordinate would have been refused.
    norm = float(np.linalg.norm(moved)) / task.release.mechanism.clip_norm
    assert norm <= norms.pull < norm * (low + 1) / low


def _is_refused(norms: HonestNorms, values: NDArray[np.int64]) -> bool:
    try:
        norms.require(0, values, norms.highest_level)
    except MessageError:
        # Zeros are refused too, from below.
        return bool(values[0] > 2)
    return False


def test_the_count_of_records_within_the_norm_is_judged_on_its_own(settings: FleetSettings) -> None:
    """Else one device would move the next clip norm at will: its estimate is a share of records, 0 to 1."""
    task = task_of(10_000, **ROUNDS["a norm that follows a quantile"])
    norms, update = HonestNorms(task.release, settings), honest_update(task)
    fitting = np.zeros(10_000, np.int64)
    fitting[: task.release.dimension] = update
    outside = next(
        value
        for value in itertools.count(1)
        if refused(norms, task, np.concatenate([update[:-1], [value]])) == [0]
    )
    mean = fleet_mean(
        task.release,
        {0: (settings.devices, np.where(np.arange(10_000) == task.release.dimension - 1, outside, 0))},
    )
    moved = abs(task.release.clipping.share_within(float(mean[-1])) - 0.5)
    # One of ten devices has at most 0.05 of the share without noise. With the norm of a whole block it would
    # move 0.6 times this bound.
    assert 0.05 < moved < 0.25 * norms.pull / task.release.clipping.count_weight / 2
    assert moved < 0.95, "nearly all of it for the noise, and 0.13 for the largest lot of records"


def test_a_mechanism_that_states_no_law_bounds_nothing(
    settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, L2Laplace)
    task = task_of(mechanism={"name": L2Laplace.name})
    norms, end = HonestNorms(task.release, settings), MAX_WIRE_VALUE
    assert norms.pull == math.inf
    assert refused(norms, task, np.full(task.release.dimension, end, np.int64)) == []
    assert refused(norms, task, np.zeros(task.release.dimension, np.int64)) == []


def test_more_fragments_of_a_job_make_the_range_a_little_wider(tmp_path: Path) -> None:
    task = task_of()
    few = HonestNorms(task.release, settings_of(tmp_path / "few"))
    many = HonestNorms(task.release, settings_of(tmp_path / "many", rounds=5_000))
    assert few.pull < many.pull < 1.2 * few.pull


# --- updates with noise of their devices --------------------------------------------------------


@pytest.mark.parametrize("name", ["central-gaussian", "central-laplace"])
@pytest.mark.parametrize("block", [DIGITS.parameter_count + 1, 300, 40])
def test_honest_updates_with_noise_count_and_stronger_ones_do_not(name: str, block: int) -> None:
    """The largest honest signal is an update that lies in one block, whole. A fragment far beyond it is
    refused; one without noise counts, and weighs less."""
    plan = update_plan(name=name, block=block, count_weight=0.5, device_noise=[2.0, 2.0, 2.0])
    release = RoundTask.of(plan).release
    assert isinstance(release, Updates)
    assert release.own_noise is not None
    norms, mechanism = UpdateNorms(release), release.own_noise.mechanism

    def blocks_of(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.pad(values, (0, release.blocks * block - len(values))).reshape(release.blocks, block)

    signal = np.zeros(release.dimension, np.int64)
    signal[0] = release.mechanism.sensitivity_units
    for _ in range(20):
        for position, values in enumerate(blocks_of(mechanism.add_clamped(signal))):
            norms.require(position, values)
    norms.require(0, np.zeros(block, np.int64))
    noise = blocks_of(mechanism.add_noise(np.zeros(release.dimension, np.int64)))
    factor = {DIGITS.parameter_count + 1: 2, 300: 3, 40: 6}[block] * (1 if name == "central-gaussian" else 2)
    with pytest.raises(MessageError, match="improbable norm: block 0"):
        norms.require(0, factor * noise[0])


@pytest.mark.parametrize(("name", "deviations"), [("central-gaussian", 20), ("central-laplace", 140)])
@pytest.mark.parametrize("block", [DIGITS.parameter_count + 1, 3_000])
def test_a_vote_with_noise_is_judged_on_its_own(name: str, deviations: int, block: int) -> None:
    """With as much in any other place, a fragment counts; padding may follow the vote."""
    plan = update_plan(name=name, block=block, count_weight=0.5, device_noise=[2.0, 2.0, 2.0])
    release = RoundTask.of(plan).release
    assert isinstance(release, Updates)
    assert release.own_noise is not None
    norms, values = UpdateNorms(release), np.zeros(block, np.int64)
    values[5] = deviations * release.own_noise.mechanism.deviation_units
    last = release.blocks - 1
    norms.require(last, values)
    with pytest.raises(MessageError, match="improbable norm"):
        norms.require(last, np.roll(values, release.dimension - last * block - 6))
