"""A group of virtual devices, and what all of them send in a round: the work of one task on Ray.

Each device's update is made, cut into fragments, checked and added up as agents and coordinator do it. What
is left of a group is what a coordinator counts: integer sums by block, and how many fragments each has.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.device_update import device_update
from agent.noisy_sums import clipped_sum, sum_of_moments
from coordinator.fragment_values import FragmentReader, norms_of
from coordinator.seats import Sums
from coordinator.settings import FleetSettings
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.front_end.features import FrontEnd
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.norm import Norm
from dpagent.privacy.noise.entropy import Entropy
from dpagent.protocol.codec import MessageError
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import Plan
from dpagent.protocol.mixing import plan_digest
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.packing import Units
from dpagent.protocol.reports import Reports
from dpagent.protocol.task import RoundTask
from dpagent.protocol.updates import Updates
from simulation.training_loop import exact_gradient
from simulation.virtual.insecure import insecure_entropy

_FEATURES_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices with consecutive numbers, and their records. Private.

    Attributes:
        first: number of the first device, from 1.
        inputs: (records, *shape) of all devices, one after the other.
        labels: (records,).
        edges: where each device's records begin, and where those of the last end.
        classes: that labels are drawn from.
        largest: most records of any device of the whole fleet, for which each reserves room.
    """

    first: int
    inputs: NDArray[Any]
    labels: NDArray[np.int64]
    edges: tuple[int, ...]
    classes: int
    largest: int

    @classmethod
    def of(cls, first: int, shards: Sequence[Dataset], largest: int) -> DeviceGroup:
        """The group of these devices.

        Raises:
            DataError: A record cannot be read.
        """
        read = [shard.batch(np.arange(len(shard))) for shard in shards]
        edges = np.cumsum([0, *map(len, shards)])
        inputs, labels = zip(*read, strict=True)
        return cls(
            first, np.concatenate(inputs), np.concatenate(labels), tuple(edges.tolist()), shards[0].classes,
            largest,
        )  # fmt: skip

    @property
    def devices(self) -> int:
        """How many there are."""
        return len(self.edges) - 1

    def shards(self) -> Iterator[tuple[int, Dataset]]:
        """Each device's number and records."""
        for place in range(self.devices):
            part = slice(self.edges[place], self.edges[place + 1])
            yield self.first + place, ArrayDataset(self.inputs[part], self.labels[part], self.classes)


@dataclass(frozen=True, slots=True)
class RoundOrder:
    """A round that groups are to compute.

    Attributes:
        plan: of the round.
        weights: as devices get them.
        fleet: the coordinator's settings.
        with_noise: whether devices send updates; otherwise their parts are added up as they are.
        insecure_noise_seed: of all lots and noise; None: from the operating system.
    """

    plan: Plan
    weights: bytes
    fleet: FleetSettings
    with_noise: bool = True
    insecure_noise_seed: int | None = None

    def entropy(self, device: int, purpose: str) -> Entropy:
        """Of a device's draws."""
        if self.insecure_noise_seed is None:
            return os.urandom
        return insecure_entropy(self.insecure_noise_seed, self.plan.round, device, purpose)


@dataclass(slots=True)
class GroupSums:
    """What a coordinator counts of some devices.

    Attributes:
        devices: that took part.
        sums: by block position, the number of counted fragments and their exact integer sum.
        rejected: fragments that failed a check, by reason.
        exact: without noise, the sum of the devices' parts. Private.
    """

    devices: int = 0
    sums: Sums = field(default_factory=dict)
    rejected: Counter[str] = field(default_factory=Counter)
    exact: NDArray[np.float64] | None = None

    def count(self, position: int, values: Units) -> None:
        """Add a fragment to its block."""
        if position in self.sums:
            number, total = self.sums[position]
            total += values
            self.sums[position] = (number + 1, total)
        else:
            self.sums[position] = (1, values.astype(np.int64))

    def add_exact(self, part: NDArray[np.float64]) -> None:
        """Add a device's part without noise."""
        self.exact = part.astype(np.float64) if self.exact is None else self.exact + part

    def add(self, other: GroupSums) -> None:
        """Add another group's."""
        self.devices += other.devices
        for position, (number, total) in other.sums.items():
            counted, so_far = self.sums.get(position, (0, np.zeros_like(total)))
            self.sums[position] = (counted + number, so_far + total)
        self.rejected += other.rejected
        if other.exact is not None:
            self.add_exact(other.exact)


