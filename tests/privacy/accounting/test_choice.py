"""The accountant that is chosen for a job: the one its name, its grid and the number of its rounds say."""

from __future__ import annotations

from typing import get_args

import pytest

from dpagent.privacy.accounting.choice import accountant_name, accountant_named, priced
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.events import ApproximateEvent, Event, GaussianEvent
from dpagent.privacy.ranges import AccountantName

DELTA = 1e-5
PURE = [ApproximateEvent(0.5)]


def different(count: int) -> list[Event]:
    return [GaussianEvent(2.0 + number / 1_000) for number in range(count)]


@pytest.mark.parametrize(
    ("events", "delta", "name"),
    [(PURE, 0.0, "basic"), (PURE, DELTA, "pld"), (different(2_048), DELTA, "pld"),
     (different(2_049), DELTA, "rdp"), (different(2_048) * 2, DELTA, "pld")],
    ids=["no delta", "pure", "2,048 different", "2,049 different", "2,048 twice"],
)  # fmt: skip
def test_the_name_is_that_of_the_documented_limits(events: list[Event], delta: float, name: str) -> None:
    assert accountant_name(events, delta) == name


@pytest.mark.parametrize(("events", "delta"), [(PURE, 0.0), (PURE, DELTA), (different(2_049), DELTA)])
def test_the_accountant_is_the_one_that_is_named(events: list[Event], delta: float) -> None:
    chosen = priced(events, delta)[0]
    assert chosen.name == accountant_name(events, delta)
    assert all(map(chosen.supports, events))
    assert (getattr(chosen, "grid", None) is None) is (chosen.name != "pld")


@pytest.mark.parametrize("name", get_args(AccountantName))
def test_each_name_makes_its_accountant(name: AccountantName) -> None:
    assert accountant_named(name).name == name


@pytest.mark.parametrize("grid", [1e-7, 0.1, 1.0])
def test_a_pinned_grid_is_kept(grid: float) -> None:
    made = accountant_named("pld", grid=grid)
    assert isinstance(made, PldAccountant)
    assert made.grid == grid
