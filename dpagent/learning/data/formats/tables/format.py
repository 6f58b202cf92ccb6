"""CSV files as a format: recognition, opening, and rows without labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from dpagent.errors import DataError
from dpagent.learning.data.classes import classes_of_texts, warnings_about
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.format import Format, Inferred, Source
from dpagent.learning.data.formats.tables.dataset import (
    SUFFIXES,
    is_table,
    open_table,
    table_files,
    too_short,
)
from dpagent.learning.data.formats.tables.index import TableIndex, columns_in, index_table
from dpagent.learning.data.formats.tables.rows import TableBounds
from dpagent.learning.data.formats.tables.settings import CsvSettings, TableForm
from dpagent.learning.data.formats.tables.unlabelled import has_labels, unlabelled_rows
from dpagent.learning.data.glance import Glance
from dpagent.learning.data.inputs import Input, Say, Target
from dpagent.learning.data.location import Location
from dpagent.wording import named

_ROW_BYTES: Final = 1_024
_CELL_BYTES: Final = 64
_EXCESS_BYTES: Final = 4 << 30
"""Which a slow card (40 MB/s) reads in two minutes."""


class CsvFormat(Format[CsvSettings]):
    """A CSV file, or a folder of them."""

    kind, title, example, section = "csv", "CSV files", "NEW.csv", CsvSettings
    form, dtype = TableForm, "float32"
    decoder_seconds = 0.2

    def recognises(self, location: Location) -> bool:
        """As of :class:`Format`."""
        return any(map(is_table, location.names if location.is_folder else [location.path.name]))

    def undeclared(self, source: Source, section: CsvSettings) -> list[str]:
        """As of :class:`Format`: the columns; without a header, how many cells a row has."""
        keys = ["features"] * (section.features is None)
        keys += ["width"] * (not section.header and section.width is None)
        return [f"{self.kind}.{key}" for key in keys]

    def infer(self, source: Source, section: CsvSettings) -> Inferred[CsvSettings]:
        """As of :class:`Format`: the columns of the first file, and the labels that occur."""
        files = table_files(source.path)
        if not files:
            raise DataError(f"{source.path} holds no CSV files; expected some called {', '.join(SUFFIXES)}.")
        listed = None if source.classes is None else source.class_table
        columns = [columns_in(file, section) for file in files]
        for file, other in zip(files, columns, strict=True):
            if sorted(other.names) != sorted(columns[0].names):
                odd = sorted(set(other.names) ^ set(columns[0].names))
                raise DataError(
                    f"{file} and {files[0]} have other columns: {', '.join(odd[:8])}. Name the columns to use"
                    f" in {named('features')}."
                )
        known: dict[str, Any] = {"features": list(columns[0].names)}
        if not section.header:
            known["width"] = columns[0].width
        complete = section.with_values(known)
        if listed is not None:
            return Inferred(source, complete)
        indexes = [index_table(file, complete, None) for file in files]
        if not any(len(index.starts) for index in indexes):
            raise DataError(f"{source.path} holds no record. {_why_none(indexes, complete)}")
        try:
            classes = classes_of_texts(text for index in indexes for text in index.label_texts)
        except DataError as error:
            raise DataError(f"{source.path}: {error}") from error
        return Inferred(replace(source, classes=classes), complete, warnings_about(classes))

    def open(self, source: Source, section: CsvSettings) -> Dataset:
        """As of :class:`Format`."""
        return open_table(source.path, section, source.class_table)

    def listed(self, source: Source, section: CsvSettings, *, growing: bool) -> Dataset:
        """As of :class:`Format`."""
        return open_table(
            source.path, section, source.class_table,
            growing=growing, most=_most(source, section), most_names=source.most_listed(), keeps_open=True,
            glance=source.glance,
        )  # fmt: skip

    def glance(self, source: Source, section: CsvSettings) -> Glance:
        """As of :class:`Format`."""
        faults = list[OSError]()
        glance = Glance.at(lambda: table_files(source.path, source.most_listed(), faults.append))
        for error in faults:
            glance.note_fault(error)
        return glance

    def unlabelled(
        self, source: Source, section: CsvSettings, target: Target, say: Say
    ) -> Iterator[Input] | None:
        """As of :class:`Format`: rows of files without the label column."""
        return None if has_labels(source.path, section) else unlabelled_rows(source.path, section)


def _why_none(indexes: Sequence[TableIndex], form: CsvSettings) -> str:
    """The reason why no row makes a record."""
    problems = [problem for index in indexes for problem in index.problems]
    if form.window is not None:
        return " ".join([*problems[:1], f"The rows: {too_short(form)}"])
    if problems:
        return f"No row fits. The first: {problems[0]}"
    return "There are no rows below the header." if form.header else "There are no rows."


def _most(source: Source, form: CsvSettings) -> TableBounds | None:
    """On a board: the first lines, and what those that are longer than rows take besides.

    A look at a file takes time by its bytes, of which a file with holes has any number, and time and memory
    by its lines, of which an empty one has a byte. A line costs one, whatever it holds: one more moves the
    last line out of a look that has far more than it may, and no other.
    """
    if source.declared_records is None:
        return None
    line_bytes = _ROW_BYTES + _CELL_BYTES * len(form.features or ())
    return TableBounds(source.most_listed(units=form.step), line_bytes, _EXCESS_BYTES)
