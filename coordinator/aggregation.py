"""From exact integer sums to the next model. Pure functions; all of it is post-processing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpagent.learning import MomentumSgd
from dpagent.privacy import ClampCap
from dpagent.protocol.messages import Plan


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the model."""

    weights: NDArray[np.float32]
    velocity: NDArray[np.float64]
    clamped: int
    """Coordinates beyond their bound, where the coordinator applies the cap."""
    kept: float
    """Share of the mean gradient's L2 norm that the coordinator's cap left, 1 without one."""


def mean_gradient(plan: Plan, sums: Mapping[int, tuple[int, NDArray[np.int64]]]) -> NDArray[np.float64]:
    """The fleet's noisy mean gradient.

    Args:
        plan: The round's plan.
        sums: By block position, how many fragments were counted and their integer sum.

    Returns:
        (dimension,) in gradient units. A block nobody sent is zero; one that some devices
        did not send is the mean of those that did.
    """
    terms, wire, dimension = plan.mechanism, plan.wire, plan.model.parameters
    wire_step = terms.clip_norm / terms.fine_steps * float(1 << wire.shift)
    mean = np.zeros(dimension, np.float64)
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
    velocity: NDArray[np.float64],
    optimiser: MomentumSgd,
) -> Step:
    """Cap the mean if the plan says so, and step the model."""
    clamped, kept = 0, 1.0
    if plan.cap.kind == "clamp" and plan.cap.where == "coordinator":
        cap = ClampCap(regularisation=plan.cap.regularisation, floor=plan.cap.floor)
        gradient, report = cap.apply(gradient, weights, radius=plan.mechanism.clip_norm)
        clamped = report.coordinates_clamped
        kept = report.norm_after / report.norm_before if report.norm_before else 1.0
    stepped, velocity = optimiser.step(weights, velocity, gradient)
    return Step(stepped, velocity, clamped, kept)
