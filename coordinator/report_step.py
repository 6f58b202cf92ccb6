"""From counted two-point reports to the next model: pure functions, all post-processing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.model_state import ModelState
from coordinator.seats import Sums
from dpagent.learning.training.optimiser import Optimiser
from dpagent.privacy.mechanisms.layer_ranges import Extent, adapted_radius, extent_of
from dpagent.privacy.mechanisms.two_point import TwoPoint
from dpagent.protocol.reports import Reports

_AT_THE_END: Final = 0.9
"""A layer whose changes are surely so far out, as a share of the radius, has left its range."""


@dataclass(frozen=True, slots=True)
class ReportStep:
    """A step of the model.

    Attributes:
        model: after it.
        reported: weights of which a report was counted.
        standard_error: bound on the error of such a weight's mean over the devices, root mean square.
        out_of_range: names of layers whose changes on the devices lie at the ends of their range.
    """

    model: ModelState
    reported: int
    standard_error: float
    out_of_range: tuple[str, ...]


def take_report_step(
    release: Reports,
    sums: Sums,
    model: ModelState,
    optimiser: Optimiser,
    learning_rate: float,
    *,
    adapts: bool,
) -> ReportStep:
    """Step along the mean change over the devices, and adapt the ranges.

    The mean change is the step's gradient, turned round: with a learning rate of 1 and no momentum, it is
    added to the weights. A weight of which nothing was reported has no gradient.

    Args:
        release: the round's.
        sums: by block position, the number of counted fragments and the sum of their tallies.
        model: before it.
        optimiser: takes the step.
        learning_rate: of this step.
        adapts: whether the next ranges follow from these reports, or stay.
    """
    mechanism = release.two_point
    ones, counts = release.tally({position: total for position, (_, total) in sums.items()})
    estimate, known = mechanism.estimate(ones, counts), counts > 0
    gradient = np.where(known, -estimate.mean, 0.0)
    stepped = model.stepped(optimiser, gradient, number=release.plan.round, learning_rate=learning_rate)
    layers = list(zip(mechanism.layers, _extents(mechanism, ones, counts), strict=True))
    if adapts:
        radii = tuple(adapted_radius(layer.radius, extent) for layer, extent in layers)
        stepped = replace(stepped, radii=radii)
    errors = estimate.standard_error[known]
    return ReportStep(
        stepped, int(known.sum()),
        float(np.sqrt(np.mean(errors**2))) if errors.size else 0.0,
        tuple(layer.name for layer, extent in layers if extent.low > _AT_THE_END),
    )  # fmt: skip


def _extents(mechanism: TwoPoint, ones: NDArray[np.int64], counts: NDArray[np.int64]) -> list[Extent]:
    """Of each layer. No one device shows in it."""
    edges = np.cumsum([layer.size for layer in mechanism.layers])[:-1]
    return [
        extent_of(*each, mechanism.amplitude)
        for each in zip(np.split(ones, edges), np.split(counts, edges), strict=True)
    ]
