"""A set of labelled records, for training and testing.

A record is an array of one public shape: ``(features,)``, ``(length, channels)`` or ``(height,
width, channels)``. It is kept as it was stored, uint8 or float32, and read when it is asked for, so
that a set may be larger than memory: only the labels and the place of each record stay in memory.
uint8 becomes float32 in [0, 1] where it is computed with (:func:`to_float32`); what the network does
beyond that belongs to the model.

The properties of the records (classes, shape, type) are settled before the first is read, and no record
changes them. A dataset may be empty: whether it can be opened depends on no record.

Files are read by ``pread`` and not mapped: a mapped file that another program truncates kills the process
with SIGBUS, and its pages count as the process's memory.
"""

from __future__ import annotations

import hashlib
import logging
import math
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError, DpagentError, require_count
from dpagent.learning.data.declared import MAX_CLASSES
from dpagent.wording import counted

log = logging.getLogger(__name__)

Indices = NDArray[np.integer[Any]]
Batch = tuple[NDArray[Any], NDArray[np.int64]]

DIGEST_BYTES: Final = 16
_DIGESTED_AT_ONCE: Final = 64
_BATCH_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Where records came from, for the eyes of their owner: it may name private files.

    Attributes:
        kind: of the format, or ``arrays``.
        source: the path, and the format that it was taken for.
        left_out: data that were found but are not among the records, a sentence each.
        warnings: likely misunderstandings, a sentence each.
        label_column: the column that the labels are from; None where they are from none.
    """

    kind: str = "arrays"
    source: str = "arrays in memory"
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    label_column: str | None = None


class Dataset(ABC):
    """Records with labels.

    Attributes:
        labels: ``(n,)`` int64 in ``0..classes-1``.
        classes: number of classes the labels are drawn from.
        class_names: the name of each class, or empty where classes are numbers only.
        shape: of one record.
        dtype: uint8 or float32.
        groups: ``(n,)`` int64, which file (or person, or session) each record is from; or None.
        origin: where the records came from.
        columns: the names of the input columns, the last axis of a record; empty unless it is a table.

    Raises:
        DataError: these do not fit together. It depends on no record and on no label.
    """

    columns: tuple[str, ...] = ()

    def __init__(
        self,
        labels: NDArray[np.int64],
        classes: int,
        *,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        class_names: Sequence[str] = (),
        groups: NDArray[np.int64] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.labels = labels
        self.classes = classes
        self.class_names = tuple(class_names)
        self.shape = tuple(int(size) for size in shape)
        self.dtype = np.dtype(dtype)
        self.groups = groups
        self.origin = Origin() if origin is None else origin
        self._require_form()

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def _read(self, indices: Indices) -> NDArray[Any]:
        """The records at ``indices``, checked, of ``self.shape`` and ``self.dtype``."""

    def batch(self, indices: Indices) -> Batch:
        """The records at ``indices`` in that order, and their labels; nothing else is read.

        Args:
            indices: ``(m,)`` in ``0..n-1``, repeated ones allowed; m may be 0.

        Returns:
            Inputs ``(m, *shape)``, uint8 or float32, and labels ``(m,)`` int64.

        Raises:
            DataError: A record cannot be read; names the file. Training uses :meth:`readable_batches`.
            IndexError: An index is out of its range.
        """
        indices = self._require_in_range(indices)
        return self._read(indices), self.labels[indices]

    def try_read(self, indices: Indices) -> tuple[NDArray[Any], dict[int, str]]:
        """The records at ``indices``, and why some of them cannot be read.

        Whatever reading a record raises costs that record alone, be it an error that no decoder should raise
        or a lack of memory: otherwise one record would decide what becomes of the others. What no record can
        cause is raised: see :func:`reason_of`.

        Returns:
            Inputs ``(m, *shape)``, and a sentence for each place in them whose values mean nothing.
        """
        indices = self._require_in_range(indices)
        try:
            return self._read(indices), {}
        except Exception as error:
            log.debug("reading records one at a time: %s", reason_of(error), exc_info=True)
        inputs, problems = np.zeros((len(indices), *self.shape), self.dtype), {}
        for place in range(len(indices)):
            try:
                inputs[place] = self._read(indices[place : place + 1])[0]
            except Exception as error:
                log.debug("a record cannot be read", exc_info=True)
                problems[place] = reason_of(error)
        return inputs, problems

    def batches(self, indices: Indices | None = None, *, size: int | None = None) -> Iterator[Batch]:
        """The same in pieces, so that a lot may be larger than memory.

        Args:
            indices: as of :meth:`batch`; without them, all records in their order.
            size: records in a piece, all but the last; by default as many as take about 4 MiB.

        Raises:
            DataError: as of :meth:`batch`.
        """
        size = self._batch_size(size)
        count = len(self) if indices is None else len(indices)
        for start in range(0, count, size):
            stop = min(start + size, count)
            yield self.batch(np.arange(start, stop) if indices is None else indices[start:stop])

    def readable_batches(self, indices: Indices | None = None, *, size: int | None = None) -> Iterator[Batch]:
        """As :meth:`batches`, without the records that cannot be read.

        It fails for no record: the output of a lot, and its existence, may depend on a record only as the
        mechanism allows. Every batch but the last is full, so that batches are
        those of a lot that never held the others, as the bound on an engine's error asks for.
        """
        size = self._batch_size(size)
        count = len(self) if indices is None else len(indices)
        start = 0
        while start < count:
            pieces: list[Batch] = []
            missing = size
            while missing and start < count:
                stop = min(start + missing, count)
                pieces.append(
                    self._readable(np.arange(start, stop) if indices is None else indices[start:stop])
                )
                missing -= len(pieces[-1][1])
                start = stop
            yield pieces[0] if len(pieces) == 1 else _joined(pieces)

    def stamps(self, key: bytes) -> NDArray[np.uint64]:
        """A number for each record, ``(n,)``, that tells it from the others and changes when the record does.

        By default of its values and label, which means to read it: for records that can all be read, such as
        those in memory. A format whose records may fail leaves those out as it lists them. Two numbers are
        equal by chance only, with a probability of 2⁻⁶⁴ a pair.

        Args:
            key: at most 64 bytes that are secret, so that nobody makes two records with one number.

        Raises:
            DataError: as of :meth:`batch`.
        """
        numbers = Stamps(key)
        for inputs, labels in self.batches():
            for values, label in zip(inputs, labels.tolist(), strict=True):
                numbers.add(values.tobytes(), label)
        return numbers.taken()

    @property
    def unfinished(self) -> Indices:
        """The records that may still be being written: they count only if they were known before."""
        return np.zeros(0, np.intp)

    @property
    def unlisted(self) -> frozenset[int]:
        """Classes of which the disk could not list all files: a record that was known before may be there, if
        it was in none of the :attr:`files`."""
        return frozenset()

    @property
    def files(self) -> Sequence[str]:
        """Those in which there may be records, a name each; none, where the disk can tell all or nothing."""
        return ()

    @property
    def unread(self) -> Sequence[str]:
        """Files that the disk cannot read, a name each: what was known to be in one of them may be there."""
        return ()

    @property
    def file_numbers(self) -> Indices:
        """Which of the files each record is in, ``(n,)``; of no meaning without files."""
        return np.zeros(len(self), np.intp)

    def place_of(self, number: int) -> str:
        """Where a record lies, in words for its owner."""
        return f"{self.origin.source}: record {number}"

    @property
    def places(self) -> NDArray[np.int64]:
        """A number for each record, ``(n,)``, different for all and rising, which is its own as long as it is
        there; by default its place in the set."""
        return np.arange(len(self))

    def digests(self) -> NDArray[np.uint8]:
        """What tells whether a record is the one of before, ``(n, 16)``, never zeros; by default of its
        values, which means to read it.

        Raises:
            DataError: as of :meth:`batch`.
        """
        digests = np.empty((len(self), DIGEST_BYTES), np.uint8)
        number = 0
        for inputs, _ in self.batches(size=_DIGESTED_AT_ONCE):
            for record in inputs:
                data = np.ascontiguousarray(record).data
                digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
                digests[number] = np.frombuffer(digest, np.uint8)
                number += 1
        return digests

    @property
    def record_bytes(self) -> int:
        """Bytes of one record in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def class_counts(self) -> NDArray[np.int64]:
        """How many records each class has, ``(classes,)``. Private."""
        return np.bincount(self.labels, minlength=self.classes)

    def class_label(self, number: int) -> str:
        """The name of class ``number``, or the number."""
        return self.class_names[number] if self.class_names else str(number)

    def _readable(self, indices: Indices) -> Batch:
        inputs, problems = self.try_read(indices)
        kept = np.delete(np.arange(len(indices)), list(problems)) if problems else slice(None)
        return inputs[kept], self.labels[indices][kept]

    def _batch_size(self, asked: int | None) -> int:
        return max(1, _BATCH_BYTES // self.record_bytes) if asked is None else require_count("size", asked)

    def _require_in_range(self, indices: Indices) -> Indices:
        indices = np.asarray(indices)
        # Also of none, as of some.
        largest = len(self) - (indices.size > 0)
        if not (int(indices.min(initial=0)) >= 0 and int(indices.max(initial=0)) <= largest):
            raise IndexError(
                f"indices from {indices.min()} to {indices.max()} for {counted(len(self), 'record')}"
            )
        return indices

    def _require_form(self) -> None:
        if self.dtype not in (np.uint8, np.float32) or not 1 <= len(self.shape) <= 3:
            raise DataError(
                f"The inputs are {self.dtype} of shape {_shown_shape(self.shape)}; expected uint8 or float32"
                " of shape (records, features), (records, length, channels) or (records, height, width,"
                " channels)."
            )
        if min(self.shape) < 1:
            raise DataError(f"A record has shape {self.shape}; expected at least one value.")
        labels = self.labels
        if labels.ndim != 1 or labels.dtype != np.int64:
            raise DataError(
                f"The labels are {labels.dtype} of shape {labels.shape}; expected int64 of shape (records,)."
            )
        if self.class_names and len(self.class_names) != self.classes:
            raise DataError(
                f"There are {len(self.class_names)} names for {counted(self.classes, 'class')}; expected "
                "one each."
            )
        if self.classes == 1:
            named = f", {self.class_names[0]!r}" if self.class_names else ""
            raise DataError(
                f"{self.origin.source}: there is only one class{named}; expected at least 2, since a model"
                " learns to tell classes apart."
            )
        if not 2 <= self.classes <= MAX_CLASSES:
            raise DataError(f"There are {counted(self.classes, 'class')}; expected 2 to {MAX_CLASSES:,}.")


class Stamps:
    """Gathers a number for each record, from what tells it from others; equal ones are told apart by count.

    Args:
        key: as of :meth:`Dataset.stamps`.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._seen, self._numbers = key, Counter[bytes](), array("Q")

    def add(self, *parts: bytes | str | int) -> None:
        """Take a record by its parts."""
        what = b"".join(_framed(part) for part in parts)
        digest = self._digest(what)
        self._seen[digest] += 1
        if (count := self._seen[digest]) > 1:
            digest = self._digest(what + _framed(count))
        self._numbers.append(int.from_bytes(digest, "little"))

    def taken(self) -> NDArray[np.uint64]:
        """The numbers, ``(n,)``."""
        return np.array(self._numbers, np.uint64)

    def _digest(self, what: bytes) -> bytes:
        return hashlib.blake2b(what, digest_size=8, key=self._key).digest()


class ArrayDataset(Dataset):
    """Records in memory.

    Args:
        inputs: ``(n, *shape)``, uint8 or float32.
        labels: ``(n,)`` int64 in ``0..classes-1``.
        classes: number of classes the labels are drawn from.
        class_names, groups, origin: as of :class:`Dataset`.

    Raises:
        DataError: they do not fit together, or a label is none of the classes.

    >>> data = ArrayDataset(np.array([[0.5, 1.0], [0.0, 2.0]], np.float32), np.array([1, 0]), 2)
    >>> inputs, labels = data.batch(np.array([1]))
    >>> inputs.tolist(), labels.tolist()
    ([[0.0, 2.0]], [0])
    """

    def __init__(
        self,
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
        classes: int,
        class_names: Sequence[str] = (),
        *,
        groups: NDArray[np.int64] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.inputs = inputs
        if inputs.ndim and len(inputs) != len(labels):
            raise DataError(
                f"There are {counted(len(inputs), 'input')} and {counted(len(labels), 'label')}; expected "
                "one label an input."
            )
        super().__init__(
            labels, classes, shape=inputs.shape[1:], dtype=inputs.dtype, class_names=class_names,
            groups=groups, origin=origin,
        )  # fmt: skip
        low, high = int(labels.min(initial=0)), int(labels.max(initial=0))
        if low < 0 or high >= classes:
            place, wrong = (labels.argmin(), low) if low < 0 else (labels.argmax(), high)
            raise DataError(
                f"A label is {wrong} (record {place}); expected whole numbers from 0 to {classes - 1}."
            )

    def _read(self, indices: Indices) -> NDArray[Any]:
        chosen: NDArray[Any] = self.inputs[indices]
        return chosen


def without_records(dataset: Dataset) -> Dataset:
    """An empty set of the same form, which keeps nothing of the other."""
    return ArrayDataset(
        np.zeros((0, *dataset.shape), dataset.dtype), np.zeros(0, np.int64), dataset.classes,
        dataset.class_names,
    )  # fmt: skip


def to_float32(inputs: NDArray[Any]) -> NDArray[np.float32]:
    """``inputs`` as a network takes them: uint8 divided by 255, float32 as it is.

    >>> to_float32(np.array([0, 51, 255], np.uint8)).tolist()
    [0.0, 0.20000000298023224, 1.0]
    """
    if inputs.dtype == np.uint8:
        scaled: NDArray[np.float32] = np.divide(inputs, np.float32(255), dtype=np.float32)
        return scaled
    return inputs.astype(np.float32, copy=False)


def reason_of(error: Exception) -> str:
    """Why a record cannot be read, as a sentence for the owner.

    Raises:
        DpagentError: ``error`` itself, where it is about the board (its disk, its packages) and not a record.
    """
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, DpagentError):
        raise error
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.') or 'no details'}."


def _framed(part: bytes | str | int) -> bytes:
    """A part with its length, so that no two lists of parts are one text."""
    data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
    return len(data).to_bytes(8, "little") + data


def _joined(pieces: Sequence[Batch]) -> Batch:
    inputs, labels = zip(*pieces, strict=True)
    return np.concatenate(inputs), np.concatenate(labels)


def _shown_shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(['records', *map(str, shape)])})"
