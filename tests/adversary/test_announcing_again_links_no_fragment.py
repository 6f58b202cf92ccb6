"""A coordinator announces a plan again and again: at which times of a board's grid do fragments leave?

Claim: a plan that is announced again, alone or in turn with that of another job, makes no fragment leave at a
    time that tells of its board's grid, which is the same for all fragments and rounds of one board.
Parameters: six boards with 20 fragments each in a window of 5 s, on grids of 5 s; the coordinator announces
    the plan every 0.9 s. It takes two fragments for one board's whose arrivals are at the same place of those
    5 s, to 0.3 s.

Power: where fragments get new times on the grid with each announcement, as they did, none leaves but in the
    moment between a point of it and the next announcement: what the coordinator guesses is more than ten
    standard deviations away from chance.

Outcome: it is within five of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from devices import Device, open_device
from fleets import DIGITS, make_plan

from agent.publisher import Publisher
from dpagent.protocol.messages import Plan

BOARDS, FRAGMENTS, PERIOD_S, STEP_S, AGAIN_S, APART_S, WATCHED_S = 6, 20, 5.0, 0.1, 0.9, 0.3, 700.0
BLOCK = -(-DIGITS.parameter_count // FRAGMENTS)
PLAN = make_plan(compute_slot_s=PERIOD_S, jitter_window_s=5.0, wire={"block": BLOCK})
OTHER = make_plan(job=b"k" * 16, compute_slot_s=PERIOD_S, deadline=1.0, wire={"block": BLOCK})
"""For which every board is too late."""


def arrivals(device: Device, epoch: float, announced: list[Plan]) -> list[float]:
    """When fragments of a board arrive, that leave for the first time."""
    publisher, clock = device.cycle._publisher, device.clock
    publisher.period_s = PERIOD_S
    began_at = clock.monotonic()
    publisher._epoch = began_at - epoch
    device.give()
    device.take_plan(announced[0], confirmed=False)
    times: list[float] = []
    due_at = began_at  # When the board has something to do of its own accord, as it says itself.
    for step in range(round(WATCHED_S / STEP_S)):
        if len(times) == FRAGMENTS:
            break
        clock.advance(STEP_S)
        if step % round(AGAIN_S / STEP_S) == 0 and device.pending():
            device.take_plan(announced[step // round(AGAIN_S / STEP_S) % len(announced)], confirmed=False)
        elif clock.monotonic() < due_at:
            continue
        device.cycle.advance()
        before = len(device.line.sent)
        publisher.publish_due()
        if len(device.line.sent) > before:
            times += [clock.monotonic() - began_at] * (len(device.line.sent) - before)
            with device.state.noted():
                device.state.connection.execute("UPDATE fragments SET state = 'counted' WHERE state = 'sent'")
        due_at = clock.monotonic() + min(device.cycle.due_in_s(), publisher.due_in_s())
    return times


def deviations(directory: Path, announced: list[Plan]) -> float:
    """How far the share of right guesses is above chance, in standard deviations of a guess at random."""
    chance, marks = random.Random(7), list[tuple[float, int]]()
    for number in range(BOARDS):
        with open_device(directory / str(number)) as device:
            found = arrivals(device, chance.uniform(0.0, PERIOD_S), announced)
            marks += [(at, number) for at in found]
    times, owners = (np.array([mark[place] for mark in marks]) for place in (0, 1))
    assert len(times) > 3 * BOARDS, "they leave"
    rows, columns = np.triu_indices(len(marks), 1)
    apart = np.abs(times[rows] - times[columns]) % PERIOD_S
    is_taken = np.minimum(apart, PERIOD_S - apart) < APART_S
    draw = np.random.default_rng(7)
    found = (owners[rows] == owners[columns])[is_taken].mean()
    drawn = [
        (mixed[rows] == mixed[columns])[is_taken].mean()
        for mixed in (draw.permutation(owners) for _ in range(500))
    ]
    print(f"{found:.3f} right, {np.mean(drawn):.3f} by chance")
    return float((found - np.mean(drawn)) / np.std(drawn))


@pytest.mark.parametrize("announced", [[PLAN], [PLAN, OTHER]], ids=["the plan", "two in turn"])
def test_what_is_announced_again_tells_no_grid(tmp_path: Path, announced: list[Plan]) -> None:
    assert deviations(tmp_path, announced) < 5.0


def test_power_times_on_the_grid_tell_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never: Callable[[Publisher, Plan], bool] = lambda publisher, plan: False  # noqa: E731
    monkeypatch.setattr(Publisher, "is_open_for", never)
    monkeypatch.setattr(Publisher, "draw_times_again", Publisher.draw_times)
    assert deviations(tmp_path, [PLAN]) > 10.0
