"""A device's part in a round, phase by phase, on a clock that stands still."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from devices import PERIOD_S, Device, open_device
from fleets import DIGITS, digits, make_plan, terms
from ledgers import DATASET
from planted import plant

from agent.training import Trainer, Work
from agent.training_messages import Update
from dpagent import faults
from dpagent.errors import ConfigurationError, DpagentError, StorageError
from dpagent.faults import FaultPoint
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.notation import upwards
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.protocol.chunks import content_digest
from dpagent.protocol.codec import decode
from dpagent.protocol.fragments import read_block
from dpagent.protocol.messages import Fragment, Receipts
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.task import RoundTask
from dpagent.protocol.weights import weights_to_bytes

JOB, OTHER_JOB = b"j" * 16, b"k" * 16


def receipts(*digests: bytes) -> Receipts:
    return Receipts(b"".join(digests))


# --- a round, from its plan to its spool --------------------------------------------------------


def test_a_round_is_run_once_however_often_it_is_announced(device: Device) -> None:
    plan = make_plan()
    arrived_at = device.clock.monotonic()
    device.take_plan(plan)
    assert not device.is_ready
    device.give()
    assert device.is_ready
    device.advance()
    assert not device.is_ready
    assert device.charged() == [1]
    (digests,) = device.pending().values()
    assert len(digests) == RoundTask.of(plan).release.blocks
    rows = device.state.connection.execute("SELECT min(due_at), max(due_at) FROM times").fetchone()
    opens_at = arrived_at + plan.compute_slot_s
    # Slots begin on the grid, a quarter of a period after the decision did or later.
    assert opens_at <= rows[0] < rows[1] <= opens_at + 1.25 * PERIOD_S + plan.jitter_window_s
    query = "SELECT body ->> 'charged_at' FROM entries WHERE kind = 'charge'"
    charged_at = device.state.connection.execute(query)
    assert charged_at.fetchone()[0] == "1970-01-01T01:23:20+00:00"
    for _ in range(2):
        device.take_plan(plan)
        assert not device.is_ready
        device.advance()
    assert device.charged() == [1]
    assert device.pending() == {1: digests}


def test_an_update_is_spooled_whole(device: Device) -> None:
    plan = make_plan()
    blocks = RoundTask.of(plan).release.blocks
    device.take_plan(plan)
    device.give()
    device.advance()
    rows = device.state.connection.execute(
        "SELECT digest, message, job, round FROM fragments JOIN messages USING (number)"
    ).fetchall()
    positions = []
    for digest, message, job, number in rows:
        fragment = decode(message, Fragment)
        assert receipt_digest(fragment.id) == digest
        assert fragment.round == plan.round
        assert (job, number) == (plan.job.hex(), plan.round)
        values, _ = read_block(fragment, plan.wire, blocks)
        positions.append(fragment.position)
        assert values.max() > values.min()
    assert sorted(positions) == list(range(blocks))
    spent = device.state.ledger.epsilon_spent(DATASET)
    assert spent > 0
    assert f"ε = {upwards(spent)} of" in device.state.ledger.spending(DATASET)


def test_the_next_round_expires_this_ones_fragments(device: Device) -> None:
    device.give()
    for number in (1, 2):
        device.take_plan(make_plan(round=number))
        device.give()
        device.clock.advance(make_plan().compute_slot_s)  # one round a slot
        device.advance()
        assert set(device.pending()) == {number}
    assert device.charged() == [1, 2]


def test_lines_of_an_earlier_job_go_when_another_begins(device: Device) -> None:
    device.take_plan(make_plan())
    device.give()
    device.advance()
    lines = "SELECT count(*) FROM fragments"
    device.take_plan(make_plan(round=2))
    assert device.state.connection.execute(lines).fetchone()[0] > 0, "a line stays while the job lasts"
    device.take_plan(make_plan(job=OTHER_JOB, state="finished"))
    device.take_plan(make_plan(job=b"l" * 16))
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
        device.take_plan(plan)
        device.give()
        with pytest.raises(KeyboardInterrupt):
            device.advance()
    with open_device(tmp_path) as device:
        assert device.charged() == [1]
        assert device.pending() == {}
        # For another plan it is not run, and the charge is not used.
        device.give()
        device.take_plan(make_plan(jitter_window_s=0.7))
        device.advance()
        assert device.pending() == {}
        device.take_plan(make_plan(deadline=plan.deadline + 60.0))
        device.advance()
        assert device.charged() == [1]
        assert set(device.pending()) == {1}
        rows = device.state.connection.execute("SELECT message FROM messages").fetchall()
    blocks = {}
    for (message,) in rows:
        fragment = decode(message, Fragment)
        blocks[fragment.position], _ = read_block(fragment, plan.wire, RoundTask.of(plan).release.blocks)
    sent = np.concatenate([blocks[position] for position in sorted(blocks)])[: len(updates[-1].values)]
    assert np.array_equal(sent, updates[-1].values)
    if point in (FaultPoint.AGENT_TRAINED, FaultPoint.AGENT_SPOOL_WRITTEN):
        first, last = updates
        assert np.mean(first.values == last.values) < 0.5, "the noise of before"


# --- the device decides -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_declined_before_anything_is_computed(
    device: Device, value: float
) -> None:
    numbers = DIGITS.initial_weights(0)
    numbers[-1] = value
    weights = weights_to_bytes(numbers, "float32")
    plan = make_plan(model={"digest": content_digest(weights)})
    device.take_plan(plan)
    device.give(weights)
    device.advance()
    ((number, reason, declined_at),) = device.declined()
    assert (number, reason) == (1, "the model has weights that are not finite")
    assert 5_000.0 <= declined_at <= 5_000.0 + 2 * PERIOD_S
    assert not device.is_ready
    assert (device.charged(), device.pending()) == ([], {})
    device.take_plan(plan)
    assert not device.is_ready, "announced again, not decided again"
    device.take_plan(plan.with_values({"deadline": plan.deadline + 1}))
    device.clock.advance(60.0)
    assert device.is_ready, "put off, decided again"


def test_a_deadline_is_measured_by_the_boards_clock(device: Device) -> None:
    device.take_plan(make_plan(deadline=5_000.4))
    device.give()
    device.advance()
    assert len(device.declined()) == 1
    assert device.charged() == []


def test_a_key_that_nothing_can_be_sealed_to_costs_nothing(device: Device) -> None:
    device.take_plan(make_plan(sealing_key=bytes(32)))
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
    plant(monkeypatch, Faulty)
    device.take_plan(make_plan(mechanism={"name": Faulty.name}))
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
    device.take_plan(plan)
    device.give()
    device.advance()
    assert (device.charged(), device.declined()) == ([1], [])
    assert len(device.pending()[1]) == RoundTask.of(plan).release.blocks
    ((state, reason),) = device.state.connection.execute("SELECT state, reason FROM rounds")
    # Other errors are about the record that was read, which does not count; these are about the board.
    assert (state, reason) == ("spooled", str(error) if isinstance(error, DpagentError) else None)
    assert {record.levelno for record in caplog.records if record.exc_info} <= {logging.DEBUG}


# --- receipts -----------------------------------------------------------------------------------


def test_receipts_empty_the_spool(device: Device) -> None:
    device.take_plan(make_plan())
    device.give()
    device.advance()
    (digests,) = device.pending().values()
    device.take_receipts(receipts(b"x" * 16))
    assert device.pending() == {1: digests}, "another device's"
    device.take_receipts(receipts(*digests[1:]))
    assert device.pending() == {1: digests[:1]}
    device.take_receipts(receipts(digests[0]))
    assert device.pending() == {}
