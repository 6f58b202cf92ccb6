"""The columns of a CSV file: their places by its first row, and the meaning of their cells."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from dpagent.errors import DataError
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.wording import named

MISSING: Final = ("", "nan", "na", "n/a", "null", "none", "?")
"""Cells, in small letters, that stand for no value: the record has a NaN and does not count."""

_DELIMITERS: Final = (";", "\t", "|", ",")
_DECIMAL_COMMA: Final = re.compile(r"\s*[+-]?\d*,\d+(?:[eE][+-]?\d+)?\s*")


class UnfitError(DataError):
    """The reason why one row does not fit, without its place."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The places of a file's columns.

    Attributes:
        width: cells in a row.
        label, group: places; None: there is none.
        features: names and places of the inputs.
        unnamed: places of columns without a name, which are no inputs.
        decimal: the mark before the fraction of a number.
    """

    width: int
    label: int | None
    group: int | None
    features: tuple[tuple[str, int], ...]
    unnamed: tuple[int, ...] = ()
    decimal: Literal[".", ","] = "."

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return tuple(name for name, _ in self.features)

    def values(self, cells: Sequence[str]) -> list[float]:
        """The inputs of a row, NaN for missing cells.

        Raises:
            UnfitError: a cell is no number.
        """
        numbers = []
        for name, place in self.features:
            cell = cells[place]
            try:
                numbers.append(float(cell) if self.decimal == "." else _of_comma(cell))
            except ValueError:
                if cell.strip().lower() not in MISSING:
                    raise UnfitError(self._no_number(name, cell)) from None
                numbers.append(math.nan)
        return numbers

    def group_of(self, cells: Sequence[str]) -> str:
        """The group of a row that fits."""
        return "" if self.group is None else cells[self.group].strip()

    def _no_number(self, name: str, cell: str) -> str:
        advice = f"Name the columns of numbers in {named('features')}"
        if self.label is None:
            advice += f", or that of the labels in {named('label')}"
        if self.decimal == "." and _DECIMAL_COMMA.fullmatch(cell):
            advice = f"Is that a decimal comma? Set {named('decimal', ',')}"
        number = "number" if self.decimal == "." else "number with a decimal comma"
        return (
            f"the column {name!r} holds {cell[:60]!r}; expected a {number}, or nothing where it is missing."
            f" {advice}."
        )


def columns_of(
    first: Sequence[str] | None, path: Path, form: CsvSettings, *, labelled: bool = True
) -> Columns:
    """Where the columns are, by the first row.

    Args:
        first: its cells; None: the file has no rows.
        path: of the file.
        form: how rows become records.
        labelled: whether there is to be a column of labels.

    Raises:
        DataError: a column is missing, or two have one name.
    """
    if not form.header and form.width is not None:
        first = [""] * form.width  # whatever the first row holds: it is a record like any other
    if first is None:
        raise DataError(f"{path} has no rows; expected a header and records. Copy it again.")
    if other := _other_delimiter(first, form):
        raise DataError(
            f"{path}: the cells of the first row, {form.delimiter.join(first)[:60]!r}, seem to be separated "
            f"by {other!r} and not by {form.delimiter!r}. Set {named('delimiter', other)}."
        )
    names = column_names(first, form)
    repeated = [name for name, count in Counter(names).items() if count > 1 and name]
    if repeated:
        raise DataError(f"{path}:1: the column {repeated[0]!r} stands twice. Give each column its own name.")
    places = {name: place for place, name in enumerate(names) if name}
    roles = form.roles(labelled=labelled)
    for role, name in roles:
        if name not in places:
            raise DataError(
                f"{path} has no column {name!r}; found: {', '.join(places)[:400]}. Set {named(role)} to one"
                " of them."
            )
    no_inputs = {form.first_column, *(name for role, name in roles if role != "features")}
    features = form.features or [name for name in places if name not in no_inputs]
    if not features:
        raise DataError(f"{path} has no column but that of the label; expected columns of numbers.")
    return Columns(
        len(names),
        places[form.label] if labelled else None,
        None if form.group is None else places[form.group],
        tuple((name, places[name]) for name in features),
        tuple(place for place, name in enumerate(names) if not name),
        form.decimal,
    )


def column_names(first: Sequence[str], form: CsvSettings) -> list[str]:
    """The names of all columns, empty where one has none."""
    if not form.header:
        return [str(number) for number in range(1, len(first) + 1)]
    names = [cell.strip() for cell in first]
    if form.first_column is None:
        return names
    return [form.first_column, *(names if names[0] else names[1:])]


def _of_comma(cell: str) -> float:
    if "." in cell:
        raise ValueError(cell)  # It may separate thousands: 1.500 is not one and a half.
    return float(cell.replace(",", "."))


def _other_delimiter(first: Sequence[str], form: CsvSettings) -> str:
    """The mark that seems to separate the cells of the first row instead, or nothing.

    One cell that holds such a mark is no table, and commas that leave decimal commas between such marks
    separate nothing.
    """
    row = form.delimiter.join(first)
    other = max((mark for mark in _DELIMITERS if mark != form.delimiter), key=row.count)
    cells = row.split(other)
    is_wrong = len(first) == 1 or (form.delimiter == "," and any(map(_DECIMAL_COMMA.fullmatch, cells)))
    return other if len(cells) > 1 and is_wrong else ""
