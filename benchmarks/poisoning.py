"""Poisoning: what dishonest members do to a model, and what the norm bound and the median hold of it.

MNIST on mnist-cnn, 20 boards with 3,000 records each, 20 rounds, lots of 300, ε = 2 and δ = 1e-5 for each
record, trained in one process by the fleet's own functions: mechanism, grid, whole numbers of the wire, the
coordinator's check of norms, exact sums, median of means, optimiser. With one-time tokens a board has one
fragment in each block, so a share of the boards is that share of the fragments. None, 10, 20 and 30 % of the
boards are hostile, from the first round to the last. They know of each other, of the model and of all
settings, and do without noise.

*Label flipping*: a hostile board keeps to the protocol, on records whose label y is 9 − y. No check of norms
sees that. *Sign flipping*: it sends −10 times the exact clipped sum of its lot. *Scaled backdoor*: half of
its records have a white patch of 4 by 4 pixels in a corner and the label 7; it sends their lot's exact
clipped sum 20 times, as many as there are boards, so that one alone would replace the mean.

*Plain mean* counts whatever the wire holds. With the *norm bound*, which is the default, a fragment counts up
to the norm that an honest one may have, and hostile boards scale each block to just that. *Median* is the
coordinate-wise median of 20 groups (``aggregation: {kind: median-of-means, groups: 20}``), with the bound.
Accuracy is on the 10,000 test images; the backdoor's success is the share of those of other classes that the
patch turns into a 7.

Interpretation: **the norm bound alone protects no model from members that act together.** An honest fragment
is mostly noise, and the bound has to let that much through; who sends no noise has all of that norm for a
direction of choice, the same in each round. Two boards of 20 then ruin the model, or put a backdoor into it
that works nine times out of ten. The bound keeps one board in one round from doing what the values of the
wire would. The median holds against the backdoor of two boards of 20 and against few others. Honest-looking
work on false labels costs little, since it has honest boards' noise. The smaller ε is, the larger is what the
bound lets through.

Limits: one run of each, on one data set that is spread evenly; strong attackers, who know all settings; an
attack that is spread over blocks and coordinates to pass a median was not looked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from agent.noisy_sums import clipped_sum, noisy_gradients
from benchmarks.figures import Figure
from benchmarks.one_process import mnist
from coordinator.influence import HonestNorms
from coordinator.settings import AggregationSettings, FleetSettings
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.data.splits import split
from dpagent.learning.model_files import find_model
from dpagent.learning.models.built_ins import built_in
from dpagent.privacy.mechanisms.wire import MAX_WIRE_VALUE
from dpagent.protocol.codec import MessageError
from dpagent.protocol.noisy_sum import NoisySum
from simulation.choices import settle
from simulation.data.source import open_source
from simulation.programs.configurations import fleet_settings
from simulation.request import Request
from simulation.training_loop import TrainingLoop

_BOARDS: Final = 20
_ROUNDS: Final = 20
_SHARES: Final = (10, 20, 30)
_TARGET: Final = 7
_SEED: Final = 0
_STEPS: Final = 30
"""Of a bisection for the largest factor that counts."""


def flipped(records: Dataset) -> Dataset:
    """Records whose labels say 9 − y."""
    inputs, labels = _arrays(records)
    return ArrayDataset(inputs, records.classes - 1 - labels, records.classes)


def patched(records: Dataset, share: float = 1.0) -> Dataset:
    """Records of which the first share has the patch and the target's label."""
    inputs, labels = _arrays(records)
    inputs, labels = inputs.copy(), labels.copy()
    end = round(share * len(labels))
    inputs[:end, -5:-1, -5:-1] = inputs.max()
    labels[:end] = _TARGET
    return ArrayDataset(inputs, labels, records.classes)


def _arrays(records: Dataset) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    inputs, labels = zip(*records.batches(), strict=True)
    return np.concatenate(inputs), np.concatenate(labels)


@dataclass(frozen=True, slots=True)
class Attack:
    """What hostile boards do.

    Attributes:
        name: in words.
        records: what they make of theirs.
        factor: of the exact clipped sum that they send; None if they follow the protocol.
    """

    name: str
    records: Callable[[Dataset], Dataset]
    factor: float | None


ATTACKS: Final = (
    Attack("label flipping", flipped, None),
    Attack("sign flipping", lambda records: records, -10.0),
    Attack("scaled backdoor", lambda records: patched(records, 0.5), float(_BOARDS)),
)


