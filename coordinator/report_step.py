"""From counted two-point reports to the next model: pure functions, all post-processing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.model_state import ModelState
from coordinator.seats import Sums
from dpagent.learning.training.optimiser import Optimiser
from dpagent.privacy.mechanisms.two_point import TwoPoint
from dpagent.protocol.reports import Reports
from dpagent.protocol.weights import weights_as_sent

_AT_THE_END: Final = 0.9
"""A layer whose weights lie so far out on average, as a share of the radius, has left its range."""
_SURE: Final = 4.0
"""Standard errors by which that has to show."""


@dataclass(frozen=True, slots=True)
class ReportStep:
    """A step of the model.

    Attributes:
        model: after it.
        reported: weights of which a report was counted.
        standard_error: bound on the error of such a weight's mean over the devices, root mean square.
        out_of_range: names of layers whose weights on the devices lie at the ends of their range.
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
) -> ReportStep:
    """Step from the weights towards the means over the devices, and stay within the ranges.

    The distance to a mean is the step's gradient: with a learning rate of 1 and no momentum, the mean
    replaces the weight. A weight of which nothing was reported has no gradient.

    Args:
        release: the round's.
        sums: by block position, the number of counted fragments and the sum of their tallies.
        model: before it.
        optimiser: takes the step.
        learning_rate: of this step.
    """
    seen = weights_as_sent(model.weights, release.plan.model.precision)
    mechanism = release.two_point(seen)
    ones, counts = release.tally({position: total for position, (_, total) in sums.items()})
    estimate, known = mechanism.estimate(ones, counts), counts > 0
    gradient = np.where(known, seen - estimate.mean, 0.0)
    stepped = model.stepped(optimiser, gradient, number=release.plan.round, learning_rate=learning_rate)
    within = replace(stepped, weights=_within_ranges(mechanism, stepped.weights))
    errors = estimate.standard_error[known]
    return ReportStep(
        within, int(known.sum()),
        float(np.sqrt(np.mean(errors**2))) if errors.size else 0.0,
        _layers_out_of_range(mechanism, seen, ones, counts),
    )  # fmt: skip


def _within_ranges(mechanism: TwoPoint, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights cut to the round's ranges. The next ranges follow from them: noise must not widen those."""
    low, high = (
        np.repeat([layer.centre + sign * layer.radius for layer in mechanism.layers], _sizes(mechanism))
        for sign in (-1, 1)
    )
    return np.clip(weights, low, high).astype(np.float32)


def _layers_out_of_range(
    mechanism: TwoPoint, seen: NDArray[np.float32], ones: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[str, ...]:
    """Layers of which the reports say that the devices' weights lie at the ends of the range.

    A report is ±B, with the mean x = (w − c)/r cut to [−1, 1]. Turned by the sign that x had before the
    round, a layer's reports have the mean |x|, where weights keep their side. No one device shows in it.
    """
    found, start = [], 0
    for layer in mechanism.layers:
        part = slice(start, start + layer.size)
        start += layer.size
        reports = int(counts[part].sum())
        if not reports:
            continue
        side = np.where(seen[part] >= layer.centre, 1, -1)
        mean = mechanism.amplitude * float(side @ (2 * ones[part] - counts[part])) / reports
        if mean - _SURE * mechanism.amplitude / reports**0.5 > _AT_THE_END:
            found.append(layer.name)
    return tuple(found)


def _sizes(mechanism: TwoPoint) -> list[int]:
    return [layer.size for layer in mechanism.layers]
