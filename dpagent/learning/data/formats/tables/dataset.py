"""Datasets from CSV files: a row a record, or windows over a time series.

Windows that overlap (``stride`` below ``window``) have readings in common. The privacy unit is the record, so
that one reading in k windows is protected k times less: roughly k·ε.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.classes import ClassTable
from dpagent.learning.data.dataset import Dataset, Indices, Origin, Stamps
from dpagent.learning.data.formats.tables.index import TableIndex, index_table
from dpagent.learning.data.formats.tables.rows import TableBounds, cells_of
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.learning.data.glance import Glance, most_open
from dpagent.learning.data.location import names_in
from dpagent.learning.data.problems import MOST_SAID, Problems
from dpagent.learning.data.stored import ChangedError, is_fault, open_raw, reading, require_readable
from dpagent.wording import counted, named

SUFFIXES: Final = (".csv", ".csv.gz", ".tsv", ".tsv.gz")


def open_table(
    path: Path,
    form: CsvSettings,
    classes: ClassTable,
    *,
    growing: bool = False,
    most: TableBounds | None = None,
    most_names: int | None = None,
    keeps_open: bool = False,
    glance: Glance | None = None,
) -> Dataset:
    """A CSV file, or all CSV files of a folder in the order of their names; maybe no record.

    Args:
        path: the file or folder; files may be packed (``.csv.gz``).
        form: how rows become records, with the columns of the inputs.
        classes: of the labels.
        growing: the files are in use: one that cannot be read is left out, and a last line without an end is
            unfinished, if it was written to a moment ago.
        most: that is read, on a board, which takes no packed file.
        most_names: of a folder, so many of its tables, the first.
        keeps_open: whether records are read from the files that are listed, whatever takes their place
            meanwhile; of very many, their bytes are compared.
        glance: at the files; None: they are as they are now.

    A row that does not fit is left out, with the windows that hold it.

    Raises:
        DataError: a file or its header cannot be read; names file, line and column.
        ConfigurationError: a constant names a column that is no input.

    >>> from tempfile import TemporaryDirectory
    >>> form = CsvSettings(features=["x"], delimiter=";", decimal=",")
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "x.csv"
    ...     _ = file.write_text("x;label\\n1,5;sit\\noops;sit\\n2;run\\n")
    ...     data = open_table(file, form, ClassTable(("run", "sit")))
    ...     data.batch(np.arange(2))[0].tolist(), data.labels.tolist(), len(data.origin.left_out)
    ([[1.5], [2.0]], [1, 0], 1)
    """
    require_readable(path)
    form.constants(form.features or ())
    indexes, rejected, unread = [], [], list[Path]()
    faults = list[OSError]()
    if glance is None:
        files: Sequence[Path] = table_files(path, most_names, faults.append if growing else None)
    else:
        files, faults = glance.files, [] if glance.fault is None else [glance.fault]
        if growing:
            glance.watch()
    if faults:
        problem = f"{path}: the disk cannot list it ({faults[-1].strerror})."
        if not growing:
            raise DataError(f"{problem} Check the disk.")
        rejected.append(f"{problem} What was known stays until it can.")
    keeps_open = keeps_open and (len(files) <= most_open() if glance is None else glance.keeps_open)
    for number, file in enumerate(files):
        if most is not None and most.lines <= 0:
            more = counted(len(files) - number, "table")
            rejected.append(f"{file}: this and what follows ({more}) is not read; max_records bounds it.")
            break
        try:
            raw = None
            if glance is not None and file.suffix != ".gz":
                raw = glance.opened(file)
            index = index_table(
                file, form, classes, growing=growing, most=most, keeps_open=keeps_open, raw=raw
            )
        except DataError as error:
            if not growing:
                raise
            rejected.append(str(error))
            is_read = raw is None or raw.was_read or file.is_symlink()
            if not is_read or is_fault(error, file):
                unread.append(file)
            continue
        indexes.append(index)
        if most is not None:
            most = most._replace(lines=most.lines - index.lines)
    return TableDataset(
        path, form, classes, indexes, rejected, is_brief=most is not None, is_all=not faults, unread=unread
    )


def table_files(
    path: Path, most: int | None = None, say: Callable[[OSError], None] | None = None
) -> list[Path]:
    """``path`` itself, or the CSV files in it, as of :func:`names_in`."""
    with reading(path):
        if not path.is_dir():
            return [path]
        names = names_in(path, lambda entry: is_table(entry.name), most, say)
        return [entry for name in names if _may_be_file(entry := path / name)]


def _may_be_file(entry: Path) -> bool:
    """Whether an entry of a folder is a file, or cannot be looked at: then reading it says why."""
    try:
        return entry.is_file()
    except OSError:
        return True


def is_table(name: str) -> bool:
    """Whether a file is a table by its name."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


