"""CSV files as records: one look through a file finds where each record begins and ends.

A record is one row, or ``window`` rows on end. What is kept of it is two offsets and its label, so that a
file may be larger than memory; its numbers are parsed again when it is asked for. Quoted line breaks are
understood, because the rows are found by the ``csv`` module itself.
"""

from __future__ import annotations

import csv
import io
import math
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.dataset import MAX_CLASSES
from dpagent.learning.data.stored import RawFile, open_raw, reading
from dpagent.learning.data.table_form import TableForm

GRACE_S: Final = 2.0
"""The last line of a file that was written to within this is left for later if it has no end yet."""

MISSING: Final = ("", "nan", "na", "n/a", "null", "none", "?")
"""Cells, in small letters, that stand for no value: the record has a NaN and does not count."""

Stamp = tuple[int, int, int]
"""Inode, size and time of change of a file, in nanoseconds."""

_LONGEST_LINE: Final = 1 << 20
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a file has what.

    Attributes:
        width: cells in a row.
        label, group: places.
        features: names and places of the inputs.
    """

    width: int
    label: int
    group: int | None
    features: tuple[tuple[str, int], ...]

    def values(self, cells: Sequence[str]) -> list[float]:
        """The inputs of a row, NaN for what is missing.

        Raises:
            ValueError: a cell is no number; its arguments are the column and the cell.
        """
        numbers = []
        for name, place in self.features:
            cell = cells[place]
            try:
                numbers.append(float(cell))
            except ValueError:
                if cell.strip().lower() not in MISSING:
                    raise ValueError(name, cell) from None
                numbers.append(math.nan)
        return numbers


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
        rows, rows_unused: how many rows there are, and how many are in no record.
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
    rows: int
    rows_unused: int


def stamp_of(path: Path) -> Stamp:
    """What tells whether a file has changed."""
    with reading(path):
        known = path.stat()
    return known.st_ino, known.st_size, known.st_mtime_ns


def index_table(
    path: Path, form: TableForm, classes: frozenset[str] | None = None, *, growing: bool = False
) -> TableIndex:
    """Look through a file.

    Args:
        path: CSV in UTF-8, with ``.gz`` if packed.
        form: how rows become records.
        classes: the labels that are allowed, or None for any.
        growing: whether a young last line that has no end is left for later.

    Raises:
        DataError: names file, line and column of what does not fit.
    """
    stamp = stamp_of(path)
    raw = open_raw(path)
    growing = growing and time.time_ns() - stamp[2] < GRACE_S * 1e9
    with open(raw.descriptor, "rb", closefd=False) as stream:
        stream.seek(0)
        lines = _Lines(path, stream, growing=growing)
        rows = read_rows(lines, path, form.delimiter)
        columns, first = _columns(rows, path, form)
        builder = _Builder(form)
        for start, end, cells in first:
            _require_row(cells, columns, path, lines)
            label = cells[columns.label].strip()
            if not label or (classes is not None and label not in classes):
                expected = "a label" if classes is None else f"one of {', '.join(sorted(classes)[:12])}"
                raise DataError(
                    f"{path}:{lines.number}: the label is {label[:60]!r}; expected {expected}. Correct the"
                    " row, or list the label in `classes`."
                )
            builder.add(start, end, label, "" if columns.group is None else cells[columns.group].strip())
            if len(builder.label_codes) > MAX_CLASSES:
                raise DataError(
                    f"{path}:{lines.number}: the column {form.label!r} has more than {MAX_CLASSES:,}"
                    " different labels. Is it the label column?"
                )
    if lines.cut:
        stamp = (stamp[0], stamp[1], 0)  # to be read again
    return builder.made(path, stamp, raw if path.suffix == ".gz" else None, columns)


def read_rows(lines: Iterable[str], path: Path, delimiter: str) -> Iterator[tuple[int, int, list[str]]]:
    """Rows that are not empty: where each begins and ends (of :class:`_Lines`, else 0), and its cells."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        start = getattr(lines, "place", 0)
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            number = getattr(lines, "number", None)
            where = f"{path}:{number}" if number else str(path)
            raise DataError(f"{where}: not valid CSV: {error}.") from error
        if cells:
            yield start, getattr(lines, "place", 0), cells


