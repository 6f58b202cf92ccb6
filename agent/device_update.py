"""What a device sends for a round, whatever the round asks for.

The agent and the simulation both make their updates here; they differ in where records come from, and in what
becomes of one that cannot be read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agent.noisy_sums import noisy_sum, published_step
from dpagent.privacy.mechanisms.published import PublishedCap, PublishedState
from dpagent.privacy.noise.entropy import Entropy
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.reports import Reports
from dpagent.protocol.task import Release
from dpagent.protocol.updates import Updates


class OnRecords(Protocol):
    """The part of a round that reads records. Its results are private."""

    def lot_sum(self, release: NoisySum, local: NDArray[np.float32]) -> NDArray[np.float64]:
        """The clipped sum, or the second moments, over a fresh lot at local weights, (dimension,)."""
        ...

    def trained(self, release: Reports | Updates) -> NDArray[np.float32]:
        """Weights after local training, (parameters,)."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceUpdate:
    """A device's part in a round.

    Attributes:
        values: (values,) whole numbers that leave, cut into fragments.
        state: that the device keeps for the next round under the ``published`` cap; else None. Private.
    """

    values: NDArray[np.int64]
    state: PublishedState | None = None


def device_update(
    release: Release,
    weights: NDArray[np.float32],
    records: OnRecords,
    *,
    state: PublishedState | None = None,
    entropy: Entropy = os.urandom,
) -> DeviceUpdate:
    """Make a device's part in a round, with its noise.

    Args:
        release: of the round.
        weights: (parameters,) the global model, as it was sent.
        records: the device's.
        state: of the round before, under the ``published`` cap; None before the first.
        entropy: of the noise and the reports; to be replaced in tests and simulations only.
    """
    match release:
        case NoisySum(published_cap=PublishedCap() as cap):
            before = cap.start(release.dimension) if state is None else state
            total = records.lot_sum(release, weights)
            return DeviceUpdate(*published_step(release, weights, total, before, entropy=entropy))
        case NoisySum():
            values = noisy_sum(
                release, weights, lambda local: records.lot_sum(release, local), entropy=entropy
            )
        case Reports() | Updates():
            values = release.update_of(records.trained(release), weights, entropy=entropy)
    return DeviceUpdate(values)
