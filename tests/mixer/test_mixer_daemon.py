"""The mixer over Mosquitto: what it publishes, what it refuses, a second start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker, wait_until
from daemons import mixer_thread
from fleets import make_plan
from mixers import opener_of, write_mixer
from observers import Observer

from dpagent.errors import StateInUseError
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.mixing import OuterOpener, seal_for
from dpagent.protocol.sealing import Opener, new_sealing_secret

BATCH = 6


class Sender(Observer):
    """Publishes for devices, and sees what the broker sees."""

    def __init__(self, broker: Broker, fleet: str, mixer: OuterOpener) -> None:
        super().__init__(broker, fleet)
        self.opener = Opener(new_sealing_secret(), fleet)
        self.plan: Plan = make_plan(fleet=fleet, sealing_key=self.opener.public_key, mixer=mixer.public_key)

    def message(self) -> tuple[bytes, bytes]:
        """The id of a new fragment, and the message that carries it."""
        fragment = Fragment(1, 0, os.urandom(16), bytes(40))
        return fragment.id, seal_for(fragment.to_bytes(), self.plan)

    def send(self, count: int) -> list[bytes]:
        """Ids of as many new fragments, in the order of their departure."""
        ids = []
        for _ in range(count):
            identity, data = self.message()
            ids.append(identity)
            self.publish(self.topics.mixer, data)
        return ids

    def opened(self) -> list[bytes]:
        """Ids that left the mixer, in order."""
        return [self.opener.open(data, self.plan.job).id for data in self.fragments]


def mixer_file(directory: Path, broker: Broker) -> Path:
    return write_mixer(directory, broker, directory.name, batch=BATCH, least=2, longest_s=86_400.0)


def left(sender: Sender, ids: list[bytes]) -> None:
    """Wait until these have left the mixer, with as many others as fill a batch."""

    def have_left() -> bool:
        sender.send(1)
        return set(ids) <= set(sender.opened())

    wait_until(have_left, "a batch")


def ready(sender: Sender) -> None:
    """Wait until the mixer is subscribed: it keeps nothing that came before."""

    def answers() -> bool:
        sender.send(1)
        return bool(sender.fragments)

    wait_until(answers, "the mixer's first batch")


def test_what_enters_leaves_once_for_the_coordinator_and_rubbish_does_not(
    tmp_path: Path, mosquitto: Broker
) -> None:
    file = mixer_file(tmp_path, mosquitto)
    with Sender(mosquitto, tmp_path.name, opener_of(file)) as sender, mixer_thread(file):
        ready(sender)
        identity, again = sender.message()
        stranger = Sender(mosquitto, tmp_path.name, OuterOpener(new_sealing_secret(), tmp_path.name))
        kept = [b"", b"\1", b"\2" + again[1:], again[:-1], os.urandom(200), stranger.message()[1]]
        for data in [*kept, again, again]:
            sender.publish(sender.topics.mixer, data)
        ids = [identity, *sender.send(BATCH - 1)]
        left(sender, ids)
        assert sender.opened().count(identity) == 1
        assert len({len(data) for data in sender.fragments}) == 1
        with stranger:
            pass


def test_a_flood_of_foreign_messages_ends_nothing(tmp_path: Path, mosquitto: Broker) -> None:
    file = mixer_file(tmp_path, mosquitto)
    with Sender(mosquitto, tmp_path.name, opener_of(file)) as sender, mixer_thread(file):
        ready(sender)
        for _ in range(2_000):
            sender.publish(sender.topics.mixer, os.urandom(2_000))
        ids = sender.send(BATCH)
        left(sender, ids)


def test_a_second_one_with_the_same_key_does_not_start(tmp_path: Path, mosquitto: Broker) -> None:
    file = mixer_file(tmp_path, mosquitto)
    with Sender(mosquitto, tmp_path.name, opener_of(file)) as sender, mixer_thread(file):
        ready(sender)
        with mixer_thread(file) as second:
            assert isinstance(second.failure(), StateInUseError)


def test_what_left_before_a_kill_does_not_leave_again(tmp_path: Path, mosquitto: Broker) -> None:
    file = mixer_file(tmp_path, mosquitto)
    with Sender(mosquitto, tmp_path.name, opener_of(file)) as sender:
        with mixer_thread(file):
            ready(sender)
            sent = [sender.message() for _ in range(BATCH)]
            for _, data in sent:
                sender.publish(sender.topics.mixer, data)
            ids = [identity for identity, _ in sent]
            left(sender, ids)
        # It notes nothing as it ends, so its end is no other than a kill.
        before = len(sender.fragments)
        with mixer_thread(file):
            wait_until(lambda: sender.send(1) and len(sender.fragments) > before, "the next batch")
            for _, data in sent:
                sender.publish(sender.topics.mixer, data)
            others = sender.send(BATCH)
            left(sender, others)
        assert all(sender.opened().count(identity) == 1 for identity in ids)


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_it_comes_back_after_the_broker(tmp_path: Path, new_broker: Any, protocol: str) -> None:
    broker = new_broker("mosquitto", protocol).start()
    file = mixer_file(tmp_path, broker)
    opener = opener_of(file)
    with mixer_thread(file):
        with Sender(broker, tmp_path.name, opener) as sender:
            ready(sender)
        broker.kill()
        broker.start()
        with Sender(broker, tmp_path.name, opener) as sender:
            ready(sender)
