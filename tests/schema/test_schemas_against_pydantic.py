"""Our checks against those of pydantic, which is made to say the same: the same values pass, and come to the
same; of others, the same places are named."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pydantic
import pytest
from fleets import agent_values, fleet_values, plan_values, terms
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.profile import Profile, load_profile
from agent.settings import AgentSettings
from coordinator.settings import FleetSettings
from dpagent.protocol.enrolment import EnrolAnswer
from dpagent.protocol.messages import Plan
from dpagent.protocol.signing import Signer
from dpagent.protocol.tokens import TokenKeys
from dpagent.schema.base import REQUIRED, Schema, fields_of
from dpagent.schema.json_values import json_values
from dpagent.schema.limits import After, Before, By, Limits
from dpagent.schema.problems import NOTHING, Location, Problem, SchemaError
from mixer.settings import MixerSettings

STRICT = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
KEY = Signer(bytes(32), "meadow").public_key


def in_pydantic(annotation: Any) -> Any:
    """A type with the limits of ours, in pydantic's words."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        made = in_pydantic(arguments[0])
        for rule in annotation.__metadata__:
            made = Annotated[made, _marker(rule)]
        return made
    if kind in (Union, UnionType):
        return Union[tuple(in_pydantic(part) for part in arguments)]  # noqa: UP007
    if kind is tuple:
        items = [part if part is Ellipsis else in_pydantic(part) for part in arguments]
        return Annotated[tuple[tuple(items)], pydantic.Field(strict=False)]  # type: ignore[misc]
    if kind in (list, dict):
        return kind[tuple(in_pydantic(part) for part in arguments)]
    if isinstance(annotation, type) and issubclass(annotation, Schema):
        return model_of(annotation)
    if annotation is Path or isinstance(annotation, enum.EnumType):
        return Annotated[annotation, pydantic.Field(strict=False)]
    return annotation


def _marker(rule: Any) -> Any:
    match rule:
        case After():
            return pydantic.AfterValidator(rule.function)
        case Before():
            return pydantic.BeforeValidator(rule.function)
        case By():
            return pydantic.Field(discriminator=rule.key)
        case Limits():
            given = {
                name: value
                for name in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")
                if (value := getattr(rule, name)) is not None
            }
            return pydantic.Field(**given)
    raise AssertionError(rule)


@cache
def model_of(schema: type[Schema]) -> type[pydantic.BaseModel]:
    """A model of pydantic with the keys of a schema, without its rules across keys."""
    fields = {
        name: (in_pydantic(field.annotation), ... if field.default is REQUIRED else copy.copy(field.default))
        for name, field in fields_of(schema).items()
    }
    return pydantic.create_model(schema.__name__, __config__=STRICT, **fields)  # type: ignore[call-overload]


def _profile() -> dict[str, Any]:
    made: dict[str, Any] = json_values(load_profile("raspberry-pi-zero-2-w").as_dict(only_given=True))
    return made


def _rich_fleet() -> dict[str, Any]:
    return fleet_values(None) | {
        "privacy": {
            "epsilon": 2.0, "method": "dp-sgd", "clipping": {"kind": "layers", "norms": [0.5, 1.0]},
            "schedule": {"kind": "custom", "weights": [1, 2.5]}, "two_point": {"coordinates": "all"},
        },
        "rounds": 2,
        "model": {
            "name": "digits", "inputs": {"csv": {"features": ["a", 2], "scale": {"a": 2}, "window": 4}},
        },
        "test_data": {"path": "x", "classes": ["yes", "no"], "shape": [8, 8]},
        "page": {"hosts": ["fleet.example"]},
    }  # fmt: skip


def _rich_agent() -> dict[str, Any]:
    return agent_values(None, KEY) | {
        "limits": {"methods": ["dp-sgd"], "trust": ["none"], "linkability": ["round"], "mixer_keys": []},
        "governor": {"hours": ["22:00-06:00"], "command": ["/bin/true"], "thermal_zones": ["cpu"]},
        "serve": {"mqtt": {"url": "mqtts://broker.example"}, "timeout_s": 3},
        "mqtt": {"url": "wss://broker.example/mqtt", "keepalive_s": 60, "client_id": "{cn}-{random}"},
    }


def _plans() -> Iterator[dict[str, Any]]:
    yield plan_values()
    yield plan_values(**terms(rate=0.125, local_steps=3))


VALUES: dict[str, tuple[type[Schema], dict[str, Any]]] = {
    "plan": (Plan, next(_plans())),
    "another plan": (Plan, list(_plans())[1]),
    "fleet.yaml": (FleetSettings, _rich_fleet()),
    "agent.yaml": (AgentSettings, _rich_agent()),
    "mixer.yaml": (MixerSettings, {"fleet": "meadow", "coordinator_key": KEY}),
    "profile": (Profile, _profile()),
    "token keys": (
        TokenKeys,
        {
            "job": bytes(16), "linkability": "round", "tokens": 1, "sealing_key": bytes(32),
            "first_round": 3, "moduli": [b"\x80" + bytes(254) + b"\1"] * 2,
        },
    ),
    "answer": (
        EnrolAnswer,
        {
            "device": "0123456789abcdef0123456789abcdef", "certificate": "…", "authorities": "…",
            "fleet": "meadow", "coordinator_key": KEY,
            "broker": {"url": "mqtt://x", "authority": "fleet"},
        },
    ),
}  # fmt: skip

