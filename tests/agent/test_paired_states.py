"""Whatever comes between, a device that sits rounds out does as one that takes part: by random walks.

A broker sees a device as it answers announcements, again after restarts, after a training process that
ended, after plans of other jobs, after the end of a job, and while the board is too hot to train. Each step
of a walk is done to two devices, of which one takes part and the other one sits out: after each, both have as
much to send, for the same rounds.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from devices import PERIOD_S, AtOnce, Device, open_device
from fleets import make_plan

from agent.training_messages import Update, WorkerError
from dpagent.protocol.codec import MessageError
from dpagent.protocol.messages import Plan

GOVERNOR: dict[str, Any] = {"highest_temperature_c": 70.0}
ON: dict[str, Any] = {"limits": {"dummy_traffic": True}, "governor": GOVERNOR}
OUT: dict[str, Any] = {
    "limits": {"dummy_traffic": True, "maximum_job_epsilon": 1e-6}, "governor": GOVERNOR
}  # fmt: skip
SLOTS = 2.5
STEPS = 14


class Ended:
    """A training process that may end in the middle of an update."""

    def __init__(self, worker: AtOnce) -> None:
        self._worker, self.ends = worker, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def update(self) -> Future[Update]:
        if not self.ends:
            return self._worker.update()
        self.ends = False
        failed: Future[Update] = Future()
        failed.set_exception(WorkerError("the training process ended"))
        return failed


@contextmanager
def running(directory: Path, settings: dict[str, Any]) -> Iterator[tuple[Device, Ended]]:
    with open_device(directory, **settings) as device:
        device.worker.longest_s = SLOTS * make_plan().compute_slot_s
        worker = Ended(device.worker)
        device.cycle._worker = worker  # type: ignore[assignment]
        device.give()
        yield device, worker


def made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def pass_time(device: Device, seconds: float) -> None:
    for _ in range(round(seconds / (PERIOD_S / 2))):
        device.clock.advance(PERIOD_S / 2)
        device.cycle.advance()


def to_send(device: Device) -> Counter[tuple[str, int]]:
    return Counter(device.state.spool.pending().values())


PLANS = [make_plan(job=job * 16, round=number) for job in (b"j", b"k") for number in (1, 2)]
ENDS = [plan.with_values({"state": "finished"}) for plan in PLANS]
Step = Callable[[Device, Ended], None]


def steps_of(generator: random.Random) -> list[tuple[str, Step | None]]:
    """What happens, and what to do; None: a power cut."""
    found: list[tuple[str, Step | None]] = []
    for _ in range(STEPS):
        kinds = (
            ["plan"] * 4 + ["time"] * 4 + ["restart", "restart", "ends", "finished", "hot", "cool", "cool"]
        )
        kind = generator.choice(kinds)
        plan = generator.choice(ENDS if kind == "finished" else PLANS)
        slots = generator.choice([0.3, 1.2, 2.0, 4.0])
        what = f"{kind} {plan.job[:1].decode()}{plan.round}" if kind in ("plan", "finished") else kind

        def announced(device: Device, _: Ended, plan: Plan = plan) -> None:
            with suppress(MessageError):  # An earlier round is refused.
                device.take_plan(plan)

        def later(device: Device, _: Ended, slots: float = slots) -> None:
            pass_time(device, slots * make_plan().compute_slot_s)

        def ended(_: Device, worker: Ended) -> None:
            worker.ends = True

        def heated(device: Device, _: Ended, celsius: float = 90.0 if kind == "hot" else 40.0) -> None:
            device.board.heat(celsius)

        step: dict[str, Step | None] = {
            "plan": announced, "finished": announced, "time": later, "ends": ended, "restart": None,
            "hot": heated, "cool": heated,
        }  # fmt: skip
        found.append((what, step[kind]))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_two_devices_have_as_much_to_send_after_each_step(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    with ExitStack() as stack:
        pair = [
            stack.enter_context(running(made(tmp_path / name), s)) for name, s in (("part", ON), ("out", OUT))
        ]
        done: list[str] = []
        for what, step in steps_of(generator):
            done.append(what)
            if step is None:
                stack.close()
                pair = [
                    stack.enter_context(running(made(tmp_path / name), s))
                    for name, s in (("part", ON), ("out", OUT))
                ]
                continue
            for device, worker in pair:
                step(device, worker)
            one, other = (to_send(device) for device, _ in pair)
            assert one == other, f"takes part: {one}, sits out: {other}, after {', '.join(done)}"
        assert pair[1][0].charged() == []


def test_as_much_is_written_and_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a plan to the end of its window. A slow disk keeps the agent from acknowledging meanwhile."""
    written: Counter[str] = Counter()
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: written.update(["fsync"]) or real(number))
    found = []
    for name, settings in (("part", ON), ("out", OUT)):
        with running(made(tmp_path / name), settings) as (device, _):
            written.clear()
            device.state.connection.set_trace_callback(
                lambda text: written.update([text] if text in ("COMMIT", "BEGIN IMMEDIATE") else [])
            )
            device.take_plan(PLANS[0])
            pass_time(device, 4 * PLANS[0].compute_slot_s)
            assert to_send(device)
            device.take_plan(PLANS[1])
            pass_time(device, 4 * PLANS[1].compute_slot_s)
            found.append(dict(written))
    assert found[0] == found[1]
    assert found[0]["fsync"] >= 8
    assert found[0]["COMMIT"] >= 8
