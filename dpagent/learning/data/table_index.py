"""CSV files as records: one look through a file finds where each record begins and ends.

A record is one row, or ``window`` rows on end. What is kept of it is two offsets and its label, so that a
file may be larger than memory; its numbers are parsed again when it is asked for.

A row that does not fit is left out alone. It keeps its place in the series: windows after it begin where they
would have begun, and only those with the row in them are no records.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.classes import ClassTable
from dpagent.learning.data.dataset import MAX_CLASSES
from dpagent.learning.data.stored import RawFile, open_raw, reading
from dpagent.learning.data.table_form import TableForm
from dpagent.learning.data.table_rows import Columns, Lines, Row, checked_rows, columns_of, read_rows

GRACE_S: Final = 2.0
"""The last line of a file that was written to within this is left for later if it has no end yet."""

Stamp = tuple[int, int, int]
"""Inode, size and time of change of a file, in nanoseconds."""

_MOST_PROBLEMS: Final = 100
_UNFIT: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class TableIndex:
    """Where the records of one file lie.

    Attributes:
        path: the file.
        stamp: its inode, size and time of change when it was read.
        unpacked: the file without a name, if it was packed.
        columns: where a row has what.
        starts, ends: ``(n,)`` int64, bytes.
        labels: ``(n,)`` int64, positions in ``label_texts``.
        groups: ``(n,)`` int64, positions in ``group_texts``.
        rows_unused: how many rows that fit are in no record.
        problems: a sentence for each row that does not fit, of many for the first.
    """

    path: Path
    stamp: Stamp
    unpacked: RawFile | None
    columns: Columns
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    labels: NDArray[np.int64]
    label_texts: tuple[str, ...]
    groups: NDArray[np.int64]
    group_texts: tuple[str, ...]
    rows_unused: int
    problems: tuple[str, ...]


def stamp_of(path: Path) -> Stamp:
    """What tells whether a file has changed."""
    with reading(path):
        known = path.stat()
    return known.st_ino, known.st_size, known.st_mtime_ns


def index_table(
    path: Path, form: TableForm, classes: ClassTable | None = None, *, growing: bool = False
) -> TableIndex:
    """Look through a file. What a row holds makes it fail for no other row.

    Args:
        path: CSV in UTF-8, with ``.gz`` if packed.
        form: how rows become records.
        classes: the labels that are allowed, or None for any.
        growing: whether a young last line that has no end is left for later.

    Raises:
        DataError: the file cannot be read, or its first row does not fit; names file, line and column.
    """
    stamp = stamp_of(path)
    raw = open_raw(path)
    growing = growing and time.time_ns() - stamp[2] < GRACE_S * 1e9
    with open(raw.descriptor, "rb", closefd=False) as stream:
        stream.seek(0)
        lines = Lines(path, stream, growing=growing)
        columns = columns_of(next(read_rows(lines, path, form.delimiter), None), path, form)
        if not form.header:
            lines.go_to(0, 0)
        builder = _Builder(form, columns)
        for row in checked_rows(lines, columns, form, classes):
            builder.add(row)
            if len(builder.label_codes) > MAX_CLASSES:
                raise DataError(
                    f"{path}:{lines.number}: the column {form.label!r} has more than {MAX_CLASSES:,}"
                    " different labels. Is it the label column?"
                )
    if lines.cut:
        stamp = (stamp[0], stamp[1], 0)  # to be read again
    return builder.made(path, stamp, raw if path.suffix == ".gz" else None)


class _Builder:
    """Gathers rows to records."""

    def __init__(self, form: TableForm, columns: Columns) -> None:
        self._columns = columns
        self._window = form.window or 1
        self._stride = form.stride or self._window
        self._drops = form.mixed == "drop"
        self._starts, self._ends, self._labels, self._groups = (array("q") for _ in range(4))
        self.label_codes: dict[str, int] = {}
        self.group_codes: dict[str, int] = {}
        self._recent: deque[tuple[int, int]] = deque(maxlen=self._window)
        self._group, self._run = -1, 0
        self._rows, self._unfit, self._used, self._used_until = 0, 0, 0, 0
        self._problems: list[str] = []

    def add(self, row: Row) -> None:
        """Take a row."""
        code = _UNFIT
        if row.problem:
            self._unfit += 1
            if len(self._problems) < _MOST_PROBLEMS:
                self._problems.append(row.problem)
        else:
            code = self.label_codes.setdefault(row.cells[self._columns.label].strip(), len(self.label_codes))
        if (number := self._group_of(row)) != self._group:
            self._group, self._run = number, 0
            self._recent.clear()
        self._recent.append((row.start, code))
        self._run += 1
        self._rows += 1
        before = self._run - self._window
        if before < 0 or before % self._stride:
            return
        if (chosen := self._label()) is None:
            return
        self._starts.append(self._recent[0][0])
        self._ends.append(row.end)
        self._labels.append(chosen)
        self._groups.append(number)
        self._used += self._rows - max(self._used_until, self._rows - self._window)
        self._used_until = self._rows

    def made(self, path: Path, stamp: Stamp, raw: RawFile | None) -> TableIndex:
        """What was gathered."""
        starts, ends, labels, groups = (
            np.array(values, np.int64) for values in (self._starts, self._ends, self._labels, self._groups)
        )
        if (more := self._unfit - len(self._problems)) > 0:
            self._problems.append(f"{path}: {more:,} more rows do not fit.")
        return TableIndex(
            path, stamp, raw, self._columns, starts, ends, labels, tuple(self.label_codes), groups,
            tuple(self.group_codes), self._rows - self._unfit - self._used, tuple(self._problems),
        )  # fmt: skip

    def _group_of(self, row: Row) -> int:
        if self._columns.group is None:
            text = ""
        elif len(row.cells) == self._columns.width:
            text = row.cells[self._columns.group].strip()
        else:
            return self._group  # Nobody knows: it is taken to go on with the row before it.
        return self.group_codes.setdefault(text, len(self.group_codes))

    def _label(self) -> int | None:
        counts = Counter(code for _, code in self._recent)  # in the order in which they come
        if _UNFIT in counts or (len(counts) > 1 and self._drops):
            return None
        return counts.most_common(1)[0][0]