ODD = [
    None, True, False, 0, 1, -1, 2, 5, 10**30, -(10**400), 0.0, -0.0, 0.5, 1.5, 1e-320, 1e300,
    math.inf, math.nan,
    "", "a", "A", "1", "1.5", "none", "auto", "yes", "a\n", "x" * 600, "mqtt://x", "22:00-06:00", "é",
    b"", b"a", bytes(16), bytes(32), [], ["a"], [1], [1, 2], [0.5], [None], [[1]], (), (1,), {}, {"a": 1},
    {"kind": "none"}, {"kind": "bounded"}, {"kind": "x"}, {"kind": []}, {1: 2}, {"path": "x"}, ["a", "a"],
]  # fmt: skip


def places(value: Any, here: Location = ()) -> Iterator[Location]:
    """All keys and indices in values."""
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, below in items:
        yield (*here, key)
        yield from places(below, (*here, key))


def changed(values: dict[str, Any], place: Location, how: str, odd: Any) -> dict[str, Any]:
    """Values with another one in one place, without it, or with one more key beside it."""
    made = copy.deepcopy(values)
    section: Any = made
    for key in place[:-1]:
        section = section[key]
    if how == "remove":
        del section[place[-1]]
    elif how == "add" and isinstance(section, dict):
        section["stranger"] = odd
    else:
        section[place[-1]] = odd
    return made


def known_part(location: Sequence[int | str], values: Any) -> Location:
    """A place that pydantic names, without the names of a union's branches."""
    known: Location = ()
    for part in location:
        if (isinstance(values, Mapping) and part in values) or (
            isinstance(values, list | tuple) and isinstance(part, int) and part < len(values)
        ):
            known, values = (*known, part), values[part]
    return known


def theirs(schema: type[Schema], values: dict[str, Any]) -> tuple[Any, set[Location]]:
    """What pydantic makes of values, or where something is wrong with them."""
    try:
        return model_of(schema).model_validate(values).model_dump(), set()
    except pydantic.ValidationError as error:
        return None, {
            (*known_part(each["loc"], values), *(each["loc"][-1:] if each["type"] == "missing" else ()))
            for each in error.errors(include_url=False)
        }


def ours(schema: type[Schema], values: dict[str, Any]) -> tuple[Any, set[Location]]:
    """The same, by our own checks; what only a rule across keys refuses passes here, too."""
    try:
        return schema.checked(values).as_dict(), set()
    except SchemaError as error:
        return None, {each.location for each in error.problems if not _is_of_a_rule(each)}


def _is_of_a_rule(problem: Problem) -> bool:
    return problem.error is not None and problem.value is NOTHING


def is_beside(place: Location, others: set[Location]) -> bool:
    """Whether one of the others is the place, above it or below it."""
    return any(place[: len(each)] == each or each[: len(place)] == place for each in others)


@pytest.mark.parametrize("name", VALUES)
def test_the_values_themselves_are_good(name: str) -> None:
    schema, values = VALUES[name]
    assert theirs(schema, values)[0] == ours(schema, values)[0]


@pytest.mark.parametrize("name", VALUES)
def test_whatever_stands_in_one_place_is_judged_alike(name: str) -> None:
    schema, values = VALUES[name]
    refused = 0
    for place in places(values):
        for odd in ODD:
            refused += _compare(schema, changed(values, place, "replace", odd))
        for how in ("remove", "add"):
            refused += _compare(schema, changed(values, place, how, 1))
    assert refused > 100


@pytest.mark.heavy
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("examples", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_whatever_stands_in_several_places_is_judged_alike(name: str, examples: int) -> None:
    schema, good = VALUES[name]

    @settings(max_examples=examples, deadline=None)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        values = good
        for _ in range(data.draw(st.integers(1, 4))):
            known = list(places(values))
            if not known:
                break
            place = data.draw(st.sampled_from(known))
            how = data.draw(st.sampled_from(["replace", "replace", "remove", "add"]))
            values = changed(values, place, how, data.draw(st.sampled_from(ODD)))
        _compare(schema, values)

    holds()


def _compare(schema: type[Schema], values: dict[str, Any]) -> bool:
    """Compare both on some values; return whether they are refused."""
    their_values, their_places = theirs(schema, values)
    our_values, our_places = ours(schema, values)
    assert bool(their_places) == bool(our_places), (values, their_places, our_places)
    for place in our_places:
        assert is_beside(place, their_places), (place, their_places)
    for place in their_places:
        assert is_beside(place, our_places), (place, our_places)
    if our_values is not None:
        assert repr(their_values) == repr(our_values)
    return bool(their_places)
