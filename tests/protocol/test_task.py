"""What a plan means to a device: derived once, refused with a reason, and all that prices it pinned."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import cbor2
import pytest
from fleets import DIGITS, make_plan, make_task, model_section, plan_values, terms

from dpagent.errors import PlanError
from dpagent.learning.models.description import from_description
from dpagent.norm import Norm
from dpagent.privacy.caps import ClampCap
from dpagent.privacy.covariance import FLOAT64_SLACK, SecondMoments
from dpagent.privacy.events import GaussianEvent, poisson_sampled
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.discretised_laplace import DiscretisedLaplace
from dpagent.privacy.mechanisms.mechanism import Query
from dpagent.protocol.codec import decode, encode
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask

PROJECTED = from_description(
    DIGITS.describe() | {"front_end": [{"projection": 6}], "layers": [{"dense": 10}]}
)
PROJECTION = {"model": model_section(PROJECTED), "projection": {"values": 64, "record_norm": 3.0}}
COUNTING = {"clipping": {"count_weight": 0.2}}
CLAMP = {"kind": "clamp", "where": "device"}
LAYERS = {"norms": [1.0, 2.0, 0.5], "shares": [0.2, 0.5, 0.3]}
VIEWS = {"views": 2, "shift": 1, "flip": False}


# --- what a device works on ---------------------------------------------------------------------


def test_a_task_is_what_its_plan_says() -> None:
    task = make_task(**terms(clipping={"norms": [2.0]}, rate=0.3, local_steps=3), round=2)
    assert task.spec.digest() == DIGITS.digest()
    assert (task.release.clipping.norms, task.release.clipping.sizes) == ((2.0,), (DIGITS.parameter_count,))
    expected = DiscretisedGaussian(
        clip_norm=2.0, noise_multiplier=3.0, sampling_rate=0.3, dimension=DIGITS.parameter_count, steps=3,
        accumulation_slack=task.release.terms.clipping.accumulation_slack,
    )  # fmt: skip
    assert task.release.mechanism == expected
    assert (task.release.dimension, task.release.second_moments, task.release.augmentation) == (
        DIGITS.parameter_count,
        None,
        None,
    )
    assert task.release.wire_unit == 2.0 / 65_536 * task.release.terms.step


def test_the_mechanism_answers_the_plans_query() -> None:
    task = make_task(
        clipping={"norms": [0.75], "accumulation_slack": 0.003}, sampling={"rate": 0.125, "local_steps": 3}
    )
    query = Query(0.75, 0.003, DIGITS.parameter_count, 0.125, steps=3)
    assert task.release.mechanism == task.release.noise.at(1, query)
    assert task.release.mechanism != task.release.noise.at(2, query)


def test_a_plan_may_augment_records() -> None:
    augmentation = make_task(augmentation=VIEWS).release.augmentation
    assert augmentation is not None
    assert (augmentation.views, augmentation.shift, augmentation.flip) == (2, 1, False)


def test_norms_may_be_one_for_each_layer_and_a_count_is_one_coordinate_more() -> None:
    assert make_task(clipping=LAYERS).release.clipping.sizes == DIGITS.layer_sizes
    counting = make_task(**COUNTING)
    assert counting.release.dimension == DIGITS.parameter_count + 1
    assert counting.release.mechanism.clip_norm == counting.release.clipping.radius > 1.0


def test_the_first_round_of_a_projection_sums_second_moments_and_the_others_gradients() -> None:
    first, second = make_task(**PROJECTION), make_task(**PROJECTION, round=2)
    assert first.release.second_moments == SecondMoments(64, 3.0)
    assert first.release.dimension == 64 * 65 // 2
    assert first.release.mechanism.clip_norm == first.release.second_moments.radius
    assert second.release.second_moments is None
    assert (second.release.dimension, second.release.mechanism.clip_norm) == (PROJECTED.parameter_count, 1.0)


def test_steps_of_the_model_are_counted_without_the_round_of_second_moments() -> None:
    assert [make_task(round=number).release.gradient_step for number in (1, 2, 3)] == [1, 2, 3]
    assert [make_task(**PROJECTION, round=number).release.gradient_step for number in (1, 2, 3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("block", "blocks"), [(1, 9_930), (9_929, 2), (9_930, 1), (9_931, 1), (1_000, 10), (331, 30)]
)
def test_an_update_takes_as_many_fragments_as_hold_it(block: int, blocks: int) -> None:
    assert DIGITS.parameter_count == 9_930
    assert make_task(wire={"block": block}).release.blocks == blocks


def test_a_cap_acts_where_the_plan_says() -> None:
    cap = {"kind": "clamp", "regularisation": 0.25, "floor": 0.125}
    expected = ClampCap(regularisation=0.25, floor=0.125)
    device = make_task(cap=cap | {"where": "device"})
    coordinator = make_task(cap=cap | {"where": "coordinator"})
    assert (device.release.device_cap, device.release.coordinator_cap) == (expected, None)
    assert (coordinator.release.device_cap, coordinator.release.coordinator_cap) == (None, expected)
    for where in ("device", "coordinator"):
        none = make_task(cap=cap | {"kind": "none", "where": where})
        assert (none.release.device_cap, none.release.coordinator_cap) == (None, None)


@pytest.mark.parametrize("clipping", [{"count_weight": 0.2}, LAYERS], ids=["quantile", "layers"])
def test_a_cap_at_the_coordinator_goes_with_every_clipping(clipping: dict[str, Any]) -> None:
    assert (
        make_task(cap=CLAMP | {"where": "coordinator"}, clipping=clipping).release.coordinator_cap is not None
    )


@pytest.mark.parametrize("changes", [{}, COUNTING, PROJECTION], ids=["gradients", "count", "projection"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_is_charged_for_is_this_round_and_all_that_follow(changes: dict[str, Any], number: int) -> None:
    changes = changes | {"sampling": {"rate": 0.3, "local_steps": 2}}
    noise = [4.0, 3.0, 2.0][number - 1 :]
    expected = tuple(poisson_sampled(GaussianEvent(sigma), 0.3, 2) for sigma in noise)
    assert make_task(**changes, round=number).release.events == expected


# --- refusals -----------------------------------------------------------------------------------

FEATURED = from_description(DIGITS.describe() | {"front_end": [{"random": {"layers": ["tanh"]}}]})
TWO_LAYERS = from_description(DIGITS.describe() | {"layers": [{"dense": 8}, "tanh", {"dense": 10}]})
LITTLE_SLACK = {"accumulation_slack": math.nextafter(FLOAT64_SLACK, 0.0)}


@pytest.mark.parametrize(
    ("changes", "offender"),
    [
        ({"model": {"description": b"\xff"}}, "cannot be built"),
        ({"model": {"description": cbor2.dumps(["digits"])}}, "cannot be built"),
        ({"model": {"description": b"\x81" * 5_000}}, "cannot be built"),
        ({"model": {"architecture": bytes(32)}}, "built differently"),
        ({"model": {"parameters": 9_929}}, "built differently"),
        ({"clipping": {"norms": [1.0, 1.0], "shares": [0.5, 0.5]}}, "3 layers, 2 clip norms"),
        ({"clipping": {"shares": [0.9]}}, "the share of the only layer is 0.9; expected 1"),
        ({"mechanism": {"name": "laplace"}}, "'laplace'"),
        ({"mechanism": {"parameters": {"resolution": 255}}}, "resolution is 255"),
        ({"mechanism": {"parameters": {"resolution": 1_048_577}}}, "resolution is 1048577"),
        ({"mechanism": {"parameters": {"resolution": 65_536.0}}}, "resolution is 65536.0"),
        ({"mechanism": {"parameters": {"bound": 3}}}, "bound, resolution"),
        ({"mechanism": {"noise_multipliers": [0.049, 1.0, 1.0]}}, "noise multiplier is 0.049"),
        ({"mechanism": {"noise_multipliers": [10_001.0, 1.0, 1.0]}}, "noise multiplier is 10001.0"),
        (terms(noise_multipliers=[10_000.0], resolution=1_048_576), "noise multiplier is 10000.0"),
        ({"augmentation": {"views": 2, "shift": 9, "flip": False}}, "shift"),
        ({"augmentation": VIEWS, "model": model_section(FEATURED)}, "views of records"),
        ({"cap": CLAMP} | COUNTING, "follows a quantile"),
        ({"cap": CLAMP, "clipping": LAYERS}, "for each layer"),
        (
            {
                "cap": CLAMP, "model": model_section(TWO_LAYERS),
                "clipping": {"norms": [1.0, 1.0], "shares": [0.5, 0.5]},
            },
            "for each layer",
        ),
        ({"projection": PROJECTION["projection"]}, "projects no values"),
        ({"model": PROJECTION["model"]}, "projects 64 values"),
        (PROJECTION | {"projection": {"values": 63, "record_norm": 3.0}}, "projects 64 values"),
        (PROJECTION | {"clipping": LITTLE_SLACK}, "second moments need"),
    ],
)  # fmt: skip
def test_a_plan_that_no_device_could_run_is_refused_with_the_reason(
    changes: dict[str, Any], offender: str
) -> None:
    with pytest.raises(PlanError) as caught:
        make_task(**changes)
    assert offender in str(caught.value)


def test_second_moments_need_their_slack_in_their_own_round_only() -> None:
    make_task(**PROJECTION, clipping={"accumulation_slack": FLOAT64_SLACK})
    make_task(**PROJECTION, clipping=LITTLE_SLACK, round=2)
    make_task(clipping=LITTLE_SLACK)


@pytest.mark.parametrize(
    ("changes", "offender"),
    [
        ({"clipping": LAYERS}, "each layer"),
        (COUNTING, "quantile"),
        (PROJECTION, "projection"),
        (PROJECTION | {"round": 2}, "projection"),
    ],
)
def test_a_mechanism_for_l1_is_refused_what_is_bounded_in_l2(changes: dict[str, Any], offender: str) -> None:
    """Its noise would be for a sensitivity that records exceed, by up to √d."""
    make_task(**changes)
    laplace = {"method": "incrementing", "mechanism": {"name": DiscretisedLaplace.name}}
    assert make_task(**laplace).release.mechanism.norm is Norm.L1
    with pytest.raises(PlanError, match=offender) as caught:
        make_task(**changes, **laplace)
    assert "discrete-laplace needs records clipped in L1" in str(caught.value)


@pytest.mark.parametrize(
    "mechanism",
    [
        {"noise_multipliers": [4.0, 3.0, 0.01]}, {"noise_multipliers": [4.0, 3.0, 10_001.0]},
        {"noise_multipliers": [4.0, 3.0, 10_000.0], "parameters": {"resolution": 1_048_576}},
    ],
)  # fmt: skip
def test_a_later_round_that_no_device_could_run_is_refused_when_it_is_priced(
    mechanism: dict[str, Any],
) -> None:
    task = make_task(mechanism=mechanism)
    with pytest.raises(PlanError, match="later round"):
        _ = task.release.events
    # And where it is this round, before.
    with pytest.raises(PlanError, match="Round 3"):
        make_task(mechanism=mechanism, round=3)


# --- what is pinned -----------------------------------------------------------------------------

#: Sections and keys that price a job. A device declines the job when any of them changes.
PINNED = {
    "delta", "model.parameters", "release.mechanism", "release.clipping", "release.sampling",
    "release.projection",
}  # fmt: skip
#: Values to change to, where another of the same type will not do.
OTHERS = {
    "linkability": "round",
    "fleet": "others", "method": "incrementing", "state": "finished",
    "release.step": 3, "model.precision": "int8",
    "release.cap.kind": "clamp", "release.cap.where": "device",
    "release.mechanism.name": "another", "assets": [{"role": "projection", "digest": bytes(32), "size": 1}],
    "mixer": bytes(32), "receipts": "fragment",
    "release.augmentation": VIEWS, "release.projection": {"values": 64, "record_norm": 1.0},
}  # fmt: skip


def leaves(values: dict[str, Any], above: str = "") -> list[str]:
    """The paths of all values in a plan."""
    found = []
    for key, value in values.items():
        found += leaves(value, f"{above}{key}.") if isinstance(value, dict) else [f"{above}{key}"]
    return found


def another(path: str, value: Any) -> Any:
    """A value of the same type, or of :data:`OTHERS`, that a plan may have."""
    if path in OTHERS:
        return OTHERS[path]
    match value:
        case list():
            return [another("", each) for each in value]
        case bytes():
            return bytes(len(value))
        case int():
            return value + 1
        case float():
            return value / 2 or 0.25
    raise AssertionError(f"no other value for {path}")


def digest_with(values: dict[str, Any]) -> str:
    """Of a plan, also of one that no device could run."""
    return with_plan(TASK, values).schedule_digest


def with_plan(task: RoundTask, values: dict[str, Any]) -> RoundTask:
    plan = Plan.checked(values)
    return replace(task, plan=plan, release=replace(task.release, plan=plan, terms=plan.release))


TASK = make_task()


@pytest.mark.parametrize("path", [path for path in leaves(plan_values()) if path != "release.kind"])
def test_what_prices_a_job_is_pinned_and_nothing_else(path: str) -> None:
    values = copy.deepcopy(plan_values())
    *sections, key = path.split(".")
    place = values
    for section in sections:
        place = place[section]
    place[key] = another(path, place[key])
    prefixes = {path, *(path[:at] for at, letter in enumerate(path) if letter == ".")}
    assert (digest_with(values) != TASK.schedule_digest) is bool(prefixes & PINNED)


def test_a_norm_that_follows_a_quantile_is_free_and_the_rest_of_its_clipping_is_not() -> None:
    first = make_task(**COUNTING).schedule_digest
    assert make_task(clipping={"count_weight": 0.2, "norms": [7.0]}).schedule_digest == first
    assert make_task(clipping={"count_weight": 0.3}).schedule_digest != first
    assert make_task(clipping={"count_weight": 0.2, "accumulation_slack": 0.005}).schedule_digest != first


def test_each_number_of_a_projection_is_pinned() -> None:
    first = make_task(**PROJECTION)
    for changes in ({"values": 63}, {"record_norm": 2.0}):
        values = copy.deepcopy(plan_values(**PROJECTION))
        values["release"]["projection"] |= changes
        assert with_plan(first, values).schedule_digest != first.schedule_digest


def test_a_digest_survives_the_wire() -> None:
    plan = make_plan(**PROJECTION)
    assert RoundTask.of(decode(encode(plan), Plan)).schedule_digest == RoundTask.of(plan).schedule_digest


# --- how the model's description is read ----------------------------------------------------------

DESCRIPTION = cbor2.dumps(DIGITS.describe(), canonical=True)


def shared(depth: int) -> bytes:
    """A list that holds twice a list that holds twice …: tags 28 and 29 share each of them."""
    data = b"\xd8\x1c\x80"
    for number in range(depth, 0, -1):
        data = b"\xd8\x1c\x82" + data + b"\xd8\x1d" + cbor2.dumps(number)
    return data


@pytest.mark.parametrize(
    "description",
    [
        b"\xd9\xd9\xf7" + DESCRIPTION,
        DESCRIPTION + b"\0",
        b"\xbf" + DESCRIPTION[1:] + b"\xff",
        bytes([DESCRIPTION[0] + 1]) + DESCRIPTION[1:] + cbor2.dumps("name") + cbor2.dumps("digits"),
        # To print it would take 2¹² lists here; 200 bytes are enough for 2⁴⁰.
        DESCRIPTION.replace(cbor2.dumps("digits"), shared(12)),
    ],
    ids=["tag", "trailing byte", "indefinite length", "key twice", "shared values"],
)
def test_a_description_is_read_as_strictly_as_a_message(description: bytes) -> None:
    assert RoundTask.of(make_plan(model={"description": DESCRIPTION})).spec == DIGITS
    with pytest.raises(PlanError, match="malformed"):
        RoundTask.of(make_plan(model={"description": description}))
