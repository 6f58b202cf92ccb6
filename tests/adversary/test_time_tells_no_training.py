"""A coordinator times the answer to one plan to learn how long a device trained for another.

Claim: the times at which a device publishes are a function of the plans, of when they came, of a trial with
    made-up records, and of the device's own random grid and jitter: how long training took, and how large
    the lot was, changes none of them.

Before, slots were counted from the time at which a plan was looked at, and a device that trained looked at
nothing: the answer to plan B came later by the rest of plan A's training, and plan A was free if it could not
be sealed. A slot of 5 ms was accepted, so that the answer to plan A itself told its training time to 5 ms.
A model so heavy that training took many slots told by their number how many records were in the lots.

Power: the grid is pinned and the jitter window empty, so the times are compared exactly. On the code of
    before they differ by the training time itself, or by slots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from devices import PERIOD_S, Device, Slow, Unpaused, open_device
from fleets import make_plan, report_plan, update_plan

from agent.training_messages import Order, Prepared, Update, WorkerError
from dpagent.protocol.messages import Plan

SLOT_S = 8 * PERIOD_S
OTHER_JOB = b"k" * 16
TAKES_ALL = {
    "limits": {
        "methods": ["dp-sgd", "incrementing", "ldp-fl", "central"],
        "trust": ["none", "coordinator"],
    },
    "budget": {"coordinator": {"epsilon": 16.0, "delta": 1e-4}},
}
"""A device that takes part in every method."""


def plan(make: Callable[..., Plan] = make_plan, **changes: object) -> Plan:
    return make(compute_slot_s=SLOT_S, jitter_window_s=0.0, **changes)


cheap_reports = functools.partial(report_plan, release={"noise_multipliers": [10.0] * 3})


def window_of(device: Device, number: int, job: bytes) -> float:
    """When the fragments of a round leave, which is at a point of the device's grid."""
    rows = device.state.connection.execute(
        "SELECT DISTINCT due_at FROM times JOIN fragments USING (digest) WHERE job = ? AND round = ?",
        (job.hex(), number),
    ).fetchall()
    assert len(rows) == 1, rows
    points = (rows[0][0] - device.cycle._publisher._epoch) / PERIOD_S
    assert points == pytest.approx(round(points), abs=1e-6)
    return float(rows[0][0])


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with open_device(tmp_path) as device:
        device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
        yield device


def answer_to_another(
    device: Device, training_s: float, b_after_s: float, make: Callable[..., Plan]
) -> float:
    """When the window of plan B opens, which comes while the device trains for plan A, of another job."""
    slow = Slow(device, training_s)
    began = device.clock.monotonic()
    device.take_plan(plan(make))
    device.give()
    slow.pass_time(b_after_s)
    device.take_plan(plan(make, job=OTHER_JOB))
    device.give()
    slow.pass_time(4 * SLOT_S)
    return window_of(device, 1, OTHER_JOB) - began


@pytest.mark.parametrize("make", [make_plan, cheap_reports, update_plan])
@pytest.mark.parametrize("training_s", [0.0, 0.2 * SLOT_S, 0.7 * SLOT_S])
def test_training_that_fits_its_slot_moves_no_window(
    tmp_path: Path, make: Callable[..., Plan], training_s: float
) -> None:
    windows = []
    for number, seconds in enumerate((training_s, 0.0)):
        with open_device(tmp_path / str(number), **TAKES_ALL) as device:
            device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
            windows.append(answer_to_another(device, seconds, 0.5 * SLOT_S, make))
    slow, quick = windows
    assert slow == pytest.approx(quick, abs=1e-9)


def test_a_look_at_the_data_begins_when_training_had_to_be_over(tmp_path: Path) -> None:
    """What it finds counts so long after it began, in the rounds that are prepared from then on, and these
    count with features of new records: by the slots of a round that is announced about then, a coordinator
    learnt to the millisecond when training had been over, however many slots hid that."""
    began = []
    for number, training_s in enumerate((0.0, 0.3 * SLOT_S, 0.7 * SLOT_S)):
        with open_device(tmp_path / str(number)) as device:
            device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
            slow = Slow(device, training_s)
            at = device.clock.monotonic()
            device.take_plan(plan())
            device.give()
            slow.pass_time(3 * SLOT_S)
            (looked_at,) = slow.looked_at
            began.append(looked_at - at)
    assert began == pytest.approx([began[0]] * 3, abs=1e-9)
    assert began[0] >= 0.75 * SLOT_S


