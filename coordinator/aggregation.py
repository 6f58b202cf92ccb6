"""From exact integer sums to the next model: pure functions, all post-processing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.training.optimiser import Optimiser
from dpagent.protocol.task import RoundTask


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the model."""

    weights: NDArray[np.float32]
    state: NDArray[np.float64]
    """The optimiser's, (rows, d)."""
    clamped: int
    """Coordinates beyond their bound, if the coordinator applies the cap."""
    kept: float
    """Share of the mean gradient's L2 norm after the coordinator's cap; 1 without a cap."""


def fleet_mean(task: RoundTask, sums: Mapping[int, tuple[int, NDArray[np.int64]]]) -> NDArray[np.float64]:
    """The fleet's noisy mean, per record of the expected lots.

    Args:
        task: the round's.
        sums: by block position, the number of counted fragments and their integer sum in wire units.

    Returns:
        (dimension,), the input of ``Clipping.gradient`` or ``SecondMoments.matrix``. A block without
        fragments is zero; otherwise it is the mean over the devices that sent it.
    """
    sampling, block = task.plan.sampling, task.plan.wire.block
    mean = np.zeros(task.dimension, np.float64)
    for position, (count, total) in sums.items():
        part = mean[position * block : (position + 1) * block]
        decoded = task.mechanism.decode(total[: len(part)], task.wire_form)
        # The divisor is the public expected lot: a device's true count is private.
        part[:] = decoded / (count * sampling.expected_lot * sampling.local_steps)
    return mean


def take_step(
    task: RoundTask,
    gradient: NDArray[np.float64],
    weights: NDArray[np.float32],
    state: NDArray[np.float64],
    optimiser: Optimiser,
    learning_rate: float,
) -> Step:
    """Cap the mean if the plan requires it, and step the model.

    The optimiser gets the number of the gradient step, not of the round: a round of second moments does not
    change the optimiser's moments, so counting it would make Adam's bias correction too small.
    """
    clamped, kept = 0, 1.0
    if (cap := task.coordinator_cap) is not None:
        gradient, report = cap.apply(gradient, weights, radius=task.clipping.reference)
        clamped = report.coordinates_clamped
        kept = report.norm_after / report.norm_before if report.norm_before else 1.0
    stepped, state = optimiser.step(
        weights, state, gradient, number=task.gradient_step, learning_rate=learning_rate
    )
    return Step(stepped, state, clamped, kept)
