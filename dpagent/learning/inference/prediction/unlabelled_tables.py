"""Rows of a CSV file that has no label column: the readings that a model is asked about.

Columns, constants, windows and groups are those of training (:class:`~dpagent.learning.data.TableForm`);
the file is read once, from its beginning to its end, a window at a time.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.settings import CsvSettings
from dpagent.learning.data.stored import open_raw, reading
from dpagent.learning.data.table_form import constants
from dpagent.learning.data.table_rows import Columns, read_rows
from dpagent.learning.data.tables import table_files
from dpagent.wording import named

_LONGEST_LINE: Final = 1 << 20


def has_labels(path: Path, settings: CsvSettings) -> bool:
    """Whether the table is to be read with labels: it has the label column, or one was asked for.

    Raises:
        DataError: the file cannot be read.
    """
    if "label" in settings.model_fields_set:
        return True
    for file in table_files(path):
        with _Lines(file) as lines:
            header = next(read_rows(lines, file, settings.delimiter), None)
        return header is not None and settings.label in _names(header[2], settings)
    return False


def unlabelled_rows(path: Path, settings: CsvSettings) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The records of a file, or of all files of a folder.

    Yields:
        The file, and the record: ``(features,)``, or with a window ``(window, features)``.

    Raises:
        DataError: names file, line and column of what does not fit; or there is no record.
        ConfigurationError: a constant names a column that is none.
    """
    count = 0
    for file in table_files(path):
        with _Lines(file) as lines:
            for values in _records(file, lines, settings):
                count += 1
                yield str(file), values
    if not count:
        rows = "row below the header" if settings.window is None else f"window of {settings.window} rows"
        raise DataError(f"{path} holds no {rows} within one file and group.")


def _records(file: Path, lines: _Lines, settings: CsvSettings) -> Iterator[NDArray[np.float32]]:
    rows = read_rows(lines, file, settings.delimiter)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{file} has no rows; expected a header and records. Copy it again.")
    columns = _columns(file, first[2], settings)
    offset, scale = constants(settings.form(), [name for name, _ in columns.features])
    window, stride = settings.window or 1, settings.stride or settings.window or 1
    recent: deque[list[float]] = deque(maxlen=window)
    group, run = None, 0
    for _, _, cells in rows if settings.header else chain([first], rows):
        values = _values(file, lines, columns, cells)
        here = "" if columns.group is None else cells[columns.group].strip()
        if here != group:
            group, run = here, 0
            recent.clear()
        recent.append(values)
        run += 1
        if run < window or (run - window) % stride:
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            record = ((np.array(recent, np.float64) - offset) / scale).astype(np.float32)
        yield record if settings.window is not None else record[0]


def _columns(file: Path, cells: list[str], settings: CsvSettings) -> Columns:
    names = _names(cells, settings)
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{file}:1: the column {repeated[0]!r} stands twice. Give each column its own name.")
    places = {name: place for place, name in enumerate(names)}
    wanted = [*(settings.features or ()), *([settings.group] if settings.group is not None else ())]
    for name in wanted:
        if name not in places:
            raise DataError(f"{file} has no column {name!r}; found: {', '.join(names[:20])}.")
    features = settings.features or [name for name in names if name != settings.group]
    group = None if settings.group is None else places[settings.group]
    return Columns(len(names), -1, group, tuple((name, places[name]) for name in features))


def _names(cells: list[str], settings: CsvSettings) -> list[str]:
    if not settings.header:
        return [str(number) for number in range(1, len(cells) + 1)]
    return [cell.strip() for cell in cells]


def _values(file: Path, lines: _Lines, columns: Columns, cells: list[str]) -> list[float]:
    if len(cells) != columns.width:
        raise DataError(
            f"{file}:{lines.number}: the row has {len(cells)} cells; expected {columns.width}, as in the"
            " first row."
        )
    try:
        return columns.values(cells)
    except ValueError as error:
        name, cell = error.args
        raise DataError(
            f"{file}:{lines.number}: the column {name!r} holds {cell[:60]!r}; expected a number, or nothing"
            f" where it is missing. Name the columns of numbers in {named('features')}, or that of labels in"
            f" {named('label')}."
        ) from None


class _Lines:
    """Lines of a file, and the number of the last one read."""

    def __init__(self, path: Path) -> None:
        self._path, self.number = path, 0
        self._raw = open_raw(path)  # which owns the descriptor, and is unpacked if the file is packed
        os.lseek(self._raw.descriptor, 0, os.SEEK_SET)
        self._text = open(  # noqa: SIM115 - closed with this object
            self._raw.descriptor, encoding="utf-8-sig", newline="", closefd=False
        )

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._text.close()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        where = f"{self._path}:{self.number + 1}"
        try:
            with reading(self._path):
                line = self._text.readline(_LONGEST_LINE + 1)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}, or a little later: not UTF-8 text ({error.reason}). Save the file as UTF-8."
            ) from error
        if not line:
            raise StopIteration
        if len(line) > _LONGEST_LINE:
            raise DataError(f"{where}: a line is longer than {_LONGEST_LINE:,}; expected CSV in lines.")
        if "\0" in line:
            raise DataError(f"{where}: holds a null character. Expected CSV as text in UTF-8.")
        self.number += 1
        return line
