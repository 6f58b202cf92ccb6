"""What looking at a sweep costs private records, against compositions by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dpagent.learning.models.built_ins import built_in
from dpagent.privacy.accounting.choice import priced
from dpagent.privacy.accounting.imperfect_noise import imperfect_delta
from dpagent.privacy.accounting.selection import PoissonRuns, selection_epsilon, worst_of
from dpagent.privacy.events import SelfComposedEvent
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE
from dpagent.privacy.statement import Trust, Unit
from simulation.choices import settle
from simulation.programs.configurations import fleet_settings
from simulation.request import Request
from simulation.settings import DataForm
from simulation.sweep.price import RunEvents, events_of, price_of

DIGITS = DataForm(1437, 360, (8, 8, 1), 10)
RECORD, DEVICE = (Unit.RECORD, Trust.NONE), (Unit.DEVICE, Trust.COORDINATOR)


def run(seed: int = 0, **changes: Any) -> RunEvents:
    request = Request(**{"devices": 5, "rounds": 10, "epsilon": 2.0, "model": "digits", **changes})
    settings, _ = settle(request, DIGITS, "digits", built_in("digits"))
    return events_of(fleet_settings(settings), built_in("digits"), (settings.devices, seed))


def test_one_run_costs_its_target() -> None:
    (price,) = price_of([run()])
    assert price.scope == RECORD
    assert price.epsilon == pytest.approx(2.0, rel=1e-3)
    assert price.delta == 1e-5
    assert price.best_alone == {}


def test_several_runs_cost_what_their_events_compose_to_whatever_was_varied() -> None:
    runs = [run(learning_rate=0.5), run(learning_rate=2.0), run(clip_norm=0.1), run(1), run(devices=7)]
    (price,) = price_of(runs)
    together = [SelfComposedEvent(event, 5) for event in runs[0].events[RECORD]]
    assert price.epsilon == pytest.approx(priced(together, 1e-5)[1], rel=1e-3)
    assert 2.0 < price.epsilon < 5 * 2.0
    assert price.best_alone.keys() == {"logarithmic", "geometric", "Poisson"}
    assert 2.0 < price.best_alone["logarithmic"] < price.best_alone["geometric"]
    many = price_of([run()] * 20)[0]
    assert many.best_alone["logarithmic"] < many.epsilon / 2


def test_units_are_never_added_and_what_has_no_bound_says_so() -> None:
    record, device = price_of([run(), run(method="central", epsilon=8.0)])
    assert (record.scope, device.scope) == (RECORD, DEVICE)
    assert math.isinf(record.epsilon)
    assert math.isinf(device.epsilon)
    alike = [run(method="central", epsilon=8.0, learning_rate=rate) for rate in (0.5, 1.0)]
    (device,) = price_of(alike)
    assert 8.0 < device.epsilon < 16.0
    # A device of another deal holds other records.
    assert math.isinf(price_of([*alike, run(1, method="central", epsilon=8.0)])[0].epsilon)


def test_jobs_that_reserve_their_budget_whole_add_up() -> None:
    bounded = {"method": "incrementing", "noise": "laplace", "cap": "bounded", "rounds": 2}
    (price,) = price_of([run(**bounded, epsilon=epsilon) for epsilon in (20.0, 30.0)])
    assert price.epsilon == pytest.approx(50.0)
    assert price.delta >= 1e-5


@pytest.mark.parametrize("runs", [1, 3, 60])
def test_the_price_is_that_of_noise_as_it_is_drawn(runs: int) -> None:
    """Sixty runs of ε = 8 come to an ε at which what the sampler lacks adds more to δ than δ is."""
    each = run(epsilon=8.0)
    (price,) = price_of([each] * runs)
    events = [SelfComposedEvent(event, runs) for event in each.events[RECORD]]
    exact = priced(events, price.delta * (1 - NOISE_SHARE))[1]
    off = runs * each.inexactness[RECORD]
    assert off > 0
    if runs < 60:
        assert price.delta == 1e-5
        assert price.epsilon >= exact
        assert imperfect_delta(price.epsilon, 0.0, off) <= NOISE_SHARE * price.delta
    else:
        together = priced(events, 1e-5 * (1 - NOISE_SHARE))[1]
        assert imperfect_delta(together, 0.0, off) > 1e-5, "no bound at the δ of one run"
        assert price.epsilon == pytest.approx(60 * 8.0, rel=1e-3)
        assert price.delta == pytest.approx(60e-5)
        assert imperfect_delta(8.0, 0.0, each.inexactness[RECORD]) <= NOISE_SHARE * 1e-5


@pytest.mark.parametrize("runs", [3, 60])
def test_the_price_of_the_best_alone_is_that_of_noise_as_it_is_drawn(runs: int) -> None:
    """Nothing is said of a law by which the ε of sixty runs would be one at which what the sampler lacks adds
    too much to δ: here of Poisson's, 59.7."""
    each = run(epsilon=8.0)
    (price,) = price_of([each] * runs)
    off = runs * each.inexactness[RECORD]
    assert ("Poisson" in price.best_alone) == (runs == 3)
    assert price.best_alone.keys() >= {"logarithmic", "geometric"}
    for epsilon in price.best_alone.values():
        assert imperfect_delta(epsilon, 0.0, off) <= NOISE_SHARE * price.best_delta
    if runs == 3:
        of_one = worst_of([each.events[RECORD]] * 3)
        assert price.best_alone["Poisson"] > selection_epsilon(of_one, PoissonRuns(3), price.best_delta)


def test_what_runs_cost_is_added_up_in_their_own_column() -> None:
    """With noise of devices besides, a run has a figure that trusts nobody, and it is another one."""
    each = run(method="central", epsilon=2.0, device_noise=30.0)
    column = (Unit.DEVICE, Trust.NONE)
    price = next(price for price in price_of([each] * 8) if price.scope == column)
    assert price.delta == pytest.approx(8e-5)
    assert price.epsilon == pytest.approx(8 * 30.0, rel=1e-3)
