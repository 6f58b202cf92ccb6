"""A training process that ends, takes too long, or has nothing to do."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from devices import STAYS_S, AtOnce, Device, Mortal, Unpaused
from fleets import make_plan

from agent.training_messages import Order, Prepared, Update, UsedProcessError, WorkerError


def test_a_plan_that_ends_training_before_the_charge_is_declined(device: Device) -> None:
    mortal = Mortal(device, prepares=1)
    plan = make_plan()
    device.take_plan(plan)
    device.give()
    device.advance()
    ((_, reason, _),) = device.declined()
    assert reason == "the training process ended: signal 9"
    assert (device.charged(), device.pending()) == ([], {})
    device.take_plan(plan)
    device.advance()
    assert len(mortal.orders) == 1, "not decided twice"


@pytest.mark.parametrize(("prepares", "updates"), [(0, 1), (0, 2), (0, 5)])
def test_a_charged_round_survives_the_end_of_training_in_the_end_with_noise_alone(
    device: Device, prepares: int, updates: int
) -> None:
    mortal = Mortal(device, prepares=prepares, updates=updates)
    plan = make_plan()
    device.take_plan(plan)
    device.give()
    for _ in range(updates + 1):
        device.advance()
        assert device.charged() == [1], "one charge, whatever happens"
        device.clock.advance(10.0)
    device.advance()
    assert set(device.pending()) == {1}
    ((state, reason),) = device.state.connection.execute("SELECT state, reason FROM rounds")
    assert state == "spooled"
    assert reason == (None if updates < 2 else "the training process ended: signal 9")
    assert [order.failure is None for order in mortal.orders] == [True, True, *[False] * 5][: updates + 1]


def test_training_longer_than_the_limit_is_declined(device: Device) -> None:
    device.worker.longest_s = 3_600.1
    device.take_plan(make_plan())
    device.give()
    device.advance()
    ((_, reason, _),) = device.declined()
    assert "limits.maximum_training_s" in reason
    assert device.charged() == []


def test_a_round_whose_slots_end_after_its_deadline_is_declined_before_the_charge(device: Device) -> None:
    device.worker.longest_s = 20.0
    device.take_plan(make_plan(deadline=5_000.0 + 19.0))
    device.give()
    device.advance()
    ((_, reason, _),) = device.declined()
    assert "could not send before 2" in reason
    assert device.charged() == []


class Silent(Unpaused):
    """A training process that answers no question of one kind until it is ended."""

    def __init__(self, device: Device, kind: str) -> None:
        self._inner, self._kind = device.worker, kind
        self._asked: list[Future[Any]] = []
        device.cycle._worker = self

    def prepare(self, order: Order) -> Future[Prepared]:
        return self._silence() if self._kind == "prepare" else self._inner.prepare(order)

    def update(self) -> Future[Update]:
        return self._silence() if self._kind == "update" else self._inner.update()

    def look(self) -> None:
        pass

    def end(self) -> None:
        for answer in self._asked:
            answer.set_exception(WorkerError("the training process ended: signal 9"))
        self._asked.clear()
        self._kind = ""

    def _silence(self) -> Future[Any]:
        self._asked.append(Future())
        return self._asked[-1]


class Used(Unpaused):
    """A training process that has worked, and must not try engines until it is ended."""

    def __init__(self, device: Device) -> None:
        self._inner, self._is_used = device.worker, True
        self.prepared, self.ended = 0, 0
        device.cycle._worker = self

    def prepare(self, order: Order) -> Future[Prepared]:
        self.prepared += 1
        if not self._is_used:
            return self._inner.prepare(order)
        answer: Future[Prepared] = Future()
        answer.set_exception(UsedProcessError("in a new training process"))
        return answer

    def update(self) -> Future[Update]:
        return self._inner.update()

    def look(self) -> None:
        pass

    def end(self) -> None:
        self.ended += 1
        self._is_used = False


def test_a_round_that_wants_a_new_training_process_gets_one(device: Device) -> None:
    used = Used(device)
    device.take_plan(make_plan())
    device.give()
    device.advance()
    assert (used.prepared, used.ended) == (2, 1)
    assert device.declined() == []
    assert device.charged() == [1]
    assert set(device.pending()) == {1}


def until_training_does_not_answer(device: Device, at_most_s: float) -> None:
    device.clock.advance(max(device.cycle.due_in_s(), 1e-6))
    device.cycle.advance()
    device.clock.advance(at_most_s - 60.0)
    device.cycle.advance()
    assert device.cycle.due_in_s() > 0, "it may still answer"
    device.clock.advance(120.0)
    device.cycle.advance()


def test_training_that_never_answers_costs_a_plan_that_is_not_charged_yet(device: Device) -> None:
    Silent(device, "prepare")
    device.take_plan(make_plan())
    device.give()
    until_training_does_not_answer(device, 3_600.0)
    device.cycle.advance()
    ((_, reason, _),) = device.declined()
    assert reason == "the training process ended: signal 9"


def test_training_that_never_answers_is_asked_again_for_a_charged_round(device: Device) -> None:
    Silent(device, "update")
    device.take_plan(make_plan())
    device.give()
    device.cycle.advance()
    until_training_does_not_answer(device, 4 * 3_600.0)
    device.cycle.advance()
    assert (device.charged(), device.pending()) == ([1], {})
    device.clock.advance(10.0)
    device.advance()
    assert set(device.pending()) == {1}


class Noted(AtOnce):
    """Notes in which order training is asked to end, and to look at the data."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.trainer)
        self.said: list[str] = []
        device.cycle._worker = self

    def end(self) -> None:
        self.said.append("end")

    def look(self) -> None:
        self.said.append("look")


def test_training_that_does_not_stay_is_ended_before_the_data_are_looked_at(device: Device) -> None:
    """A small board has memory for one of them."""
    noted, device.cycle._stays_s = Noted(device), 0.0
    for number in (1, 2):
        device.take_plan(make_plan(round=number))
        device.give()
        device.advance()
        assert device.charged() == [*range(1, number + 1)]
        assert noted.said == ["end", "look"] * number


def test_training_that_has_nothing_to_do_is_ended_and_begins_again(device: Device) -> None:
    ends: list[float] = []
    device.worker.end = lambda: ends.append(device.clock.monotonic())  # type: ignore[method-assign]
    device.take_plan(make_plan())
    device.give()
    device.advance()
    spooled_at = device.clock.monotonic()
    device.clock.advance(STAYS_S - 1.0)
    device.cycle.advance()
    assert ends == []
    device.clock.advance(2.0)
    assert device.cycle.due_in_s() == 0
    device.cycle.advance()
    assert ends == [spooled_at + STAYS_S + 1.0]
    assert device.cycle.due_in_s() == np.inf
    device.take_plan(make_plan(round=2))
    device.give()
    device.advance()
    assert device.charged() == [1, 2]