@pytest.mark.parametrize("late_s", [0.5 * PERIOD_S, 3.3 * PERIOD_S, 0.7 * SLOT_S, 1.9 * SLOT_S])
def test_a_last_chunk_that_comes_late_leaves_a_whole_slot_all_the_same(tmp_path: Path, late_s: float) -> None:
    """A coordinator that withholds it would else choose the time within which training has to end."""
    windows = []
    for number, training_s in enumerate((0.0, 0.3 * SLOT_S, 0.6 * SLOT_S)):
        with open_device(tmp_path / str(number)) as device:
            device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
            slow = Slow(device, training_s)
            began = device.clock.monotonic()
            device.take_plan(plan())
            slow.pass_time(late_s)
            device.give()
            slow.pass_time(4 * SLOT_S)
            windows.append(window_of(device, 1, b"j" * 16) - began)
    assert windows == pytest.approx([windows[0]] * 3, abs=1e-9)


@pytest.mark.parametrize(("share", "slots"), [(0.7, 1), (0.8, 2), (1.7, 2), (2.9, 4), (11.0, 12)])
def test_a_heavy_plan_takes_as_many_slots_as_the_largest_lot_does_whatever_the_lot_is(
    tmp_path: Path, share: float, slots: int
) -> None:
    """A coordinator chooses the model, the views and the steps, and counted the slots until the answer."""
    windows = []
    for number, training_s in enumerate((0.0, 0.4 * share * SLOT_S, share * SLOT_S)):
        with open_device(tmp_path / str(number)) as device:
            device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
            slow = Slow(device, training_s, longest_s=share * SLOT_S)
            began = device.clock.monotonic()
            device.take_plan(plan())
            device.give()
            slow.pass_time((slots + 2) * SLOT_S)
            windows.append(window_of(device, 1, b"j" * 16) - began)
    assert windows == pytest.approx([windows[0]] * 3, abs=1e-9)
    assert slots * SLOT_S <= windows[0] <= slots * SLOT_S + PERIOD_S


class Prepares(Unpaused):
    """Prepares a round in a time on the device's clock, with some processor time of its own."""

    def __init__(self, device: Device, seconds: float, took_s: float) -> None:
        self._at_once, self._clock, self._took_s = device.worker, device.clock, took_s
        self._done_at, self._seconds = math.inf, seconds
        self._future: Future[Prepared] = Future()
        device.cycle._worker = self

    def prepare(self, order: Order) -> Future[Prepared]:
        self._at_once.prepare(order).result()
        self._done_at = self._clock.monotonic() + self._seconds
        return self._future

    def update(self) -> Future[Update]:
        return self._at_once.update()

    def look(self) -> None:
        pass

    def end(self) -> None:
        pass

    def answer(self) -> None:
        """Answer, if it is time."""
        if self._clock.monotonic() >= self._done_at and not self._future.done():
            self._future.set_result(Prepared(0.0, self._took_s))


@pytest.mark.parametrize("took_s", [0.3 * PERIOD_S, 0.8 * PERIOD_S, 0.95 * PERIOD_S, 3.9 * PERIOD_S])
def test_a_look_that_wants_the_same_core_while_a_round_is_prepared_moves_no_window(
    tmp_path: Path, took_s: float
) -> None:
    """Before, slots began once the round was prepared: on one core, a look that still decoded a slow picture
    put that off by up to 42 %, and so by a period where the coordinator chose the model for it."""
    windows = []
    for number, stretched in enumerate((1.0, 1.1, 1.42)):
        with open_device(tmp_path / str(number)) as device:
            device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
            slow = Prepares(device, stretched * took_s, took_s)
            began = device.clock.monotonic()
            device.take_plan(plan())
            device.give()
            for _ in range(400):
                device.cycle.advance()
                device.clock.advance(PERIOD_S / 20)
                slow.answer()
            windows.append(window_of(device, 1, b"j" * 16) - began)
    assert windows == pytest.approx([windows[0]] * 3, abs=1e-9)


