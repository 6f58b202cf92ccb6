"""What a fragment adds to its block, once it is checked: of whoever sent it, this much counts."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coordinator.influence import HonestNorms, UpdateNorms
from coordinator.settings import FleetSettings
from dpagent.protocol.fragments import read_block, read_tally, require_place
from dpagent.protocol.messages import Fragment
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.packing import Units
from dpagent.protocol.reports import Reports
from dpagent.protocol.task import RoundTask
from dpagent.protocol.updates import Updates

Norms: TypeAlias = HonestNorms | UpdateNorms | None
"""The norms of honest fragments of a round; None where any has to count."""

NO_VALUES: Final[Units] = np.zeros(0, np.int64)
"""Of a dummy or a probe."""


def norms_of(task: RoundTask, settings: FleetSettings) -> Norms:
    """The norms of honest fragments of a round."""
    match task.release:
        case NoisySum() as release:
            return HonestNorms(release, settings)
        case Updates() as release if release.own_noise is not None:
            return UpdateNorms(release)
    return None


class FragmentReader:
    """Reads the fragments of one round. What follows from the round alone is found once.

    Args:
        task: of the round.
        norms: of it, as of :func:`norms_of`.
    """

    def __init__(self, task: RoundTask, norms: Norms) -> None:
        self._plan, self._release, self._norms = task.plan, task.release, norms
        self._wire, self._blocks = task.plan.wire, task.release.blocks
        match task.release:
            case NoisySum():
                self._read = self._of_noisy_sum
            case Reports(terms=terms):
                self._terms, self._read = terms, self._of_reports
            case Updates():
                self._read = self._of_update

    def values(self, fragment: Fragment) -> Units:
        """What a fragment adds to its block, (block,).

        Args:
            fragment: opened; no dummy and no probe.

        Raises:
            MessageError: It is not a valid one.
        """
        return self._read(fragment)

    def require_place(self, fragment: Fragment) -> None:
        """See that a dummy or a probe has a place in the update, and the length of a fragment.

        Raises:
            MessageError: It has not.
        """
        require_place(fragment, self._wire, self._blocks)

    def _of_noisy_sum(self, fragment: Fragment) -> Units:
        values, level = read_block(fragment, self._wire, self._blocks)
        assert isinstance(self._norms, HonestNorms)
        self._norms.require(fragment.position, values, level)
        return values

    def _of_reports(self, fragment: Fragment) -> NDArray[np.int64]:
        return read_tally(fragment, self._plan, self._terms, self._blocks)

    def _of_update(self, fragment: Fragment) -> NDArray[np.int64]:
        assert isinstance(self._release, Updates)
        values = self._release.read(fragment)
        if isinstance(self._norms, UpdateNorms):
            self._norms.require(fragment.position, values)
        return values
