"""A device's part in a round, phase by phase, on a clock that stands still."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from devices import PERIOD_S, Device, open_device
from fleets import DIGITS, digits, make_plan, terms
from ledgers import DATASET

from agent.training import Trainer, Work
from agent.worker import Order, Prepared, Update, WorkerError
from dpagent import faults
from dpagent.errors import ConfigurationError, DpagentError, StorageError
from dpagent.faults import FaultPoint
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.notation import upwards
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.registry import MECHANISMS
from dpagent.protocol.codec import MessageError, decode
from dpagent.protocol.fragments import (
    content_digest,
    read_block,
    receipt_digest,
    weights_to_bytes,
)
from dpagent.protocol.messages import Fragment, Plan, Receipts
from dpagent.protocol.task import RoundTask

JOB, OTHER_JOB = b"j" * 16, b"k" * 16


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with open_device(tmp_path) as device:
        yield device


def refused(device: Device, plan: Plan) -> str:
    with pytest.raises(MessageError) as caught:
        device.cycle.take_plan(plan)
    return caught.value.reason


def receipts(*digests: bytes, job: bytes = JOB) -> Receipts:
    return Receipts(version=1, kind="receipts", job=job, round=1, digests=b"".join(digests))


# --- a plan arrives -----------------------------------------------------------------------------


def test_a_plan_of_another_fleet_changes_nothing(device: Device) -> None:
    device.give()
    assert refused(device, make_plan(fleet="others")) == "wrong fleet"
    assert not device.is_ready


def test_a_round_is_new_once_and_an_older_one_of_its_job_is_a_replay(device: Device) -> None:
    assert device.cycle.take_plan(make_plan(round=2))
    assert not device.cycle.take_plan(make_plan(round=2))
    assert refused(device, make_plan(round=1)) == "replayed"
    assert device.cycle.take_plan(make_plan(round=3))
    assert device.cycle.take_plan(make_plan(round=1, job=OTHER_JOB)), "another job begins where it likes"
    assert device.cycle.take_plan(make_plan(round=1, job=OTHER_JOB, state="finished"))
    assert not device.cycle.take_plan(make_plan(round=1, job=OTHER_JOB, state="finished"))


def test_an_older_round_is_a_replay_after_a_restart_too(tmp_path: Path) -> None:
    # Brokers come back with the plan that they retained when they last wrote their store.
    with open_device(tmp_path) as device:
        device.give()
        for number in (1, 2):
            device.cycle.take_plan(make_plan(round=number))
            device.clock.advance(make_plan().compute_slot_s)
            device.advance()
        pending = device.pending()
        assert set(pending) == {2}
    with open_device(tmp_path) as device:
        assert refused(device, make_plan(round=1)) == "replayed"
        assert device.pending() == pending
        assert device.cycle.take_plan(make_plan(round=2))
        assert device.pending() == pending


def test_a_round_is_run_once_however_often_it_is_announced(device: Device) -> None:
    plan = make_plan()
    arrived_at = device.clock.monotonic()
    device.cycle.take_plan(plan)
    assert not device.is_ready
    device.give()
    assert device.is_ready
    device.advance()
    assert not device.is_ready
    assert device.charged() == [1]
    (digests,) = device.pending().values()
    assert len(digests) == RoundTask.of(plan).blocks
    rows = device.state.connection.execute("SELECT min(due_at), max(due_at) FROM fragments").fetchone()
    opens_at = arrived_at + plan.compute_slot_s
    assert opens_at <= rows[0] < rows[1] <= opens_at + PERIOD_S + plan.jitter_window_s
    query = "SELECT body ->> 'charged_at' FROM entries WHERE kind = 'charge'"
    charged_at = device.state.connection.execute(query)
    assert charged_at.fetchone()[0] == "1970-01-01T01:23:20+00:00"
    for _ in range(2):
        device.cycle.take_plan(plan)
        assert not device.is_ready
        device.advance()
    assert device.charged() == [1]
    assert device.pending() == {1: digests}


def test_an_update_is_spooled_whole(device: Device) -> None:
    plan = make_plan()
    task = RoundTask.of(plan)
    device.cycle.take_plan(plan)
    device.give()
    device.advance()
    rows = device.state.connection.execute("SELECT digest, message, job, round FROM fragments").fetchall()
    positions = []
    for digest, message, job, number in rows:
        fragment = decode(message, Fragment)
        assert receipt_digest(fragment.id) == digest
        assert (fragment.job, fragment.round) == (plan.job, plan.round)
        assert (job, number) == (plan.job.hex(), plan.round)
        position, values = read_block(fragment, plan.wire, task.dimension)
        positions.append(position)
        assert np.ptp(values) > 0
    assert sorted(positions) == list(range(task.blocks))
    spent = device.state.ledger.epsilon_spent(DATASET)
    assert spent > 0
    assert f"ε = {upwards(spent)} of" in device.cycle.spent()


def test_what_is_pending_is_drawn_anew_when_the_round_is_announced_again(device: Device) -> None:
    plan = make_plan()
    device.cycle.take_plan(plan)
    device.give()
    device.advance()
    device.clock.advance(100.0)
    device.cycle.take_plan(plan)
    next_due_at = device.state.spool.next_due_at()
    assert next_due_at is not None
    assert next_due_at > device.clock.monotonic(), "at their old times all would leave at once"


def test_the_next_round_expires_this_ones_fragments(device: Device) -> None:
    device.give()
    for number in (1, 2):
        device.cycle.take_plan(make_plan(round=number))
        device.give()
        device.clock.advance(make_plan().compute_slot_s)  # one round a slot
        device.advance()
        assert set(device.pending()) == {number}
    assert device.charged() == [1, 2]


def test_the_end_of_a_job_leaves_nothing_to_send_or_decide(device: Device) -> None:
    device.cycle.take_plan(make_plan())
    device.give()
    device.advance()
    assert device.pending()
    device.cycle.take_plan(make_plan(state="finished"))
    assert device.pending() == {}
    device.give()
    assert not device.is_ready
    device.advance()
    assert device.charged() == [1]


def test_the_end_of_another_job_costs_the_open_round_nothing(device: Device) -> None:
    # A broker comes back with an older store, in which the job before has just ended.
    device.cycle.take_plan(make_plan())
    device.give()
    device.advance()
    pending = device.pending()
    assert device.cycle.take_plan(make_plan(job=OTHER_JOB, state="finished"))
    device.cycle.take_plan(make_plan())
    assert device.pending() == pending
    assert device.charged() == [1]


def test_lines_of_an_earlier_job_go_when_another_begins(device: Device) -> None:
    device.cycle.take_plan(make_plan())
    device.give()
    device.advance()
    lines = "SELECT count(*) FROM fragments"
    device.cycle.take_plan(make_plan(round=2))
    assert device.state.connection.execute(lines).fetchone()[0] > 0, "a line stays while the job lasts"
    device.cycle.take_plan(make_plan(job=OTHER_JOB, state="finished"))
    device.cycle.take_plan(make_plan(job=b"l" * 16))
    device.give()
    device.clock.advance(make_plan().compute_slot_s)
    device.advance()
    jobs = device.state.connection.execute("SELECT DISTINCT job FROM fragments").fetchall()
    assert [row[0] for row in jobs] == [(b"l" * 16).hex()]


@pytest.mark.parametrize(
    "point",
    [
        FaultPoint.AGENT_CHARGED, FaultPoint.AGENT_HEAD_SAVED, FaultPoint.AGENT_TRAINED,
        FaultPoint.AGENT_SPOOL_WRITTEN,
    ],
)  # fmt: skip
def test_a_round_that_was_charged_and_not_spooled_is_run_again_under_its_charge_with_fresh_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: FaultPoint
) -> None:
    plan, updates = make_plan(), []

    def crash(at: FaultPoint) -> None:
        if at is point:
            raise KeyboardInterrupt

    noisy_update = Trainer.noisy_update

    def kept(trainer: Trainer, work: Work) -> Update:
        updates.append(noisy_update(trainer, work))
        return updates[-1]

    monkeypatch.setattr(Trainer, "noisy_update", kept)
    with open_device(tmp_path) as device, monkeypatch.context() as patch:
        patch.setattr(faults, "reached", crash)
        device.cycle.take_plan(plan)
        device.give()
        with pytest.raises(KeyboardInterrupt):
            device.advance()
    with open_device(tmp_path) as device:
        assert device.charged() == [1]
        assert device.pending() == {}
        # For another plan it is not run, and the charge is not used.
        device.give()
        device.cycle.take_plan(make_plan(jitter_window_s=0.7))
        device.advance()
        assert device.pending() == {}
        device.cycle.take_plan(make_plan(deadline=plan.deadline + 60.0))
        device.advance()
        assert device.charged() == [1]
        assert set(device.pending()) == {1}
        rows = device.state.connection.execute("SELECT message FROM fragments").fetchall()
    blocks = {}
    for (message,) in rows:
        position, values = read_block(decode(message, Fragment), plan.wire, RoundTask.of(plan).dimension)
        blocks[position] = values
    sent = np.concatenate([blocks[position] for position in sorted(blocks)])[: len(updates[-1].values)]
    assert np.array_equal(sent, updates[-1].values)
    if point in (FaultPoint.AGENT_TRAINED, FaultPoint.AGENT_SPOOL_WRITTEN):
        first, last = updates
        assert np.mean(first.values == last.values) < 0.5, "the noise of before"


# --- the model arrives --------------------------------------------------------------------------


def test_a_model_that_does_not_come_is_asked_for_every_ten_seconds(device: Device) -> None:
    start = device.clock.monotonic()
    device.cycle.advance()
    device.cycle.take_plan(make_plan())
    for _ in range(60):
        device.cycle.advance()
        device.clock.advance(0.5)
    assert device.asked_at == [start + 10.0, start + 20.0]
    assert device.charged() == []


# --- the device decides -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_declined_before_anything_is_computed(
    device: Device, value: float
) -> None:
    numbers = DIGITS.initial_weights(0)
    numbers[-1] = value
    weights = weights_to_bytes(numbers)
    plan = make_plan(model={"digest": content_digest(weights)})
    device.cycle.take_plan(plan)
    device.give(weights)
    device.advance()
    ((number, reason, declined_at),) = device.declined()
    assert (number, reason) == (1, "the model has weights that are not finite")
    assert 5_000.0 <= declined_at <= 5_000.0 + 2 * PERIOD_S
    assert not device.is_ready
    assert (device.charged(), device.pending()) == ([], {})
    device.cycle.take_plan(plan)
    assert not device.is_ready, "announced again, not decided again"
    device.cycle.take_plan(plan.model_copy(update={"deadline": plan.deadline + 1}))
    device.clock.advance(60.0)
    assert device.is_ready, "put off, decided again"


def test_a_deadline_is_measured_by_the_boards_clock(device: Device) -> None:
    device.cycle.take_plan(make_plan(deadline=5_000.4))
    device.give()
    device.advance()
    assert len(device.declined()) == 1
    assert device.charged() == []


def test_a_key_that_nothing_can_be_sealed_to_costs_nothing(device: Device) -> None:
    device.cycle.take_plan(make_plan(sealing_key=bytes(32)))
    device.give()
    device.advance()
    assert len(device.declined()) == 1
    assert (device.charged(), device.pending()) == ([], {})


class Faulty(DiscretisedGaussian):
    """A mechanism whose price fails in an unforeseen way. No plan for the others was found to do so."""

    name: ClassVar[str] = "faulty"

    @property
    def event(self) -> Event:
        raise ZeroDivisionError("float division by zero")


def test_a_price_that_fails_declines_the_round(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setitem(MECHANISMS, Faulty.name, Faulty)
    device.cycle._limits = device.cycle._limits.model_copy(update={"mechanisms": (Faulty.name,)})
    device.cycle.take_plan(make_plan(mechanism={"name": Faulty.name}))
    device.give()
    device.advance()
    ((_, reason, _),) = device.declined()
    assert "ZeroDivisionError" in reason
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.DEBUG]
    assert (device.charged(), device.pending()) == ([], {})


# --- the device trains, charged -----------------------------------------------------------------


class Treacherous(ArrayDataset):
    """Records whose reading fails."""

    error: Exception

    def _read(self, indices: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError("a sentence"),
        StorageError("no disk"),
        RuntimeError("odd"),
        OSError(5, "Input/output error"),
        MemoryError(),
    ],
    ids=repr,
)
def test_whatever_fails_once_a_round_is_charged_it_leaves_like_any_other(
    device: Device, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    caplog.set_level(logging.DEBUG)
    records = device.trainer.records
    bad = Treacherous(digits(0, 50).inputs, np.zeros(50, np.int64), 10)
    bad.error = error
    records.dataset = bad
    plan = make_plan(**terms(rate=1.0))
    device.cycle.take_plan(plan)
    device.give()
    device.advance()
    assert (device.charged(), device.declined()) == ([1], [])
    assert len(device.pending()[1]) == RoundTask.of(plan).blocks
    ((state, reason),) = device.state.connection.execute("SELECT state, reason FROM rounds")
    # Other errors are about the record that was read, which does not count; these are about the board.
    assert (state, reason) == ("spooled", str(error) if isinstance(error, DpagentError) else None)
    assert {record.levelno for record in caplog.records if record.exc_info} <= {logging.DEBUG}


# --- the training process ends ------------------------------------------------------------------


class Mortal:
    """A training process that ends at chosen questions, and then goes on."""

    def __init__(self, device: Device, *, prepares: int = 0, updates: int = 0) -> None:
        self._inner, self._prepares, self._updates = device.worker, prepares, updates
        self.orders: list[Order] = []
        device.cycle._worker = self

    def prepare(self, order: Order) -> Future[Prepared]:
        self.orders.append(order)
        self._prepares -= 1
        return _ended() if self._prepares >= 0 else self._inner.prepare(order)

    def update(self) -> Future[Update]:
        self._updates -= 1
        return _ended() if self._updates >= 0 else self._inner.update()

    def end(self) -> None:
        pass


def _ended() -> Future[Any]:
    answer: Future[Any] = Future()
    answer.set_exception(WorkerError("the training process ended: signal 9"))
    return answer


def test_a_plan_that_ends_training_before_the_charge_is_declined(device: Device) -> None:
    mortal = Mortal(device, prepares=1)
    plan = make_plan()
    device.cycle.take_plan(plan)
    device.give()
    device.advance()
    ((_, reason, _),) = device.declined()
    assert reason == "the training process ended: signal 9"
    assert (device.charged(), device.pending()) == ([], {})
    device.cycle.take_plan(plan)
    device.advance()
    assert len(mortal.orders) == 1, "not decided twice"


@pytest.mark.parametrize(("prepares", "updates"), [(0, 1), (0, 2), (0, 5)])
def test_a_charged_round_survives_the_end_of_training_in_the_end_with_noise_alone(
    device: Device, prepares: int, updates: int
) -> None:
    mortal = Mortal(device, prepares=prepares, updates=updates)
    plan = make_plan()
    device.cycle.take_plan(plan)
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


class Silent:
    """A training process that answers no question of one kind until it is ended."""

    def __init__(self, device: Device, kind: str) -> None:
        self._inner, self._kind = device.worker, kind
        self._asked: list[Future[Any]] = []
        device.cycle._worker = self

    def prepare(self, order: Order) -> Future[Prepared]:
        return self._silence() if self._kind == "prepare" else self._inner.prepare(order)

    def update(self) -> Future[Update]:
        return self._silence() if self._kind == "update" else self._inner.update()

    def end(self) -> None:
        for answer in self._asked:
            answer.set_exception(WorkerError("the training process ended: signal 9"))
        self._asked.clear()
        self._kind = ""

    def _silence(self) -> Future[Any]:
        self._asked.append(Future())
        return self._asked[-1]


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
    device.cycle.take_plan(make_plan())
    device.give()
    until_training_does_not_answer(device, 3_600.0)
    device.cycle.advance()
    ((_, reason, _),) = device.declined()
    assert reason == "the training process ended: signal 9"


def test_training_that_never_answers_is_asked_again_for_a_charged_round(device: Device) -> None:
    Silent(device, "update")
    device.cycle.take_plan(make_plan())
    device.give()
    device.cycle.advance()
    until_training_does_not_answer(device, 4 * 3_600.0)
    device.cycle.advance()
    assert (device.charged(), device.pending()) == ([1], {})
    device.clock.advance(10.0)
    device.advance()
    assert set(device.pending()) == {1}


def test_training_longer_than_the_limit_is_declined(device: Device) -> None:
    device.worker.longest_s = 3_600.1
    device.cycle.take_plan(make_plan())
    device.give()
    device.advance()
    ((_, reason, _),) = device.declined()
    assert "limits.maximum_training_s" in reason
    assert device.charged() == []


def test_a_round_whose_slots_end_after_its_deadline_is_declined_before_the_charge(device: Device) -> None:
    device.worker.longest_s = 20.0
    device.cycle.take_plan(make_plan(deadline=5_000.0 + 19.0))
    device.give()
    device.advance()
    ((_, reason, _),) = device.declined()
    assert "could not send before 2" in reason
    assert device.charged() == []


def test_training_that_has_nothing_to_do_is_ended_and_begins_again(device: Device) -> None:
    ends: list[float] = []
    device.worker.end = lambda: ends.append(device.clock.monotonic())  # type: ignore[method-assign]
    device.cycle.take_plan(make_plan())
    device.give()
    device.advance()
    spooled_at = device.clock.monotonic()
    device.clock.advance(1_199.0)
    device.cycle.advance()
    assert ends == []
    device.clock.advance(2.0)
    assert device.cycle.due_in_s() == 0
    device.cycle.advance()
    assert ends == [spooled_at + 1_201.0]
    assert device.cycle.due_in_s() == np.inf
    device.cycle.take_plan(make_plan(round=2))
    device.give()
    device.advance()
    assert device.charged() == [1, 2]


# --- other jobs ---------------------------------------------------------------------------------


def test_a_plan_of_another_job_costs_the_present_round_nothing_until_it_is_charged(device: Device) -> None:
    """A broker with an older store retains a plan of a job that was given up long ago."""
    device.cycle.take_plan(make_plan())
    device.give()
    device.advance()
    pending = device.pending()
    device.clock.advance(100.0)
    device.cycle.take_plan(make_plan(job=OTHER_JOB, deadline=1.0))
    device.advance()
    assert len(device.declined()) == 1
    assert device.pending() == pending
    assert device.state.spool.due(1e300, 100) == [], "sealed for another plan, they would be lost"
    device.cycle.take_plan(make_plan())
    assert device.pending() == pending
    assert len(device.state.spool.due(1e300, 100)) == len(pending[1])
    device.cycle.take_plan(make_plan(job=OTHER_JOB))
    device.advance()
    jobs = device.state.connection.execute("SELECT DISTINCT job FROM fragments WHERE message IS NOT NULL")
    assert [row[0] for row in jobs] == [OTHER_JOB.hex()]
    states = device.state.connection.execute("SELECT job, state FROM rounds ORDER BY number").fetchall()
    assert [tuple(row) for row in states] == [(JOB.hex(), "expired"), (OTHER_JOB.hex(), "spooled")]


# --- receipts -----------------------------------------------------------------------------------


def test_receipts_empty_the_spool(device: Device) -> None:
    device.cycle.take_plan(make_plan())
    device.give()
    device.advance()
    (digests,) = device.pending().values()
    device.cycle.take_receipts(receipts(*digests, job=OTHER_JOB))
    assert device.pending() == {1: digests}, "another job's"
    with pytest.raises(MessageError) as caught:
        device.cycle.take_receipts(receipts(digests[0], digests[1][:-1]))
    assert caught.value.reason == "malformed"
    assert device.pending() == {1: digests}
    device.cycle.take_receipts(receipts(*digests[1:]))
    assert device.pending() == {1: digests[:1]}
    device.cycle.take_receipts(receipts(digests[0]))
    assert device.pending() == {}