class _Attacked(TrainingLoop):
    """A fleet whose first boards are hostile."""

    hostile: ClassVar[int] = 0
    attack: ClassVar[Attack]
    has_bound: ClassVar[bool] = True

    def _updates(self, release: NoisySum) -> list[NDArray[np.int64]]:
        honest = [
            noisy_gradients(release, self._received, shard, self._engine)
            for shard in self._shards[self.hostile :]
        ]
        return [*(self._hostile(release, shard) for shard in self._shards[: self.hostile]), *honest]

    def _hostile(self, release: NoisySum, shard: Dataset) -> NDArray[np.int64]:
        if self.attack.factor is None:
            return noisy_gradients(release, self._received, shard, self._engine)
        exact = clipped_sum(release, self._received, shard, self._engine) / release.wire_unit
        wanted = exact * self.attack.factor
        if not self.has_bound:
            return _on_the_wire(wanted)
        norms, block = HonestNorms(release, self._fleet), release.plan.wire.block
        sent = np.zeros(release.dimension, np.int64)
        for position in range(release.blocks):
            here = slice(position * block, (position + 1) * block)
            sent[here] = largest_that_counts(norms, position, wanted[here], block)
        return sent


def _on_the_wire(values: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.clip(np.rint(values), -MAX_WIRE_VALUE, MAX_WIRE_VALUE).astype(np.int64)


def largest_that_counts(
    norms: HonestNorms, position: int, wanted: NDArray[np.float64], block: int
) -> NDArray[np.int64]:
    """A block in a direction, as large as a coordinator counts it.

    Honest noise gives every fragment a least norm, too: a direction of which no length counts is sent as
    nothing, which does not count either.
    """
    size = float(np.linalg.norm(wanted)) or 1.0
    direction, low, high = wanted / size, 0.0, float(MAX_WIRE_VALUE)
    best = np.zeros(len(wanted), np.int64)
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5 if low else high / 2
        values = _on_the_wire(direction * middle)
        if _is_too_large(norms, position, values, block):
            high = middle
        else:
            low, best = middle, values
    return best


def _is_too_large(norms: HonestNorms, position: int, values: NDArray[np.int64], block: int) -> bool:
    padded = np.zeros(block, np.int64)
    padded[: len(values)] = values
    try:
        norms.require(position, padded, norms.highest_level)
    except MessageError:
        return True
    return False


WAYS: Final = {
    "plain mean": (AggregationSettings(), False),
    "norm bound": (AggregationSettings(), True),
    "median": (AggregationSettings(kind="median-of-means", groups=_BOARDS), True),
}


class Bench:
    """The job, its data, and its runs."""

    def __init__(self) -> None:
        data, form = mnist()
        request = Request(data=data, devices=_BOARDS, rounds=_ROUNDS)
        settings, _ = settle(request, form, "mnist-cnn", built_in("mnist-cnn"))
        self.fleet: FleetSettings = fleet_settings(settings)
        source = open_source(settings.data, _SEED)
        self.spec, self.test = find_model(settings.model), source.test
        self.shards: Sequence[Dataset] = [
            *split(
                source.train,
                _BOARDS,
                settings.data.split,
                seed=_SEED,
                classes_per_part=settings.data.classes_per_device,
            )
        ]
        inputs, labels = _arrays(self.test)
        others = labels != _TARGET
        self.triggered = patched(ArrayDataset(inputs[others], labels[others], self.test.classes))

    def run(self, attack: Attack, hostile: int, way: str) -> tuple[float, float]:
        """Accuracy and the backdoor's success, in percent."""
        aggregation, has_bound = WAYS[way]
        fleet = self.fleet.with_values({"aggregation": aggregation})
        loop_type = type(
            "_Loop", (_Attacked,), {"hostile": hostile, "attack": attack, "has_bound": has_bound}
        )
        shards = [
            attack.records(shard) if number < hostile else shard for number, shard in enumerate(self.shards)
        ]
        loop = loop_type(fleet, self.spec, shards, self.test, noise=True)
        for number in range(loop.first_round, _ROUNDS + 1):
            loop.round(number)
        accuracy = loop.accuracy()
        loop._test = self.triggered
        return 100 * accuracy, 100 * loop.accuracy()


def run() -> list[Figure]:
    """Train under each attack.

    Raises:
        Skipped: The data are not there.
    """
    _benches.append(Bench())
    # Of boards that keep to the protocol every fragment counts, so the plain mean is that with the bound.
    runs = [("all honest", ATTACKS[0], 0, way) for way in WAYS if way != "plain mean"]
    runs += [
        (f"{attack.name}, {share} % of the boards", attack, share, way)
        for attack in ATTACKS
        for share in _SHARES
        for way in WAYS
        if attack.factor is not None or way != "plain mean"
    ]
    figures: list[Figure] = []
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
        results = [pool.submit(_result, ATTACKS.index(attack), share, way) for _, attack, share, way in runs]
        for (name, _, _, way), result in zip(runs, results, strict=True):
            figures += _figures(f"{name}, {way}", result.result())
    return figures


_benches: list[Bench] = []
"""One, which the processes of a run share."""


def _result(attack: int, share: int, way: str) -> tuple[float, float]:
    return _benches[-1].run(ATTACKS[attack], share * _BOARDS // 100, way)


def _figures(name: str, result: tuple[float, float]) -> list[Figure]:
    accuracy, success = result
    figures = [Figure(f"{name}: accuracy", accuracy, "%")]
    if "backdoor" in name or "honest" in name:
        figures.append(Figure(f"{name}: backdoor's success", success, "%"))
    return figures