class BrokenOff(Prepares):
    """Prepares a round in a time on the device's clock, and then fails, or finds it replaced."""

    def answer(self) -> None:
        if self._clock.monotonic() >= self._done_at and not self._future.done():
            self._future.set_exception(WorkerError("the training process ended: signal 9", self._took_s))


@pytest.mark.parametrize("dummy_traffic", [False, True])
@pytest.mark.parametrize("ending", ["is replaced", "fails"])
def test_a_look_beside_a_preparation_that_is_broken_off_does_not_put_the_next_round_off(
    tmp_path: Path, ending: str, dummy_traffic: bool
) -> None:
    """Before, the rest was nine times what the preparation took by the clock: a look that decoded a slow
    picture beside it put the next round off by nine times as much, two periods of the grid here."""
    begins = []
    for number, stretched in enumerate((1.0, 1.1, 1.42)):
        directory, took_s = tmp_path / str(number), 0.5 * PERIOD_S
        with open_device(directory, limits={"dummy_traffic": dummy_traffic}) as device:
            device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
            at_once = device.worker
            slow = (Prepares if ending == "is replaced" else BrokenOff)(device, stretched * took_s, took_s)
            began = device.clock.monotonic()
            device.give()
            device.take_plan(plan())
            for turn in range(40):
                device.cycle.advance()
                device.clock.advance(PERIOD_S / 20)
                slow.answer()
                if turn == 2 and ending == "is replaced":
                    device.take_plan(plan(job=b"k" * 16))
            device.cycle._worker = at_once
            if ending == "fails":
                device.take_plan(plan(job=b"k" * 16))
            announced = device.announcements.current
            assert announced is not None
            begins.append(announced.begins_at - began)
    assert begins[0] >= 10 * took_s - 1e-9
    assert begins == pytest.approx([begins[0]] * 3, abs=1e-9)


def test_a_slot_too_short_to_hide_anything_is_declined(device: Device) -> None:
    limits = device.cycle._limits.with_values({"minimum_compute_slot_s": SLOT_S})
    device.cycle._limits = device.cycle._questions._limits = limits
    device.take_plan(make_plan(compute_slot_s=0.005))
    device.give()
    device.advance()
    assert len(device.declined()) == 1
    assert device.charged() == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"compute_slot_s": 0.005}, "minimum_compute_slot_s"),
        ({"jitter_window_s": 0.0}, "minimum_jitter_window_s"),
        ({"wire": {"block": 20_000}}, "minimum_fragments"),
        ({"wire": {"block": 1}}, "maximum_fragments"),
        ({"wire": {"block": 10, "bytes": 50_000}}, "maximum_update_mib"),
        ({"sampling": {"rate": 0.9}}, "maximum_sampling_rate"),
        ({"delta": 1e-4}, "maximum_job_delta"),
        ({"mechanism": {"noise_multipliers": [1.0] * 3}}, "maximum_job_epsilon"),
    ],
)
def test_each_limit_is_the_devices_own(tmp_path: Path, changes: dict[str, object], key: str) -> None:
    limits = {
        "minimum_compute_slot_s": 0.1, "minimum_jitter_window_s": 0.1, "minimum_fragments": 4,
        "maximum_sampling_rate": 0.5, "maximum_job_delta": 5e-5, "maximum_job_epsilon": 3.0,
        "maximum_update_mib": 16,
    }  # fmt: skip
    with open_device(tmp_path, limits=limits) as device:
        device.take_plan(make_plan(**({"jitter_window_s": 0.5} | changes)))
        device.give()
        device.clock.advance(1.0)
        device.advance()
        ((_, reason, _),) = device.declined()
    assert f"limits.{key}" in reason