def sums_of_group(order: RoundOrder, group: DeviceGroup) -> GroupSums:
    """Compute a round for each device of a group.

    Args:
        order: the round.
        group: with records as the round reads them: behind a front end, their features.
    """
    round_ = _round_of(order)
    found = GroupSums()
    for device, shard in group.shards():
        found.devices += 1
        if not order.with_noise:
            found.add_exact(round_.exact_part(shard))
            continue
        entropy = order.entropy(device, "update")
        records = _Records(round_, shard, _population(order, group), entropy)
        update = device_update(round_.task.release, round_.weights, records, entropy=entropy)
        for fragment in cut(update.values, order.plan, entropy=order.entropy(device, "wire")):
            try:
                found.count(fragment.position, round_.reader.values(fragment))
            except MessageError as error:
                found.rejected[error.reason] += 1
    return found


def features_of_group(
    spec: ModelSpec, assets: Mapping[str, bytes], group: DeviceGroup, *, before_projection: bool
) -> DeviceGroup:
    """A group with the features of its records in place of them.

    Args:
        spec: a model with a front end.
        assets: of it, by role.
        group: with records.
        before_projection: whether without the projection, for the round that finds it.
    """
    front_end = FrontEnd(spec, assets, before_projection=before_projection)
    starts = range(0, len(group.inputs), _FEATURES_AT_ONCE)
    features = [front_end(group.inputs[start : start + _FEATURES_AT_ONCE]) for start in starts]
    return DeviceGroup(
        group.first, np.concatenate(features), group.labels, group.edges, group.classes, group.largest
    )


def engine_for(order: RoundOrder) -> tuple[RoundTask, NumpyEngine]:
    """The task of a round, and the engine that computes it in this process."""
    round_ = _round_of(order)
    return round_.task, round_.engine


class _Round:
    """A round as a worker computes it.

    Args:
        order: the round.
    """

    def __init__(self, order: RoundOrder) -> None:
        self.task = RoundTask.of(order.plan)
        self.weights = self.task.weights_from(order.weights)
        self.reader = FragmentReader(self.task, norms_of(self.task, order.fleet))
        self.engine = _engine_of(self.task, is_repeated=order.insecure_noise_seed is not None)

    def exact_part(self, shard: Dataset) -> NDArray[np.float64]:
        """A device's part without noise."""
        match self.task.release:
            case NoisySum() as release if release.second_moments is not None:
                return sum_of_moments(release, shard) / release.sampling.expected_lot
            case NoisySum() as release:
                return exact_gradient(release, self.weights, shard, self.engine)
            case Reports(training=training) | Updates(training=training):
                return training.train(self.engine, self.weights, shard).astype(np.float64)


class _Records:
    """The part of a device's round that reads records; see :class:`~agent.device_update.OnRecords`."""

    def __init__(self, round_: _Round, shard: Dataset, population: int, entropy: Entropy) -> None:
        self._round, self._shard = round_, shard
        self._population, self._entropy = population, entropy

    def lot_sum(self, release: NoisySum, local: NDArray[np.float32]) -> NDArray[np.float64]:
        """As of ``OnRecords``."""
        if release.second_moments is not None:
            return sum_of_moments(release, self._shard, population=self._population, entropy=self._entropy)
        return clipped_sum(
            release, local, self._shard, self._round.engine, population=self._population,
            entropy=self._entropy,
        )  # fmt: skip

    def trained(self, release: Reports | Updates) -> NDArray[np.float32]:
        """As of ``OnRecords``."""
        return release.training.train(
            self._round.engine, self._round.weights, self._shard, entropy=self._entropy
        )


def _population(order: RoundOrder, group: DeviceGroup) -> int:
    """Records that a lot is drawn among. A board draws among as many as there may be, which takes the time of
    the largest lot; without a seed to repeat, nobody sees the difference."""
    return 0 if order.insecure_noise_seed is None else group.largest


_rounds: dict[tuple[bytes, int | None], _Round] = {}
"""Of the last orders that this process computed; one task after another is of the same."""
_engines: dict[tuple[bytes, Norm, bool], NumpyEngine] = {}
_MOST_KEPT: Final = 2


def _round_of(order: RoundOrder) -> _Round:
    name = (plan_digest(order.plan), order.insecure_noise_seed)
    if name not in _rounds:
        while len(_rounds) >= _MOST_KEPT:
            del _rounds[next(iter(_rounds))]
        _rounds[name] = _Round(order)
    return _rounds[name]


def _engine_of(task: RoundTask, *, is_repeated: bool) -> NumpyEngine:
    """The engine for a task. Where a run is to be repeated, products have the form that every machine knows:
    otherwise each process times which form is the fastest, and they round differently."""
    release = task.release
    norm = release.mechanism.norm if isinstance(release, NoisySum) else Norm.L2
    spec = task.spec.head
    key = (spec.digest(), norm, is_repeated)
    if key not in _engines:
        while len(_engines) >= _MOST_KEPT:
            del _engines[next(iter(_engines))]
        _engines[key] = NumpyEngine(spec, norm=norm, products="stacked" if is_repeated else "calibrated")
    return _engines[key]
