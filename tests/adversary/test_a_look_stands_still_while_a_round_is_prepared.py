"""A coordinator sees by the slots of an answer whether a board still decoded a slow picture when the round
was prepared, or when it trained: beside a look, both take longer, and the plan is such that it just fits its
slots.

Claim: a look at the data computes nothing while a round is priced, is prepared and trains, and what it found
    counts later by as much, whatever it was at.
Parameters: a real training process with a real look at a picture that takes all of its time; a device whose
    training process is asked what it is to do.

Before, only a core that both want was thought of, and the processor time of a trial was taken for what no
look moves. A look takes a share of caches and of the memory's bandwidth: on two cores of an Intel Xeon with
nothing else to do, trials of ``mnist-cnn`` took 1.18 times as much processor time beside one as without
(medians of 30 each), and of one of each the longer one was that beside the look in 79 of 100 cases. The noise
of such rounds may be of any size, so that they cost next to nothing, and ten of them told in 99 of 100.

Before, a look went on while a round trained, which has half as long again as its trial, and takes 1.41 times
as long beside a look on one core. But a coordinator that keeps the agent busy takes of the rest: with
messages that take 30 % of its time, training took 1.27 times its trial (1.26, 1.27, 1.27), and beside a look
1.75 times (1.76, 1.75, 1.75; one core of an Intel Xeon, programs of the niceness that agent, training and
look have), a slot more.

Power: no randomness.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future
from pathlib import Path

import hostile_files as hostile
import pytest
from brokers import wait_until
from children import PATIENCE_S
from devices import SLOT_S, WEIGHTS, Device, Unpaused, open_device
from fleets import make_plan, terms
from pictures import write

from agent.rounds import RoundState
from agent.training_messages import Order, Prepared, Update
from agent.worker import Worker

ORDER = Order(make_plan(**terms(rate=1.0)), WEIGHTS, {})


def below(process: int) -> list[int]:
    """The processes that descend from one."""
    parents: dict[int, int] = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [number for number, parent in parents.items() if parent == process]
    return found + [other for number in found for other in below(number)]


def computed(processes: list[int]) -> list[tuple[str, int]]:
    """What the kernel says that they do, and the processor time of each, in ticks."""
    fields = [Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split() for number in processes]
    return [(each[0], sum(map(int, each[11:13]))) for each in fields]


def held_look(worker: Worker, directory: Path) -> list[int]:
    """The processes of a look that decodes a slow picture, and stands still."""
    worker.prepare(ORDER).result(PATIENCE_S)
    write(directory / "photos" / "0" / "slow.jpg", hostile.slow_jpeg())
    worker.update().result(PATIENCE_S)
    worker.look()
    assert worker._looks._look is not None
    leader = worker._looks._look.group
    wait_until(lambda: below(leader), "a look that decodes")
    worker.hold_look()
    look = [leader, *below(leader)]
    wait_until(lambda: all(state == "T" for state, _ in computed(look)), "a look that stands still")
    return look


@pytest.mark.usefixtures("executed")
def test_a_look_computes_nothing_while_a_round_is_prepared(worker: Worker, tmp_path: Path) -> None:
    look = held_look(worker, tmp_path)
    before = computed(look)
    lasts_s = worker._looks._lasts_s()
    worker.prepare(ORDER).result(PATIENCE_S)
    assert computed(look) == before
    assert worker._looks._lasts_s() == pytest.approx(lasts_s, abs=1e-6)
    worker.resume_look()
    assert worker._looks._lasts_s() > lasts_s
    wait_until((tmp_path / "state" / "records.found").exists, "the end of the look")


class Asked(Unpaused):
    """Notes what the device asks of its training process, which the test's own is."""

    def __init__(self, device: Device) -> None:
        self._inner = device.worker
        self.asked: list[str] = []
        self.is_held = False
        device.cycle._worker = self

    def hold_look(self) -> None:
        if not self.is_held:
            self.is_held = True
            self.asked.append("hold")

    def resume_look(self) -> None:
        if self.is_held:
            self.is_held = False
            self.asked.append("resume")

    def prepare(self, order: Order) -> Future[Prepared]:
        self.asked.append("prepare")
        return self._inner.prepare(order)

    def update(self) -> Future[Update]:
        self.asked.append("update")
        return self._inner.update()

    def look(self) -> None:
        self.asked.append("look")

    def end(self) -> None:
        pass


@pytest.mark.parametrize("is_declined", [False, True])
def test_it_stands_still_from_the_decision_on_until_the_update_is_taken(
    tmp_path: Path, *, is_declined: bool
) -> None:
    with open_device(tmp_path) as device:
        asked = Asked(device)
        device.give()
        device.take_plan(make_plan(jitter_window_s=0.5, **({"delta": 0.5} if is_declined else {})))
        for _ in range(100):
            device.cycle.advance()
            device.clock.advance(0.5)
        assert bool(device.declined()) is is_declined
        usual = ["hold", "prepare", "update", "resume", "look"]
        assert asked.asked == (["hold", "resume"] if is_declined else usual)


def test_each_round_leaves_a_look_a_quarter_of_its_last_slot(tmp_path: Path) -> None:
    """A coordinator whose rounds follow close on each other keeps new records out for long, and not for ever:
    whatever the rounds are, a look computes at the end of the slots of each."""
    with open_device(tmp_path) as device:
        asked, times = Asked(device), list[float]()
        device.worker.longest_s = 3.5 * SLOT_S
        device.give()
        for number in range(1, 6):
            plan = make_plan(round=number, jitter_window_s=0.5, mechanism={"noise_multipliers": [40.0] * 5})
            device.take_plan(plan)
            while device.state.round(plan.job.hex(), number).state is not RoundState.SPOOLED:  # type: ignore[union-attr]
                device.clock.advance(SLOT_S / 100)
                was_held = asked.is_held
                device.cycle.advance()
                if asked.is_held is not was_held:
                    times.append(device.clock.monotonic())
        assert len(times) == 10
        held = [end - begin for begin, end in zip(times[::2], times[1::2], strict=True)]
        free = [begin - end for begin, end in zip(times[2::2], times[1::2], strict=False)]
        assert min(held) > 3 * SLOT_S
        assert min(free) > SLOT_S / 5


DECODER = """
    import os, sys, time
    import numpy as np
    from pathlib import Path
    from agent.bounded_decoding import Limits, decode_apart
    from dpagent.learning.data.dataset import Dataset

    class Waiting(Dataset):
        def _read(self, indices):
            Path(sys.argv[1]).touch()
            time.sleep(0.7)
            return np.zeros((len(indices), 2), np.uint8)

    data = Waiting(np.zeros(1, np.int64), 2, shape=(2,), dtype=np.dtype(np.uint8))
    rows = os.open(sys.argv[1] + ".rows", os.O_RDWR | os.O_CREAT)
    found = list(decode_apart(data, [0], [0], rows, Limits(64 << 20, 0.05)))
    sys.exit(f"{found}" if found[0].problem else 0)
"""


def test_a_time_in_which_a_look_stands_still_is_no_time_of_its_record(tmp_path: Path) -> None:
    """Before, the kernel counted it: a record that a slow one before it had put there was left out."""
    begun = tmp_path / "begun"
    program = [sys.executable, "-P", "-c", textwrap.dedent(DECODER), str(begun)]
    with subprocess.Popen(program, process_group=0) as decoding:
        wait_until(begun.exists, "the record")
        os.killpg(decoding.pid, signal.SIGSTOP)
        time.sleep(4)
        os.killpg(decoding.pid, signal.SIGCONT)
        assert decoding.wait(PATIENCE_S) == 0
