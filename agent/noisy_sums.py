"""One device's contribution to a round: from private records to integers that may leave.

The only I/O here reads the data set. The order follows the proof (``docs/privacy.md``): Poisson
lot in random order, per-example gradients, clipped and summed within the engine's bound, quantized to
the fine grid, noise, and only then post-processing (local steps on noisy gradients, the
cap, rounding to the wire).

**Noise is added whatever happens.** The round is charged by now, and what the device sends may depend on a
record only as the mechanism allows; so :func:`noisy_sum` is total. Everything it computes from noisy sums is
defined for all of them: quantized sums are below 2⁵³ grid units, since a device admits no lot that could
exceed it, and so 64 steps of them with their noise stay below 2⁶²; a plan's ``expected_lot``, clip norm and
resolution have ranges within which their quotients are normal numbers; weights that local steps make infinite
exclude every record.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.training.engine import Engine
from dpagent.learning.training.lots import Filling, Room, batches_of, sum_over_lot
from dpagent.privacy.covariance import MAX_LOT, SecondMoments
from dpagent.privacy.mechanisms.published import PublishedState
from dpagent.privacy.mechanisms.wire import round_at_random, round_to_wire
from dpagent.privacy.noise.entropy import Entropy
from dpagent.privacy.sampling import poisson_lot, shuffled
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.wording import counted

LotSum: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float64]]
"""The sum over a fresh lot at local weights, shape (dimension,). Private. It never fails."""

_WIDEST: Final = 1 << 32
"""Wire units that a value is cut to where weights of any size take the place of noise."""
MOMENTS_AT_ONCE: Final = 256
"""Records in memory together where second moments are summed: no more than are tried before the charge."""


def noisy_sum(
    release: NoisySum, weights: NDArray[np.float32], lot_sum: LotSum, *, entropy: Entropy = os.urandom
) -> NDArray[np.int64]:
    """Run the local steps of a round.

    Args:
        release: of the round.
        weights: (parameters,) the global model.
        lot_sum: gives the clipped sum, or the second moments, of a step.
        entropy: of the noise; to be replaced in tests and simulations only.

    Returns:
        (dimension,) the noisy sum over all local steps, integers in wire units.
    """
    local = weights.copy()
    update = np.zeros(release.dimension, np.int64)
    for _ in range(release.sampling.local_steps):
        update += noisy_step(release, local, lot_sum(local), entropy=entropy)
    return for_wire(release, update, weights, entropy=entropy)


def noisy_step(
    release: NoisySum,
    local: NDArray[np.float32],
    total: NDArray[np.float64],
    *,
    entropy: Entropy = os.urandom,
) -> NDArray[np.int64]:
    """Add noise to the sum over a lot, and move the local weights by the noisy sum.

    Args:
        release: of the round.
        local: (parameters,) the weights of the step; they are changed in place.
        total: (dimension,) the sum over a lot at these weights. Private.
        entropy: as of :func:`noisy_sum`.

    Returns:
        (dimension,) the noisy sum, in grid units.
    """
    mechanism, sampling = release.mechanism, release.sampling
    noisy = mechanism.add_noise(mechanism.quantize(total), entropy=entropy)
    if release.second_moments is None:
        # Local steps use only the noisy gradient, so the path is as private as the noisy sum.
        gradient = release.clipping.gradient(noisy.astype(np.float64) * mechanism.granularity)
        with np.errstate(over="ignore", invalid="ignore"):
            change = sampling.local_learning_rate / sampling.expected_lot * gradient
            local -= change.astype(np.float32)
    return noisy


def published_step(
    release: NoisySum,
    weights: NDArray[np.float32],
    total: NDArray[np.float64],
    state: PublishedState,
    *,
    entropy: Entropy = os.urandom,
) -> tuple[NDArray[np.int64], PublishedState]:
    """A round of Algorithm 1 of Luo, Xu and Guan. **Not private**: see
    :mod:`dpagent.privacy.mechanisms.published`.

    Args:
        release: of a round that asks for it.
        weights: (parameters,) the global model.
        total: (dimension,) the clipped sum over a lot. Private.
        state: the device's, after the rounds before. Private.
        entropy: as of :func:`noisy_sum`.

    Returns:
        (dimension,) what leaves, in wire units, and the state after the round.
    """
    cap = release.published_cap
    assert cap is not None
    step = cap.noisy_step(total / release.sampling.expected_lot, weights, state, entropy=entropy)
    units = np.rint(step.gradient * (release.sampling.expected_lot / release.wire_unit))
    return np.clip(units, -_WIDEST, _WIDEST).astype(np.int64), step.state


def for_wire(
    release: NoisySum,
    update: NDArray[np.int64],
    weights: NDArray[np.float32],
    *,
    entropy: Entropy = os.urandom,
) -> NDArray[np.int64]:
    """The update, (dimension,) in grid units, in wire units; capped, where the device caps.

    Args:
        release: of the round.
        update: the noisy sum over all local steps.
        weights: (parameters,) the global model.
        entropy: as of :func:`noisy_sum`.
    """
    if release.device_cap is not None and release.second_moments is None:
        # What a cap has moved lacks the noise that makes rounding to the nearest unbiased.
        return round_at_random(_capped(release, update, weights), release.terms.step, entropy=entropy)
    return round_to_wire(update, release.terms.step)


def noisy_gradients(
    release: NoisySum, weights: NDArray[np.float32], dataset: Dataset, engine: Engine
) -> NDArray[np.int64]:
    """The noisy sum of the gradients of records with which nothing fails; see :func:`noisy_sum`."""
    return noisy_sum(release, weights, lambda local: clipped_sum(release, local, dataset, engine))


def sum_of_moments(
    release: NoisySum,
    dataset: Dataset,
    filling: Filling | None = None,
    *,
    population: int | None = None,
    entropy: Entropy = os.urandom,
) -> NDArray[np.float64]:
    """The second moments of a fresh lot, without noise. Private.

    Args:
        release: of a round that asks for them.
        dataset: the device's records, before the projection.
        filling: makes the work that of the largest lot.
        population: as of :func:`clipped_sum`.
        entropy: of the lot; to be replaced in tests and simulations only.

    Returns:
        (dimension,) in the units of ``SecondMoments.matrix``'s argument.

    Raises:
        ParameterError: the round asks for gradients, or the lot is too large.
    """
    if release.second_moments is None:
        raise ParameterError(f"round {release.plan.round} asks for gradients; expected second moments.")
    lot = _drawn(release, dataset, filling, population, entropy)
    if len(lot) > MAX_LOT:
        raise ParameterError(f"a lot has {counted(len(lot), 'record')}; expected at most {MAX_LOT:,}.")
    return moments_of(release.second_moments, dataset, lot, filling)


def moments_of(
    moments: SecondMoments, dataset: Dataset, lot: NDArray[np.intp], filling: Filling | None = None
) -> NDArray[np.float64]:
    """The second moments of a lot, (moments.dimension,), without noise. Private.

    Args:
        moments: that are asked for.
        dataset: the device's records, before the projection.
        lot: indices of the records.
        filling: makes the work that of the largest lot, with blank records, which add exact zeros.
    """
    room = filling.room if filling else Room(min(MOMENTS_AT_ONCE, len(lot)), (moments.values,))
    total = np.zeros(moments.dimension)
    for inputs, _ in batches_of(dataset, lot, room, filling):
        total += moments.total(inputs)
    return total


def clipped_sum(
    release: NoisySum,
    weights: NDArray[np.float32],
    dataset: Dataset,
    engine: Engine,
    filling: Filling | None = None,
    *,
    population: int | None = None,
    entropy: Entropy = os.urandom,
) -> NDArray[np.float64]:
    """The sum over a fresh lot, without noise. Private.

    Args:
        release: of the round.
        weights: (parameters,) of the step.
        dataset: the device's records, as the engine takes them.
        engine: computes their gradients, clipped in the mechanism's norm.
        filling: makes the work that of the largest lot.
        population: the lot is drawn among so many records, those that there are not being nobody's; by
            default the filling's, or the records that there are.
        entropy: of the lot and its order; to be replaced in tests and simulations only.

    Returns:
        (dimension,) in the units of :meth:`~dpagent.privacy.clipping.Clipping.gradient`'s argument.

    Raises:
        ParameterError: the engine clips in another norm.
    """
    if engine.norm is not release.mechanism.norm:
        raise ParameterError(
            f"the engine clips records in {engine.norm}; mechanism {release.mechanism.name} needs"
            f" {release.mechanism.norm}."
        )
    lot = shuffled(_drawn(release, dataset, filling, population, entropy), entropy=entropy)
    norms, augmentation = release.clipping.norms, release.augmentation
    part = sum_over_lot(engine, weights, dataset, lot, norms, augmentation, filling)
    # The number of records excluded as not finite is private: it is not reported.
    return release.clipping.scaled_sum(part.total, int(part.within[0]), len(lot) - part.excluded)


def _drawn(
    release: NoisySum, dataset: Dataset, filling: Filling | None, population: int | None, entropy: Entropy
) -> NDArray[np.intp]:
    """A lot, drawn among as many records as there may be: that takes as long, and as much memory, for any
    number of them. Indices from that number on are nobody's."""
    if filling is not None:
        population = filling.population
    return poisson_lot(max(population or 0, len(dataset)), release.sampling.rate, entropy=entropy)


def _capped(release: NoisySum, update: NDArray[np.int64], weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """The noise cap on the device: on its own noisy mean, then back onto the grid."""
    sampling, mechanism, cap = release.sampling, release.mechanism, release.device_cap
    assert cap is not None
    units_to_one = sampling.expected_lot * sampling.local_steps / mechanism.granularity
    capped, _ = cap.apply(update / units_to_one, weights, radius=mechanism.clip_norm)
    return np.rint(capped * units_to_one).astype(np.int64)
