"""The input columns of a table: their ranges, and whether one only grows.

A column that never falls from row to row is mostly a time or a number of the row. A model that is given it
learns the time of a record, not its content, and meets only values beyond those later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.wording import named

_FEWEST_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class ColumnRange:
    """One input column, as ``offset`` and ``scale`` leave it.

    Attributes:
        name: of the column.
        minimum, maximum: of its finite values; None if there is none.
        only_grows: it never falls within a file or group, and grows in some places.
    """

    name: str
    minimum: float | None
    maximum: float | None
    only_grows: bool


class ColumnTally:
    """Looks at the records of a table in their order, a piece at a time.

    Args:
        names: of the columns, the last axis of a record.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        count = len(self._names)
        self._low, self._high = np.full(count, math.inf), np.full(count, -math.inf)
        self._falls, self._steps = np.zeros(count, np.bool_), np.zeros(count, np.int64)
        self._last: tuple[NDArray[Any], int] | None = None

    def add(self, inputs: NDArray[Any], groups: NDArray[np.int64]) -> None:
        """Take the next records.

        Args:
            inputs: ``(n, columns)`` or ``(n, window, columns)``; n may be 0.
            groups: ``(n,)`` the file or group of each.
        """
        if not len(inputs):
            return
        finite = np.isfinite(inputs)
        axes = tuple(range(inputs.ndim - 1))
        self._low = np.minimum(self._low, inputs.min(axis=axes, where=finite, initial=math.inf))
        self._high = np.maximum(self._high, inputs.max(axis=axes, where=finite, initial=-math.inf))
        firsts = inputs if inputs.ndim == 2 else inputs[:, 0]
        if self._last is not None:
            firsts = np.concatenate([self._last[0][np.newaxis], firsts])
            groups = np.concatenate([[self._last[1]], groups])
        self._last = firsts[-1], int(groups[-1])
        with np.errstate(invalid="ignore"):
            self._count(np.diff(firsts, axis=0)[groups[1:] == groups[:-1]])
            if inputs.ndim == 3:
                self._count(np.diff(inputs, axis=1).reshape(-1, len(self._names)))

    def ranges(self) -> tuple[ColumnRange, ...]:
        """The values seen, for each column."""
        return tuple(
            ColumnRange(
                name,
                float(low) if low <= high else None,
                float(high) if low <= high else None,
                bool(not falls and steps >= _FEWEST_STEPS),
            )
            for name, low, high, falls, steps in zip(
                self._names, self._low, self._high, self._falls, self._steps, strict=True
            )
        )

    def _count(self, differences: NDArray[Any]) -> None:
        self._falls |= (differences < 0).any(axis=0)
        self._steps += (differences > 0).sum(axis=0)


def hint_of_growth(columns: Sequence[ColumnRange]) -> str:
    """A sentence about the columns that only grow, or nothing."""
    growing = [column.name for column in columns if column.only_grows]
    if not growing:
        return ""
    shown = ", ".join(growing[:5]) + (", …" if len(growing) > 5 else "")
    return (
        f"{'A column that only grows is' if len(growing) == 1 else 'Columns that only grow are'} taken as"
        f" input: {shown}. Is it a time or a number of the row? Name the columns to learn from in"
        f" {named('features')}."
    )
