"""How the rows of a CSV file become records: what an operator writes, and what of it cannot be.

``offset`` and ``scale`` are public constants from the meaning of the columns (a heart rate: 70 and 30),
never computed from the data: a mean or a maximum of private values, used without noise, is itself a release
that nobody accounts for, and boards that scale unlike train unlike models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError, require_count
from dpagent.wording import named

Mixed = Literal["majority", "drop"]
Constants = float | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TableForm:
    """How rows become records. All of it is public.

    Attributes:
        label: the column of the label, by its name.
        features: the columns of the inputs, in order; None: all but those of the label and the group.
        offset, scale: an input is ``(cell - offset) / scale``; one number, or one by the column's name.
        window: rows in a record; None: one row, and the record is not a series.
        stride: rows from the beginning of a window to that of the next; None: ``window``.
        group: a column; no window goes across a change of its value.
        mixed: the label of a window whose rows have several: that of most rows (of those alike, the one
            that comes first), or no record.
        delimiter: one character.
        header: whether the first row names the columns; without, they are called 1, 2, ….
    """

    label: str = "label"
    features: tuple[str, ...] | None = None
    offset: Constants = 0.0
    scale: Constants = 1.0
    window: int | None = None
    stride: int | None = None
    group: str | None = None
    mixed: Mixed = "majority"
    delimiter: str = ","
    header: bool = True


def constants(form: TableForm, names: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Offset and scale of each input, ``(features,)``.

    Raises:
        ConfigurationError: one names a column that is no input, or is not finite, or a scale is not above 0.
    """
    made = []
    for key, given, default in (("offset", form.offset, 0.0), ("scale", form.scale, 1.0)):
        if isinstance(given, Mapping):
            if unknown := [name for name in given if name not in names]:
                raise ConfigurationError(
                    f"{named(key)} names the column {unknown[0]!r}, which is no input; expected some of"
                    f" {', '.join(names[:20])}."
                )
            values = np.array([given.get(name, default) for name in names], np.float64)
        else:
            values = np.full(len(names), given, np.float64)
        if not np.isfinite(values).all() or (key == "scale" and values.min() <= 0):
            raise ConfigurationError(
                f"{named(key)} is {given!r}; expected finite numbers{', above 0' * (key == 'scale')}."
            )
        made.append(values)
    return made[0], made[1]


def require_possible(form: TableForm) -> None:
    """Raise :class:`ConfigurationError` or :class:`ParameterError` unless ``form`` makes sense."""
    if len(form.delimiter) != 1 or form.delimiter in '\r\n"':
        raise ConfigurationError(
            f"delimiter is {form.delimiter!r}; expected one character, such as ',' or ';'."
        )
    if form.window is None and form.stride is not None:
        raise ConfigurationError(
            f"{named('stride')} is given without {named('window')}; give the number of rows in a window."
        )
    if form.window is not None:
        require_count("window", form.window, maximum=1 << 20)
        require_count("stride", form.stride or form.window, maximum=1 << 30)
    roles = [
        ("label", form.label),
        ("group", form.group),
        *(("features", name) for name in form.features or ()),
    ]
    taken: dict[str, str] = {}
    for role, name in roles:
        if name is None:
            continue
        if name in taken:
            raise ConfigurationError(
                f"The column {name!r} stands in {named(taken[name])} and in {named(role)}; expected one place"
                " for it."
            )
        taken[name] = role
