"""The rows of a CSV file, where each begins and ends, and what does not fit in one.

Quoted line breaks are understood, because the rows are found by the ``csv`` module itself. A quotation mark
that is never closed, or too late, takes no other row with it: a row over several lines fits only if none of
its later lines would be a row by itself, and after one that does not fit, reading goes on at the line after
its first.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from dpagent.errors import DataError
from dpagent.learning.data.classes import ClassTable
from dpagent.learning.data.stored import reading
from dpagent.learning.data.table_form import TableForm
from dpagent.wording import named

MISSING: Final = ("", "nan", "na", "n/a", "null", "none", "?")
"""Cells, in small letters, that stand for no value: the record has a NaN and does not count."""

_LONGEST_LINE: Final = 1 << 20
_MOST_LINES: Final = 32
"""Of one row. Were there no bound, marks that are never closed would be looked for to the end, row by row."""
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


def read_rows(lines: Iterable[str], path: Path, delimiter: str) -> Iterator[tuple[int, int, list[str]]]:
    """Rows that are not empty: where each begins and ends (of :class:`Lines`, else 0), and its cells."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        start = getattr(lines, "place", 0)
        try:
            cells = next(reader)
        except StopIteration:
            return
        except _UnfitError as error:
            raise DataError(f"{path}:{getattr(lines, 'number', 1)}: {error}") from error
        except csv.Error as error:
            number = getattr(lines, "number", None)
            where = f"{path}:{number}" if number else str(path)
            raise DataError(f"{where}: not valid CSV: {error}.") from error
        if cells:
            yield start, getattr(lines, "place", 0), cells


class Row(NamedTuple):
    """A row: where it begins and ends, its cells, and why it does not fit, if it does not."""

    start: int
    end: int
    cells: list[str]
    problem: str


class _UnfitError(DataError):
    """What is wrong with one row, without its place."""


def checked_rows(
    lines: Lines, columns: Columns, form: TableForm, classes: ClassTable | None
) -> Iterator[Row]:
    """Rows that are not empty. Where one does not fit, the next begins one line on."""
    row_lines = _RowLines(lines)
    reader = csv.reader(row_lines, delimiter=form.delimiter, strict=True)
    while True:
        start, before = lines.place, lines.number
        row_lines.texts.clear()
        cells: list[str] = []
        try:
            cells = next(reader)
            if cells:
                _require_fit(cells, columns, classes)
            if any(_is_row(text, columns, form, classes) for text in row_lines.texts[1:]):
                raise _UnfitError("a quotation mark is open over the end of the line. Close it.")
        except StopIteration:
            return
        except (csv.Error, _UnfitError) as error:
            if lines.number > before + 1:
                lines.go_to(start, before)
                lines.skip()
            reason = f"not valid CSV: {error}." if isinstance(error, csv.Error) else error
            yield Row(start, lines.place, cells, f"{lines.path}:{before + 1}: {reason}")
        else:
            if cells:
                yield Row(start, lines.place, cells, "")


class _RowLines:
    """The lines of one row, as many as one may have."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.texts: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if len(self.texts) == _MOST_LINES:
            raise _UnfitError(f"a quoted cell has more than {_MOST_LINES} lines. Close the quotation mark.")
        text = next(self._lines)
        self.texts.append(text)
        return text


def _is_row(text: str, columns: Columns, form: TableForm, classes: ClassTable | None) -> bool:
    try:
        cells = next(csv.reader([text], delimiter=form.delimiter, strict=True))
        _require_fit(cells, columns, classes)
    except (csv.Error, _UnfitError):
        return False
    return bool(cells)


class Lines:
    """Lines of a file as text, with the place and number of the last one read."""

    def __init__(self, path: Path, stream: io.BufferedReader, *, growing: bool) -> None:
        self.path, self._stream, self._growing = path, stream, growing
        self.place, self.number, self.cut = 0, 0, False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._next()
        if not line:
            raise StopIteration
        if len(line) > _LONGEST_LINE:
            raise _UnfitError(f"a line has more than {_LONGEST_LINE:,} bytes; expected CSV in lines.")
        if self.number == 1:
            line = line.removeprefix(_BOM)
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _UnfitError(f"not UTF-8 text ({error.reason}). Save the file as UTF-8.") from error
        if "\0" in text:
            raise _UnfitError("holds a null character. Expected CSV as text in UTF-8.")
        return text

    def go_to(self, place: int, number: int) -> None:
        """Go on at byte ``place``, where the line after line ``number`` begins."""
        self._stream.seek(place)
        self.place, self.number = place, number

    def skip(self) -> None:
        """Go on after the next line, whatever is in it."""
        self._next()

    def _next(self) -> bytes:
        """A line, of one that is too long the beginning; nothing at the end."""
        with reading(self.path):
            line = end = self._stream.readline(_LONGEST_LINE + 1)
            size = len(line)
            while len(end) > _LONGEST_LINE and not end.endswith(b"\n"):
                end = self._stream.readline(_LONGEST_LINE + 1)
                size += len(end)
        self.cut = self._growing and size > 0 and not end.endswith(b"\n")
        if self.cut:
            self._stream.seek(self.place)
            return b""
        self.place += size
        self.number += bool(line)
        return line


def columns_of(first: tuple[int, int, list[str]] | None, path: Path, form: TableForm) -> Columns:
    """Where the columns are, by the first row."""
    if first is None:
        raise DataError(f"{path} has no rows; expected a header and records. Copy it again.")
    names = [cell.strip() for cell in first[2]]
    if not form.header:
        names = [str(number) for number in range(1, len(names) + 1)]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{path}:1: the column {repeated[0]!r} stands twice. Give each column its own name.")
    return _places(names, path, form)


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
                hint = f" Set {named('delimiter')} to {other!r}?"
            raise DataError(
                f"{path} has no column {name!r}; found: {', '.join(names[:20])}. Set {named(role)} to one of"
                f" them.{hint}"
            )
    features = form.features or tuple(n for n in names if n not in (form.label, form.group))
    if not features:
        raise DataError(f"{path} has no column but that of the label; expected columns of numbers.")
    group = None if form.group is None else where[form.group]
    return Columns(len(names), where[form.label], group, tuple((name, where[name]) for name in features))


def _require_fit(cells: list[str], columns: Columns, classes: ClassTable | None) -> None:
    if len(cells) != columns.width:
        raise _UnfitError(f"the row has {len(cells)} cells; expected {columns.width}, as in the first row.")
    try:
        columns.values(cells)
    except ValueError as error:
        name, cell = error.args
        raise _UnfitError(
            f"the column {name!r} holds {cell[:60]!r}; expected a number, or nothing where it is missing."
            f" Name the columns of numbers in {named('features')}."
        ) from None
    label = cells[columns.label].strip()
    if not label or (classes is not None and classes.number(label) is None):
        expected = "a label" if classes is None else classes.expected()
        raise _UnfitError(
            f"the label is {label[:60]!r}; expected {expected}. Correct the row, or list the label in"
            f" {named('classes')}."
        )
