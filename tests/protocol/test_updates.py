"""Updates without noise: what a device sends, of one length, and what the coordinator takes and adds up."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from executed import executed
from fleets import DIGITS, make_plan, report_plan, update_plan
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import PlanError
from dpagent.norm import Norm
from dpagent.protocol.codec import MessageError
from dpagent.protocol.dummies import as_sent, dummies_for
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.task import RoundTask
from dpagent.protocol.update_packing import pack_update, read_update
from dpagent.protocol.update_size import values_of
from dpagent.protocol.updates import Updates
from dpagent.schema.problems import SchemaError

WEIGHTS = DIGITS.initial_weights(0)
DIMENSION = DIGITS.parameter_count


def release_of(plan: Plan) -> Updates:
    release = RoundTask.of(plan).release
    assert isinstance(release, Updates)
    return release


@given(st.integers(1, 1 << 28), st.data())
def test_values_come_back_from_one_length(largest: int, data: st.DataObject) -> None:
    values = np.array(data.draw(st.lists(st.integers(-largest, largest), min_size=5, max_size=5)))
    payload = pack_update(values, largest)
    assert len(payload) == len(pack_update(np.zeros(5, np.int64), largest))
    assert payload[:1] != Fragment.DUMMY
    if np.abs(values).sum() <= largest:
        read = read_update(payload, 0, 5, dimension=5, largest=largest, norm=Norm.L1)
        assert read.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("payload", "position", "norm", "text"),
    [
        (pack_update(np.array([3, 4, 1]), 5), 0, Norm.L2, "norm in L2 above 5"),
        (pack_update(np.array([3, -3, 0]), 5), 0, Norm.L1, "norm in L1 above 5"),
        (b"\0\xff\xf0", 0, Norm.L2, "a value of 10; expected at most 5"),
        (b"\0\xff\xff", 0, Norm.L2, "beyond the last value"),
        (pack_update(np.array([1, 0, 1]), 5), 1, Norm.L2, "beyond the update's end"),
        (b"\0\x55", 0, Norm.L2, "2 bytes; expected 3"),
    ],
)
def test_what_no_honest_device_sends_is_refused(payload: bytes, position: int, norm: Norm, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_update(payload, position, 3, dimension=5, largest=5, norm=norm)


@pytest.mark.parametrize("name", ["central-gaussian", "central-laplace"])
def test_devices_updates_add_up_exactly_to_their_mean(name: str) -> None:
    plan = update_plan(name=name)
    release, rng = release_of(plan), np.random.default_rng(1)
    changes = rng.normal(scale=[[1e-5], [1e-6]], size=(2, DIMENSION)).astype(np.float32)
    sums: dict[int, tuple[int, Any]] = {}
    for change in changes:
        for fragment in cut(release.update_of(WEIGHTS + change, WEIGHTS), plan):
            part = release.read(fragment)
            count, total = sums.get(fragment.position, (0, 0))
            sums[fragment.position] = (count + 1, total + part)
    # Of four that are expected, two came.
    mean = release.mean_of(release.total_of(sums))
    wanted = ((WEIGHTS + changes) - WEIGHTS).sum(axis=0, dtype=np.float64) / 4
    assert np.abs(mean - wanted).max() <= release.mechanism.granularity


@pytest.mark.parametrize("name", ["central-gaussian", "central-laplace"])
@pytest.mark.parametrize("block", [200, 325, DIMENSION + 1, 5])
def test_a_vote_is_the_last_value_and_of_one_length(name: str, block: int) -> None:
    plan = update_plan(name=name, count_weight=0.5, clip_norm=0.3, block=block)
    release = release_of(plan)
    assert values_of(plan) == release.dimension == DIMENSION + 1
    change = np.zeros(DIMENSION, np.float32)
    lengths, votes = set(), []
    for first in (0.0, 0.29, 0.31, np.nan):
        change[0] = first
        fragments = list(cut(release.update_of(WEIGHTS + change, WEIGHTS), plan))
        lengths |= {len(fragment.payload) for fragment in fragments}
        sums = {each.position: (1, release.read(each)) for each in fragments}
        votes.append(release.clipping.share_within(4 * release.mean_of(release.total_of(sums))[-1]))
    assert votes == pytest.approx([0.5, 1.0, 0.0, 0.5], abs=1e-3)
    assert len(lengths) == 1


@pytest.mark.parametrize("name", ["central-gaussian", "central-laplace"])
@pytest.mark.parametrize("clip_norm", [1e-9, 1e-4, 0.3, 7.0, 1e6])
def test_a_device_has_one_vote_whatever_it_sends(name: str, clip_norm: float) -> None:
    """The greatest vote that counts is an honest one's, up to a unit of the grid."""
    plan = update_plan(name=name, count_weight=0.5, clip_norm=clip_norm)
    release = release_of(plan)
    assert release.largest_vote is not None
    largest, end = release.largest_vote, DIMENSION - (release.blocks - 1) * 200
    change = np.full(DIMENSION, clip_norm / DIMENSION / 2, np.float32)
    honest = int(release.update_of(change, np.zeros_like(change))[-1])
    assert largest - 1 <= honest <= largest

    def last_block(vote: int) -> Fragment:
        values = np.zeros(200, np.int64)
        values[end] = vote
        return Fragment(1, release.blocks - 1, bytes(16), pack_update(values, release.terms.largest))

    for sign in (1, -1):
        assert release.read(last_block(sign * largest))[end] == sign * largest
        for vote in (largest + 1, release.terms.largest):
            with pytest.raises(MessageError, match="vote"):
                release.read(last_block(sign * vote))


