"""One record from columns that come by name, as an application asks about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.formats.tables.settings import TableForm
from dpagent.wording import counted


def record_of(form: TableForm, columns: Mapping[str, Any]) -> NDArray[np.float32]:
    """A record from its columns as they were read: a number each, or with a window one for each row.

    Args:
        form: of the record.
        columns: by name; those that are no inputs do not matter.

    Raises:
        DataError: one is missing, or is something else.
    """
    names, rows = form.features or [], form.window
    expected = "a number" if rows is None else f"a list of {counted(rows, 'number')}"
    if missing := [name for name in names if name not in columns]:
        raise DataError(
            f"The column {missing[0]!r} is missing; expected {', '.join(names[:20])}, {expected} each."
        )
    series = []
    for name in names:
        try:
            values = np.asarray(columns[name])
        except (ValueError, OverflowError):  # lists of several lengths, numbers of too many digits
            values = np.empty(0)
        if values.dtype.kind not in "iuf" or values.shape != (() if rows is None else (rows,)):
            raise DataError(f"The column {name!r} is something else; expected {expected}.")
        series.append(values.astype(np.float64))
    offset, scale = map(np.array, form.constants(names))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled: NDArray[np.float32] = ((np.stack(series, axis=-1) - offset) / scale).astype(np.float32)
    return scaled
