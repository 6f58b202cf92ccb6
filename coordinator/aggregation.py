"""From exact integer sums to the next model. Pure functions; all of it is post-processing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.training.optimiser import Optimiser
from dpagent.privacy.caps import ClampCap
from dpagent.protocol.messages import Plan


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the model."""

    weights: NDArray[np.float32]
    state: NDArray[np.float64]
    """The optimiser's, (rows, d)."""
    clamped: int
    """Coordinates beyond their bound, where the coordinator applies the cap."""
    kept: float
    """Share of the mean gradient's L2 norm that the coordinator's cap left, 1 without one."""


def mean_release(
    plan: Plan, sums: Mapping[int, tuple[int, NDArray[np.int64]]], radius: float
) -> NDArray[np.float64]:
    """The fleet's noisy mean release, to a record of the expected lots.

    Args:
        plan: The round's plan.
        sums: By block position, how many fragments were counted and their integer sum.
        radius: The clip norm of the release as a whole.

    Returns:
        (dimension,) in the units of the release, which ``Clipping.gradient`` makes a gradient. A block
        nobody sent is zero; one that some devices did not send is the mean of those that did.
    """
    terms, wire = plan.mechanism, plan.wire
    wire_step = radius / terms.fine_steps * float(1 << wire.shift)
    mean = np.zeros(plan.dimension, np.float64)
    for position, (count, total) in sums.items():
        start = position * wire.block
        part = mean[start : start + wire.block]
        # The lot is the public expectation: a device's true count is private.
        part[:] = total[: len(part)] * (wire_step / (count * terms.expected_lot * terms.local_steps))
    return mean


def take_step(
    plan: Plan,
    gradient: NDArray[np.float64],
    weights: NDArray[np.float32],
    state: NDArray[np.float64],
    optimiser: Optimiser,
    learning_rate: float,
) -> Step:
    """Cap the mean if the plan says so, and step the model.

    The optimiser is told the number of the step and not of the round: a round of second moments moves
    none of its moments, so counting it would make Adam's correction of its bias too small.
    """
    clamped, kept = 0, 1.0
    if plan.cap.kind == "clamp" and plan.cap.where == "coordinator":
        cap = ClampCap(regularisation=plan.cap.regularisation, floor=plan.cap.floor)
        gradient, report = cap.apply(gradient, weights, radius=math.hypot(*plan.mechanism.clipping.norms))
        clamped = report.coordinates_clamped
        kept = report.norm_after / report.norm_before if report.norm_before else 1.0
    stepped, state = optimiser.step(weights, state, gradient, number=plan.step, learning_rate=learning_rate)
    return Step(stepped, state, clamped, kept)
