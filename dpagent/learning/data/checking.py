"""Reads every record once and says what there is: for the owner of the data, on the machine they are on.

All of it is private, the counts too: show it to nobody whom the records are not for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.dataset import Dataset, Indices

_LARGE: Final = 20.0
"""Models are made for inputs of about −1 to 1; beyond this most units are saturated."""
_MOST_SENTENCES: Final = 1_000


@dataclass(frozen=True, slots=True)
class Findings:
    """What a dataset holds.

    Attributes:
        kind, source, left_out: as of :class:`~dpagent.learning.data.dataset.Origin`.
        warnings: what may be wrong, a sentence each.
        records, shape, dtype: of the whole.
        classes: name and count of each class.
        minimum, maximum: of all finite values; None if there is none.
        non_finite: records with a NaN or an infinity, which never count.
        duplicates: records whose inputs equal those of one before.
        contradictions: duplicates whose label differs.
        unreadable: a sentence for each record that cannot be read.
        memory_bytes: what all records would take in memory.
    """

    kind: str
    source: str
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    records: int
    shape: tuple[int, ...]
    dtype: str
    classes: tuple[tuple[str, int], ...]
    minimum: float | None
    maximum: float | None
    non_finite: int
    duplicates: int
    contradictions: int
    unreadable: tuple[str, ...]
    memory_bytes: int


def examine(dataset: Dataset) -> Findings:
    """Read all of ``dataset``, a piece at a time; 16 bytes a record stay in memory meanwhile."""
    inputs_seen, records_seen = (np.zeros(len(dataset), np.uint64) for _ in range(2))
    read, non_finite, unreadable = 0, 0, []
    low, high = math.inf, -math.inf
    for inputs, labels, problem in _pieces(dataset):
        if problem:
            unreadable.append(problem)
            continue
        flat = np.ascontiguousarray(inputs).reshape(len(inputs), -1)
        finite = np.isfinite(flat)
        non_finite += int(np.count_nonzero(~finite.all(axis=1)))
        low = min(
            low, float(flat.min(where=finite, initial=math.inf) if flat.dtype.kind == "f" else flat.min())
        )
        high = max(
            high, float(flat.max(where=finite, initial=-math.inf) if flat.dtype.kind == "f" else flat.max())
        )
        for row, label in zip(flat, labels, strict=True):
            digest = hashlib.blake2b(row.data, digest_size=8)
            inputs_seen[read] = int.from_bytes(digest.digest(), "little")
            digest.update(int(label).to_bytes(8, "little"))
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
        ),
        records=len(dataset),
        shape=dataset.shape,
        dtype=str(dataset.dtype),
        classes=tuple(
            (dataset.class_label(number), int(count)) for number, count in enumerate(dataset.class_counts())
        ),
        minimum=low if has_values else None,
        maximum=high if has_values else None,
        non_finite=non_finite,
        duplicates=read - different,
        contradictions=len(np.unique(records_seen[:read])) - different,
        unreadable=tuple(unreadable[:_MOST_SENTENCES]),
        memory_bytes=len(dataset) * dataset.record_bytes,
    )


def count_non_finite(dataset: Dataset) -> int:
    """How many records hold a NaN or an infinity. The mechanism leaves them out of its sums.

    Raises:
        DataError: a record cannot be read.
    """
    if dataset.dtype == np.uint8:
        return 0
    count = 0
    for inputs, _ in dataset.batches():
        count += int(np.count_nonzero(~np.isfinite(inputs).all(axis=tuple(range(1, inputs.ndim)))))
    return count


def _pieces(dataset: Dataset) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], str]]:
    """The records in pieces, and a sentence in place of one that cannot be read."""
    size = max(1, (1 << 20) // dataset.record_bytes)
    waiting: list[Indices] = [
        np.arange(start, min(start + size, len(dataset))) for start in range(0, len(dataset), size)
    ]
    waiting.reverse()
    while waiting:
        indices = waiting.pop()
        try:
            yield (*dataset.batch(indices), "")
        except DataError as error:
            if len(indices) == 1:
                yield np.empty(0), np.empty(0, np.int64), str(error)
            else:
                waiting += [indices[number : number + 1] for number in reversed(range(len(indices)))]


def _warnings(
    dataset: Dataset, values: tuple[float, float] | None, non_finite: int, duplicates: int
) -> Iterator[str]:
    counts = dataset.class_counts()
    missing = [dataset.class_label(int(number)) for number in np.flatnonzero(counts == 0)]
    if missing:
        shown = ", ".join(missing[:12]) + (", …" if len(missing) > 12 else "")
        yield f"No records of {len(missing)} of {dataset.classes} classes: {shown}."
    if not dataset.class_names:
        yield (
            f"The classes are the whole numbers 0 to {dataset.classes - 1}, as far as the labels here go."
            " Name them in `classes` to fix how many there are."
        )
    if non_finite:
        yield f"{non_finite:,} record(s) hold NaN or infinity (or a missing value) and will not count."
    if values is not None and dataset.dtype != np.uint8 and max(map(abs, values)) > _LARGE:
        yield (
            f"Values go from {values[0]:g} to {values[1]:g}; models are made for about −1 to 1. Give public"
            " constants: `offset` and `scale` of CSV columns, or a model's `input_offset` and `input_scale`."
        )
    if duplicates:
        yield (
            f"{duplicates:,} record(s) equal one before. What stands k times is protected k times less,"
            " because the privacy unit is the record."
        )
