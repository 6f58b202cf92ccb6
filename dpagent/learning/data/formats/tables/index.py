"""CSV files as records: one look through a file finds where each record begins and ends.

A record is one row, or ``window`` rows on end. Only two offsets and its label are kept, so that a
file may be larger than memory; its numbers are parsed again when it is asked for.

A row that does not fit is left out alone. It keeps its place in the file: windows after it begin where they
would have begun, and only those with the row in them are no records. Likewise one whose group is another.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.classes import ClassTable
from dpagent.learning.data.dataset import MAX_CLASSES
from dpagent.learning.data.formats.tables.header import Columns
from dpagent.learning.data.formats.tables.rows import LONGEST_ROW, Row, TableBounds, checked_rows, opened_rows
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.learning.data.formats.tables.windows import Windows
from dpagent.learning.data.stamp import Stamp, stamp_of
from dpagent.learning.data.stored import RawFile, open_raw
from dpagent.wording import counted

_MOST_PROBLEMS: Final = 100
_CELL_BYTES: Final = 32
"""A cell of a window, and what separates it, with empty lines: a longer window is no record."""
_UNFIT: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class TableIndex:
    """Where the records of one file lie.

    Attributes:
        path: the file.
        stamp: of it, when it was read.
        file: the file, if it is open: one without a name, if it was packed.
        columns: their places in a row.
        starts, ends: ``(n,)`` int64, bytes.
        labels: ``(n,)`` int64, positions in ``label_texts``.
        groups: ``(n,)`` int64, positions in ``group_texts``.
        rows_unused: how many rows that fit are in no record.
        problems: a sentence for each row that does not fit, of many for the first.
        is_whole: whether the last record cannot be still being written.
        lines: that were read.
        most: that might have been.
    """

    path: Path
    stamp: Stamp
    file: RawFile | None
    columns: Columns
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    labels: NDArray[np.int64]
    label_texts: tuple[str, ...]
    groups: NDArray[np.int64]
    group_texts: tuple[str, ...]
    rows_unused: int
    problems: tuple[str, ...]
    is_whole: bool
    lines: int
    most: TableBounds | None


def columns_in(path: Path, form: CsvSettings) -> Columns:
    """The columns that the first row of a file tells of.

    Raises:
        DataError: as of :func:`index_table`.
    """
    with opened_rows(open_raw(path), form) as (_, columns):
        return columns


def index_table(
    path: Path,
    form: CsvSettings,
    classes: ClassTable | None,
    *,
    growing: bool = False,
    most: TableBounds | None = None,
    keeps_open: bool = False,
) -> TableIndex:
    """Look through a file. No row makes it fail for another.

    Args:
        path: CSV in UTF-8, with ``.gz`` if packed.
        form: how rows become records.
        classes: the labels that are allowed, or None for any, to infer them.
        growing: whether a young last line that has no end may still be being written.
        most: that is read, on a board, which takes no packed file.
        keeps_open: whether the records are read from this very file, whatever takes its place.

    Raises:
        DataError: the file cannot be read, or its first row does not fit; names file, line and column.
    """
    stamp = stamp_of(path)
    if most is not None and path.suffix == ".gz":
        raise DataError(f"{path} is packed; a board unpacks no table. Unpack it: gunzip {path.name}")
    made = index_open(open_raw(path), stamp, form, classes, growing=growing, most=most)
    return made if keeps_open or path.suffix == ".gz" else replace(made, file=None)


def index_open(
    raw: RawFile,
    stamp: Stamp,
    form: CsvSettings,
    classes: ClassTable | None,
    *,
    growing: bool,
    most: TableBounds | None = None,
) -> TableIndex:
    """The same of a file that is open."""
    path = raw.path
    growing = growing and stamp.is_young()
    with opened_rows(raw, form, most=most) as (lines, columns):
        builder = _Builder(form, columns)
        for row in checked_rows(lines, columns, form, classes):
            is_whole = lines.is_ended or not growing
            if row.problem and not is_whole:
                break
            builder.add(row, is_whole=is_whole)
            if classes is None and len(builder.label_codes) > MAX_CLASSES:
                raise DataError(
                    f"{path}:{lines.number}: the column {form.label!r} has more than {MAX_CLASSES:,}"
                    " different labels. Is it the label column?"
                )
        if lines.is_cut_short:
            builder.note(f"{path}: what follows line {lines.number:,} is not read; max_records bounds it.")
        return builder.made(path, stamp, raw, lines.number, most)


class _Seen(NamedTuple):
    """What a window has to know of a row: where it begins, the codes of its label and its group."""

    start: int
    label: int
    group: str


class _Builder:
    """Gathers rows to records."""

    def __init__(self, form: CsvSettings, columns: Columns) -> None:
        self._columns = columns
        self._windows: Windows[_Seen] = Windows(form)
        self._drops = form.mixed == "drop"
        self._longest = LONGEST_ROW + _CELL_BYTES * columns.width * (form.window or 1)
        self._starts, self._ends, self._labels, self._groups = (array("q") for _ in range(4))
        self.label_codes: dict[str, int] = {}
        self.group_codes: dict[str, int] = {}
        self._rows, self._unfit, self._used, self._used_until = 0, 0, 0, 0
        self._problems: list[str] = []
        self._is_whole = True

    def add(self, row: Row, *, is_whole: bool) -> None:
        """Take a row; the last one may not be whole."""
        code, group = _UNFIT, ""
        if row.problem:
            self._unfit += 1
            if len(self._problems) < _MOST_PROBLEMS:
                self._problems.append(row.problem)
        else:
            assert self._columns.label is not None
            code = self.label_codes.setdefault(row.cells[self._columns.label].strip(), len(self.label_codes))
            group = self._columns.group_of(row.cells)
        window = self._windows.add(_Seen(row.start, code, group))
        self._rows += 1
        if window is None or (label := self._label(window)) is None:
            return
        if row.end - window[0].start > self._longest:  # it is read at once
            return
        self._starts.append(window[0].start)
        self._ends.append(row.end)
        self._labels.append(label)
        self._groups.append(self.group_codes.setdefault(group, len(self.group_codes)))
        self._used += self._rows - max(self._used_until, self._rows - len(window))
        self._used_until = self._rows
        self._is_whole = is_whole

    def note(self, problem: str) -> None:
        """Take a sentence about the file."""
        self._problems.append(problem)

    def made(
        self, path: Path, stamp: Stamp, raw: RawFile, lines: int, most: TableBounds | None
    ) -> TableIndex:
        """The index of the rows that were added."""
        starts, ends, labels, groups = (
            np.array(values, np.int64) for values in (self._starts, self._ends, self._labels, self._groups)
        )
        if (more := self._unfit - len(self._problems)) > 0:
            self._problems.append(f"{path}: {counted(more, 'more row')} do not fit.")
        return TableIndex(
            path, stamp, raw, self._columns, starts, ends, labels, tuple(self.label_codes), groups,
            tuple(self.group_codes), self._rows - self._unfit - self._used, tuple(self._problems),
            self._is_whole, lines, most,
        )  # fmt: skip

    def _label(self, window: Sequence[_Seen]) -> int | None:
        """The label of a window; None: it is no record."""
        counts = Counter(row.label for row in window)  # in the order in which they come
        if _UNFIT in counts or (len(counts) > 1 and self._drops):
            return None
        if any(row.group != window[0].group for row in window):
            return None
        return counts.most_common(1)[0][0]