@pytest.mark.parametrize("trained", [np.inf, np.nan, 3e38])
def test_an_update_is_within_its_bound_whatever_was_trained(trained: float) -> None:
    release = release_of(update_plan())
    wild = WEIGHTS.copy()
    wild[:3] = trained
    update = release.update_of(wild, WEIGHTS)
    assert int((update**2).sum()) <= release.terms.largest**2
    assert bool(update.any()) == (trained == 3e38)


@pytest.mark.parametrize("device_noise", [None, [2.0, 1.5, 1.0]])
@pytest.mark.parametrize("count_weight", [0.0, 0.5])
def test_an_update_takes_the_same_steps_whatever_was_trained(
    count_weight: float, device_noise: list[float] | None
) -> None:
    """Before, weights that had not changed, and others that were not finite, had a way of their own."""
    release = release_of(update_plan(count_weight=count_weight, device_noise=device_noise))
    changed = [WEIGHTS.copy() for _ in range(5)]
    for weights, by in zip(changed, (0.0, 1e-3, 5.0, 3e38, np.nan), strict=True):
        weights[:3] += np.float32(by)
    release.update_of(WEIGHTS, WEIGHTS)  # Makes the tables of the noise.
    taken = [executed(partial(release.update_of, weights, WEIGHTS)) for weights in changed]
    assert all(one == taken[0] for one in taken), [one - taken[0] for one in taken]


