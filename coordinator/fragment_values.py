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
from dpagent.protocol.reports import Reports
from dpagent.protocol.task import RoundTask
from dpagent.protocol.updates import Updates

Norms: TypeAlias = HonestNorms | UpdateNorms | None
"""The norms of honest fragments of a round; None where any has to count."""

NO_VALUES: Final = np.zeros(0, np.int64)
"""Of a dummy or a probe."""


def norms_of(task: RoundTask, settings: FleetSettings) -> Norms:
    """The norms of honest fragments of a round."""
    match task.release:
        case NoisySum() as release:
            return HonestNorms(release, settings)
        case Updates() as release if release.own_noise is not None:
            return UpdateNorms(release)
    return None


def values_of(fragment: Fragment, task: RoundTask, norms: Norms) -> NDArray[np.int64]:
    """What a fragment of a round adds to its block, (block,); nothing, if it is a dummy or a probe.

    Args:
        fragment: opened.
        task: of its round.
        norms: of the round, as of :func:`norms_of`.

    Raises:
        MessageError: It is not a valid one.
    """
    plan, release = task.plan, task.release
    if fragment.dummy or fragment.probe:
        require_place(fragment, plan.wire, release.blocks)
        return NO_VALUES
    match release:
        case NoisySum():
            values, level = read_block(fragment, plan.wire, release.blocks)
            assert isinstance(norms, HonestNorms)
            norms.require(fragment.position, values, level)
            return values
        case Reports(terms=terms):
            return read_tally(fragment, plan, terms, release.blocks)
        case Updates():
            values = release.read(fragment)
            if isinstance(norms, UpdateNorms):
                norms.require(fragment.position, values)
            return values
