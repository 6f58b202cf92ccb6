"""Rounds of a device whose governor holds training back: before the charge, and after it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from boards import BoardTree
from devices import PERIOD_S, SLOT_S, Device, Mortal, Slow, open_device
from fleets import make_plan

from agent.rounds import RoundState, energy_of_jobs

GOVERNOR: dict[str, Any] = {"highest_temperature_c": 70.0}
COOL, HOT = 40.0, 90.0
JOB = (b"j" * 16).hex()


@contextmanager
def board(
    directory: Path, governor: dict[str, Any] = GOVERNOR, **changes: Any
) -> Iterator[tuple[Device, BoardTree]]:
    with open_device(directory, governor=governor, **changes) as device:
        device.give()
        yield device, device.board


def pass_time(device: Device, seconds: float) -> None:
    for _ in range(round(seconds / PERIOD_S)):
        device.clock.advance(PERIOD_S)
        device.cycle.advance()


def state_of(device: Device, number: int = 1) -> RoundState | None:
    known = device.state.round(JOB, number)
    return None if known is None else known.state


# --- before the charge ------------------------------------------------------------------------------


def test_a_round_waits_until_the_board_may_train(tmp_path: Path) -> None:
    with board(tmp_path) as (device, tree):
        tree.heat(HOT)
        device.take_plan(make_plan())
        pass_time(device, 20 * SLOT_S)
        assert state_of(device) is RoundState.OFFERED
        assert device.cycle._governor.held is not None
        assert 0 < device.cycle.due_in_s() < 1.0, "it looks again soon, and does not spin"
        tree.heat(COOL)
        pass_time(device, 4 * SLOT_S)
        assert state_of(device) is RoundState.SPOOLED
        assert device.charged() == [1]
        assert device.cycle._governor.held is None


def test_a_round_that_another_one_replaces_meanwhile_is_missed(tmp_path: Path) -> None:
    with board(tmp_path) as (device, tree):
        tree.heat(HOT)
        device.take_plan(make_plan())
        pass_time(device, SLOT_S)
        device.take_plan(make_plan(round=2))
        tree.heat(COOL)
        pass_time(device, 4 * SLOT_S)
        assert (state_of(device, 1), state_of(device, 2)) == (RoundState.MISSED, RoundState.SPOOLED)
        assert device.charged() == [2]


def test_a_round_whose_deadline_passes_meanwhile_is_declined_and_costs_nothing(tmp_path: Path) -> None:
    with board(tmp_path) as (device, tree):
        tree.heat(HOT)
        plan = make_plan(deadline=device.clock.unix() + 5 * SLOT_S)
        device.take_plan(plan)
        pass_time(device, 6 * SLOT_S)
        assert state_of(device) is RoundState.OFFERED
        tree.heat(COOL)
        pass_time(device, SLOT_S)
        assert state_of(device) is RoundState.DECLINED
        device.take_plan(plan.with_values({"deadline": plan.deadline + 600.0}))
        pass_time(device, 4 * SLOT_S)
        assert device.charged() == [1]


def test_nothing_is_charged_where_it_turns_hot_while_the_round_is_prepared(tmp_path: Path) -> None:
    with board(tmp_path) as (device, tree):
        device.take_plan(make_plan())
        device.cycle.advance()
        assert device.cycle._at_work is not None
        tree.heat(HOT)
        device.clock.advance(1.0)  # The sensors were read just now.
        pass_time(device, 10 * SLOT_S)
        assert device.charged() == []
        assert device.cycle._at_work is None, "it is prepared again, on a board that may train"
        tree.heat(COOL)
        pass_time(device, 4 * SLOT_S)
        assert state_of(device) is RoundState.SPOOLED


LARGE = {"role": "training-graph", "digest": bytes(32), "size": 2 << 20}


@pytest.mark.parametrize(
    ("limits", "plan"),
    [({}, {}), ({"maximum_job_epsilon": 1e-6}, {}), ({"maximum_model_mib": 1}, {"assets": [LARGE]})],
    ids=["takes part", "too dear", "too large"],
)
def test_a_board_that_is_held_back_is_silent_whether_it_would_take_part_or_not(
    tmp_path: Path, limits: dict[str, Any], plan: dict[str, Any]
) -> None:
    with board(tmp_path, limits=limits | {"dummy_traffic": True}) as (device, tree):
        tree.heat(HOT)
        device.take_plan(make_plan(**plan))
        pass_time(device, 10 * SLOT_S)
        assert (state_of(device), device.pending()) == (RoundState.OFFERED, {})
        tree.heat(COOL)
        pass_time(device, 4 * SLOT_S)
        assert state_of(device) is (RoundState.SAT_OUT if limits else RoundState.SPOOLED)
        assert set(device.pending()) == {1}


# --- after the charge -------------------------------------------------------------------------------


def opening_of(device: Device, begins_at: float) -> float:
    """When the window of the round opens, in slots since they began."""
    window = device.cycle._publisher._window
    assert window is not None
    assert window.begins_at == begins_at
    return window.slots


@pytest.mark.parametrize("paused_s", [0.9 * SLOT_S, 3.3 * SLOT_S])
def test_when_an_update_leaves_tells_how_long_a_pause_was_and_not_what_it_interrupted(
    tmp_path: Path, paused_s: float
) -> None:
    """Of two devices, one had its update before the pause and one has it afterwards: a lot that is a little
    larger must not decide whether it leaves before a pause, or hours later."""
    found = set()
    for number, takes in enumerate((0.1, 1.2, 1.6)):
        with board(tmp_path / str(number)) as (device, tree):
            slow = Slow(device, takes * SLOT_S, longest_s=1.7 * SLOT_S)
            device.take_plan(make_plan())
            while device.charged() == []:
                slow.pass_time(PERIOD_S)
            begins_at = device.cycle._announcements._slots.begins_at
            slow.pass_time(SLOT_S)
            tree.heat(HOT)
            slow.pass_time(paused_s)
            assert slow.is_paused
            tree.heat(COOL)
            slow.pass_time((3 + math.ceil(paused_s / SLOT_S)) * SLOT_S)
            assert state_of(device) is RoundState.SPOOLED
            assert not slow.is_paused
            found.add(opening_of(device, begins_at))
    # Two slots by the trial; a look at the sensors may lengthen a pause by a slot.
    assert len(found) == 1
    assert found <= {2 + math.ceil(paused_s / SLOT_S) + more for more in (0, 1)}


def test_an_update_that_is_done_is_not_taken_while_the_board_may_not_train(tmp_path: Path) -> None:
    with board(tmp_path) as (device, tree):
        slow = Slow(device, 0.1 * SLOT_S)
        device.take_plan(make_plan())
        while device.charged() == []:
            slow.pass_time(PERIOD_S)
        tree.heat(HOT)
        slow.pass_time(30 * SLOT_S)
        assert (state_of(device), device.pending()) == (RoundState.CHARGED, {})
        device.take_plan(make_plan())  # Announced again, it is not run again.
        device.take_plan(make_plan(job=b"k" * 16))
        device.take_plan(make_plan())
        tree.heat(COOL)
        slow.pass_time(34 * SLOT_S)
        assert state_of(device) is RoundState.SPOOLED
        assert device.charged() == [1]
        assert len(slow.looked_at) == 1


def test_training_that_another_round_has_replaced_is_ended_and_not_gone_on_with(tmp_path: Path) -> None:
    with board(tmp_path) as (device, tree):
        slow = Slow(device, 0.5 * SLOT_S)
        device.take_plan(make_plan())
        while device.charged() == []:
            slow.pass_time(PERIOD_S)
        tree.heat(HOT)
        device.take_plan(make_plan(round=2))
        slow.pass_time(PERIOD_S)
        assert device.cycle._at_work is not None, "its slots are not over"
        slow.pass_time(5 * SLOT_S)
        assert device.cycle._at_work is None
        assert state_of(device) is RoundState.EXPIRED
        tree.heat(COOL)
        slow.pass_time(6 * SLOT_S)
        assert state_of(device, 2) is RoundState.SPOOLED
        assert device.charged() == [1, 2]


def test_a_training_process_is_not_ended_for_the_time_that_it_was_paused(tmp_path: Path) -> None:
    with board(tmp_path, limits={"maximum_training_s": 10.0}) as (device, tree):
        slow = Slow(device, 0.9 * SLOT_S)
        device.take_plan(make_plan())
        while device.charged() == []:
            slow.pass_time(PERIOD_S)
        tree.heat(HOT)
        slow.pass_time(SLOT_S)
        for _ in range(100):
            device.clock.advance(100.0)
            slow.pass_time(PERIOD_S)
        tree.heat(COOL)
        slow.pass_time(2 * SLOT_S)
        assert device.cycle._answers_by > device.clock.monotonic()


def test_a_round_that_a_restart_finds_charged_waits_too(tmp_path: Path) -> None:
    with board(tmp_path) as (device, _):
        Slow(device, 100.0)
        device.take_plan(make_plan())
        pass_time(device, 2 * SLOT_S)
        assert device.charged() == [1]
    with board(tmp_path) as (device, tree):
        tree.heat(HOT)
        device.take_plan(make_plan())
        pass_time(device, 10 * SLOT_S)
        assert state_of(device) is RoundState.CHARGED
        tree.heat(COOL)
        pass_time(device, 4 * SLOT_S)
        assert state_of(device) is RoundState.SPOOLED
        assert device.charged() == [1]


def test_a_processor_share_makes_training_take_as_many_times_longer(tmp_path: Path) -> None:
    found = []
    for number, share in enumerate((1.0, 0.25)):
        with board(tmp_path / str(number), {"processor_share": share}) as (device, _):
            device.worker.longest_s = 2.0 * SLOT_S
            device.take_plan(make_plan())
            device.advance()
            found.append(device.cycle._announcements._slots.number)
    assert found == [3, 9]


def test_a_share_that_makes_training_take_too_long_is_a_reason_to_decline(tmp_path: Path) -> None:
    with board(tmp_path, {"processor_share": 0.1}, limits={"maximum_training_s": 9.0}) as (device, _):
        device.worker.longest_s = 1.0
        device.take_plan(make_plan())
        device.advance()
        ((_, reason, _),) = device.declined()
        assert "the time of training in seconds, by a trial, is 10" in reason


# --- energy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [4.0, 1e-6])
def test_the_energy_of_a_round_is_kept_for_the_owner_whether_the_board_takes_part_or_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, epsilon: float
) -> None:
    caplog.set_level(logging.INFO)
    BoardTree(tmp_path / "board").write("sys/class/powercap/intel-rapl:0/energy_uj", 250_000_000)
    limits = {"dummy_traffic": True, "maximum_job_epsilon": epsilon}
    with board(tmp_path, {}, limits=limits) as (device, tree):
        slow = Slow(device, 0.5 * SLOT_S)
        mortal = Mortal(device, updates=1)
        for number, joules in ((1, 7.0), (2, 5.0)):
            device.take_plan(make_plan(round=number))
            before = 250.0 if number == 1 else 257.0
            while device.cycle._at_work is None or not hasattr(device.cycle._at_work, "over_at"):
                slow.pass_time(PERIOD_S)
            tree.write("sys/class/powercap/intel-rapl:0/energy_uj", round(1e6 * (before + joules)))
            slow.pass_time(30.0)
        assert mortal._updates < 0
        (energy,) = energy_of_jobs(device.state.connection)
    assert (energy.job, energy.rounds, energy.source) == (JOB, 2, "intel-rapl")
    assert energy.joules == pytest.approx(12.0)
    assert "7 J, as intel-rapl measures it" in caplog.text
