"""Attack: a schedule that takes a minute to price, at each announcement, before the device may decline it.

Claim: a device prices any schedule that a plan can hold by at most 70 million cells of transforms on one
grid, and a few tries to find the grid, which transform nothing: a second or two on one core of a PC, where
the slowest schedule that we found took 110. The price is a bound, and the one that the auditor finds.

And plans that lead to no charge take a tenth of the board's time, however many come: declined ones, and such
as the coordinator replaces while the device prepares them. Before, the latter took all of it: 98 %.

Power: there is no randomness. Work is counted, not time: on the code of before these schedules take 8 to 120
times as many cells, so the test fails each time; by chance it fails never.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import Device, open_device
from fleets import make_plan, make_task, records, terms
from ledgers import DATASET, LIMITS, open_state
from numpy.typing import NDArray

from agent.admission import admit
from agent.declined import Declined
from agent.training_messages import Order, Prepared
from dpagent.privacy.accounting.choice import accountant_named, priced
from dpagent.privacy.accounting.composed_loss import ComposedLoss
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.events import ApproximateEvent, Event, GaussianEvent, poisson_sampled

MOST_CELLS = 70_000_000
DELTA = 1e-5


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cells of every transform that is taken from here on."""
    seen: list[int] = []
    transform = ComposedLoss._transform

    def counted(
        self: ComposedLoss, mechanism: int, tilt: float, log_moment: float, cells: int
    ) -> NDArray[np.complex128]:
        seen.append(cells)
        return transform(self, mechanism, tilt, log_moment, cells)

    monkeypatch.setattr(ComposedLoss, "_transform", counted)
    return seen


def geometric(least: float, most: float, count: int) -> list[float]:
    return [float(value) for value in np.geomspace(least, most, count)]


SLOW: dict[str, tuple[list[Event], float]] = {
    "Gaussian noise": (
        [poisson_sampled(GaussianEvent(sigma), 0.9999, 64) for sigma in geometric(10.0, 100.0, 2_048)],
        211.704,
    ),
    "Laplace noise": (
        [poisson_sampled(ApproximateEvent(cost), 0.5, 64) for cost in geometric(5e-5, 5.2e-5, 2_048)],
        0.0248993,
    ),
}
"""Schedules, and the ε that the code of before found for them, in 12 and 110 seconds."""


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_schedule_is_priced_by_little_work_and_from_above(name: str, cells: list[int]) -> None:
    events, true = SLOW[name]
    account, epsilon = priced(events, DELTA)
    assert 0 < sum(cells) <= MOST_CELLS
    assert true <= epsilon <= 1.02 * true
    # The charge pins the grid, and the auditor, who has nothing else, finds the same price.
    assert isinstance(account, PldAccountant)
    assert accountant_named("pld", grid=account.grid).epsilon_after(events, DELTA) == epsilon


ALTERNATING: list[Event] = [
    poisson_sampled(ApproximateEvent(1 / (2e3, 1e4)[i % 2]), 0.5, 64) for i in range(5_000)
]
"""A job of ε = 0.35, which any budget may have room for. Its ledger took 80 s to replay."""


