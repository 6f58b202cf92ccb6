"""A price within a bound of work: from above, nearly tight, the same for all who ask."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpagent.errors import ParameterError
from dpagent.privacy.accounting import pld
from dpagent.privacy.accounting.choice import accountant_named, priced
from dpagent.privacy.accounting.composed_loss import GridTooFineError
from dpagent.privacy.accounting.normal_form import runs_of
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.events import ApproximateEvent, Event, GaussianEvent, poisson_sampled

DELTA = 1e-5
NOISE = np.geomspace(1.0, 4.0, 60).tolist()
GAUSSIAN: list[Event] = [poisson_sampled(GaussianEvent(sigma), 0.05, 3) for sigma in NOISE]
PURE: list[Event] = [poisson_sampled(ApproximateEvent(0.1 / sigma), 0.5, 3) for sigma in NOISE]
APPROXIMATE: list[Event] = [poisson_sampled(ApproximateEvent(0.1 / sigma, 1e-9), 0.5, 3) for sigma in NOISE]
MIXED = GAUSSIAN[:30] + PURE[:30]


@pytest.mark.parametrize("events", [GAUSSIAN, PURE, APPROXIMATE, MIXED], ids=["σ", "ε", "ε, δ", "both"])
def test_less_work_costs_more_never_less_and_is_priced_alike_by_all(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = PldAccountant().epsilon_after(events, DELTA)
    assert priced(events, DELTA)[1] == exact
    costs = []
    for work in (2**20, 2**18, 2**17, 2**16):
        monkeypatch.setattr(pld, "_MOST_WORK", work)
        account, epsilon = priced(events, DELTA)
        assert isinstance(account, PldAccountant)
        assert PldAccountant().epsilon_after(events, DELTA) == epsilon, "a coordinator that plans it"
        costs.append(epsilon)
        # For whom the grid is given, work has no bound.
        monkeypatch.setattr(pld, "_MOST_WORK", 1)
        assert accountant_named("pld", grid=account.grid).epsilon_after(events, DELTA) == epsilon
    assert costs == sorted(costs)
    assert exact <= costs[0]
    assert costs[0] < costs[-1] < 1.25 * exact


def test_where_no_grid_is_coarse_enough_other_bounds_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pld, "_MOST_WORK", 1)
    for events, name in ((GAUSSIAN, "rdp"), (PURE, "rdp"), (APPROXIMATE, "basic")):
        account, epsilon = priced(events, DELTA)
        assert account.name == name
        assert epsilon == accountant_named(account.name).epsilon_after(events, DELTA)
    assert PldAccountant().epsilon_after(GAUSSIAN, DELTA) == RdpAccountant().epsilon_after(GAUSSIAN, DELTA)
    mixed = GAUSSIAN + APPROXIMATE
    assert PldAccountant().epsilon_after(mixed, DELTA) == math.inf
    with pytest.raises(ParameterError, match="takes too long"):
        priced(mixed, DELTA)


def test_what_has_a_price_has_a_figure_after_each_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a look at a part of a job takes longer than the price of all of it, as with a great ε: else
    a device would refuse its own ledger at its next start (before, 2,047 rounds at ε = 984 and δ = 1e-12)."""
    events: list[Event] = [GaussianEvent(sigma) for sigma in np.geomspace(0.2, 0.3, 16).tolist()]
    account, epsilon = priced(events, DELTA)
    assert isinstance(account, PldAccountant)
    assert epsilon > 200
    exact = account.running_epsilon(events, DELTA)
    charges = [runs_of(event) for event in events]
    for work in (round(2**25 * 0.75**power) for power in range(40)):
        monkeypatch.setattr(pld, "_MOST_RUNNING_WORK", work)
        try:
            account._running_at(charges, DELTA, len(events))
        except GridTooFineError:
            break
    else:
        pytest.fail("no look takes too long: nothing is shown")
    running = account.running_epsilon(events, DELTA)
    assert (running >= exact * (1 - 1e-9)).all()
    assert running[-1] == pytest.approx(epsilon, rel=1e-9)
    monkeypatch.setattr(pld, "_MOST_RUNNING_WORK", 1)
    with pytest.raises(GridTooFineError):
        account.running_epsilon(events, DELTA)
