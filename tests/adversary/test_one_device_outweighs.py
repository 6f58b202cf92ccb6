"""One device sends one well-formed fragment a block, made to move the fleet's mean as far as it can.

Claim: a fragment counts only if its norm is one that an honest device's has. Whatever one device sends, it
moves the mean of a block by at most ``HonestNorms.pull`` clip norms, and all B blocks by √B times that.
Parameters: mnist-cnn (26,010 coordinates in 16 blocks), 10 devices with 6,000 records, q = 0.1,
100 rounds at ε = 2 and δ = 1e-5, one sum a round. Real coordinator, real Mosquitto.

Outcome: before, the largest values that the wire holds moved the mean of all blocks by 27 clip norms; now
they are rejected. The strongest fragments that count move it by up to 0.148 clip norms in one block and 0.59
in all 16 together, where an honest device moves it by up to 0.1, and by 0.06 with its noise alone.

Power: the attack has no randomness. On the code of before the test fails always; on the new code the honest
fragments of round 1 are counted except with probability 1e-9.
"""

from __future__ import annotations

import itertools
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import Broker, wait_until
from clocks import MovableClock
from daemons import attentive_daemons, coordinator_thread
from fleets import honest_update, write_fleet
from numpy.typing import NDArray
from observers import Observer

from coordinator.aggregation import fleet_mean
from coordinator.influence import HonestNorms
from coordinator.keys import load_signer
from coordinator.settings import load_fleet_settings
from coordinator.store import StoreReader
from dpagent.privacy.mechanisms.wire import MAX_WIRE_VALUE
from dpagent.protocol.codec import MessageError, encode
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import Plan
from dpagent.protocol.sealing import seal
from dpagent.protocol.signing import Verifier
from dpagent.protocol.task import RoundTask