@pytest.mark.parametrize("rounds", [250, pytest.param(5_000, marks=pytest.mark.slow)])
def test_a_long_history_is_replayed_by_little_work(
    rounds: int, cells: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer looks, each as before, and bounds from above between them."""
    most = 200_000_000
    if rounds < 5_000:
        monkeypatch.setattr("dpagent.privacy.accounting.pld._MOST_RUNNING_WORK", most := 30_000_000)
    events = ALTERNATING[:rounds]
    account, epsilon = priced(events, DELTA)
    assert isinstance(account, PldAccountant)
    cells.clear()
    running = account.running_epsilon(events, DELTA)
    assert 0 < sum(cells) <= most
    assert running.shape == (rounds,)
    assert running[-1] == pytest.approx(epsilon, rel=1e-3)
    looks = np.flatnonzero(np.diff(running, append=np.inf) > 0)
    assert 10 < len(looks) < rounds / 4
    for last in looks[:: len(looks) // 4]:
        assert running[last] == pytest.approx(account.epsilon_after(events[: last + 1], DELTA), rel=1e-3)
    assert (np.diff(running) >= 0).all()


@pytest.mark.parametrize(
    ("sigma", "rounds", "rate", "delta", "known"),
    [(0.3, 2, 1e-8, 1e-9, 5.31e-4), (0.5, 50, 1e-6, 1e-6, 2.34e-4)],
)
def test_where_great_losses_are_rare_no_search_for_a_grid_takes_long(
    sigma: float, rounds: int, rate: float, delta: float, known: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the last grid was transformed, and so counted: six finer ones were tried and given up, each
    after a search for its tilt. That took 18 s, and four times these cells."""
    seen: list[int] = []
    moments = ComposedLoss._moments_at

    def counted(self: ComposedLoss, tilt: float) -> Any:
        seen.append(sum(block.masses.size for block in self._blocks))
        return moments(self, tilt)

    monkeypatch.setattr(ComposedLoss, "_moments_at", counted)
    _, epsilon = priced([poisson_sampled(GaussianEvent(sigma), rate, rounds)], delta)
    assert 0 < sum(seen) <= MOST_CELLS
    assert epsilon <= known, "as the code of before found"


def test_a_device_declines_a_slow_plan_by_little_work(tmp_path: Path, cells: list[int]) -> None:
    noise = terms(noise_multipliers=geometric(10.0, 100.0, 2_048), rate=0.9999, local_steps=64)
    task = make_task(**noise | {"mechanism": noise["mechanism"] | {"parameters": {"resolution": 65_536}}})
    state = open_state(tmp_path / "state")
    with pytest.raises(Declined, match=r"would bring ε to 214"):
        admit(task, records(20), state.ledger.books, DATASET, LIMITS, now=0.0)
    state.close()
    assert 0 < sum(cells) <= MOST_CELLS


class Slow:
    """A device's decisions, each of which takes three seconds on its clock.

    Args:
        device: whose decisions they become.
        is_replaced: whether another plan comes while the device prepares the one that it decided on.
    """

    def __init__(self, device: Device, *, is_replaced: bool) -> None:
        self._device, self._is_replaced = device, is_replaced
        self._admit, self._prepare = device.cycle._questions.price, device.worker.prepare
        device.cycle._questions.price, device.worker.prepare = self.admit, self.prepare  # type: ignore[method-assign]
        self._unanswered: list[Future[Any]] = []
        self._plans = 0
        self.began_at: list[float] = []

    def admit(self, *arguments: Any) -> Any:
        self.began_at.append(self._device.clock.monotonic())
        self._device.clock.compute(3.0)
        return self._admit(*arguments)

    def prepare(self, order: Order) -> Future[Prepared]:
        if not self._is_replaced:
            return self._prepare(order)
        self._unanswered.append(Future())
        return self._unanswered[-1]

    def decide_on_a_plan(self) -> None:
        """Announce one, unless one waits, and let time pass until the device decides on it."""
        if not (self._is_replaced and self._plans):
            self._announce()
        decisions = len(self.began_at)
        while len(self.began_at) == decisions:
            self._device.clock.advance(max(0.01, self._device.cycle.due_in_s()))
            self._device.cycle.advance()
        if self._is_replaced:
            self._announce()
            self._unanswered.pop().set_result(Prepared(0.0))
            self._device.cycle.advance()

    def _announce(self) -> None:
        self._plans += 1
        self._device.take_plan(make_plan(job=self._plans.to_bytes(16, "big"), deadline=1e9))


@pytest.mark.parametrize("is_replaced", [False, True], ids=["declined", "replaced"])
def test_plans_that_lead_to_no_charge_take_a_tenth_of_the_time(tmp_path: Path, is_replaced: bool) -> None:
    limits = {} if is_replaced else {"maximum_job_epsilon": 1e-6}
    with open_device(tmp_path, limits=limits) as device:
        device.give()
        slow = Slow(device, is_replaced=is_replaced)
        for _ in range(5):
            slow.decide_on_a_plan()
        assert device.charged() == []
    assert min(np.diff(slow.began_at)) >= 30.0
