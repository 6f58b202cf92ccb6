"""The clipped sum over a lot, however large it is.

Records are read and computed a few microbatches at a time, so neither a lot nor a data set has to
fit in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.learning.training.engine import MAX_LOT_MICROBATCHES, ClippedSum, Engine

if TYPE_CHECKING:
    from dpagent.learning.data.dataset import Dataset
    from dpagent.learning.training.augmentation import Augmentation

_AT_ONCE: Final = 8
"""Microbatches read together: enough to share among threads, few enough to be small."""


def sum_over_lot(
    engine: Engine,
    weights: NDArray[np.float32],
    dataset: Dataset,
    lot: NDArray[np.intp],
    clip_norms: Sequence[float],
    augmentation: Augmentation | None = None,
) -> ClippedSum:
    """Σ of the clipped gradients of the records in ``lot``, in its order. Private.

    A record that cannot be read is excluded, like one whose gradient is not finite.

    Args:
        engine: computes microbatches; with ``augmentation``, of as many views.
        weights: ``(d,)`` float32.
        dataset: the records that the lot is drawn from.
        lot: indices in uniformly random order, as the bound on the engine's error asks for
            (:func:`dpagent.privacy.sampling.shuffled`); may be empty.
        clip_norms: as :meth:`Engine.clipped_sum`.
        augmentation: how the views of a record differ.

    Raises:
        ParameterError: weights or norms do not fit, or the lot is larger than the bound on the
            engine's error allows.
        DataError: the records do not fit the model.
    """
    if len(lot) * -(-len(lot) // engine.microbatch) > MAX_LOT_MICROBATCHES:
        raise ParameterError(
            f"a lot has {len(lot):,} records in microbatches of {engine.microbatch}; expected fewer, with a"
            " lower sampling rate."
        )
    total = np.zeros(engine.spec.parameter_count)
    within = np.zeros(len(clip_norms), np.int64)
    excluded = len(lot)
    for inputs, labels in dataset.readable_batches(lot, size=_AT_ONCE * engine.microbatch):
        excluded -= len(labels)
        if augmentation is not None:
            inputs = augmentation.views_of(inputs)
        part = engine.clipped_sum(weights, inputs, labels, clip_norms)
        total += part.total
        within += part.within
        excluded += part.excluded
    return ClippedSum(total, within, excluded)
