"""Reads every record once and describes the data: for their owner, on the machine that holds them.

All of it is private, the counts too: show it only to people who may see the records.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.data.balance import hint_of_imbalance
from dpagent.learning.data.classes import doubt_about_labels
from dpagent.learning.data.columns import ColumnRange, ColumnTally, hint_of_growth
from dpagent.learning.data.dataset import Dataset
from dpagent.wording import counted, named

_LARGE: Final = 20.0
"""Models are made for inputs of about −1 to 1; beyond this most units are saturated."""
_PIECE_BYTES: Final = 1 << 20
_MOST_SENTENCES: Final = 1_000


@dataclass(frozen=True, slots=True)
class Findings:
    """The content of a dataset.

    Attributes:
        kind, source, left_out: as of :class:`~dpagent.learning.data.dataset.Origin`.
        warnings: possible mistakes, a sentence each.
        records, shape, dtype: of the whole.
        classes: name and count of each class.
        columns: the input columns of a table; of all other data there are none.
        minimum, maximum: of all finite values; None if there is none.
        non_finite: records with a NaN or an infinity, which never count.
        duplicates: records whose inputs equal those of one before.
        contradictions: duplicates whose label differs.
        unreadable: a sentence for each record that cannot be read.
        memory_bytes: of all records, if they were in memory.
    """

    kind: str
    source: str
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    records: int
    shape: tuple[int, ...]
    dtype: str
    classes: tuple[tuple[str, int], ...]
    columns: tuple[ColumnRange, ...]
    minimum: float | None
    maximum: float | None
    non_finite: int
    duplicates: int
    contradictions: int
    unreadable: tuple[str, ...]
    memory_bytes: int


def examine(dataset: Dataset) -> Findings:
    """Read all of ``dataset``, a piece at a time; 16 bytes a record stay in memory meanwhile.

    >>> from dpagent.learning.data.dataset import ArrayDataset
    >>> inputs = np.array([[0.5], [0.5], [np.nan]], np.float32)
    >>> findings = examine(ArrayDataset(inputs, np.array([0, 1, 1]), 2, ["cat", "fox"]))
    >>> findings.classes, findings.non_finite, findings.duplicates, findings.contradictions
    ((('cat', 1), ('fox', 2)), 1, 1, 1)
    """
    columns = ColumnTally(dataset.columns)
    inputs_seen, records_seen = (np.zeros(len(dataset), np.uint64) for _ in range(2))
    read, non_finite = 0, 0
    unreadable: list[str] = []
    low, high = math.inf, -math.inf
    size = max(1, _PIECE_BYTES // dataset.record_bytes)
    for start in range(0, len(dataset), size):
        indices = np.arange(start, min(start + size, len(dataset)))
        inputs, problems = dataset.try_read(indices)
        unreadable += problems.values()
        kept = np.delete(np.arange(len(indices)), list(problems))
        if not len(kept):
            continue
        if dataset.columns:
            columns.add(inputs[kept], groups_of(dataset)[indices[kept]])
        flat = np.ascontiguousarray(inputs[kept]).reshape(len(kept), -1)
        finite = np.isfinite(flat)
        non_finite += int(np.count_nonzero(~finite.all(axis=1)))
        low = min(
            low, float(flat.min(where=finite, initial=math.inf) if flat.dtype.kind == "f" else flat.min())
        )
        high = max(
            high, float(flat.max(where=finite, initial=-math.inf) if flat.dtype.kind == "f" else flat.max())
        )
        for row, number in zip(flat, dataset.labels[indices[kept]], strict=True):
            digest = hashlib.blake2b(row.data, digest_size=8)
            inputs_seen[read] = int.from_bytes(digest.digest(), "little")
            digest.update(int(number).to_bytes(8, "little"))
            records_seen[read] = int.from_bytes(digest.digest(), "little")
            read += 1
    different = len(np.unique(inputs_seen[:read]))
    has_values = low <= high
    return Findings(
        kind=dataset.origin.kind,
        source=dataset.origin.source,
        left_out=dataset.origin.left_out,
        warnings=(
            *dataset.origin.warnings,
            *_warnings(dataset, (low, high) if has_values else None, non_finite, read - different),
            *filter(
                None,
                [hint_of_growth(columns.ranges()), doubt_about_labels(dataset), hint_of_imbalance(dataset)],
            ),
        ),
        records=len(dataset),
        shape=dataset.shape,
        dtype=str(dataset.dtype),
        classes=tuple(
            (dataset.class_label(number), int(count)) for number, count in enumerate(dataset.class_counts())
        ),
        columns=columns.ranges(),
        minimum=low if has_values else None,
        maximum=high if has_values else None,
        non_finite=non_finite,
        duplicates=read - different,
        contradictions=len(np.unique(records_seen[:read])) - different,
        unreadable=tuple(unreadable[:_MOST_SENTENCES]),
        memory_bytes=len(dataset) * dataset.record_bytes,
    )


def count_non_finite(dataset: Dataset) -> int:
    """How many of the records that can be read hold a NaN or an infinity. They are left out of all sums."""
    if dataset.dtype == np.uint8:
        return 0
    count = 0
    for inputs, _ in dataset.readable_batches():
        count += int(np.count_nonzero(~np.isfinite(inputs).all(axis=tuple(range(1, inputs.ndim)))))
    return count


def groups_of(dataset: Dataset) -> NDArray[np.int64]:
    """The file or group of each record, ``(n,)``; 0 for all where nothing tells."""
    return np.zeros(len(dataset), np.int64) if dataset.groups is None else dataset.groups


def sentence_of_non_finite(count: int) -> str:
    """The sentence on records that hold NaN or an infinity."""
    holds = "holds" if count == 1 else "hold"
    return f"{counted(count, 'record')} {holds} NaN or infinity (or a missing value) and will not count."


def _warnings(
    dataset: Dataset, values: tuple[float, float] | None, non_finite: int, duplicates: int
) -> Iterator[str]:
    counts = dataset.class_counts()
    missing = [dataset.class_label(int(number)) for number in np.flatnonzero(counts == 0)]
    if missing:
        shown = ", ".join(missing[:12]) + (", …" if len(missing) > 12 else "")
        yield f"No records of {len(missing)} of {counted(dataset.classes, 'class')}: {shown}."
    if non_finite:
        yield sentence_of_non_finite(non_finite)
    if values is not None and dataset.dtype != np.uint8 and max(map(abs, values)) > _LARGE:
        yield (
            f"Values go from {values[0]:g} to {values[1]:g}; models are made for about −1 to 1. Give public"
            f" constants: {named('offset')} and {named('scale')} of CSV columns, or a model's"
            " `input_offset` and `input_scale`."
        )
    if duplicates:
        equal = "equals" if duplicates == 1 else "equal"
        yield (
            f"{counted(duplicates, 'record')} {equal} one before. What stands k times is protected k times"
            " less, because the privacy unit is the record."
        )
