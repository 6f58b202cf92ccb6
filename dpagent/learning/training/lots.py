"""The clipped sum over a lot, however large it is.

Records are read and computed a few microbatches at a time, so neither a lot nor a data set has to
fit in memory.

**The work of a lot can be that of a larger one** (:class:`Filling`), so that neither the time nor the memory
that it takes tells its size. Engines compute records in blocks, of which a half empty one takes as long as a
full one, and several blocks at a time. So each row of each batch that the largest lot has is there in any
lot, in the same place of the same memory (:class:`Room`): where it holds no record it is blank, and a made-up
record is read in its stead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.blank_rows import blank_all_but
from dpagent.errors import ConfigurationError, ParameterError, StorageError
from dpagent.learning.data.dataset import to_float32
from dpagent.learning.training.engine import MAX_LOT_MICROBATCHES, NOBODY, ClippedSum, Engine

if TYPE_CHECKING:
    from dpagent.learning.data.dataset import Batch, Dataset
    from dpagent.learning.training.augmentation import Augmentation

log = logging.getLogger(__name__)

AT_ONCE: Final = 8
"""Microbatches read together: enough to share among threads, few enough to be small."""
_READ_AT_ONCE: Final = 32
"""Records that are asked for together: a batch is not in memory twice, as it was stored and as it is used."""
_READ_BYTES: Final = 256 << 10
"""Of such records, if one has no more. Memory for larger ones might not be in one piece after the trial, and
how many of a lot's rows are records says how large the pieces are."""


class Room:
    """Memory for a batch of records, taken once, in which all batches of a round take each other's place.

    Args:
        rows: records of a batch, at most.
        shape: of a record, as the engine takes it.
        augmentation: of whose views there is room as well.

    Attributes:
        inputs: (rows, *shape) float32.
        views: (rows, views, *shape), or None.
        labels: (rows,), of the classes or :data:`~dpagent.learning.training.engine.NOBODY`.
    """

    def __init__(self, rows: int, shape: Sequence[int], augmentation: Augmentation | None = None) -> None:
        self.inputs = np.empty((rows, *shape), np.float32)
        self.labels = np.empty(rows, np.int64)
        views = None if augmentation is None else np.empty((rows, augmentation.views, *shape), np.float32)
        self.views = views
        for array in (self.inputs, self.labels, self.views):
            if array is not None:
                array[...] = 0  # Until it is written to, the system only promises it.


@dataclass(frozen=True, slots=True)
class Filling:
    """What makes the work of every lot that of the largest.

    Attributes:
        records: of the largest lot. Public.
        population: the most records that a data set may have, for all of which a lot is drawn. Public.
        made_up: is read in place of missing records; it has as many as are read together.
        room: for a batch.
        left_out: (population + 1,), which records could not be read. Private. From then on a made-up one is
            read in its stead: to find that out takes another time, and a round may read one a million times.
    """

    records: int
    population: int
    made_up: Dataset
    room: Room
    left_out: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "left_out", np.zeros(self.population + 1, np.bool_))


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

    A record that cannot be read is excluded, like one whose gradient is not finite: its row stays blank. So
    does the row of one with which the engine fails: if it does, each record is tried alone, so that a record
    can cost its own part and nothing else.

    Args:
        engine: computes microbatches; with ``augmentation``, of as many views.
        weights: ``(d,)`` float32.
        dataset: the records that the lot is drawn from.
        lot: indices in uniformly random order, as the bound on the engine's error asks for
            (:func:`dpagent.privacy.sampling.shuffled`); may be empty. From ``len(dataset)`` on, they are
            nobody's.
        clip_norms: as :meth:`Engine.clipped_sum`.
        augmentation: how the views of a record differ.
        filling: makes the work that of the largest lot.

    Returns:
        The sum, with the number of indices that add nothing to it as ``excluded``.

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
        rest, records = lot.copy(), np.flatnonzero(lot < len(dataset))
        for place in records.tolist():
            if not _is_computed(engine, weights, dataset, lot[place : place + 1], clip_norms, augmentation):
                rest[place] = len(dataset)
        failed = np.count_nonzero(rest != lot)
        # Only for the owner of the device: the numbers are private.
        log.warning("an engine failed with %d of the %d records of a lot: %r", failed, len(records), error)
        return total_of(engine, weights, dataset, rest, clip_norms, augmentation, filling)


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
    if filling is None:
        room = Room(min(AT_ONCE * engine.microbatch, len(lot)), dataset.shape, augmentation)
    else:
        room = filling.room
    total = np.zeros(engine.spec.parameter_count)
    within = np.zeros(len(clip_norms), np.int64)
    counted = 0
    for inputs, labels in batches_of(dataset, lot, room, filling):
        views = inputs
        if augmentation is not None:
            assert room.views is not None
            views = augmentation.views_of(inputs, into=room.views[: len(inputs)])
        part = engine.clipped_sum(weights, views, labels, clip_norms)
        total += part.total
        within += part.within
        counted += int(np.count_nonzero(labels != NOBODY)) - part.excluded
    return ClippedSum(total, within, len(lot) - counted)


def batches_of(
    dataset: Dataset, lot: NDArray[np.intp], room: Room, filling: Filling | None = None
) -> Iterator[Batch]:
    """The records of a lot in batches that each fill the room, with a row for each index of the lot, and for
    as many more as the largest lot has.

    The row of an index that is no record's, or of a record that cannot be read, is blank: zeros, and nobody's
    label. With ``filling``, one that could not be read once is not tried again.

    Returns:
        Inputs, float32, and labels. They are valid until the next ones.
    """
    rows = len(lot) if filling is None else max(len(lot), filling.records)
    record_bytes = max(math.prod(room.inputs.shape[1:]) * room.inputs.itemsize, 1)
    at_once = min(max(_READ_BYTES // record_bytes, 1), _READ_AT_ONCE)
    for start in range(0, rows, max(len(room.labels), 1)):
        count = min(len(room.labels), rows - start)
        inputs, labels = room.inputs[:count], room.labels[:count]
        for first in range(0, count, at_once):
            part = slice(first, min(first + at_once, count))
            indices = lot[start + part.start : start + part.stop]
            _fill(inputs[part], labels[part], dataset, indices, filling)
        yield inputs, labels


def _fill(
    inputs: NDArray[np.float32],
    labels: NDArray[np.int64],
    dataset: Dataset,
    indices: NDArray[np.intp],
    filling: Filling | None,
) -> None:
    """Read records into rows, of which there may be more than indices.

    Made-up records go the way of the others to the end, together with them: a round may have a million rows
    to fill for next to nothing, and how long that takes would tell how many of them are records.
    """
    is_record = np.zeros(len(labels), np.bool_)
    np.less(indices, len(dataset), out=is_record[: len(indices)])
    if filling is not None:
        is_record[: len(indices)] &= ~filling.left_out.take(indices, mode="clip")
    places, others = np.flatnonzero(is_record), np.flatnonzero(~is_record)
    records, problems = dataset.try_read(indices[places])
    stored = np.zeros((len(labels), *records.shape[1:]), records.dtype)
    stored[places], labels[places] = records, dataset.labels[indices[places]]
    if filling is not None:
        made_up, _ = filling.made_up.try_read(np.arange(len(others)))
        stored[others] = made_up.reshape(len(others), *records.shape[1:])
    labels[others] = NOBODY
    unreadable = places[list(problems)]
    is_record[unreadable], labels[unreadable] = False, NOBODY
    if filling is not None:
        filling.left_out[indices[unreadable]] = True
    np.copyto(inputs, to_float32(stored).reshape(inputs.shape))
    blank_all_but(is_record, inputs)
