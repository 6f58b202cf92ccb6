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
from observers import Announcer

from dpagent.errors import StateInUseError
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.mixing import OuterOpener, seal_for
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.signing import Signer, new_signing_secret

BATCH = 6


SIGNING_SECRET = new_signing_secret()


class Sender(Announcer):
    """Publishes for devices, announces their plan, and sees what the broker sees."""

    def __init__(self, broker: Broker, fleet: str, mixer: OuterOpener, **changes: Any) -> None:
        super().__init__(broker, fleet)
        self.signer = Signer(SIGNING_SECRET, fleet)
        self.opener = Opener(new_sealing_secret(), fleet)
        self.mixer, self.changes = mixer, changes
        self.plan = self.new_plan()
        self.announce(self.plan)

    def new_plan(self, **changes: Any) -> Plan:
        keys = {"sealing_key": self.opener.public_key, "mixer": self.mixer.public_key}
        return make_plan(**({"fleet": self.topics.fleet} | keys | self.changes | changes))

    def message(self, plan: Plan | None = None, spare_bytes: int = 0) -> tuple[bytes, bytes]:
        """The id of a new fragment, and the message that carries it."""
        plan = plan or self.plan
        fragment = Fragment(1, 0, os.urandom(16), bytes(plan.wire.bytes + spare_bytes))
        return fragment.id, seal_for(fragment.to_bytes(), plan)

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
    key = Signer(SIGNING_SECRET, directory.name).public_key
    return write_mixer(directory, broker, directory.name, key, batch=BATCH, least=2, longest_s=86_400.0)


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
        stranger = OuterOpener(new_sealing_secret(), tmp_path.name)
        kept = [
            b"", b"\1", b"\2" + again[1:], again[:-1], os.urandom(200),
            sender.message(sender.new_plan(mixer=stranger.public_key))[1],
            sender.message(spare_bytes=1)[1],
        ]  # fmt: skip
        for data in [*kept, again, again]:
            sender.publish(sender.topics.mixer, data)
        ids = [identity, *sender.send(BATCH - 1)]
        left(sender, ids)
        assert sender.opened().count(identity) == 1
        assert len({len(data) for data in sender.fragments}) == 1


def test_a_flood_of_foreign_messages_ends_nothing(tmp_path: Path, mosquitto: Broker) -> None:
    file = mixer_file(tmp_path, mosquitto)
    with Sender(mosquitto, tmp_path.name, opener_of(file)) as sender, mixer_thread(file):
        ready(sender)
        for _ in range(2_000):
            sender.publish(sender.topics.mixer, os.urandom(2_000))
        ids = sender.send(BATCH)
        left(sender, ids)


def test_messages_of_made_up_plans_take_no_room(tmp_path: Path, mosquitto: Broker) -> None:
    """Before, each of them began a pool, in the place of the one with the fewest messages: the fleet's own,
    which was filled again message by message."""
    file = mixer_file(tmp_path, mosquitto)
    with Sender(mosquitto, tmp_path.name, opener_of(file)) as sender, mixer_thread(file):
        ready(sender)
        ids = []
        for number in range(BATCH):
            for other in range(200):
                made_up = sender.new_plan(job=(200 * number + other).to_bytes(16, "big"))
                sender.publish(sender.topics.mixer, sender.message(made_up)[1])
            ids += sender.send(1)
        left(sender, ids)
        first = next(place for place, each in enumerate(sender.opened()) if each in ids)
        assert set(ids) <= set(sender.opened()[first : first + 2 * BATCH])


def test_a_plan_that_the_coordinator_did_not_sign_or_that_names_another_mixer_is_none(
    tmp_path: Path, mosquitto: Broker
) -> None:
    file = mixer_file(tmp_path, mosquitto)
    with Sender(mosquitto, tmp_path.name, opener_of(file)) as sender, mixer_thread(file):
        ready(sender)
        strange = Signer(new_signing_secret(), tmp_path.name)
        unsigned, elsewhere = (sender.new_plan(delta=delta) for delta in (1e-6, 1e-7))
        last = sender.new_plan(round=2)
        elsewhere = elsewhere.with_values({"mixer": new_sealing_secret()})
        for _ in range(5):
            sender.announce(unsigned, strange)
            sender.announce(elsewhere)
            sender.announce(sender.plan.with_values({"state": "finished"}))
        sender.announce(last)
        for _ in range(2 * BATCH):
            sender.publish(sender.topics.mixer, sender.message(unsigned)[1])
        sender.plan = last
        ids = sender.send(BATCH)
        wait_until(lambda: len(sender.fragments) >= BATCH, "the batch of the last plan")
        left(sender, ids)
        assert {len(data) for data in sender.fragments} == {len(sender.fragments[0])}


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
