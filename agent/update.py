"""One device's contribution to a round: from private records to integers that may leave.

Nothing here does I/O but reading the data set. The order is the proof's order (``docs/privacy.md``): Poisson
lot in random order, per-example gradients, clipped and added up within the engine's bound, rounded to
the fine grid, discrete Gaussian noise, and only after it what is post-processing (local steps on
noisy gradients, the cap, the coarse grid).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.learning.data.dataset import Dataset, to_float32
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.augmentation import Augmentation
from dpagent.learning.training.engine import Engine
from dpagent.learning.training.lots import sum_over_lot
from dpagent.privacy.caps import ClampCap
from dpagent.privacy.covariance import MAX_LOT
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.wire import coarsen
from dpagent.privacy.sampling import poisson_lot, shuffled
from dpagent.protocol.messages import Plan


def mechanism_of(plan: Plan, spec: ModelSpec) -> DiscretisedGaussian:
    """The mechanism that ``plan`` asks for in its round.

    Raises:
        ParameterError: A parameter is out of the mechanism's range.
    """
    terms = plan.mechanism
    released = plan.second_moments or plan.clipping(spec.layer_sizes)
    return DiscretisedGaussian(
        clip_norm=released.radius,
        noise_multiplier=plan.noise_multiplier,
        sampling_rate=terms.sampling_rate,
        dimension=released.dimension,
        steps=terms.local_steps,
        fine_steps=terms.fine_steps,
        accumulation_slack=terms.accumulation_slack,
    )


def augmentation_of(plan: Plan) -> Augmentation | None:
    """The views that ``plan`` asks for."""
    return None if plan.augmentation is None else Augmentation(**plan.augmentation.model_dump())


def make_update(
    plan: Plan, weights: NDArray[np.float32], dataset: Dataset, engine: Engine
) -> NDArray[np.int64]:
    """Run the local steps of a round.

    Args:
        plan: The round's plan, checked.
        weights: (parameters,) the global model.
        dataset: The device's records, or their features.
        engine: Computes clipped sums, with an error within the plan's accumulation slack.

    Returns:
        (dimension,) the noised sum over all local steps, integers on the wire grid.
    """
    clipping, mechanism = plan.clipping(engine.spec.layer_sizes), mechanism_of(plan, engine.spec)
    terms, wire = plan.mechanism, plan.wire
    local = weights.copy()
    released = np.zeros(mechanism.dimension, np.int64)
    for step in range(terms.local_steps):
        total = lot_sum(plan, local, dataset, engine)
        noisy = mechanism.perturb(mechanism.snap(total))
        released += noisy
        if step + 1 < terms.local_steps:
            # Local steps follow the noisy gradient only, so the path is as private as the release.
            gradient = clipping.gradient(noisy.astype(np.float64) * mechanism.granularity)
            local -= (terms.local_learning_rate / terms.expected_lot * gradient).astype(np.float32)
    if plan.cap.kind == "clamp" and plan.cap.where == "device":
        released = _clamp(plan, mechanism, released, weights)
    return coarsen(released, wire.shift, wire.width)


def make_moments(plan: Plan, spec: ModelSpec, dataset: Dataset) -> NDArray[np.int64]:
    """The second moments of a round that releases them, over as many lots as a round has steps.

    Args:
        plan: The round's plan, checked.
        spec: The plan's model.
        dataset: The device's records, before the projection.

    Returns:
        (dimension,) the noised sum over all lots, integers on the wire grid.

    Raises:
        ParameterError: The round releases no second moments, or a lot is too large.
    """
    moments, mechanism = plan.second_moments, mechanism_of(plan, spec)
    if moments is None:
        raise ParameterError(f"round {plan.round} releases gradients; expected second moments.")
    released = np.zeros(mechanism.dimension, np.int64)
    for _ in range(plan.mechanism.local_steps):
        lot = poisson_lot(len(dataset), plan.mechanism.sampling_rate)
        if len(lot) > MAX_LOT:
            raise ParameterError(f"a lot has {len(lot):,} records; expected at most {MAX_LOT:,}.")
        total = np.zeros(moments.dimension)
        for inputs, _ in dataset.readable_batches(lot):
            total += moments.total(to_float32(inputs).reshape(len(inputs), -1))
        released += mechanism.perturb(mechanism.snap(total))
    return coarsen(released, plan.wire.shift, plan.wire.width)


def lot_sum(
    plan: Plan, weights: NDArray[np.float32], dataset: Dataset, engine: Engine
) -> NDArray[np.float64]:
    """What a fresh lot comes to, without noise. Private.

    Returns:
        (dimension,) in the units of the release.
    """
    clipping = plan.clipping(engine.spec.layer_sizes)
    lot = shuffled(poisson_lot(len(dataset), plan.mechanism.sampling_rate))
    part = sum_over_lot(engine, weights, dataset, lot, clipping.norms, augmentation_of(plan))
    # How many records were excluded as not finite is private: it is not reported.
    return clipping.release(part.total, int(part.within[0]), len(lot) - part.excluded)


def _clamp(
    plan: Plan, mechanism: DiscretisedGaussian, released: NDArray[np.int64], weights: NDArray[np.float32]
) -> NDArray[np.int64]:
    """The ``clamp`` cap on the device: on its own noisy mean, then back onto the fine grid."""
    steps_per_unit = plan.mechanism.expected_lot * plan.mechanism.local_steps / mechanism.granularity
    cap = ClampCap(regularisation=plan.cap.regularisation, floor=plan.cap.floor)
    capped, _ = cap.apply(released / steps_per_unit, weights, radius=mechanism.clip_norm)
    return np.rint(capped * steps_per_unit).astype(np.int64)