DEVICES, BLOCKS, LOT = 10, 16, 600
_numbers = itertools.count()
FLEET: dict[str, Any] = {
    "devices": DEVICES, "records_per_device": 6_000, "rounds": 100, "fragments_per_update": BLOCKS,
    "model": {"name": "mnist-cnn"}, "keep_models": "last", "cap": {"kind": "none"},
    "privacy": {"epsilon": 2.0, "delta": 1e-5, "sampling_rate": 0.1},
    "optimiser": {"learning_rate": 1.0, "momentum": 0.0},
    "round": {"compute_slot_s": 30.0, "jitter_window_s": 60.0, "deadline_s": 600.0},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _attentive() -> Iterator[None]:
    with attentive_daemons():
        yield


def strongest(task: RoundTask, norms: HonestNorms) -> NDArray[np.int64]:
    """The same value in every coordinate of a block, as large as counts."""
    block, update = task.plan.wire.block, np.zeros(task.release.dimension, np.int64)
    for position in range(task.release.blocks):
        part = update[position * block : (position + 1) * block]
        value, beyond = 0, MAX_WIRE_VALUE
        while beyond - value > 1:
            middle = (value + beyond) // 2
            # The least that counts is above a unit.
            if middle < 3 or _counts(norms, position, np.full(block, middle, np.int64)):
                value = middle
            else:
                beyond = middle
        part[:] = value
    return update


def _counts(norms: HonestNorms, position: int, values: NDArray[np.int64]) -> bool:
    try:
        norms.require(position, values)
    except MessageError:
        return False
    return True


def weights_of(state_dir: Path) -> NDArray[np.float64]:
    connection = sqlite3.connect(state_dir / "coordinator.db")
    try:
        raw = connection.execute("SELECT weights FROM model").fetchone()[0]
    finally:
        connection.close()
    return np.frombuffer(raw, np.float32).astype(np.float64)


class Attacked:
    """A fleet whose coordinator and broker run, and whose devices are played."""

    def __init__(self, directory: Path, broker: Broker) -> None:
        self.name = f"outweighed-{next(_numbers)}"
        self.file = write_fleet(directory, broker, fleet=self.name, **FLEET)
        self.settings = load_fleet_settings(self.file)
        self.verifier = Verifier(load_signer(self.settings.keys_dir, self.name).public_key, self.name)
        self.clock = MovableClock()

    def task(self, observer: Observer, number: int) -> RoundTask:
        """The task of a round, once its plan is out."""

        def announced() -> Plan | None:
            plans = [self.verifier.open(message, Plan, "plan") for message in observer.plans]
            return next((plan for plan in plans if plan.round == number), None)

        return RoundTask.of(wait_until(announced, f"the plan of round {number}"))

    def send(self, observer: Observer, task: RoundTask, update: NDArray[np.int64]) -> None:
        """All fragments of an update."""
        for fragment in cut(update, task.plan):
            observer.publish(observer.topics.fragments, seal(encode(fragment), task.plan))

    def close_round(self, task: RoundTask, expected: int) -> NDArray[np.float64]:
        """Let honest devices' time pass, once so many fragments are counted; the step of the model."""
        number, before = task.plan.round, weights_of(self.settings.state_dir)
        wait_until(lambda: self.fragments_of(number) == expected, "the fragments")
        self.clock.advance(120.0)
        wait_until(lambda: self.fragments_of(number + 1) is not None, "the next round")
        return before - weights_of(self.settings.state_dir)

    def fragments_of(self, number: int) -> int | None:
        reader = StoreReader(self.settings.state_dir)
        try:
            return next((each.fragments for each in reader.rounds() if each.number == number), None)
        finally:
            reader.close()

    def counters(self) -> dict[str, int]:
        reader = StoreReader(self.settings.state_dir)
        try:
            return reader.counters()
        finally:
            reader.close()


def mean_of(task: RoundTask, updates: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Their sum as a part of the mean over all devices."""
    block = task.plan.wire.block
    total = np.zeros(task.release.blocks * block, np.int64)
    total[: task.release.dimension] = sum(updates)
    return fleet_mean(task.release, {at: (DEVICES, part) for at, part in enumerate(total.reshape(-1, block))})


def test_one_device_moves_the_mean_by_little_more_than_an_honest_one(
    tmp_path: Path, mosquitto: Broker
) -> None:
    fleet = Attacked(tmp_path, mosquitto)
    with (
        Observer(mosquitto, fleet.name) as observer,
        coordinator_thread(fleet.file, fleet.clock) as coordinator,
    ):
        task = fleet.task(observer, 1)
        end = MAX_WIRE_VALUE
        largest = np.full(task.release.dimension, end, np.int64)
        one_norm = task.release.mechanism.clip_norm
        before = float(np.linalg.norm(mean_of(task, [largest]))) / one_norm
        assert before > 16

        # The largest values come to nothing: the step is the mean of ten honest devices.
        updates = [honest_update(task, LOT) for _ in range(DEVICES)]
        for update in [largest, *updates]:
            fleet.send(observer, task, update)
        step = fleet.close_round(task, BLOCKS * DEVICES)
        assert float(np.linalg.norm(step - mean_of(task, updates))) < 1e-4 * one_norm
        assert fleet.counters() == {"rejected: improbable norm": BLOCKS}

        # The largest that count come to no more than the bound.
        task = fleet.task(observer, 2)
        norms = HonestNorms(task.release, fleet.settings)
        updates = [honest_update(task, LOT) for _ in range(DEVICES - 1)]
        for update in [strongest(task, norms), *updates]:
            fleet.send(observer, task, update)
        step = fleet.close_round(task, BLOCKS * DEVICES)
        moved = float(np.linalg.norm(step - mean_of(task, updates))) / one_norm
        noise = (
            task.release.mechanism.deviation_units
            / task.release.mechanism.grid.resolution
            * math.sqrt(task.release.dimension)
        )
        print(f"clip norms of the mean: {before:.1f} before, {norms.pull:.3f} in a block now,")
        print(f"{moved:.3f} in all {BLOCKS}; an honest device's noise {noise / (DEVICES * LOT):.3f}")
        assert norms.pull < 0.15
        assert 0.9 * math.sqrt(BLOCKS) * norms.pull < moved <= math.sqrt(BLOCKS) * norms.pull
        assert coordinator.stop() is False
