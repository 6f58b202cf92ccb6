"""Deriving a task from a plan: all that it means, and the terms that exclude each other."""

from __future__ import annotations

import math
from typing import Any

import cbor2
import pytest
from fleets import DIGITS, make_plan, make_task

from dpagent.errors import PlanError
from dpagent.learning.models.description import from_description
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.caps import ClampCap
from dpagent.privacy.covariance import FLOAT64_SLACK
from dpagent.privacy.mechanisms.mechanism import Query
from dpagent.protocol.task import RoundTask

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


def model_of(spec: ModelSpec) -> dict[str, Any]:
    """The section of a plan."""
    return {
        "description": cbor2.dumps(spec.describe(), canonical=True),
        "parameters": spec.parameter_count,
        "architecture": spec.digest(),
    }


PROJECTED = from_description(
    DIGITS.describe() | {"front_end": [{"projection": 6}], "layers": [{"dense": 10}]}
)
MOMENTS = {"values": 64, "record_norm": 4.0}
TWO_LAYERS = from_description(DIGITS.describe() | {"layers": [{"dense": 8}, "tanh", {"dense": 10}]})
LAYERS = len(DIGITS.layer_sizes)
DEVICE_CAP = {"kind": "clamp", "where": "device", "regularisation": 0.25, "floor": 0.5}


def refused(**changes: Any) -> str:
    with pytest.raises(PlanError) as caught:
        make_task(**changes)
    return str(caught.value)


def clipping(layers: int, count_weight: float = 0.0) -> dict[str, Any]:
    return {"norms": [1.0] * layers, "shares": [1 / layers] * layers, "count_weight": count_weight}


@pytest.mark.parametrize(
    "changes",
    [{"architecture": bytes(32)}, {"parameters": DIGITS.parameter_count + 1}],
    ids=["architecture", "parameters"],
)
def test_a_model_that_differs_in_either_is_refused(changes: dict[str, Any]) -> None:
    assert "built differently" in refused(model=changes)


def test_the_mechanism_answers_the_plans_query() -> None:
    task = make_task(
        clipping=clipping(1) | {"norms": [0.75], "accumulation_slack": 0.003},
        sampling={"rate": 0.125, "local_steps": 3},
    )
    asked = Query(0.75, 0.003, DIGITS.parameter_count, 0.125, steps=3)
    assert task.mechanism == task.noise.at(1, asked)
    assert task.mechanism != task.noise.at(2, asked)
    assert task.clipping.norms == (0.75,)
    assert len(task.events) == 3
    assert len(make_task(round=3).events) == 1
    assert make_task(augmentation={"views": 2, "shift": 1, "flip": False}).augmentation is not None


def test_a_cap_is_applied_in_one_place_as_the_plan_says() -> None:
    cap = ClampCap(regularisation=0.25, floor=0.5)
    on_device = make_task(cap=DEVICE_CAP)
    assert (on_device.device_cap, on_device.coordinator_cap) == (cap, None)
    at_coordinator = make_task(cap=DEVICE_CAP | {"where": "coordinator"})
    assert (at_coordinator.device_cap, at_coordinator.coordinator_cap) == (None, cap)
    none = make_task(cap=DEVICE_CAP | {"kind": "none"})
    assert (none.device_cap, none.coordinator_cap) == (None, None)


def test_a_cap_on_the_device_needs_one_clip_norm_that_stays() -> None:
    assert "quantile" in refused(cap=DEVICE_CAP, clipping=clipping(1, 0.2))
    assert "layer" in refused(cap=DEVICE_CAP, clipping=clipping(LAYERS))
    assert "layer" in refused(cap=DEVICE_CAP, model=model_of(TWO_LAYERS), clipping=clipping(2))
    at_coordinator = DEVICE_CAP | {"where": "coordinator"}
    make_task(cap=at_coordinator, clipping=clipping(1, 0.2))
    make_task(cap=at_coordinator, clipping=clipping(LAYERS))


def test_second_moments_and_the_model_agree_on_what_is_projected() -> None:
    model = model_of(PROJECTED)
    first = make_task(model=model, projection=MOMENTS)
    assert first.second_moments is not None
    assert (first.second_moments.values, first.gradient_step) == (64, 0)
    later = make_task(model=model, projection=MOMENTS, round=2)
    assert (later.second_moments, later.gradient_step) == (None, 1)
    assert later.dimension == PROJECTED.parameter_count
    assert "64" in refused(model=model, projection=MOMENTS | {"values": 63})
    assert "projects" in refused(model=model)
    assert "projects" in refused(projection=MOMENTS)


def test_second_moments_need_room_for_their_error() -> None:
    model = model_of(PROJECTED)
    make_task(model=model, projection=MOMENTS, clipping={"accumulation_slack": FLOAT64_SLACK})
    too_little = {"accumulation_slack": math.nextafter(FLOAT64_SLACK, 0.0)}
    assert "second" in refused(model=model, projection=MOMENTS, clipping=too_little)
    make_task(model=model, projection=MOMENTS, clipping=too_little, round=2)
    make_task(clipping=too_little)


def test_what_prices_a_job_is_pinned_and_a_norm_that_follows_a_quantile_is_not() -> None:
    def digest(**changes: Any) -> str:
        return make_task(**changes).schedule_digest

    other_norm = {"norms": [0.5]}
    assert digest() == digest(round=2) != digest(clipping=other_norm)
    adapted = clipping(1, 0.2)
    assert digest(clipping=adapted) == digest(clipping=adapted | other_norm) != digest()
    assert digest(clipping=clipping(1, 0.3)) != digest(clipping=adapted)
    changed = [
        {"delta": 2e-5},
        {"sampling": {"rate": 0.5}},
        {"clipping": {"accumulation_slack": 0.003}},
        {"mechanism": {"noise_multipliers": [4.0, 3.0, 2.5]}},
        {"model": model_of(TWO_LAYERS)},
    ]
    assert len({digest(), *(digest(**changes) for changes in changed)}) == 1 + len(changed)
    model = model_of(PROJECTED)
    assert digest(model=model, projection=MOMENTS) != digest(
        model=model, projection=MOMENTS | {"record_norm": 5.0}
    )
