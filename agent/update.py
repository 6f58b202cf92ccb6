"""One device's contribution to a round: from private records to integers that may leave.

Nothing here does I/O. The order is the proof's order (``docs/privacy.md``): Poisson lot,
per-example gradients, clip and round each to the fine grid, exact integer sum, discrete
Gaussian noise, and only after it what is post-processing (local steps on noisy gradients,
the cap, the coarse grid).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.learning import Dataset, NumpyEngine
from dpagent.privacy import ClampCap, DiscretisedGaussian, coarsen, poisson_lot
from dpagent.protocol.messages import Plan


def mechanism_of(plan: Plan) -> DiscretisedGaussian:
    """The mechanism that ``plan`` asks for in its round.

    Raises:
        ParameterError: A parameter is out of the mechanism's range.
    """
    terms = plan.mechanism
    return DiscretisedGaussian(
        clip_norm=terms.clip_norm,
        noise_multiplier=plan.noise_multiplier,
        sampling_rate=terms.sampling_rate,
        dimension=plan.model.parameters,
        steps=terms.local_steps,
        fine_steps=terms.fine_steps,
    )


def make_update(
    plan: Plan, weights: NDArray[np.float32], dataset: Dataset, engine: NumpyEngine
) -> NDArray[np.int64]:
    """Run the local steps of a round.

    Args:
        plan: The round's plan, checked.
        weights: (dimension,) the global model.
        dataset: The device's records.
        engine: Computes per-example gradients, batch-invariantly.

    Returns:
        (dimension,) the noised sum over all local steps, integers on the wire grid.
    """
    mechanism, terms, wire = mechanism_of(plan), plan.mechanism, plan.wire
    local = weights.copy()
    released = np.zeros(mechanism.dimension, np.int64)
    for step in range(terms.local_steps):
        noisy = mechanism.perturb(clipped_sum(mechanism, local, dataset, engine))
        released += noisy
        if step + 1 < terms.local_steps:
            # Local steps follow the noisy gradient only, so the path is as private as the release.
            scale = terms.local_learning_rate * mechanism.granularity / terms.expected_lot
            local -= (scale * noisy).astype(np.float32)
    if plan.cap.kind == "clamp" and plan.cap.where == "device":
        released = _clamp(plan, mechanism, released, weights)
    return coarsen(released, wire.shift, wire.width)


def clipped_sum(
    mechanism: DiscretisedGaussian, weights: NDArray[np.float32], dataset: Dataset, engine: NumpyEngine
) -> NDArray[np.int64]:
    """The exact integer sum of a fresh lot's clipped, rounded gradients, without noise. Private.

    Returns:
        (dimension,) in fine-grid steps.
    """
    total = np.zeros(mechanism.dimension, np.int64)
    lot = poisson_lot(len(dataset), mechanism.sampling_rate)
    if not len(lot):
        return total
    for gradients in engine.gradients(weights, dataset.inputs[lot], dataset.labels[lot]):
        # How many records were excluded as not finite is private: it is not reported.
        total += mechanism.constrain(gradients).total
    return total


def _clamp(
    plan: Plan, mechanism: DiscretisedGaussian, released: NDArray[np.int64], weights: NDArray[np.float32]
) -> NDArray[np.int64]:
    """The ``clamp`` cap on the device: on its own noisy mean, then back onto the fine grid."""
    steps_per_unit = plan.mechanism.expected_lot * plan.mechanism.local_steps / mechanism.granularity
    cap = ClampCap(regularisation=plan.cap.regularisation, floor=plan.cap.floor)
    capped, _ = cap.apply(released / steps_per_unit, weights, radius=mechanism.clip_norm)
    return np.rint(capped * steps_per_unit).astype(np.int64)
