"""How the rows of a CSV file become records.

``offset`` and ``scale`` are public constants from the meaning of the columns (a heart rate: 70 and 30),
never computed from the data: a mean or a maximum of private values, used without noise, reveals private data
that no ledger counts, and boards that scale differently train different models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from dpagent.errors import ConfigurationError, ParameterError
from dpagent.learning.data.names import PlainName
from dpagent.learning.data.record_form import RecordForm
from dpagent.schema.base import rule
from dpagent.schema.limits import After, Limits
from dpagent.wording import named


def _delimiter(value: str) -> str:
    value = {"tab": "\t"}.get(value, value)
    if len(value) != 1 or value in '\r\n"':
        raise ValueError("expected one character, such as ',' or ';', or tab")
    return value


_CONSTANTS: Final = {"offset": 0.0, "scale": 1.0}


class TableForm(RecordForm):
    """How cells become records."""

    # Where windows begin changes none of them: not the stride.
    compared: ClassVar = ("features", "offset", "scale", "window")

    features: Annotated[list[PlainName], Limits(min_length=1, max_length=65_536)] | None = None
    """The columns of the inputs, in order."""
    offset: float | dict[str, float] = 0.0
    """An input is (cell − offset) / scale: one number, or one by the column's name. Public constants, never
    computed from the data: that would reveal private data without noise."""
    scale: float | dict[str, float] = 1.0
    """See ``offset``; above 0."""
    window: Annotated[int, Limits(ge=1, le=1 << 20)] | None = None
    """Rows in a record, for a time series; without it each row is a record."""
    stride: Annotated[int, Limits(ge=1, le=1 << 30)] | None = None
    """Rows from one window to the next; by default ``window``. Below it a reading is in several records and
    protected that many times less."""

    @rule
    def _is_possible(self) -> None:
        if self.window is None and self.stride is not None:
            raise ValueError(
                f"{named('stride')} is given without {named('window')}; give the number of rows in a window"
            )
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
        if self.features is not None:
            try:
                self.constants(self.features)
            except ConfigurationError as error:
                raise ValueError(str(error)) from error

    @property
    def record_shape(self) -> tuple[int, ...] | None:
        """As of :class:`RecordForm`: ``(features,)`` or ``(window, features)``."""
        if self.features is None:
            return None
        return (len(self.features),) if self.window is None else (self.window, len(self.features))

    @property
    def step(self) -> int:
        """Rows from the beginning of a record to that of the next."""
        return self.stride or self.window or 1

    def roles(self, *, labelled: bool = True) -> list[tuple[str, str]]:
        """The columns that are named, each with the key that names it; without ``labelled`` no label."""
        return [("features", name) for name in self.features or ()]

    def constants(self, names: Sequence[str]) -> tuple[list[float], list[float]]:
        """Offset and scale of each input.

        Raises:
            ConfigurationError: one names a column that is no input.
        """
        made = []
        for key, default in _CONSTANTS.items():
            given = getattr(self, key)
            if isinstance(given, Mapping) and (unknown := [name for name in given if name not in names]):
                raise ConfigurationError(
                    f"{named(key)} names the column {unknown[0]!r}, which is no input; expected some of"
                    f" {', '.join(names[:20])}."
                )
            made.append(_by_column(given, default, names))
        return made[0], made[1]

    def _meaning(self, key: str, form: Self) -> Any:
        given = getattr(form, key)
        if key not in _CONSTANTS:
            return given
        names = self.features or ()
        strangers = set(given) - set(names) if isinstance(given, Mapping) else set()
        return _by_column(given, _CONSTANTS[key], names), strangers


def _by_column(given: float | Mapping[str, float], default: float, names: Sequence[str]) -> list[float]:
    return [given.get(name, default) if isinstance(given, Mapping) else given for name in names]


class CsvSettings(TableForm):
    """How rows become records. All of it is public."""

    label: PlainName = "label"
    """The column of the label, by its name."""
    group: PlainName | None = None
    """A column, such as a person or a session: a window whose rows have several values of it is left out."""
    mixed: Literal["majority", "drop"] = "majority"
    """A window whose rows have several labels takes that of most rows (of those alike, the one that comes
    first), or is left out."""
    delimiter: Annotated[str, After(_delimiter)] = ","
    """One character, or ``tab``."""
    decimal: Literal[".", ","] = "."
    """The mark before the fraction of a number. With a comma, a cell that holds a point is no number: it may
    separate thousands."""
    header: bool = True
    """Whether the first row names the columns; without it they are called 1, 2, …."""
    width: Annotated[int, Limits(ge=1, le=65_536)] | None = None
    """Cells in a row of files without a header."""
    first_column: PlainName | None = None
    """The name of a first column that the header leaves out (R), or leaves empty (pandas). It is no input
    unless ``features`` lists it."""

    @rule
    def _has_a_header_or_not(self) -> None:
        if self.first_column is not None and not self.header:
            raise ValueError(
                f"{named('first_column')} is given with {named('header', False)}, where columns are called 1,"
                " 2, …; leave one out"
            )
        if self.width is not None and self.header:
            raise ValueError(f"{named('width')} is given, and the header tells it; leave it out")

    def roles(self, *, labelled: bool = True) -> list[tuple[str, str]]:
        """As of :class:`TableForm`."""
        columns = [("label", self.label if labelled else None), ("group", self.group)]
        return [(role, name) for role, name in columns if name is not None] + super().roles()
