"""From exact integer sums to the next model: pure functions, all post-processing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.model_state import ModelState
from dpagent.learning.training.optimiser import Optimiser
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.weights import weights_as_sent


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the model.

    Attributes:
        model: after it.
        clamped: coordinates beyond their bound, if the coordinator applies the cap.
        kept: share of the mean gradient's L2 norm after the coordinator's cap; 1 without a cap.
        out_of_range: names of layers whose changes on the devices lie at the ends of their ranges.
    """

    model: ModelState
    clamped: int = 0
    kept: float = 1.0
    out_of_range: tuple[str, ...] = ()


def fleet_mean(release: NoisySum, sums: Mapping[int, tuple[int, NDArray[np.int64]]]) -> NDArray[np.float64]:
    """The fleet's noisy mean, per record of the expected lots.

    Args:
        release: the round's.
        sums: by block position, the number of counted fragments and their integer sum in wire units.

    Returns:
        (dimension,), the input of ``Clipping.gradient`` or ``SecondMoments.matrix``. A block without
        fragments is zero; otherwise it is the mean over the devices that sent it.
    """
    return median_of_means(release, [sums])


def median_of_means(
    release: NoisySum, groups: Sequence[Mapping[int, tuple[int, NDArray[np.int64]]]]
) -> NDArray[np.float64]:
    """The median over groups of their noisy means, coordinate by coordinate.

    Post-processing. As long as less than half of the groups of a block have a hostile fragment, no coordinate
    leaves the range of the other groups' means. The median of g independent normal means has more variance
    than the mean of all: 1.35 times with 3 groups, 1.43 with 5, and at most π/2 times. It has no bias where
    the means are symmetric about one value, as noise is; where devices hold different data, it lies nearer to
    the common ones.

    Args:
        release: the round's.
        groups: for each, the sums as of :func:`fleet_mean`. A block is the median over the groups that have
            it.

    Returns:
        As of :func:`fleet_mean`.
    """
    block = release.plan.wire.block
    median = np.zeros(release.dimension, np.float64)
    for position in range(release.blocks):
        part = median[position * block : (position + 1) * block]
        means = [_block_mean(release, *group[position])[: len(part)] for group in groups if position in group]
        if means:
            part[:] = np.median(means, axis=0)
    return median


def _block_mean(release: NoisySum, count: int, total: NDArray[np.int64]) -> NDArray[np.float64]:
    # The divisor is the public expected lot: a device's true count is private.
    sampling = release.sampling
    return np.asarray(total * release.wire_unit / (count * sampling.expected_lot * sampling.local_steps))


def take_step(
    release: NoisySum,
    gradient: NDArray[np.float64],
    model: ModelState,
    optimiser: Optimiser,
    learning_rate: float,
) -> Step:
    """Cap the mean if the plan requires it, and step the model.

    The cap bounds the gradient by the weights at which devices took it, which they got at the plan's
    precision; the step starts from the exact ones.

    The optimiser gets the number of the gradient step, not of the round: a round of second moments does not
    change the optimiser's moments, so counting it would make Adam's bias correction too small.
    """
    clamped, kept = 0, 1.0
    if (cap := release.coordinator_cap) is not None:
        seen = weights_as_sent(model.weights, release.plan.model.precision)
        gradient, report = cap.apply(gradient, seen, radius=release.clipping.reference)
        clamped = report.coordinates_clamped
        kept = report.norm_after / report.norm_before if report.norm_before else 1.0
    stepped = model.stepped(optimiser, gradient, number=release.gradient_step, learning_rate=learning_rate)
    return Step(stepped, clamped, kept)
