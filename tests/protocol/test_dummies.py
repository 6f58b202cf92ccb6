"""Dummies: as many as fragments, of their length, from the plan alone."""

from __future__ import annotations

import numpy as np
import pytest
from fleets import make_plan

from dpagent.protocol.codec import encode
from dpagent.protocol.dummies import MAX_DUMMIES, as_sent, dummies_for
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask
from dpagent.protocol.update_size import values_of

PLANS = [
    make_plan(),
    make_plan(round=3, wire={"block": 7_000}),
    make_plan(wire={"block": 4_001}, clipping={"count_weight": 0.5}),
]


@pytest.mark.parametrize("plan", PLANS)
def test_dummies_are_as_many_as_fragments_and_as_long(plan: Plan) -> None:
    fragments = list(cut(np.zeros(values_of(plan), np.int64), plan))
    dummies = list(dummies_for(plan))
    assert [each.position for each in dummies] == [each.position for each in fragments]
    assert len({each.id for each in dummies}) == len(dummies)
    sent = [as_sent(encode(each), plan) for each in dummies]
    assert {*map(len, sent)} == {len(encode(each)) for each in fragments}


@pytest.mark.parametrize("plan", PLANS)
def test_the_dimension_is_that_of_the_task(plan: Plan) -> None:
    assert values_of(plan) == RoundTask.of(plan).release.dimension


def test_the_first_round_with_a_projection_has_the_dimension_of_second_moments() -> None:
    projection = {"values": 64, "record_norm": 1.0}
    assert values_of(make_plan(projection=projection)) == 64 * 65 // 2
    assert values_of(make_plan(projection=projection, round=2)) == make_plan().model.parameters


def test_a_fragment_leaves_as_it_is() -> None:
    plan = make_plan()
    fragment = encode(next(cut(np.ones(10, np.int64), plan)))
    assert as_sent(fragment, plan) == fragment


def test_a_plan_that_asks_for_too_many_gets_none() -> None:
    at_the_bound = make_plan(wire={"block": 1}, model={"parameters": MAX_DUMMIES})
    assert sum(1 for _ in dummies_for(at_the_bound)) == MAX_DUMMIES
    assert not list(dummies_for(make_plan(wire={"block": 1}, model={"parameters": MAX_DUMMIES + 1})))
