"""Broker and coordinator in one hand capture all of a fleet: which device has sent the fragment that I read?

Claim: through a mixer, a broker and a coordinator that only look know no more of a fragment's sender than how
    many messages each device has in its batch. Order, length and bytes of what leaves tell nothing.
Parameters: digits, 4 devices, 40 fragments an update, 3 rounds, batches of 32. Real coordinator, agents and
    mixer, real Mosquitto, and between them a wiretap that writes down each publication with its connection.
    The adversary has that record and the coordinator's key. It says of the n-th message of a round to leave
    that the n-th to enter has left; and it correlates the places at which a message entered and left a batch.

Power: both are compared with a uniformly random order within each batch of the same senders (exact mean and
    variance), and fail by chance once in 10⁶ each. Of 480 messages, some 120 are guessed right by chance,
    ± 10: a mixer that left one message in seven in its place would be found in half of all runs. Each run
    also orders what really left as weaker mixers would (not at all, in groups of 4, in groups of 8), and
    finds each of them.

Outcome: without a mixer all guesses are right. With one, as many as by chance (29 % of 490, ± 10). What
    stays: a resend shows that its device had no receipt yet, and those who act (withhold receipts, fill
    batches, cut connections) learn more; see ``docs/threat-model.md``.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from clocks import MovableClock
from daemons import agent_thread, attentive_daemons, coordinator_thread, mixer_thread
from fleets import write_agent
from mixers import key_of, opener_of, write_mixer
from watched_fleets import WatchedFleet
from wiretaps import Wiretap, Written

from dpagent import faults
from dpagent.faults import FaultPoint
from dpagent.protocol.topics import Topics

pytestmark = pytest.mark.slow

DEVICES = tuple(f"device-{number}" for number in range(4))
FRAGMENTS, ROUNDS, BATCH = 40, 3, 32
WORST_Z = 4.9
"""Standard deviations that chance exceeds once in 10⁶."""
TIMES = {"compute_slot_s": 0.5, "jitter_window_s": 1.0, "deadline_s": 600.0}


class Captured(NamedTuple):
    """All publications, in order, and the fleet whose coordinator looks at them."""

    written: list[Written]
    fleet: WatchedFleet
    topics: Topics
    sizes: list[int]
    """Of the mixer's batches, in truth, which the adversary does not have."""


class Batch(NamedTuple):
    """Messages that left together, in the order of their departure."""

    senders: list[str]
    """In truth."""
    places: list[int]
    """In truth: the place of each among the messages of its round to enter."""
    guesses: list[str]
    """The adversary's."""


def run_job(directory: Path, new_broker: Any, *, mixed: bool) -> Captured:
    """A whole job, and the adversary's record of it."""
    broker, sizes = new_broker("mosquitto", "5").start(), [0]

    def reached(point: FaultPoint) -> None:
        if point is FaultPoint.MIXER_PUBLISHED:
            sizes[-1] += 1
        elif point is FaultPoint.MIXER_BATCH_LEFT:
            sizes.append(0)

    with ExitStack() as running:
        running.enter_context(pytest.MonkeyPatch.context()).setattr(faults, "reached", reached)
        tap = running.enter_context(Wiretap(directory, broker, ["coordinator", "mixer", *DEVICES]))
        changes: dict[str, Any] = {"mqtt": {"url": tap.url("coordinator")}, "round": TIMES}
        fleet = WatchedFleet(
            directory, broker, devices=len(DEVICES), rounds=ROUNDS, fragments_per_update=FRAGMENTS, **changes
        )
        clock, limits = MovableClock(), {}
        if mixed:
            mixer_file = write_mixer(
                directory / "mixer", None, fleet.name, fleet.public_key,
                batch=BATCH, least=BATCH, longest_s=86_400.0,
                mqtt=broker.values | {"url": tap.url("mixer")},
            )  # fmt: skip
            limits = {"mixer_keys": [key_of(mixer_file)], "require_mixer": True}
            text = fleet.file.read_text()
            fleet.file.write_text(f"{text}mixer_key: {key_of(mixer_file)}\n")
            running.enter_context(mixer_thread(mixer_file))
        running.enter_context(attentive_daemons())
        coordinator = running.enter_context(coordinator_thread(fleet.file, clock))
        for number, name in enumerate(DEVICES):
            file = write_agent(
                directory / name, broker, fleet.public_key, number, fleet=fleet.name, limits=limits,
                mqtt={"url": tap.url(name)},
            )  # fmt: skip
            running.enter_context(agent_thread(file, clock))
        clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 0.05)
        assert coordinator.result is True
        return Captured([*tap.written()], fleet, Topics(fleet.name), sizes)


