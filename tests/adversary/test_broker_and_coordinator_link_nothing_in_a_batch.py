"""Broker and coordinator in one hand: which device sent the fragment that the coordinator has opened?

The broker knows the connection of each message and the order of all; the coordinator opens what it gets. Here
the adversary does as told and only looks: it guesses that the n-th message to leave came from the sender of
the n-th to arrive, unless it knows the message itself. Without a mixer it is always right. A mixer leaves
it chance. Against one that floods, the mixer leaves nothing; the last test measures that.
"""

from __future__ import annotations

import math
import os
from typing import Any

from fleets import make_plan

from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.mixing import OuterOpener, plan_digest, seal_for
from dpagent.protocol.sealing import Opener, new_sealing_secret, sealed_bytes
from mixer.pools import Pools

DEVICES, FRAGMENTS, BATCHES = 4, 16, 40
COORDINATOR = Opener(new_sealing_secret(), "testers")
MIXER = OuterOpener(new_sealing_secret(), "testers")
PLAN = make_plan(sealing_key=COORDINATOR.public_key)
MIXED = make_plan(sealing_key=COORDINATOR.public_key, mixer=MIXER.public_key)


def updates() -> tuple[list[tuple[int, bytes]], dict[bytes, int]]:
    """Senders and encoded fragments of a batch, device after device; the true sender of each id."""
    sent, truth = [], {}
    for device in range(DEVICES):
        for position in range(FRAGMENTS):
            fragment = Fragment(1, position, os.urandom(16), os.urandom(MIXED.wire.bytes))
            sent.append((device, fragment.to_bytes()))
            truth[fragment.id] = device
    return sent, truth


def guessed(arrived: list[tuple[int, bytes]], left: list[bytes]) -> dict[bytes, int]:
    """The adversary's guess of each opened fragment's sender."""
    known = {data: device for device, data in arrived}
    return {
        COORDINATOR.open(data, PLAN.job).id: known.get(data, device)
        for (device, _), data in zip(arrived, left, strict=True)
    }


def pools_for(*plans: Plan, **settings: Any) -> Pools:
    """A mixer's, to which these were announced, the payloads of :func:`updates` being theirs."""
    pools = Pools(**settings, memory_bytes=1 << 24)
    for plan in plans:
        pools.announce(plan_digest(plan), sealed_bytes(plan))
    return pools


def hits(*, mixed: bool, batches: int) -> int:
    """Right guesses, of ``DEVICES * FRAGMENTS`` a batch."""
    right = 0
    pools = pools_for(MIXED, batch=DEVICES * FRAGMENTS, least=2, longest_s=60.0)
    for _ in range(batches):
        sent, truth = updates()
        arrived = [(device, seal_for(data, MIXED if mixed else PLAN)) for device, data in sent]
        left = [data for _, data in arrived]
        if mixed:
            for _, data in arrived:
                pools.add(MIXER.open(data), 0.0)
            left = pools.depart(0.0)
        right += sum(truth[identity] == device for identity, device in guessed(arrived, left).items())
    return right


def test_without_a_mixer_every_fragment_is_linked() -> None:
    assert hits(mixed=False, batches=2) == 2 * DEVICES * FRAGMENTS


def test_with_a_mixer_a_guess_is_chance() -> None:
    number = BATCHES * DEVICES * FRAGMENTS
    chance = number / DEVICES
    # Five standard deviations of independent guesses; those of a permutation of equal parts spread as much
    # times 64/63.
    spread = 5.0 * math.sqrt(number / DEVICES * (1 - 1 / DEVICES))
    assert abs(hits(mixed=True, batches=BATCHES) - chance) < spread


def test_one_plan_for_each_device_is_not_mixed_with_others() -> None:
    """Of a plan for each device, with fewer fragments than ``least``, nothing leaves."""
    own_plans = [MIXED.with_values({"job": bytes([device]) * 16}) for device in range(DEVICES)]
    pools = pools_for(*own_plans, batch=64, least=32, longest_s=1.0)
    for own in own_plans:
        for position in range(FRAGMENTS):
            fragment = Fragment(1, position, os.urandom(16), bytes(MIXED.wire.bytes))
            pools.add(MIXER.open(seal_for(fragment.to_bytes(), own)), 0.0)
    assert pools.held == DEVICES * FRAGMENTS
    assert pools.depart(1e9) == []


def test_a_batch_filled_by_the_adversary_shows_the_one_message_of_a_device() -> None:
    """What a mixer does not prevent: n - 1 messages of the adversary's own in a batch of n."""
    pools = pools_for(MIXED, batch=64, least=32, longest_s=1.0)
    own = set()
    for number in range(64):
        fragment = Fragment(1, number % FRAGMENTS, os.urandom(16), bytes(MIXED.wire.bytes))
        if number:
            own.add(fragment.id)
        else:
            victim = fragment.id
        pools.add(MIXER.open(seal_for(fragment.to_bytes(), MIXED)), 0.0)
    left = {COORDINATOR.open(data, PLAN.job).id for data in pools.depart(0.0)}
    assert left - own == {victim}
