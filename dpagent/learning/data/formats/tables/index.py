"""CSV files as records: one look through a file finds where each record begins and ends, and what it is.

A record is one row, or ``window`` rows on end. Two offsets, a digest and its label are kept, all of one
read of each line, so that a file may be larger than memory; its numbers are parsed again when it is asked
for, from bytes that have the digest.

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
from dpagent.learning.data.dataset import DIGEST_BYTES
from dpagent.learning.data.declared import MAX_CLASSES
from dpagent.learning.data.formats.tables.header import Columns
from dpagent.learning.data.formats.tables.rows import (
    LONGEST_ROW,
    Row,
    TableBounds,
    checked_rows,
    content_of,
    opened_rows,
    rows_in,
)
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.learning.data.formats.tables.windows import Windows
from dpagent.learning.data.stamp import Stamp
from dpagent.learning.data.stored import ChangedError, RawFile, open_raw
from dpagent.wording import counted

_MOST_PROBLEMS: Final = 100
_CELL_BYTES: Final = 32
"""A cell of a window, and what separates it, with empty lines: a longer window is no record."""
_UNFIT: Final = -1
_TRIES: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class TableIndex:
    """Where the records of one file lie.

    Attributes:
        path: the file.
        file: the file, if it is open: one without a name, if it was packed.
        columns: their places in a row.
        starts, ends: ``(n,)`` int64, bytes.
        contents: ``(n, 16)`` uint8, digests of the records (:func:`~.rows.content_of`).
        labels: ``(n,)`` int64, positions in ``label_texts``.
        groups: ``(n,)`` int64, positions in ``group_texts``.
        rows_unused: how many rows that fit are in no record.
        problems: a sentence for each row that does not fit, of many for the first.
        unsettled: ``(n,)`` bool, which records may still be being written, or are newer than the look: of a
            file that grows, those that reach beyond its end as it was when it was opened, or up to it without
            an end of their own; and those that did not stand there any more when all were read.
        lines: that were read.
    """

    path: Path
    file: RawFile | None
    columns: Columns
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    contents: NDArray[np.uint8]
    labels: NDArray[np.int64]
    label_texts: tuple[str, ...]
    groups: NDArray[np.int64]
    group_texts: tuple[str, ...]
    rows_unused: int
    problems: tuple[str, ...]
    unsettled: NDArray[np.bool_]
    lines: int

    def rows_of(self, place: int, file: RawFile) -> list[str]:
        """The rows of a record as text, as they were listed, read again.

        Args:
            place: of the record in this index.
            file: open.

        Raises:
            ChangedError: it does not stand there any more.
        """
        start, end = int(self.starts[place]), int(self.ends[place])
        data = np.empty(end - start, np.uint8)
        try:
            file.read_into(data, start)
        except DataError as error:  # It could be read then.
            raise ChangedError(str(error)) from error
        rows = rows_in(data.tobytes())
        if content_of([digest for digest, _ in rows]) != self.contents[place].tobytes():
            raise ChangedError(
                f"{self.path}: the rows at byte {start} are not what they were when it was listed; the next"
                " look, or another start, lists it again."
            )
        return [text for _, text in rows]


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
    raw: RawFile | None = None,
) -> TableIndex:
    """Look through a file. No row makes it fail for another.

    On a board it is read twice. Who makes a line longer or shorter in its place moves all that follow, which
    then are found twice or not at all; so where a record does not stand where it was found, the file is
    looked through anew, and what still does not then is unsettled.

    Args:
        path: CSV in UTF-8, with ``.gz`` if packed.
        form: how rows become records.
        classes: the labels that are allowed, or None for any, to infer them.
        growing: whether a last line that has no end may still be being written, in a file that was young when
            it was opened, and more lines come meanwhile.
        most: that is read, on a board, which takes no packed file.
        keeps_open: whether the records are read from this very file, whatever takes its place.
        raw: the file, if it is open.

    Raises:
        DataError: the file cannot be read, or its first row does not fit; names file, line and column.
    """
    if most is not None and path.suffix == ".gz":
        raise DataError(f"{path} is packed; a board unpacks no table. Unpack it: gunzip {path.name}")
    raw = raw or open_raw(path)
    for _ in range(1 if most is None else _TRIES):
        made = _indexed(raw, form, classes, growing=growing, most=most)
        if most is None or not (moved := _moved(made, raw)).any():
            break
    else:
        made = replace(made, unsettled=made.unsettled | moved)
    return made if keeps_open or path.suffix == ".gz" else replace(made, file=None)


def _moved(index: TableIndex, file: RawFile) -> NDArray[np.bool_]:
    """Which records do not stand where they were found."""
    moved = np.zeros(len(index.starts), np.bool_)
    for place in range(len(moved)):
        try:
            index.rows_of(place, file)
        except ChangedError:
            moved[place] = True
    return moved


def _indexed(
    raw: RawFile,
    form: CsvSettings,
    classes: ClassTable | None,
    *,
    growing: bool,
    most: TableBounds | None,
) -> TableIndex:
    path = raw.path
    with opened_rows(raw, form, most=most) as (lines, columns):
        builder, was_growing = _Builder(form, columns), growing and _may_grow(raw)
        for row in checked_rows(lines, columns, form, classes):
            if row.problem and not lines.is_ended and was_growing:
                break
            # As it was when the file was opened: what came since makes no row before it whole.
            had_end = lines.is_ended and row.end <= raw.size
            is_settled = row.text_end <= raw.size and (had_end or not was_growing)
            builder.add(row, is_settled=is_settled or not growing)
            if classes is None and len(builder.label_codes) > MAX_CLASSES:
                raise DataError(
                    f"{path}:{lines.number}: the column {form.label!r} has more than {MAX_CLASSES:,}"
                    " different labels. Is it the label column?"
                )
        if lines.is_cut_short:
            builder.note(f"{path}: what follows line {lines.number:,} is not read; max_records bounds it.")
        return builder.made(raw, lines.number)


def _may_grow(file: RawFile) -> bool:
    """Whether somebody may be at the last row of a file, where that has no end."""
    if file.rests is not None:
        return not file.rests
    return Stamp.of(file.known).is_young(file.opened_ns)


class _Seen(NamedTuple):
    """What a window has to know of a row: where it begins, what it is, the codes of label and group."""

    start: int
    digest: bytes
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
        self._contents = bytearray()
        self.label_codes: dict[str, int] = {}
        self.group_codes: dict[str, int] = {}
        self._rows, self._unfit, self._used, self._used_until = 0, 0, 0, 0
        self._problems: list[str] = []
        self._unsettled: list[bool] = []

    def add(self, row: Row, *, is_settled: bool) -> None:
        """Take a row, which may be one that is left for later."""
        code, group = _UNFIT, ""
        if row.problem:
            self._unfit += 1
            if len(self._problems) < _MOST_PROBLEMS:
                self._problems.append(row.problem)
        else:
            assert self._columns.label is not None
            code = self.label_codes.setdefault(row.cells[self._columns.label].strip(), len(self.label_codes))
            group = self._columns.group_of(row.cells)
        window = self._windows.add(_Seen(row.start, row.digest, code, group))
        self._rows += 1
        if window is None or (label := self._label(window)) is None:
            return
        if row.end - window[0].start > self._longest:  # it is read at once
            return
        self._starts.append(window[0].start)
        self._ends.append(row.end)
        self._contents += content_of([each.digest for each in window])
        self._labels.append(label)
        self._groups.append(self.group_codes.setdefault(group, len(self.group_codes)))
        self._used += self._rows - max(self._used_until, self._rows - len(window))
        self._used_until = self._rows
        self._unsettled.append(not is_settled)

    def note(self, problem: str) -> None:
        """Take a sentence about the file."""
        self._problems.append(problem)

    def made(self, file: RawFile, lines: int) -> TableIndex:
        """The index of the rows that were added."""
        starts, ends, labels, groups = (
            np.array(values, np.int64) for values in (self._starts, self._ends, self._labels, self._groups)
        )
        contents = np.frombuffer(bytes(self._contents), np.uint8).reshape(-1, DIGEST_BYTES)
        if (more := self._unfit - len(self._problems)) > 0:
            self._problems.append(f"{file.path}: {counted(more, 'more row')} do not fit.")
        return TableIndex(
            file.path, file, self._columns, starts, ends, contents, labels, tuple(self.label_codes), groups,
            tuple(self.group_codes), self._rows - self._unfit - self._used, tuple(self._problems),
            np.array(self._unsettled, np.bool_), lines,
        )  # fmt: skip

    def _label(self, window: Sequence[_Seen]) -> int | None:
        """The label of a window; None: it is no record."""
        counts = Counter(row.label for row in window)  # in the order in which they come
        if _UNFIT in counts or (len(counts) > 1 and self._drops):
            return None
        if any(row.group != window[0].group for row in window):
            return None
        return counts.most_common(1)[0][0]
