"""The devices of a virtual fleet on Ray's workers, computed in groups.

A group's records are put into Ray's object store once, and stay on the nodes that compute it. A task that is
lost with its worker or its node is computed again elsewhere, and counts once: a round adds up the result of
each group's one task, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from dpagent.errors import ClusterError, DpagentError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.subnormals import flush_subnormals
from simulation.virtual.cluster import cores_of
from simulation.virtual.devices import (
    DeviceGroup,
    GroupSums,
    RoundOrder,
    features_of_group,
    sums_of_group,
)

_LARGEST_GROUP: Final = 64
_GROUPS_A_CORE: Final = 4
"""At least, so that all cores end a round at about the same time."""
_RETRIES: Final = 5
"""Of a task whose worker has ended."""
_LOOK_S: Final = 0.5


class Crew(Protocol):
    """Whoever computes the devices of a fleet."""

    def compute_features(
        self, spec: ModelSpec, assets: Mapping[str, bytes], *, before_projection: bool
    ) -> None:
        """Compute from now on on the features of records.

        Args:
            spec: A model with a front end.
            assets: Of it, by role.
            before_projection: Whether without the projection.
        """
        ...

    def compute(self, order: RoundOrder, tell: Callable[[int], None] = lambda _: None) -> GroupSums:
        """A round of all devices.

        Args:
            order: The round.
            tell: Is told how many devices are done, now and then; what it raises ends the round.

        Raises:
            ClusterError: The workers end again and again.
            DpagentError: A device cannot compute the round.
        """
        ...


class LocalCrew:
    """This process, in which all devices are computed one after the other. Implements :class:`Crew`.

    Args:
        shards: The devices' records, in the order of their numbers.
    """

    def __init__(self, shards: Sequence[Dataset]) -> None:
        self._records = self._computed = DeviceGroup.of(1, shards, max(map(len, shards)))

    def compute_features(
        self, spec: ModelSpec, assets: Mapping[str, bytes], *, before_projection: bool
    ) -> None:
        """As of :class:`Crew`."""
        self._computed = features_of_group(spec, assets, self._records, before_projection=before_projection)

    def compute(self, order: RoundOrder, tell: Callable[[int], None] = lambda _: None) -> GroupSums:
        """As of :class:`Crew`."""
        found = sums_of_group(order, self._computed)
        tell(found.devices)
        return found


class RayCrew:
    """Ray's workers, and the devices that they compute. Implements :class:`Crew`.

    Args:
        ray: The package, connected.
        shards: The devices' records, in the order of their numbers.
    """

    def __init__(self, ray: Any, shards: Sequence[Dataset]) -> None:
        self._ray = ray
        self.devices, self.largest = len(shards), max(map(len, shards))
        size = group_size(len(shards), cores_of(ray))
        self._groups = [
            ray.put(DeviceGroup.of(1 + start, shards[start : start + size], self.largest))
            for start in range(0, len(shards), size)
        ]
        self._sizes = [min(size, len(shards) - start) for start in range(0, len(shards), size)]
        self._computed = self._groups
        """With features in place of records, if the model has a front end."""
        self._sum = ray.remote(num_cpus=1, max_retries=_RETRIES)(_sums_in_a_worker)
        self._features = ray.remote(num_cpus=1, max_retries=_RETRIES)(features_of_group)

    def compute_features(
        self, spec: ModelSpec, assets: Mapping[str, bytes], *, before_projection: bool
    ) -> None:
        """As of :class:`Crew`."""
        kept = self._ray.put(dict(assets))
        self._computed = [
            self._features.remote(spec, kept, group, before_projection=before_projection)
            for group in self._groups
        ]

    def compute(self, order: RoundOrder, tell: Callable[[int], None] = lambda _: None) -> GroupSums:
        """As of :class:`Crew`."""
        kept = self._ray.put(order)
        waiting = {
            self._sum.remote(kept, group): size
            for group, size in zip(self._computed, self._sizes, strict=True)
        }
        found = GroupSums()
        try:
            while waiting:
                done, _ = self._ray.wait([*waiting], num_returns=1, timeout=_LOOK_S)
                for task in done:
                    found.add(self._ray.get(task))
                    del waiting[task]
                tell(found.devices)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DpagentError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:
            raise ClusterError(
                f"Ray lost the workers of a round {_RETRIES} times and more: {_first_line(error)}. They may "
                "have run out of memory: use fewer cores, or more nodes. The rounds before are kept."
            ) from error
        finally:
            for task in waiting:
                self._ray.cancel(task, force=True)
        return found


def _sums_in_a_worker(order: RoundOrder, group: DeviceGroup) -> GroupSums:
    # As in a board's training process; Ray's worker is a process of its own.
    flush_subnormals()
    return sums_of_group(order, group)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def group_size(devices: int, cores: int) -> int:
    """Devices of a group: few enough for all cores to have some, many enough for a task to be worth its way.

    >>> group_size(10_000, 2), group_size(10, 2), group_size(1, 64)
    (64, 1, 1)
    """
    return min(max(devices // (_GROUPS_A_CORE * cores), 1), _LARGEST_GROUP) if devices > 1 else 1