def test_dummies_and_updates_have_one_length() -> None:
    plan = update_plan()
    release = release_of(plan)
    sent = [*cut(release.update_of(WEIGHTS, WEIGHTS), plan), *dummies_for(plan)]
    lengths = {len(as_sent(each.to_bytes(), plan)) for each in sent}
    assert len(lengths) == 1
    assert values_of(plan) == DIMENSION
    assert release.blocks == -(-DIMENSION // 200)


@pytest.mark.parametrize(
    ("section", "changes", "text"),
    [
        ("release", {"largest": 3}, "expected"),
        ("release", {"largest": 0}, "largest"),
        ("release", {"expected_devices": 0}, "expected_devices"),
        ("wire", {"bytes": 17}, "17 bytes"),
    ],
)
def test_a_plan_that_no_device_could_run_is_refused(section: str, changes: dict[str, Any], text: str) -> None:
    values = update_plan().as_dict()
    values[section] |= changes
    with pytest.raises(SchemaError, match=text):
        Plan.checked(values)


def test_a_plan_makes_room_for_exactly_what_an_update_has() -> None:
    values = update_plan().as_dict()
    values["release"]["largest"] += 1
    with pytest.raises(PlanError, match="the plan makes room for"):
        RoundTask.of(Plan.checked(values))


def test_no_device_sends_an_update_under_another_method() -> None:
    """Otherwise a plan could have a device that trusts nobody send an update without noise."""
    values = update_plan().as_dict()
    with pytest.raises(PlanError, match="do not go together"):
        RoundTask.of(Plan.checked(values | {"method": "dp-sgd"}))
    values["release"]["mechanism"]["name"] = "discrete-gaussian"
    with pytest.raises(PlanError, match="not for the coordinator to add"):
        RoundTask.of(Plan.checked(values))
    sums = make_plan().as_dict()
    sums["release"]["mechanism"]["name"] = "central-gaussian"
    with pytest.raises(PlanError, match="for the coordinator to add"):
        RoundTask.of(Plan.checked(sums | {"method": "central"}))


def test_what_the_job_costs_is_pinned_and_how_devices_train_is_not() -> None:
    task = RoundTask.of(update_plan())
    assert task.schedule_digest == RoundTask.of(update_plan(round=2)).schedule_digest
    values = update_plan().as_dict()
    values["release"]["training"]["steps"] = 9
    assert RoundTask.of(Plan.checked(values)).schedule_digest == task.schedule_digest
    values["release"]["clip_norm"] = 0.9
    assert RoundTask.of(Plan.checked(values)).schedule_digest != task.schedule_digest
    counting = RoundTask.of(update_plan(count_weight=0.5))
    other = RoundTask.of(update_plan(count_weight=0.5, clip_norm=0.9, round=2))
    assert counting.schedule_digest == other.schedule_digest != task.schedule_digest
    assert counting.release.mechanism.event == task.release.mechanism.event
    values = update_plan().as_dict()
    values["release"]["mechanism"]["noise_multipliers"][2] = 0.5
    assert RoundTask.of(Plan.checked(values)).schedule_digest != task.schedule_digest
    assert len(task.release.events) == 3
    assert report_plan().wire.bytes != update_plan().wire.bytes


def test_a_position_beyond_the_update_is_refused() -> None:
    plan = update_plan()
    release = release_of(plan)
    payload = pack_update(np.zeros(200, np.int64), release.terms.largest)
    with pytest.raises(MessageError, match="block"):
        release.read(Fragment(1, release.blocks, bytes(16), payload))


# --- with noise of devices besides --------------------------------------------------------------

NAMES = pytest.mark.parametrize("name", ["central-gaussian", "central-laplace"])


def noisy_plan(name: str = "central-gaussian", **changes: Any) -> Plan:
    return update_plan(name=name, device_noise=[4.0, 3.0, 2.0], **changes)


@NAMES
@pytest.mark.parametrize("count_weight", [0.0, 0.5])
def test_a_device_adds_its_own_noise_to_its_whole_vector(name: str, count_weight: float) -> None:
    """Vote included, afresh each time, and whatever was trained: zeros, the largest update, or nonsense."""
    plan = noisy_plan(name, count_weight=count_weight)
    release = release_of(plan)
    assert release.own_noise is not None
    mechanism, lengths = release.own_noise.mechanism, set()
    wild = np.where(np.arange(DIMENSION) % 2, np.inf, WEIGHTS).astype(np.float32)
    for trained in (WEIGHTS, WEIGHTS + 100, wild):
        sent = release.update_of(trained, WEIGHTS)
        assert sent.shape == (DIMENSION + (count_weight > 0),)
        assert sent.std() == pytest.approx(mechanism.deviation_units, rel=0.2)
        assert sent[-1] != release.update_of(trained, WEIGHTS)[-1]
        assert np.abs(sent).max() <= release.terms.largest
        fragments = list(cut(sent, plan))
        lengths |= {len(each.payload) for each in fragments}
        sums = {each.position: (1, release.read(each)) for each in fragments}
        np.testing.assert_array_equal(release.total_of(sums), sent)
    assert lengths == {plan.wire.bytes}


@NAMES
def test_a_round_with_noise_of_devices_has_two_guarantees(name: str) -> None:
    task = RoundTask.of(noisy_plan(name, round=2))
    own, release = task.priced
    assert (own.mechanism.name, own.mechanism.noise_multiplier) == (name.replace("central", "device"), 3.0)
    assert own.mechanism.granularity == release.mechanism.granularity
    assert [len(each.events) for each in (own, release)] == [2, 2]
    assert [each.mechanism.trust for each in (own, release)] == ["none", "coordinator"]
    alone = RoundTask.of(update_plan(name=name))
    assert alone.priced == (alone.release,)


def test_noise_of_devices_is_pinned_and_what_follows_from_it_is_not() -> None:
    tasks = [RoundTask.of(noisy_plan(round=number)) for number in (1, 2, 3)]
    assert len({task.plan.wire.bytes for task in tasks}) > 1
    assert len({task.schedule_digest for task in tasks}) == 1
    other = RoundTask.of(update_plan(device_noise=[4.0, 3.0, 1.9]))
    assert (
        len({tasks[0].schedule_digest, other.schedule_digest, RoundTask.of(update_plan()).schedule_digest})
        == 3
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "central-gaussian"}, "not for a device to add"),
        ({"name": "discrete-gaussian"}, "not for a device to add"),
        ({"name": "device-laplace"}, "not for a device to add"),
        ({"parameters": {"resolution": 1 << 15}}, "on a grid of"),
        ({"noise_multipliers": [4.0, 3.0]}, "is for 2 rounds"),
        ({"noise_multipliers": [4.0, 3.0, 2.0, 1.0]}, "is for 4 rounds"),
        ({"noise_multipliers": [5.0, 3.0, 2.0]}, "the plan makes room for"),
    ],
)
def test_noise_that_a_device_does_not_add_is_refused(changes: dict[str, Any], text: str) -> None:
    values = noisy_plan().as_dict()
    values["release"]["device_noise"] |= changes
    with pytest.raises(PlanError, match=text):
        RoundTask.of(Plan.checked(values))


def test_no_fragment_has_a_value_beyond_what_devices_send() -> None:
    plan = noisy_plan()
    release = release_of(plan)
    values = np.full(200, release.terms.largest)
    release.read(Fragment(1, 0, bytes(16), pack_update(values, release.terms.largest)))
    values[7] += 1
    with pytest.raises(MessageError, match="expected at most"):
        release.read(Fragment(1, 0, bytes(16), pack_update(values, release.terms.largest)))
