"""One sender sends the fragments of all devices as soon as the plan is out.

Claim: a round does not end before honest devices have had their slot and their jitter window, and fragments
    that come early or in a flood displace no honest one: if K fragments of a block come in time beside n
    honest ones, each has the same chance at one of the n seats. So K = n, here 320 messages, take half of the
    round, and not all of it. (More messages take more: that one sender cannot pass for many takes an
    identity, which fragments do not have.)
Parameters: digits, 20 devices, 16 blocks, slot 30 s, jitter 60 s, a grid of 2 s. Real coordinator, real
    Mosquitto.

Outcome: before, the round was over at once and no honest fragment counted, though every device had paid. Now
    it ends 92.5 s after its plan, with about 160 of 320 honest fragments.

Power: on the code of before the test fails always. On the new code the honest part of each block is
    hypergeometric (20 of 40); the test accepts sums within six standard deviations, which chance leaves once
    in 10⁸.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker, wait_until
from clocks import MovableClock
from daemons import attentive_daemons, coordinator_thread
from fleets import honest_update, write_fleet
from observers import Observer
from scipy import stats

from coordinator.keys import load_opener, load_signer
from coordinator.reader import StoreReader
from coordinator.settings import load_fleet_settings
from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import Plan
from dpagent.protocol.sealing import seal
from dpagent.protocol.signing import Verifier
from dpagent.protocol.task import RoundTask

DEVICES, BLOCKS, SLOT_S, JITTER_S = 20, 16, 30.0, 60.0
GRID_S = 2.0
_numbers = itertools.count()
FLEET: dict[str, Any] = {
    "devices": DEVICES, "fragments_per_update": BLOCKS, "rounds": 2, "keep_models": "last",
    "round": {"compute_slot_s": SLOT_S, "jitter_window_s": JITTER_S, "deadline_s": 600.0,
        "device_grid_s": GRID_S},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _attentive() -> Iterator[None]:
    with attentive_daemons():
        yield


def test_a_round_waits_for_honest_devices_and_a_flood_has_no_more_than_its_share(
    tmp_path: Path, mosquitto: Broker
) -> None:
    name = f"flooded-{next(_numbers)}"
    file = write_fleet(tmp_path, mosquitto, fleet=name, **FLEET)
    settings = load_fleet_settings(file)
    verifier = Verifier(load_signer(settings.keys_dir, name).public_key, name)
    opener, clock = load_opener(settings.keys_dir, name), MovableClock()

    def rounds() -> list[int]:
        reader = StoreReader(settings.state_dir)
        try:
            return [record.fragments for record in reader.rounds()]
        finally:
            reader.close()

    def handled() -> int:
        """Fragments that the coordinator has dealt with."""
        reader = StoreReader(settings.state_dir)
        try:
            return sum(rounds()) + reader.counters().get("rejected: block full", 0)
        finally:
            reader.close()

    with Observer(mosquitto, name) as observer, coordinator_thread(file, clock) as coordinator:
        wait_until(lambda: observer.plans, "the plan")
        plan = verifier.open(observer.plans[0], Plan, "plan")
        task = RoundTask.of(plan)

        def messages() -> list[bytes]:
            """Well-formed fragments of all devices."""
            updates = [honest_update(task) for _ in range(DEVICES)]
            return [seal(encode(each), plan) for update in updates for each in cut(update, plan)]

        hostile = messages()
        for message in hostile:
            observer.publish(observer.topics.fragments, message)
        wait_until(lambda: handled() == len(hostile), "the flood")
        assert len(hostile) == 320
        assert rounds() == [320], "all seats are taken, and the round is open"

        # Honest devices send in their window, as they would without the flood.
        clock.advance(1.25 * GRID_S + SLOT_S)
        honest = messages()
        ids = {opener.open(message, plan.job).id for message in honest}
        random.shuffle(honest)
        for number, message in enumerate(honest):
            if number % 32 == 0:
                clock.advance(JITTER_S / 10 * (1 - 1e-6))
                assert len(rounds()) == 1
            observer.publish(observer.topics.fragments, message)
        wait_until(lambda: handled() == 640, "the honest fragments")
        reader = StoreReader(settings.state_dir)
        counted = len(ids & reader.fragments().keys())
        assert reader.counters() == {"rejected: block full": 320}
        reader.close()
        assert len(rounds()) == 1
        clock.advance(1e-3)
        wait_until(lambda: len(rounds()) == 2, "the next round")
        assert rounds()[0] == 320
        print(f"{counted} of 320 honest fragments counted beside 320 of one sender")
        law = stats.hypergeom(2 * DEVICES, DEVICES, DEVICES)
        assert abs(counted - BLOCKS * law.mean()) <= 6 * math.sqrt(BLOCKS * law.var())
        assert coordinator.stop() is False


def test_messages_that_waited_for_the_coordinator_do_not_end_a_round_early(
    tmp_path: Path, mosquitto: Broker
) -> None:
    """The sender fills the broker's queue while the coordinator is away. No randomness in the attack."""
    name = f"queued-{next(_numbers)}"
    file = write_fleet(tmp_path, mosquitto, fleet=name, **FLEET)
    settings = load_fleet_settings(file)
    verifier = Verifier(load_signer(settings.keys_dir, name).public_key, name)
    clock = MovableClock()
    with Observer(mosquitto, name) as observer:
        with coordinator_thread(file, clock) as coordinator:
            wait_until(lambda: observer.plans, "the plan")
            coordinator.stop()
        plan = verifier.open(observer.plans[0], Plan, "plan")
        task = RoundTask.of(plan)
        for _ in range(DEVICES):
            for fragment in cut(honest_update(task), plan):
                observer.publish(observer.topics.fragments, seal(encode(fragment), plan))
        clock.advance(1.25 * GRID_S + SLOT_S + JITTER_S - 1.0)
        with coordinator_thread(file, clock) as coordinator:
            reader = StoreReader(settings.state_dir)
            wait_until(lambda: reader.rounds()[0].fragments == 320, "the queue")
            assert len(reader.rounds()) == 1
            clock.advance(1.0)
            wait_until(lambda: len(reader.rounds()) == 2, "the next round")
            reader.close()
            assert coordinator.stop() is False
