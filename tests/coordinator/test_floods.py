"""A coordinator under more messages than it can count: in a process of its own, at a real Mosquitto."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker, wait_until
from fleets import honest_update, run_coordinator
from floods import PATIENCE_S, publish_all, resident_kib, stopped
from observers import Observer
from watched_fleets import WatchedFleet

from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import Plan
from dpagent.protocol.sealing import seal
from dpagent.protocol.task import RoundTask

pytestmark = pytest.mark.usefixtures("executed")

DEVICES, BLOCKS, MESSAGES = 200, 5, 8_000
RUBBISH_BYTES = 6_000
MOST_GROWTH_KIB = 16 * 1024
"""The flood has 46 MiB."""


class Flood:
    """A coordinator whose plan is out, and messages to it: valid fragments, each once, among rubbish."""

    def __init__(self, directory: Path, broker: Broker) -> None:
        self.broker = broker
        self.fleet = WatchedFleet(directory, broker, devices=DEVICES, fragments_per_update=BLOCKS)
        with run_coordinator(self.fleet.file) as coordinator, Observer(broker, self.fleet.name) as observer:
            wait_until(lambda: observer.plans, "the plan")
            plan = self.fleet.verifier.open(observer.plans[0], Plan, "plan")
            assert coordinator.stop() == 0
        self.task = RoundTask.of(plan)
        self.topic = observer.topics.fragments
        updates = [cut(honest_update(self.task), plan) for _ in range(DEVICES)]
        self.fragments = [fragment for update in updates for fragment in update]
        self.valid = [seal(encode(fragment), plan) for fragment in self.fragments]

    def messages(self, count: int = MESSAGES) -> list[bytes]:
        """The valid fragments in random places among rubbish, so many in all."""
        rubbish = [
            number.to_bytes(4, "big") * (RUBBISH_BYTES // 4) for number in range(count - len(self.valid))
        ]
        mixed = self.valid + rubbish
        random.Random(13).shuffle(mixed)
        return mixed

    def send(self, messages: list[bytes]) -> None:
        publish_all(self.broker, self.topic, messages)

    def handled(self) -> int:
        """Messages that the coordinator has counted or rejected."""
        return len(self.fleet.counted()) + self.fleet.counters().get("rejected: unsupported version", 0)

    def all_counted(self) -> bool:
        return len(self.fleet.counted()) == len(self.valid)

    def require_each_once(self) -> None:
        """Each valid fragment is counted, and the sums are theirs."""
        assert self.fleet.counted().keys() == {fragment.id for fragment in self.fragments}
        assert self.fleet.rounds()[0].fragments == len(self.fragments)


@pytest.fixture(params=["5", pytest.param("3.1.1", marks=pytest.mark.slow)])
def flood(request: pytest.FixtureRequest, tmp_path: Path, new_broker: Any) -> Flood:
    return Flood(tmp_path, new_broker("mosquitto", request.param).start())


def at_work(flood: Flood) -> None:
    """Wait until the coordinator rejects a message."""
    flood.send([b"rubbish"])
    wait_until(lambda: flood.handled() == 1, "the coordinator", PATIENCE_S)


def test_a_stopped_coordinator_loses_no_message_and_holds_few(flood: Flood) -> None:
    with run_coordinator(flood.fleet.file) as coordinator:
        at_work(flood)
        before = resident_kib(coordinator)
        with stopped(coordinator):
            flood.send(flood.messages())
        wait_until(lambda: flood.handled() > MESSAGES, "all messages", PATIENCE_S)
        flood.require_each_once()
        assert flood.fleet.counters()["rejected: unsupported version"] == 1 + MESSAGES - len(flood.valid)
        growth = resident_kib(coordinator) - before
        print(f"resident memory: {before} KiB, and {growth} KiB more under {MESSAGES} messages")
        assert growth < MOST_GROWTH_KIB
        assert coordinator.stop() == 0


@pytest.mark.slow
def test_a_coordinator_and_a_broker_that_are_killed_lose_no_message(flood: Flood) -> None:
    """What the broker has stored, that is: it writes its store every second."""
    broker, messages = flood.broker, flood.messages(4 * len(flood.valid))
    flood.send(messages)
    broker.wait_until_stored()
    for share in (0.2, 0.4, 0.6):
        with run_coordinator(flood.fleet.file) as coordinator:
            wait_until(
                lambda share=share: len(flood.fleet.counted()) > share * len(flood.valid), "some", PATIENCE_S
            )
            coordinator.kill()
    with run_coordinator(flood.fleet.file) as coordinator:
        wait_until(lambda: len(flood.fleet.counted()) > 0.8 * len(flood.valid), "more", PATIENCE_S)
        broker.kill()
        broker.start()
        wait_until(flood.all_counted, "the rest", PATIENCE_S)
        flood.require_each_once()
        assert coordinator.stop() == 0


@pytest.mark.slow
def test_rubbish_does_not_starve_fragments(flood: Flood) -> None:
    """It is acknowledged like any other message, so that the broker sends on."""
    with run_coordinator(flood.fleet.file) as coordinator:
        at_work(flood)
        rubbish = [time.monotonic_ns().to_bytes(8, "big") * 10] * 5_000
        for part in range(4):
            flood.send([*rubbish, *flood.valid[part::4]])
        wait_until(flood.all_counted, "the fragments", PATIENCE_S)
        assert coordinator.stop() == 0
