"""Whom a device trusts is its owner's word, also after the device has been charged for a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devices import open_device, sent_for
from fleets import make_plan, published_plan, update_plan

from dpagent.protocol.messages import Plan

_BUDGET = {"epsilon": 50.0, "delta": 1e-3, "coordinator": {"epsilon": 50.0, "delta": 1e-3}}
_TRUSTING: dict[str, Any] = {"methods": ["dp-sgd", "central"], "trust": ["none", "coordinator"]}
_NO_LONGER: dict[str, Any] = {"methods": ["dp-sgd", "central"], "trust": ["none"]}


@pytest.mark.parametrize(
    "announced", [update_plan(), make_plan()], ids=["the same plan", "one that trusts nobody"]
)
def test_no_update_leaves_for_a_coordinator_that_the_owner_trusts_no_more(
    tmp_path: Path, announced: Plan
) -> None:
    """It is charged, spooled and has no noise; then the owner strikes the coordinator off the list."""
    plan = update_plan()
    assert (announced.job, announced.round) == (plan.job, plan.round)
    with open_device(tmp_path, limits=_TRUSTING, budget=_BUDGET) as device:
        device.take_plan(plan)
        device.give()
        device.advance()
        assert device.charged() == [1]
        assert device.pending()
    with open_device(tmp_path, limits=_NO_LONGER, budget=_BUDGET) as device:
        assert sent_for(device, announced) == 0
    with open_device(tmp_path, limits=_TRUSTING, budget=_BUDGET) as device:
        assert sent_for(device, plan) > 0


def test_an_update_with_noise_of_its_device_leaves_all_the_same(tmp_path: Path) -> None:
    """It is charged in the account that trusts nobody too."""
    plan = update_plan(device_noise=[4.0, 3.0, 2.0])
    with open_device(tmp_path, limits=_TRUSTING, budget=_BUDGET) as device:
        device.take_plan(plan)
        device.give()
        device.advance()
        assert device.charged() == [1, 1]
        assert device.pending()
    with open_device(tmp_path, limits=_NO_LONGER, budget=_BUDGET) as device:
        assert sent_for(device, plan) > 0


def test_no_update_of_algorithm_1_leaves_once_the_owner_allows_none(tmp_path: Path) -> None:
    allowing = {"methods": ["incrementing"], "allow_unproven": True}
    plan = published_plan()
    with open_device(tmp_path, limits=allowing) as device:
        device.take_plan(plan)
        device.give()
        device.advance()
        assert device.charged() == [1]
        assert device.pending()
    with open_device(tmp_path, limits=allowing | {"allow_unproven": False}) as device:
        assert sent_for(device, plan) == 0
    with open_device(tmp_path, limits=allowing) as device:
        assert sent_for(device, plan) > 0