def batches(captured: Captured, directory: Path) -> Iterator[Batch]:
    """What the adversary says of each batch, and the truth, which only the mixer's key opens."""
    opener, job = opener_of(directory / "mixer" / "mixer.yaml"), captured.fleet.job
    entered: dict[bytes, list[str]] = defaultdict(list)
    truth: dict[bytes, tuple[str, int]] = {}
    left: list[bytes] = []
    for sender, topic, payload in captured.written:
        if topic == captured.topics.mixer:
            # The plan's digest stands in the clear.
            entered[payload[1:33]].append(sender)
            inner = opener.open(payload)
            truth[inner.sealed] = sender, len(entered[inner.plan]) - 1
        elif topic == captured.topics.fragments:
            left.append(payload)
    plans = [*entered]  # in the order of the rounds
    guesses = {number + 1: iter(entered[plan]) for number, plan in enumerate(plans)}
    messages = iter(left)
    for size in captured.sizes:
        of_round: dict[int, Batch] = {}
        for payload in itertools.islice(messages, size):
            number = captured.fleet.opener.open(payload, job).round
            batch = of_round.setdefault(number, Batch([], [], []))
            sender, place = truth[payload]
            batch.senders.append(sender)
            batch.places.append(place)
            batch.guesses.append(next(guesses[number]))
        yield from of_round.values()


def hits(found: list[Batch]) -> int:
    return sum(
        guess == sender for each in found for guess, sender in zip(each.guesses, each.senders, strict=True)
    )


def hits_by_chance(found: list[Batch]) -> tuple[float, float]:
    """Mean and variance of the right guesses, if all orders within a batch are as likely."""
    mean = variance = 0.0
    for each in found:
        right = np.array([[guess == sender for sender in each.senders] for guess in each.guesses], float)
        centred = right - right.mean(0) - right.mean(1)[:, np.newaxis] + right.mean()
        mean += right.sum() / len(right)
        variance += (centred**2).sum() / (len(right) - 1)
    return mean, variance


def z_of_guesses(found: list[Batch]) -> float:
    """The right guesses beyond chance, in standard deviations."""
    mean, variance = hits_by_chance(found)
    return (hits(found) - mean) / math.sqrt(variance)


def z_of_places(found: list[Batch]) -> float:
    """The rank correlation of the places of entering and leaving, in standard deviations."""
    total = variance = 0.0
    for each in found:
        entering = np.argsort(np.argsort(each.places))
        total += np.corrcoef(entering, np.arange(len(entering)))[0, 1]
        variance += 1 / (len(entering) - 1)
    return total / math.sqrt(variance)


def as_by_a_weaker_mixer(each: Batch, group: int) -> Batch:
    """The same batch, shuffled only among ``group`` messages that entered one after the other."""
    order = sorted(range(len(each.places)), key=each.places.__getitem__)
    for start in range(0, len(order), group):
        part = order[start : start + group]
        random.SystemRandom().shuffle(part)
        order[start : start + group] = part
    return Batch([each.senders[at] for at in order], [each.places[at] for at in order], each.guesses)


def test_without_a_mixer_every_fragment_is_linked(tmp_path: Path, new_broker: Any) -> None:
    captured = run_job(tmp_path, new_broker, mixed=False)
    job, linked = captured.fleet.job, defaultdict[str, set[tuple[int, int]]](set)
    for sender, topic, payload in captured.written:
        if topic == captured.topics.fragments:
            fragment = captured.fleet.opener.open(payload, job)
            linked[sender].add((fragment.round, fragment.position))
    everything = {(number + 1, place) for number in range(ROUNDS) for place in range(FRAGMENTS)}
    assert linked == dict.fromkeys(DEVICES, everything)


def test_with_a_mixer_the_adversary_guesses_as_chance_would(tmp_path: Path, new_broker: Any) -> None:
    captured = run_job(tmp_path, new_broker, mixed=True)
    entered = [each for each in captured.written if each.topic == captured.topics.mixer]
    left = [each for each in captured.written if each.topic == captured.topics.fragments]
    assert {each.sender for each in entered} == {*DEVICES}
    assert {each.sender for each in left} == {"mixer"}
    assert len({len(each.payload) for each in entered}) == len({len(each.payload) for each in left}) == 1
    assert not {each.payload for each in entered} & {each.payload for each in left}

    found = [*batches(captured, tmp_path)]
    number = sum(len(each.senders) for each in found)
    assert number >= ROUNDS * len(DEVICES) * FRAGMENTS
    mean, variance = hits_by_chance(found)
    print(
        f"{hits(found)} of {number} guesses right, by chance {mean:.0f} ± {math.sqrt(variance):.0f}; "
        f"places entering and leaving: {z_of_places(found):+.1f} standard deviations"
    )
    assert abs(z_of_guesses(found)) < WORST_Z
    assert abs(z_of_places(found)) < WORST_Z
    for group, least in ((1, 20.0), (4, 20.0), (8, 15.0)):
        weaker = [as_by_a_weaker_mixer(each, group) for each in found]
        print(f"in groups of {group}: {z_of_guesses(weaker):.0f} and {z_of_places(weaker):.0f}")
        assert z_of_places(weaker) > least
    assert z_of_guesses([as_by_a_weaker_mixer(each, 1) for each in found]) > WORST_Z
