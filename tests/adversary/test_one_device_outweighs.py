"""One device sends one well-formed fragment a block, made to move the fleet's mean as far as it can.

Claim: a fragment counts only if its norm is one that an honest device's has. Whatever one device sends, it
moves the mean of a block by at most ``HonestNorms.pull`` clip norms, and all B blocks by √B times that with
Gaussian noise, where norms are L2, and B times that with Laplace noise, where they are L1.
Parameters: mnist-cnn (26,010 coordinates in 16 blocks), 10 devices with 6,000 records, q = 0.1,
100 rounds at ε = 2 and δ = 1e-5, one sum a round. Real coordinator, real Mosquitto.

Outcome, Gaussian: before, the largest values that the wire holds moved the mean of all blocks by 27 clip
norms (at the width of then); now they are rejected. The strongest fragments that count move it by up to 0.148
clip norms in one block and 0.59 in all 16 together, where an honest device moves it by up to 0.1, and by 0.06
with its noise alone. Laplace, in L1 clip norms: up to 0.960 in one block and 14.6 in all, where an honest
device's noise alone moves it by 0.65 and 10.2; before, by 10¹⁰.

Power: the attack has no randomness. On the code of before the test fails always; on the new code the honest
fragments of round 1 are counted except with probability 1e-9.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import Broker, wait_until
from clocks import MovableClock
from daemons import attentive_daemons, coordinator_thread
from fleets import honest_update, merged, write_fleet
from numpy.typing import NDArray
from observers import Observer

from coordinator.aggregation import fleet_mean
from coordinator.influence import HonestNorms
from coordinator.keys import load_signer
from coordinator.reader import StoreReader
from coordinator.settings import load_fleet_settings
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
    """As large a norm in each block as counts: in one coordinate, or for L2 spread over all."""
    block, power = task.plan.wire.block, task.release.mechanism.norm.power
    update, honest = np.zeros(task.release.dimension, np.int64), honest_update(task)
    for position in range(task.release.blocks):
        here = slice(position * block, (position + 1) * block)
        part = update[here] if power == 2 else update[here][:1]
        # An honest fragment's norm counts; below the least that does, nothing is gained.
        value = int(np.linalg.norm(honest[here], power) / len(part) ** (1 / power))
        beyond = MAX_WIRE_VALUE
        while beyond - value > 1:
            part[:] = middle = (value + beyond) // 2
            padded = np.zeros(block, np.int64)
            padded[: len(update[here])] = update[here]
            if _counts(norms, position, padded):
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
        raw = connection.execute("SELECT weights FROM models").fetchone()[0]
    finally:
        connection.close()
    return np.frombuffer(raw, np.float32).astype(np.float64)


class Attacked:
    """A fleet whose coordinator and broker run, and whose devices are played."""

    def __init__(self, directory: Path, broker: Broker, noise: str = "gaussian") -> None:
        self.name = f"outweighed-{next(_numbers)}"
        kind = {"gaussian": {}, "laplace": {"method": "incrementing", "noise": "laplace"}}[noise]
        values = merged(FLEET, {"fleet": self.name, "privacy": kind})
        self.file = write_fleet(directory, broker, **values)
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


@pytest.mark.parametrize(
    ("noise", "most"), [("gaussian", 0.15), pytest.param("laplace", 0.97, marks=pytest.mark.slow)]
)
def test_one_device_moves_the_mean_by_little_more_than_an_honest_one(
    tmp_path: Path, mosquitto: Broker, noise: str, most: float
) -> None:
    fleet = Attacked(tmp_path, mosquitto, noise)
    with (
        Observer(mosquitto, fleet.name) as observer,
        coordinator_thread(fleet.file, fleet.clock) as coordinator,
    ):
        task = fleet.task(observer, 1)
        end = MAX_WIRE_VALUE
        largest = np.full(task.release.dimension, end, np.int64)
        one_norm = task.release.mechanism.clip_norm
        power = task.release.mechanism.norm.power

        def norm_of(vector: NDArray[np.float64]) -> float:
            return float(np.linalg.norm(vector, power)) / one_norm

        before = norm_of(mean_of(task, [largest]))
        assert before > 16

        # The largest values come to nothing: the step is the mean of ten honest devices.
        updates = [honest_update(task, LOT) for _ in range(DEVICES)]
        for update in [largest, *updates]:
            fleet.send(observer, task, update)
        step = fleet.close_round(task, BLOCKS * DEVICES)
        assert norm_of(step - mean_of(task, updates)) < 1e-3 * norm_of(step)
        assert fleet.counters() == {"rejected: improbable norm": BLOCKS}

        # The largest that count come to no more than the bound.
        task = fleet.task(observer, 2)
        norms = HonestNorms(task.release, fleet.settings)
        updates = [honest_update(task, LOT) for _ in range(DEVICES - 1)]
        for update in [strongest(task, norms), *updates]:
            fleet.send(observer, task, update)
        step = fleet.close_round(task, BLOCKS * DEVICES)
        moved = norm_of(step - mean_of(task, updates))
        own = norm_of(mean_of(task, [honest_update(task)]))
        print(f"clip norms of the mean: {before:.3g} before, {norms.pull:.3f} in a block now,")
        print(f"{moved:.3f} in all {BLOCKS}; an honest device's noise {own:.3f}")
        assert norms.pull < most
        blocks = BLOCKS ** (1 / power)
        assert 0.9 * blocks * norms.pull < moved <= blocks * norms.pull
        assert coordinator.stop() is False
