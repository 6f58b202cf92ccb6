"""How the rows of a CSV file become records.

``offset`` and ``scale`` are public constants from the meaning of the columns (a heart rate: 70 and 30),
never computed from the data: a mean or a maximum of private values, used without noise, reveals private data
that no ledger counts, and boards that scale differently train different models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from dpagent.configuration import Settings
from dpagent.errors import ConfigurationError, ParameterError
from dpagent.learning.data.names import PlainName
from dpagent.wording import named


def _delimiter(value: str) -> str:
    value = {"tab": "\t"}.get(value, value)
    if len(value) != 1 or value in '\r\n"':
        raise ValueError("expected one character, such as ',' or ';', or tab")
    return value


Number = Annotated[float, Field(strict=False)]


class CsvSettings(Settings):
    """How rows become records. All of it is public."""

    label: PlainName = "label"
    """The column of the label, by its name."""
    features: Annotated[list[PlainName], Field(min_length=1)] | None = None
    """The columns of the inputs, in order."""
    offset: Number | dict[str, Number] = 0.0
    """An input is (cell − offset) / scale: one number, or one by the column's name. Public constants, never
    computed from the data: that would reveal private data without noise."""
    scale: Number | dict[str, Number] = 1.0
    """See ``offset``; above 0."""
    window: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    """Rows in a record, for a time series; without it each row is a record."""
    stride: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    """Rows from one window to the next; by default ``window``. Below it a reading is in several records and
    protected that many times less."""
    group: PlainName | None = None
    """A column, such as a person or a session: a window whose rows have several values of it is left out."""
    mixed: Literal["majority", "drop"] = "majority"
    """A window whose rows have several labels takes that of most rows (of those alike, the one that comes
    first), or is left out."""
    delimiter: Annotated[str, AfterValidator(_delimiter)] = ","
    """One character, or ``tab``."""
    decimal: Literal[".", ","] = "."
    """The mark before the fraction of a number. With a comma, a cell that holds a point is no number: it may
    separate thousands."""
    header: bool = True
    """Whether the first row names the columns; without it they are called 1, 2, …."""
    width: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Cells in a row of files without a header."""
    first_column: PlainName | None = None
    """The name of a first column that the header leaves out (R), or leaves empty (pandas). It is no input
    unless ``features`` lists it."""

    @model_validator(mode="after")
    def _is_possible(self) -> CsvSettings:
        if self.window is None and self.stride is not None:
            raise ValueError(
                f"{named('stride')} is given without {named('window')}; give the number of rows in a window"
            )
        if self.first_column is not None and not self.header:
            raise ValueError(
                f"{named('first_column')} is given with {named('header', False)}, where columns are called 1,"
                " 2, …; leave one out"
            )
        if self.width is not None and self.header:
            raise ValueError(f"{named('width')} is given, and the header tells it; leave it out")
        scales = self.scale.values() if isinstance(self.scale, dict) else [self.scale]
        if any(scale <= 0 for scale in scales):
            raise ParameterError(f"{named('scale')} is {self.scale!r}; expected numbers above 0")
        taken: dict[str, str] = {}
        for role, name in self.roles():
            if name in taken:
                raise ValueError(
                    f"the column {name!r} stands in {named(taken[name])} and in {named(role)}; expected one"
                    " place for it"
                )
            taken[name] = role
        return self

    @property
    def step(self) -> int:
        """Rows from the beginning of a record to that of the next."""
        return self.stride or self.window or 1

    def roles(self, *, labelled: bool = True) -> list[tuple[str, str]]:
        """The columns that are named, each with the key that names it; without ``labelled`` no label."""
        columns = [("label", self.label if labelled else None), ("group", self.group)]
        columns += [("features", name) for name in self.features or ()]
        return [(role, name) for role, name in columns if name is not None]

    def constants(self, names: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Offset and scale of each input, ``(features,)``.

        Raises:
            ConfigurationError: one names a column that is no input.
        """
        made = []
        for key, given, default in (("offset", self.offset, 0.0), ("scale", self.scale, 1.0)):
            if isinstance(given, Mapping):
                if unknown := [name for name in given if name not in names]:
                    raise ConfigurationError(
                        f"{named(key)} names the column {unknown[0]!r}, which is no input; expected some of"
                        f" {', '.join(names[:20])}."
                    )
                made.append(np.array([given.get(name, default) for name in names], np.float64))
            else:
                made.append(np.full(len(names), given, np.float64))
        return made[0], made[1]