class TableDataset(Dataset):
    """Rows, or windows of rows, in CSV files; see :func:`open_table`.

    Args:
        path: file or folder.
        form: how rows become records.
        classes: the number of each label.
        indexes: where the records lie, a file each.
        rejected: a sentence for each file that is left out.
        is_brief: whether of what is left out the first is said, and how much more there is.
        is_all: whether the disk could tell which files there are.
        unread: those that it cannot read.
    """

    def __init__(
        self,
        path: Path,
        form: CsvSettings,
        classes: ClassTable,
        indexes: Sequence[TableIndex],
        rejected: Sequence[str] = (),
        *,
        is_brief: bool = False,
        is_all: bool = True,
        unread: Sequence[Path] = (),
    ) -> None:
        self._is_all, self._unread = is_all, [os.fsdecode(file) for file in unread]
        self._rejected, self._is_brief = tuple(rejected), is_brief
        self._path, self._form, self._classes, self._indexes = path, form, classes, tuple(indexes)
        self.columns = tuple(form.features or ())
        self._ends = np.cumsum([len(index.starts) for index in indexes], dtype=np.int64)
        self._unsettled = np.concatenate([np.empty(0, np.bool_), *(index.unsettled for index in indexes)])
        self._offset, self._scale = map(np.array, form.constants(self.columns))
        shape = (len(self.columns),) if form.window is None else (form.window, len(self.columns))
        super().__init__(
            self._labels(), classes.count, shape=shape, dtype=np.dtype(np.float32), class_names=classes.names,
            groups=self._groups(), origin=self._origin(),
        )  # fmt: skip

    def stamps(self, key: bytes) -> NDArray[np.uint64]:
        """As of :meth:`Dataset.stamps`: of the records as they were listed, their labels and their columns,
        wherever they lie; nothing is read again. Of equal ones, those that may still be being written come
        last."""
        numbers, made = Stamps(key), np.empty(len(self), np.uint64)
        meanings = {index.path: repr(index.columns) for index in self._indexes}
        order = np.argsort(self._unsettled, kind="stable")
        for number in order.tolist():
            index, place = self._at(number)
            numbers.add(meanings[index.path], int(self.labels[number]), index.contents[place].tobytes())
        made[order] = numbers.taken()
        return made

    @property
    def unfinished(self) -> Indices:
        """As of :attr:`Dataset.unfinished`: last rows that have no end yet, and rows that have moved."""
        return np.flatnonzero(self._unsettled)

    @property
    def unlisted(self) -> frozenset[int]:
        """As of :attr:`Dataset.unlisted`."""
        return frozenset(() if self._is_all else range(self.classes))

    @property
    def files(self) -> Sequence[str]:
        """As of :attr:`Dataset.files`."""
        return [os.fsdecode(index.path) for index in self._indexes]

    @property
    def unread(self) -> Sequence[str]:
        """As of :attr:`Dataset.unread`."""
        return self._unread

    @property
    def file_numbers(self) -> Indices:
        """As of :attr:`Dataset.file_numbers`."""
        return np.searchsorted(self._ends, np.arange(len(self)), side="right")

    def place_of(self, number: int) -> str:
        """As of :meth:`Dataset.place_of`."""
        index, place = self._at(number)
        return f"{index.path}: the rows at byte {int(index.starts[place])}"

    def _at(self, number: int) -> tuple[TableIndex, int]:
        """Where a record is: in which file, and which of its records."""
        owner = bisect_right(self._ends, number)
        index = self._indexes[owner]
        return index, number - int(self._ends[owner]) + len(index.starts)

    def _read(self, indices: Indices) -> NDArray[Any]:
        inputs = np.empty((len(indices), *self.shape), np.float32)
        owners = np.searchsorted(self._ends, indices, side="right")
        for number in np.flatnonzero(np.bincount(owners)):  # np.unique loads masked arrays.
            index = self._indexes[number]
            first = int(self._ends[number]) - len(index.starts)
            mine = np.flatnonzero(owners == number)
            for row, values in zip(mine, self._values(index, indices[mine] - first), strict=True):
                # A value too large for float32 becomes infinite: the record does not count.
                with np.errstate(over="ignore", invalid="ignore"):
                    inputs[row] = ((values - self._offset) / self._scale).reshape(self.shape)
        return inputs

    def _values(self, index: TableIndex, places: Indices) -> Iterator[NDArray[np.float64]]:
        """The numbers of records of a file, as they were listed.

        Raises:
            ChangedError: one does not stand there any more.
        """
        try:
            # By its name again: a folder may hold more files than a process may have open.
            file = index.file or open_raw(index.path)
        except DataError as error:
            raise ChangedError(str(error)) from error
        for place in places.tolist():
            cells = (cells_of(line, self._form) for line in index.rows_of(place, file))
            yield np.array([index.columns.values(row) for row in cells], np.float64)

    def _labels(self) -> NDArray[np.int64]:
        parts = []
        for index in self._indexes:
            # Rows with another label are in no record.
            table = np.array([self._classes.number(text) for text in index.label_texts], np.int64)
            parts.append(table[index.labels])
        return _concatenated(parts)

    def _groups(self) -> NDArray[np.int64]:
        if self._form.group is None:
            return np.repeat(np.arange(len(self._indexes)), [len(index.starts) for index in self._indexes])
        codes: dict[str, int] = {}
        parts = []
        for index in self._indexes:
            table = np.array([codes.setdefault(text, len(codes)) for text in index.group_texts], np.int64)
            parts.append(table[index.groups])
        return _concatenated(parts)

    def _origin(self) -> Origin:
        form, count = self._form, len(self._indexes)
        problems = (problem for index in self._indexes for problem in index.problems)
        left_out = Problems(MOST_SAID if self._is_brief else None)
        for sentence in (*self._rejected, *problems):
            left_out.add(sentence)
        what = "a row a record" if form.window is None else f"windows of {counted(form.window, 'row')}"
        files = "a CSV file" if count == 1 else f"{count:,} CSV files"
        warnings = []
        if self._indexes and (unnamed := self._indexes[0].columns.unnamed):
            numbers = ", ".join(str(place + 1) for place in unnamed[:8])
            warnings.append(
                f"The header leaves the name of {'column' if len(unnamed) == 1 else 'columns'} {numbers}"
                f" empty: no input. Name all columns, or the first by {named('first_column')}, to use them."
            )
        if form.window is not None and form.step < form.window:
            times = -(-form.window // form.step)
            warnings.append(
                f"THE WINDOWS OVERLAP: one reading is in up to {counted(times, 'record')}. The privacy unit "
                f"is the record, so that a reading is protected {times} times less than the statement says: "
                f"roughly {times}·ε. Use {named('stride', form.window)}, or divide your ε by {times}."
            )
        unused = sum(index.rows_unused for index in self._indexes)
        sentences = [
            *left_out.sentences(),
            *([f"{counted(unused, 'row')}: {too_short(form)}"] if unused else []),
        ]
        return Origin("csv", f"{self._path}, {files}, {what}", tuple(sentences), tuple(warnings), form.label)


def too_short(form: CsvSettings) -> str:
    """Why rows that fit are in no window."""
    return (
        f"they fill no window of {counted(form.window or 1, 'row')} within one file and group, lie between"
        " two windows, or beside a row that does not fit."
    )


def _concatenated(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts])
