"""Rows of CSV files that have no label column: the readings that a model is asked about.

Columns, constants, windows and groups are those of training; a file is read once, from its beginning to its
end, a window at a time. A row that does not fit is an input that cannot be read, and so is each window that
holds it; a file that cannot be read leaves the other files of a folder as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dpagent.errors import DataError
from dpagent.learning.data.formats.tables.dataset import table_files
from dpagent.learning.data.formats.tables.header import column_names
from dpagent.learning.data.formats.tables.rows import Row, checked_rows, first_row, opened_lines, opened_rows
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.learning.data.formats.tables.windows import Windows
from dpagent.learning.data.inputs import Input
from dpagent.learning.data.stored import open_raw
from dpagent.wording import counted


def has_labels(path: Path, form: CsvSettings) -> bool:
    """Whether a file, or the first readable one of a folder, has the label column, or one was asked for."""
    if "label" in form.given:
        return True
    for file in table_files(path):
        try:
            with opened_lines(open_raw(file)) as lines:
                header = first_row(lines, form)
        except DataError:
            continue
        return header is not None and form.label in column_names(header, form)
    return False


def unlabelled_rows(path: Path, form: CsvSettings) -> Iterator[Input]:
    """The records of a file, or of all files of a folder.

    Yields:
        Inputs of shape ``(features,)``, or with a window ``(window, features)``, numbered in their file.

    Raises:
        DataError: there is no record.
        ConfigurationError: a constant names a column that is none.
    """
    found = False
    for file in table_files(path):
        try:
            for record in _records(file, form):
                found = True
                yield record
        except DataError as error:
            found = True
            yield Input(str(file), problem=str(error), is_whole_path=True)
    if not found:
        rows = "row below the header" if form.window is None else f"window of {counted(form.window, 'row')}"
        raise DataError(f"{path} holds no {rows} within one file and group.")


def _records(file: Path, form: CsvSettings) -> Iterator[Input]:
    with opened_rows(open_raw(file), form, labelled=False) as (lines, columns):
        offset, scale = map(np.array, form.constants(columns.names))
        windows: Windows[Row] = Windows(form)
        number = 0
        for row in checked_rows(lines, columns, form, None):
            window = windows.add(row)
            if window is None:
                continue
            if problem := next((each.problem for each in window if each.problem), ""):
                yield Input(str(file), number, problem=problem)
            elif len({columns.group_of(each.cells) for each in window}) > 1:
                continue
            else:
                values = np.array([columns.values(each.cells) for each in window], np.float64)
                with np.errstate(over="ignore", invalid="ignore"):
                    record = ((values - offset) / scale).astype(np.float32)
                yield Input(str(file), number, record if form.window is not None else record[0])
            number += 1
