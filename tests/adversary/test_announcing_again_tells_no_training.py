"""A coordinator announces a plan again while a device trains, to learn whether training is over.

Claim: what a device does with an announcement that comes between a charge and its jitter window is a function
    of the plans, of their times and of a trial with made-up records: not of how long training really took.
Parameters: a plan that takes three slots by its trial; the same announcement again, one with a later
    deadline, or a plan of another job and then this one again, at three times between charge and window.

Before, an announcement was ignored until training was over, and gave the fragments new times after that: one
    at the next slot, so that a coordinator learned the length of training to a slot from one charge, as often
    as it announced. A plan of another job in between made a device that still trained begin again, and one
    that had finished send.

Power: no randomness. The grid is pinned and the jitter window empty, so times are compared exactly; on the
    code of before they differ by whole slots for each kind of announcement.
Outcome: an update is not taken before the last quarter of its slots, however soon it is ready.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from devices import PERIOD_S, open_device
from test_time_tells_no_training import OTHER_JOB, SLOT_S, Slow, plan

LONGEST_S = 2.6 * SLOT_S
SHARES = (0.0, 0.3, 0.7)
"""Of what the trial says."""


def left_at(directory: Path, training_s: float, again_after_s: float, kind: str) -> list[float]:
    """When the fragments of a round leave, of which an announcement came again; none if they do not."""
    with open_device(directory) as device:
        device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
        slow = Slow(device, training_s, longest_s=LONGEST_S)
        began = device.clock.monotonic()
        device.take_plan(plan())
        device.give()
        slow.pass_time(again_after_s)
        match kind:
            case "again":
                device.take_plan(plan())
            case "later":
                device.take_plan(plan(deadline=plan().deadline + 1.0))
            case "between":
                device.take_plan(plan(job=OTHER_JOB))
                slow.pass_time(PERIOD_S)
                device.take_plan(plan())
            case "beyond":
                device.take_plan(plan(job=OTHER_JOB))
                slow.pass_time(device.announcements._underway.fixed_until - device.clock.monotonic())
                slow.pass_time(PERIOD_S)
                device.take_plan(plan())
        device.give()
        slow.pass_time(8 * SLOT_S)
        rows = device.state.connection.execute(
            "SELECT DISTINCT due_at FROM times JOIN fragments USING (digest) WHERE job = ?",
            (plan().job.hex(),),
        )
        return [float(row[0]) - began for row in rows]


@pytest.mark.parametrize("kind", ["again", "later", "between"])
@pytest.mark.parametrize("after", [0.4, 1.3, 2.4])
def test_an_announcement_between_charge_and_window_does_not_tell_whether_training_is_over(
    tmp_path: Path, after: float, kind: str
) -> None:
    quick, middle, whole = (
        left_at(tmp_path / str(share), share * LONGEST_S, after * SLOT_S, kind) for share in SHARES
    )
    assert quick
    assert middle == pytest.approx(quick, abs=1e-9)
    assert whole == pytest.approx(quick, abs=1e-9)


@pytest.mark.parametrize("share", SHARES)
def test_what_comes_back_as_the_window_is_about_to_open_leaves_no_sooner(
    tmp_path: Path, share: float
) -> None:
    """Dummies of a board that could not train were there since it declined, and would not either."""
    as_planned, found = (
        left_at(tmp_path / kind, share * LONGEST_S, 1.3 * SLOT_S, kind) for kind in ("again", "beyond")
    )
    assert as_planned
    assert found == pytest.approx(as_planned, abs=1e-9)
