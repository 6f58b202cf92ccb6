"""Counting fragments: what a coordinator does with each, and how much of it is the seal.

A round of 100 devices of the demo's MNIST job, 1,600 fragments, goes through the coordinator's own code in
batches of 256, as they come from its network session: open, decode, check the norm, take a seat, and commit
with its values to the database, receipts made and signed; without MQTT. Opening alone is timed in turns with
it, over the same messages. Medians of 7 rounds, each in a new database.

Interpretation: the seal is two fifths of the work: X25519 and HKDF, in OpenSSL, for each fragment.

Limits: one thread, one machine. A round at a real broker adds what MQTT costs, about half as much again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.figures import Figure
from benchmarks.seal import RECORDS, fleet_values
from benchmarks.timing import alternate
from coordinator.daemon import Coordinator
from coordinator.settings import FleetSettings
from dpagent.privacy.mechanisms.wire import round_to_wire
from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import cut
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.sealing import seal

_DEVICES: Final = 100
_DRAWN: Final = 100
_BATCH: Final = 256
_REPEATS: Final = 7


def run() -> list[Figure]:
    """Count the fragments of rounds."""
    with tempfile.TemporaryDirectory() as directory:
        values = fleet_values("mnist", RECORDS["mnist"]) | {"devices": _DEVICES}
        rounds = [FilledRound(Path(directory) / str(number), values) for number in range(_REPEATS + 1)]
        counting, opening = alternate(_each(rounds, "count"), _each(rounds, "open"), repeats=_REPEATS)
        fragments = len(rounds[0].messages)
        for each in rounds:
            each.close()
    return [
        Figure("fragments counted", fragments / counting, "a second"),
        Figure("fragments opened, no more", fragments / opening, "a second"),
        Figure("the seal's share", 100 * opening / counting, "% of the time"),
    ]


class FilledRound:
    """A round that is open, and all of its fragments.

    Args:
        directory: for the coordinator's state and keys.
        values: of ``fleet.yaml``; each of its ``devices`` sends an update. A hundred of them draw noise of
            their own, and the others send one of these once more, in fragments with ids of their own.
    """

    def __init__(self, directory: Path, values: dict[str, Any]) -> None:
        paths = {"state_dir": directory / "state", "keys_dir": directory / "keys"}
        self._coordinator = Coordinator(FleetSettings.checked(values | paths))
        assert self._coordinator.running is not None
        self._cycle = self._coordinator.running.cycle
        self._cycle.open()
        task = self._cycle._task
        assert task is not None
        release, self.messages = task.release, []
        assert isinstance(release, NoisySum)
        sampler, updates = release.mechanism.sampler(), []
        for number in range(values["devices"]):
            if number < _DRAWN:
                noise = np.asarray(sampler.sample(release.dimension))
                updates.append(round_to_wire(noise, release.terms.step))
            update = updates[number % _DRAWN]
            self.messages += [seal(encode(piece), task.plan) for piece in cut(update, task.plan)]

    def count(self) -> None:
        """Count all."""
        for start in range(0, len(self.messages), _BATCH):
            self._cycle.take_fragments(self.messages[start : start + _BATCH])
        assert self._cycle.progress().counted == len(self.messages)

    def open(self) -> None:
        """Open all, and do nothing with them."""
        for message in self.messages:
            self._cycle._intake._opener.open(message, self._cycle._job.id)

    def close(self) -> None:
        """Let go of the database."""
        with closing(self._coordinator):
            pass


def _each(rounds: list[FilledRound], verb: str) -> Callable[[], None]:
    """A call for one round after the other."""
    left = iter(rounds)
    return lambda: getattr(next(left), verb)()
