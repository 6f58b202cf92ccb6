"""What is announced: plans that are new, known, replayed or of another job; and models that do not come."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from devices import SLOT_S, Device, open_device
from fleets import make_plan

from agent.announcements import Phase
from agent.training_messages import Order, Prepared
from dpagent.protocol.codec import MessageError
from dpagent.protocol.messages import Plan

JOB, OTHER_JOB = b"j" * 16, b"k" * 16


def refused(device: Device, plan: Plan) -> str:
    with pytest.raises(MessageError) as caught:
        device.take_plan(plan)
    return caught.value.reason


def test_a_plan_of_another_fleet_changes_nothing(device: Device) -> None:
    device.give()
    assert refused(device, make_plan(fleet="others")) == "wrong fleet"
    assert not device.is_ready


def test_a_round_is_new_once_and_an_older_one_of_its_job_is_a_replay(device: Device) -> None:
    assert device.take_plan(make_plan(round=2))
    assert not device.take_plan(make_plan(round=2))
    assert refused(device, make_plan(round=1)) == "replayed"
    assert device.take_plan(make_plan(round=3))
    assert device.take_plan(make_plan(round=1, job=OTHER_JOB)), "another job begins where it likes"
    assert device.take_plan(make_plan(round=1, job=OTHER_JOB, state="finished"))
    assert not device.take_plan(make_plan(round=1, job=OTHER_JOB, state="finished"))


def test_an_older_round_is_a_replay_after_a_restart_too(tmp_path: Path) -> None:
    # Brokers come back with the plan that they retained when they last wrote their store.
    with open_device(tmp_path) as device:
        device.give()
        for number in (1, 2):
            device.take_plan(make_plan(round=number))
            device.clock.advance(make_plan().compute_slot_s)
            device.advance()
        pending = device.pending()
        assert set(pending) == {2}
    with open_device(tmp_path) as device:
        assert refused(device, make_plan(round=1)) == "replayed"
        assert device.pending() == pending
        assert device.take_plan(make_plan(round=2))
        assert device.pending() == pending


def test_a_plan_that_is_announced_again_moves_nothing_and_one_in_between_does(device: Device) -> None:
    """When the connection was there all the time, nothing is overdue."""
    plan = make_plan(jitter_window_s=1_000.0)
    device.take_plan(plan)
    device.give()
    device.advance()
    times = device.state.spool.due(1e300, 100)
    device.clock.advance(100.0)
    device.take_plan(plan.with_values({"deadline": 3e9}))
    assert device.state.spool.due(1e300, 100) == times
    device.take_plan(make_plan(job=OTHER_JOB, deadline=1.0))
    device.take_plan(plan)
    others = device.state.spool.due(1e300, 100)
    now = device.clock.monotonic()
    assert others.keys() == times.keys()
    assert all(now <= at <= now + 1_000.0 for at in others.values()), (
        "at their old times, some would be overdue"
    )
    assert set(others.values()).isdisjoint(times.values())


def test_the_end_of_a_job_leaves_nothing_to_send_or_decide(device: Device) -> None:
    device.take_plan(make_plan())
    device.give()
    device.advance()
    assert device.pending()
    device.take_plan(make_plan(state="finished"))
    assert device.pending() == {}
    device.give()
    assert not device.is_ready
    device.advance()
    assert device.charged() == [1]


def test_the_end_of_another_job_costs_the_open_round_nothing(device: Device) -> None:
    # A broker comes back with an older store, in which the job before has just ended.
    device.take_plan(make_plan())
    device.give()
    device.advance()
    pending = device.pending()
    assert device.take_plan(make_plan(job=OTHER_JOB, state="finished"))
    device.take_plan(make_plan())
    assert device.pending() == pending
    assert device.charged() == [1]


def test_a_model_that_does_not_come_is_asked_for_every_ten_seconds(device: Device) -> None:
    start = device.clock.monotonic()
    device.cycle.advance()
    device.take_plan(make_plan())
    for _ in range(60):
        device.cycle.advance()
        device.clock.advance(0.5)
    assert device.asked_at == [start + 10.0, start + 20.0]
    assert device.charged() == []


def test_a_plan_of_another_job_costs_the_present_round_nothing_until_it_is_charged(device: Device) -> None:
    """A broker with an older store retains a plan of a job that was given up long ago."""
    device.take_plan(make_plan())
    device.give()
    device.advance()
    pending = device.pending()
    device.clock.advance(100.0)
    device.take_plan(make_plan(job=OTHER_JOB, deadline=1.0))
    device.advance()
    assert len(device.declined()) == 1
    assert device.pending() == pending
    assert device.state.spool.due(1e300, 100) == {}, "sealed for another plan, they would be lost"
    device.take_plan(make_plan())
    assert device.pending() == pending
    assert len(device.state.spool.due(1e300, 100)) == len(pending[1])
    device.take_plan(make_plan(job=OTHER_JOB))
    device.advance()
    jobs = device.state.connection.execute("SELECT DISTINCT job FROM fragments JOIN messages USING (number)")
    assert [row[0] for row in jobs] == [OTHER_JOB.hex()]
    states = device.state.connection.execute("SELECT job, state FROM rounds ORDER BY number").fetchall()
    assert [tuple(row) for row in states] == [(JOB.hex(), "expired"), (OTHER_JOB.hex(), "spooled")]


@pytest.mark.parametrize("takes_part", [True, False])
def test_what_is_spooled_leaves_for_no_other_plan_of_its_round(tmp_path: Path, takes_part: bool) -> None:
    """Its length would tell an update, which was cut by the first plan, from dummies, which follow the one
    that is announced."""
    limits = {"dummy_traffic": True, "maximum_sampling_rate": 1.0 if takes_part else 0.01}
    changed = make_plan(wire={"block": 1_000, "bytes": make_plan().wire.bytes + 100})
    with open_device(tmp_path, limits=limits) as device:
        line: Any = device.cycle._publisher._session
        device.take_plan(make_plan())
        device.give()
        device.advance()
        assert bool(device.charged()) is takes_part
        assert device.pending()
        for announced, leaves in ((changed, False), (make_plan(), True)):
            device.take_plan(announced)
            device.clock.advance(8 * SLOT_S)
            device.cycle._publisher.publish_due()
            assert bool(line.sent) is leaves


@pytest.mark.parametrize("later_s", [0.0, 1.0])
@pytest.mark.parametrize("takes_part", [True, False])
def test_what_is_announced_while_a_round_trains_has_it_trained_no_second_time(
    tmp_path: Path, takes_part: bool, later_s: float
) -> None:
    limits = {"dummy_traffic": True, "maximum_sampling_rate": 1.0 if takes_part else 0.01}
    plan = make_plan()
    with open_device(tmp_path, limits=limits) as device:
        prepare, prepared = device.worker.prepare, list[Order]()

        def counting(order: Order) -> Future[Prepared]:
            prepared.append(order)
            return prepare(order)

        device.worker.prepare = counting  # type: ignore[method-assign]
        device.take_plan(plan)
        device.give()
        while (announced := device.announcements.current) is None or announced.phase is not Phase.TRAIN:
            device.clock.advance(max(device.cycle.due_in_s(), 1e-6))
            device.cycle.advance()
        device.take_plan(plan.with_values({"deadline": plan.deadline + later_s}))
        device.advance()
        assert len(prepared) == 1
        assert device.pending()