class _Lines:
    """Lines of a file as text, with the place and number of the last one read."""

    def __init__(self, path: Path, stream: io.BufferedReader, *, growing: bool) -> None:
        self._path, self._stream, self._growing = path, stream, growing
        self.place, self.number, self.cut = 0, 0, False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        with reading(self._path):
            line = self._stream.readline(_LONGEST_LINE + 1)
        self.cut = self._growing and line[-1:] not in (b"", b"\n")
        if not line or self.cut:
            raise StopIteration
        self.place += len(line)
        self.number += 1
        where = f"{self._path}:{self.number}"
        if len(line) > _LONGEST_LINE:
            raise DataError(f"{where}: a line has more than {_LONGEST_LINE:,} bytes; expected CSV in lines.")
        if self.number == 1:
            line = line.removeprefix(_BOM)
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 text ({error.reason}). Save the file as UTF-8.") from error
        if "\0" in text:
            raise DataError(f"{where}: holds a null character. Expected CSV as text in UTF-8.")
        return text


class _Builder:
    """Gathers rows to records."""

    def __init__(self, form: TableForm) -> None:
        self._window = form.window or 1
        self._stride = form.stride or self._window
        self._drops = form.mixed == "drop"
        self._starts, self._ends, self._labels, self._groups = (array("q") for _ in range(4))
        self.label_codes: dict[str, int] = {}
        self.group_codes: dict[str, int] = {}
        self._recent: deque[tuple[int, int]] = deque(maxlen=self._window)
        self._group, self._run = -1, 0
        self._rows, self._used, self._used_until = 0, 0, 0

    def add(self, start: int, end: int, label: str, group: str) -> None:
        """Take a row."""
        code = self.label_codes.setdefault(label, len(self.label_codes))
        if (number := self.group_codes.setdefault(group, len(self.group_codes))) != self._group:
            self._group, self._run = number, 0
            self._recent.clear()
        self._recent.append((start, code))
        self._run += 1
        self._rows += 1
        before = self._run - self._window
        if before < 0 or before % self._stride:
            return
        if (chosen := self._label()) is None:
            return
        self._starts.append(self._recent[0][0])
        self._ends.append(end)
        self._labels.append(chosen)
        self._groups.append(number)
        self._used += self._rows - max(self._used_until, self._rows - self._window)
        self._used_until = self._rows

    def made(self, path: Path, stamp: Stamp, raw: RawFile | None, columns: Columns) -> TableIndex:
        """What was gathered."""
        starts, ends, labels, groups = (
            np.array(values, np.int64) for values in (self._starts, self._ends, self._labels, self._groups)
        )
        return TableIndex(
            path, stamp, raw, columns, starts, ends, labels, tuple(self.label_codes), groups,
            tuple(self.group_codes), self._rows, self._rows - self._used,
        )  # fmt: skip

    def _label(self) -> int | None:
        counts = Counter(code for _, code in self._recent)  # in the order in which they come
        if len(counts) > 1 and self._drops:
            return None
        return counts.most_common(1)[0][0]


def _columns(
    rows: Iterator[tuple[int, int, list[str]]], path: Path, form: TableForm
) -> tuple[Columns, Iterator[tuple[int, int, list[str]]]]:
    """Where the columns are, and the rows that hold records."""
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path} has no rows; expected a header and records. Copy it again.")
    names = [cell.strip() for cell in first[2]]
    if not form.header:
        names = [str(number) for number in range(1, len(names) + 1)]

        def with_first() -> Iterator[tuple[int, int, list[str]]]:
            yield first
            yield from rows

        return _places(names, path, form), with_first()
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{path}:1: the column {repeated[0]!r} stands twice. Give each column its own name.")
    return _places(names, path, form), rows


def _places(names: list[str], path: Path, form: TableForm) -> Columns:
    where = {name: place for place, name in enumerate(names)}
    for role, name in (
        ("label", form.label),
        ("group", form.group),
        *(("features", n) for n in form.features or ()),
    ):
        if name is not None and name not in where:
            hint = ""
            if len(names) == 1 and (other := next((c for c in ";\t|," if c in names[0]), None)):
                hint = f" Set `delimiter` to {other!r}?"
            raise DataError(
                f"{path} has no column {name!r}; found: {', '.join(names[:20])}. Set `{role}` to one of"
                f" them.{hint}"
            )
    features = form.features or tuple(n for n in names if n not in (form.label, form.group))
    if not features:
        raise DataError(f"{path} has no column but that of the label; expected columns of numbers.")
    group = None if form.group is None else where[form.group]
    return Columns(len(names), where[form.label], group, tuple((name, where[name]) for name in features))


def _require_row(cells: list[str], columns: Columns, path: Path, lines: _Lines) -> None:
    if len(cells) != columns.width:
        raise DataError(
            f"{path}:{lines.number}: the row has {len(cells)} cells; expected {columns.width}, as in the"
            " first row."
        )
    try:
        columns.values(cells)
    except ValueError as error:
        name, cell = error.args
        raise DataError(
            f"{path}:{lines.number}: the column {name!r} holds {cell[:60]!r}; expected a number, or nothing"
            " where it is missing. Name the columns of numbers in `features`."
        ) from None
