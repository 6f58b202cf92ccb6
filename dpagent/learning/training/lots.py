"""The clipped sum over a lot, however large it is.

Records are read and computed a few microbatches at a time, so neither a lot nor a data set has to
fit in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError, ParameterError, StorageError
from dpagent.learning.training.engine import MAX_LOT_MICROBATCHES, ClippedSum, Engine

if TYPE_CHECKING:
    from dpagent.learning.data.dataset import Dataset
    from dpagent.learning.training.augmentation import Augmentation

log = logging.getLogger(__name__)

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

    A record that cannot be read is excluded, like one whose gradient is not finite. So is one with which the
    engine fails: if it does, each record is tried alone, and the sum is that of a lot that never held those
    which fail, so that a record can cost its own part and nothing else.

    Args:
        engine: computes microbatches; with ``augmentation``, of as many views.
        weights: ``(d,)`` float32.
        dataset: the records that the lot is drawn from.
        lot: indices in uniformly random order, as the bound on the engine's error asks for
            (:func:`dpagent.privacy.sampling.shuffled`); may be empty.
        clip_norms: as :meth:`Engine.clipped_sum`.
        augmentation: how the views of a record differ.

    Raises:
        ParameterError: the lot is larger than the bound on the engine's error allows.
        ConfigurationError, StorageError: the board fails, which is no record's doing.
    """
    if len(lot) * -(-len(lot) // engine.microbatch) > MAX_LOT_MICROBATCHES:
        raise ParameterError(
            f"a lot has {len(lot):,} records in microbatches of {engine.microbatch}; expected fewer, with a"
            " lower sampling rate."
        )
    try:
        return _sum(engine, weights, dataset, lot, clip_norms, augmentation)
    except (ConfigurationError, StorageError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it costs the records at which it shows
        fails = [
            not _is_computed(engine, weights, dataset, lot[place : place + 1], clip_norms, augmentation)
            for place in range(len(lot))
        ]
        # Only for the owner of the device: the number is private.
        log.warning("an engine failed with %d of the %d records of a lot: %r", sum(fails), len(lot), error)
        part = _sum(engine, weights, dataset, lot[~np.array(fails, np.bool_)], clip_norms, augmentation)
        return part._replace(excluded=part.excluded + sum(fails))


def _is_computed(
    engine: Engine,
    weights: NDArray[np.float32],
    dataset: Dataset,
    record: NDArray[np.intp],
    clip_norms: Sequence[float],
    augmentation: Augmentation | None,
) -> bool:
    try:
        _sum(engine, weights, dataset, record, clip_norms, augmentation)
    except (ConfigurationError, StorageError):
        raise
    except Exception:  # noqa: BLE001 - whatever a record does to an engine, it costs that record alone
        return False
    return True


def _sum(
    engine: Engine,
    weights: NDArray[np.float32],
    dataset: Dataset,
    lot: NDArray[np.intp],
    clip_norms: Sequence[float],
    augmentation: Augmentation | None,
) -> ClippedSum:
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
