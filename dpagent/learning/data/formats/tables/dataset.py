"""Datasets from CSV files: a row a record, or windows over a time series.

Windows that overlap (``stride`` below ``window``) have readings in common. The privacy unit is the record, so
that one reading in k windows is protected k times less: roughly k·ε.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.classes import ClassTable
from dpagent.learning.data.dataset import Dataset, Indices, Origin
from dpagent.learning.data.formats.tables.header import UnfitError
from dpagent.learning.data.formats.tables.index import Stamp, TableIndex, index_table, keys_of, stamp_of
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.learning.data.stored import RawFile, open_raw, reading, require_readable
from dpagent.wording import counted, named

SUFFIXES: Final = (".csv", ".csv.gz", ".tsv", ".tsv.gz")


def open_table(path: Path, form: CsvSettings, classes: ClassTable) -> Dataset:
    """A CSV file, or all CSV files of a folder in the order of their names; maybe no record.

    Args:
        path: the file or folder; files may be packed (``.csv.gz``).
        form: how rows become records, with the columns of the inputs.
        classes: of the labels.

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
    return TableDataset(path, form, classes, [index_table(file, form, classes) for file in table_files(path)])


def table_files(path: Path) -> list[Path]:
    """``path`` itself, or the CSV files in it."""
    with reading(path):
        if not path.is_dir():
            return [path]
        return sorted(entry for entry in path.iterdir() if is_table(entry.name) and entry.is_file())


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
        rejected: files that are no part of it: what they were when they were read, and why.
    """

    def __init__(
        self,
        path: Path,
        form: CsvSettings,
        classes: ClassTable,
        indexes: Sequence[TableIndex],
        rejected: Mapping[Path, tuple[Stamp, str]] | None = None,
    ) -> None:
        self._rejected = dict(rejected or {})
        self._path, self._form, self._classes, self._indexes = path, form, classes, tuple(indexes)
        self.columns = tuple(form.features or ())
        self._ends = np.cumsum([len(index.starts) for index in indexes], dtype=np.int64)
        self._offset, self._scale = form.constants(self.columns)
        shape = (len(self.columns),) if form.window is None else (form.window, len(self.columns))
        super().__init__(
            self._labels(), classes.count, shape=shape, dtype=np.dtype(np.float32), class_names=classes.names,
            groups=self._groups(), origin=self._origin(),
        )  # fmt: skip

    @property
    def keys(self) -> NDArray[np.int64]:
        """As of :attr:`Dataset.keys`."""
        return _concatenated([keys_of(index) for index in self._indexes])

    def refresh(self) -> Dataset:
        """As of :meth:`Dataset.refresh`: new files and new rows are taken in, vanished files left out."""
        known = {index.path: index for index in self._indexes}
        try:
            files = table_files(self._path)
        except DataError as error:
            self.origin = replace(self.origin, left_out=(str(error),))
            return self
        indexes, rejected = [], {}
        for file in files:
            stamp: Stamp = (0, 0, 0)
            try:
                stamp, index = stamp_of(file), known.get(file)
                if file in self._rejected and self._rejected[file][0] == stamp:
                    rejected[file] = self._rejected[file]
                    continue
                if index is None or index.stamp != stamp:
                    index = index_table(file, self._form, self._classes, growing=True)
                indexes.append(index)
            except DataError as error:
                rejected[file] = (stamp, str(error))
        if indexes == list(self._indexes) and rejected == self._rejected:
            return self
        return TableDataset(self._path, self._form, self._classes, indexes, rejected)

    def _read(self, indices: Indices) -> NDArray[Any]:
        rows = self._form.window or 1
        inputs = np.empty((len(indices), *self.shape), np.float32)
        owners = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(owners):
            index = self._indexes[number]
            first = self._ends[number] - len(index.starts)
            file = _reopened(index)
            for row in np.flatnonzero(owners == number):
                place = int(indices[row] - first)
                values = self._record(file, index, place, rows)
                # A value too large for float32 becomes infinite: the record does not count.
                with np.errstate(over="ignore", invalid="ignore"):
                    inputs[row] = ((values - self._offset) / self._scale).reshape(self.shape)
        return inputs

    def _record(self, file: RawFile, index: TableIndex, place: int, rows: int) -> NDArray[np.float64]:
        start, end = int(index.starts[place]), int(index.ends[place])
        data = np.empty(end - start, np.uint8)
        file.read_into(data, start)
        try:
            text = io.StringIO(data.tobytes().decode("utf-8").removeprefix("\ufeff"), newline="")
            cells = list(filter(None, csv.reader(text, delimiter=self._form.delimiter, strict=True)))
            if len(cells) != rows or any(len(row) != index.columns.width for row in cells):
                raise ValueError
            return np.array([index.columns.values(row) for row in cells], np.float64)
        except (ValueError, csv.Error, UnfitError) as error:
            raise DataError(
                f"{index.path}: the rows at byte {start} are not what they were when the file was read. It"
                " must grow at its end only; start again to read it anew."
            ) from error

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
        left_out = [*(sentence for _, sentence in self._rejected.values()), *problems]
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
        sentences = [*left_out, *([f"{counted(unused, 'row')}: {too_short(form)}"] if unused else [])]
        return Origin("csv", f"{self._path}, {files}, {what}", tuple(sentences), tuple(warnings), form.label)


def too_short(form: CsvSettings) -> str:
    """Why rows that fit are in no window."""
    return (
        f"they fill no window of {counted(form.window or 1, 'row')} within one file and group, lie between"
        " two windows, or beside a row that does not fit."
    )


def _concatenated(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _reopened(index: TableIndex) -> RawFile:
    """The file again: a folder may hold more files than a process may have open."""
    if index.unpacked is not None:
        return index.unpacked
    inode, size, _ = stamp_of(index.path)
    if inode != index.stamp[0] or size < index.stamp[1]:
        raise DataError(f"{index.path} was replaced since it was read. It is read anew at the next refresh.")
    return open_raw(index.path)
