"""The clipped sum over a lot, however large it is.

Records are read and computed a few microbatches at a time, so neither a lot nor a data set has to
fit in memory.

**The work of a lot can be that of a larger one** (:class:`Filling`), so that the time it takes does not tell
its size. Engines compute records in blocks, of which a half empty one takes as long as a full one, and
several blocks at a time. So blank rows take the places of the missing records in the very calls, and with
them in the very blocks, that the largest lot has: a lot that is computed first and filled up afterwards takes
a block more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError, ParameterError, StorageError
from dpagent.learning.training.engine import MAX_LOT_MICROBATCHES, ClippedSum, Engine

if TYPE_CHECKING:
    from dpagent.learning.data.dataset import Dataset
    from dpagent.learning.training.augmentation import Augmentation

log = logging.getLogger(__name__)

AT_ONCE: Final = 8
"""Microbatches read together: enough to share among threads, few enough to be small."""


@dataclass(frozen=True, slots=True)
class Filling:
    """What makes the work of every lot that of the largest.

    Attributes:
        records: of the largest lot. Public.
        population: the most records that a data set may have, for all of which a lot is drawn. Public.
        made_up: is read in place of missing records; it has as many as are read together.
    """

    records: int
    population: int
    made_up: Dataset


def sum_over_lot(
    engine: Engine,
    weights: NDArray[np.float32],
    dataset: Dataset,
    lot: NDArray[np.intp],
    clip_norms: Sequence[float],
    augmentation: Augmentation | None = None,
    filling: Filling | None = None,
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
        filling: makes the work that of the largest lot, unless the engine fails.

    Raises:
        ParameterError: the lot is larger than the bound on the engine's error allows.
        ConfigurationError, StorageError, MemoryError: the board fails, which is no record's doing.
    """
    if len(lot) * -(-len(lot) // engine.microbatch) > MAX_LOT_MICROBATCHES:
        raise ParameterError(
            f"a lot has {len(lot):,} records in microbatches of {engine.microbatch}; expected fewer, with a"
            " lower sampling rate."
        )
    try:
        return total_of(engine, weights, dataset, lot, clip_norms, augmentation, filling)
    except (ConfigurationError, StorageError, MemoryError):
        raise  # Memory: to try again with less would take in small lots, and leave out large ones.
    except Exception as error:  # noqa: BLE001 - whatever it is, it costs the records at which it shows
        fails = [
            not _is_computed(engine, weights, dataset, lot[place : place + 1], clip_norms, augmentation)
            for place in range(len(lot))
        ]
        # Only for the owner of the device: the number is private.
        log.warning("an engine failed with %d of the %d records of a lot: %r", sum(fails), len(lot), error)
        part = total_of(engine, weights, dataset, lot[~np.array(fails, np.bool_)], clip_norms, augmentation)
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
        total_of(engine, weights, dataset, record, clip_norms, augmentation)
    except (ConfigurationError, StorageError, MemoryError):
        raise
    except Exception:  # noqa: BLE001 - whatever a record does to an engine, it costs that record alone
        return False
    return True


def total_of(
    engine: Engine,
    weights: NDArray[np.float32],
    dataset: Dataset,
    lot: NDArray[np.intp],
    clip_norms: Sequence[float],
    augmentation: Augmentation | None = None,
    filling: Filling | None = None,
) -> ClippedSum:
    """As :func:`sum_over_lot`, but it raises whatever the engine raises."""
    total = np.zeros(engine.spec.parameter_count)
    within = np.zeros(len(clip_norms), np.int64)
    excluded = len(lot)
    for inputs, labels, made_up in filled_batches(
        dataset, lot, size=AT_ONCE * engine.microbatch, filling=filling
    ):
        excluded -= len(labels)
        blank, beside = len(made_up), made_up
        if augmentation is not None:
            beside = augmentation.views_of(made_up)  # Held, so that any lot takes as much memory.
            inputs = augmentation.views_of(inputs)
        part = engine.clipped_sum(weights, inputs, labels, clip_norms, blank=blank)
        total += part.total
        within += part.within
        excluded += part.excluded
        del beside
    return ClippedSum(total, within, excluded)


def filled_batches(
    dataset: Dataset, lot: NDArray[np.intp], *, size: int, filling: Filling | None
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], NDArray[Any]]]:
    """The readable records of a lot in batches of ``size``, as many batches as the largest lot has.

    Returns:
        Inputs and labels of the records, and the made-up inputs that were read to fill up the batch.
    """
    left = 0 if filling is None else filling.records

    def made_up(records: int) -> NDArray[Any]:
        nonlocal left
        missing = max(0, min(size, left) - records)
        left -= records + missing
        if filling is None or not missing:
            return np.zeros((0, *dataset.shape), dataset.dtype)
        return filling.made_up.try_read(np.arange(missing))[0]

    for inputs, labels in dataset.readable_batches(lot, size=size):
        yield inputs, labels, made_up(len(labels))
    nobody = np.zeros((0, *dataset.shape), dataset.dtype), np.zeros(0, np.int64)
    while left > 0:
        yield *nobody, made_up(0)
