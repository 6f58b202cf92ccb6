"""How much one fragment can weigh: fragments with a norm that no honest device's has are rejected.

The maths is in :mod:`dpagent.privacy.mechanisms.honest_norms`; this module applies it to a round. With
``largest_signal`` s, the range holds a device with at most s times ``records_per_device`` records,
whatever they are. The probability that it loses any fragment of all such devices in the job is at most
``false_rejection``. A device with k times as many records is inside as long as, in each block, the mean of
its clipped gradients has a norm of at most 1/k clip norms; only records that all say the same come near 1.
An update with noise of its device is judged likewise, for a signal of one update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.settings import FleetSettings
from dpagent.privacy.mechanisms.device_noise import REFUSAL_TAIL
from dpagent.privacy.mechanisms.honest_norms import NormRange, capped_norms, largest_lot
from dpagent.protocol.codec import MessageError
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.packing import MAX_LEVEL, Units, highest_level
from dpagent.protocol.updates import Updates

IMPROBABLE: Final = "improbable norm"
"""Why such fragments are rejected."""


class UpdateNorms:
    """The norms of honest fragments of updates with noise of their devices, and how much a vote can be.

    An honest device loses no fragment of a round but for a probability that its figure with trust in the
    coordinator allows for (:mod:`dpagent.privacy.mechanisms.device_noise`), so no setting changes it. There
    is no least norm: a fragment without noise weighs less than one with it.

    Args:
        release: the round's, with noise of devices.
    """

    def __init__(self, release: Updates) -> None:
        assert release.own_noise is not None
        self._mechanism, self._blocks = release.own_noise.mechanism, release.blocks
        self._block, self._dimension = release.plan.wire.block, release.dimension
        largest = release.mechanism.sensitivity_units
        self._most = {size: self._range(size, largest) for size in map(self._size, range(self._blocks))}
        vote = release.largest_vote
        self._of_vote = None if vote is None else self._range(1, vote)

    def require(self, position: int, values: NDArray[np.int64]) -> None:
        """Refuse a fragment that no honest device sends, except with a negligible probability.

        Args:
            position: of its block.
            values: ``(block,)`` in grid units; padding does not matter.

        Raises:
            MessageError: its norm, or that of its vote, is above the range.
        """
        own = values[: self._size(position)]
        parts = [(self._most[len(own)], own)]
        if position == self._blocks - 1:
            parts.append((self._of_vote, own[-1:]))
        if any(honest is not None and not honest.holds(part) for honest, part in parts):
            raise MessageError(IMPROBABLE, f"block {position}")

    def _size(self, position: int) -> int:
        """Coordinates of a block, without padding."""
        return min(self._block, self._dimension - position * self._block)

    def _range(self, coordinates: int, signal_units: int) -> NormRange | None:
        if (law := self._mechanism.noise_law) is None:
            return None
        # As if each fragment were judged twice: for its norm, and as the one with the vote is.
        tail = REFUSAL_TAIL / (2 * self._blocks)
        honest = law.norms(1, coordinates=coordinates, steps=1, signal_units=signal_units, tail=tail)
        return NormRange(honest.norm, 0.0, honest.most)


class HonestNorms:
    """The norms of honest fragments of noisy sums in a round.

    A coordinate that counts the records within a clip norm is judged on its own too: its signal is much
    smaller than that of a block, and one fragment would move the next clip norm at will.

    Args:
        release: the round's.
        settings: the fleet's.
    """

    def __init__(self, release: NoisySum, settings: FleetSettings) -> None:
        self._release, self._settings = release, settings
        self._last = release.blocks - 1
        self._sizes = self._size(0), self._size(self._last)
        self._whole, self._of_last = map(self._ranges, self._sizes)
        self._of_count = self._ranges(1, of_a_record=self._count_share) if self._count_share else None

    def require(self, position: int, values: Units, level: int = 0) -> None:
        """Refuse a fragment that no honest device sends, except with a negligible probability.

        Args:
            position: of its block.
            values: ``(block,)`` in wire units; padding does not matter.
            level: at which they came.

        Raises:
            MessageError: its norm is outside the range, or its level above what the largest norm needs.
        """
        is_last = position == self._last
        own = values[: self._sizes[is_last]]
        is_honest = _holds(self._of_last if is_last else self._whole, own, level)
        if not is_honest or (is_last and not _holds(self._of_count, own[-1:], level)):
            raise MessageError(IMPROBABLE, f"block {position}, level {level}")

    @property
    def pull(self) -> float:
        """Bound on what one fragment moves the mean of all devices, in clip norms, in the norm of the range.

        Infinite if the mechanism states no law of its noise.
        """
        if self._whole is None:
            return math.inf
        release, sampling = self._release, self._release.sampling
        records = self._settings.devices * sampling.expected_lot * sampling.local_steps
        largest = max(allowed.largest for allowed in self._whole)
        return largest * release.wire_unit / release.mechanism.clip_norm / records

    def _size(self, position: int) -> int:
        """Coordinates of a block, without padding."""
        block = self._release.plan.wire.block
        return min(block, self._release.dimension - position * block)

    @property
    def _count_share(self) -> float:
        """Largest part of a record's clip norm in the coordinate that counts; 0 without one."""
        clipping = self._release.clipping
        if self._release.second_moments is not None:
            return 0.0
        return clipping.count_weight / 2 * clipping.reference / clipping.radius

    @cached_property
    def highest_level(self) -> int:
        """The highest at which an honest fragment comes."""
        largest = self._range(self._size(0), 1.0, 0)
        if largest is None:
            return MAX_LEVEL
        return highest_level(self._release.plan.wire.block, largest.norm, largest.most, self._tail)

    @property
    def _tail(self) -> float:
        """The probability with which one fragment may be rejected, for each reason."""
        # As if each were judged three times: for its norm, for its level, and as the one with the count is.
        judged = 3 * self._settings.rounds * self._settings.devices * self._release.blocks
        return self._settings.aggregation.false_rejection / judged

    def _ranges(self, coordinates: int, of_a_record: float = 1.0) -> list[NormRange] | None:
        """The range at each level, for a part of each record's clip norm in so many coordinates."""
        ranges = [self._range(coordinates, of_a_record, each) for each in range(1 + self.highest_level)]
        known = [each for each in ranges if each is not None]
        return known or None

    def _range(self, coordinates: int, of_a_record: float, level: int) -> NormRange | None:
        release, wanted = self._release, self._settings.aggregation
        mechanism, sampling, step = release.mechanism, release.sampling, release.terms.step
        tail = self._tail
        if release.device_cap is not None and release.second_moments is None:
            ball = sampling.expected_lot * sampling.local_steps * mechanism.clip_norm / mechanism.granularity
            return capped_norms(step=step, coordinates=coordinates, ball_units=ball, tail=tail, level=level)
        if (law := mechanism.noise_law) is None:
            return None
        records = wanted.largest_signal * sampling.expected_lot * sampling.local_steps
        lot = largest_lot(records, sampling.rate, tail / 2)
        return law.norms(
            step,
            coordinates=coordinates,
            steps=sampling.local_steps,
            signal_units=lot * of_a_record * mechanism.sensitivity_units,
            tail=tail / 2,
            level=level,
        )


def _holds(ranges: Sequence[NormRange] | None, values: Units, level: int) -> bool:
    """Whether values that came at a level are in its range; any are where the noise has no known law."""
    return ranges is None or (level < len(ranges) and ranges[level].holds(values))
