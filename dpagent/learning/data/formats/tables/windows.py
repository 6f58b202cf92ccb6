"""Which rows make a record: one each, or the windows over the rows of a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from dpagent.learning.data.formats.tables.settings import CsvSettings

ItemT = TypeVar("ItemT")


class Windows(Generic[ItemT]):
    """Gathers the rows of one file, in any representation of a row.

    Where a window begins follows from its place in the file alone, and from no row's content: one row changes
    no window but those that hold it.

    Args:
        form: its window and stride.
    """

    def __init__(self, form: CsvSettings) -> None:
        self._window, self._step = form.window or 1, form.step
        self._recent: deque[ItemT] = deque(maxlen=self._window)
        self._rows = 0

    def add(self, row: ItemT) -> Sequence[ItemT] | None:
        """Take a row; return the rows of the window that ends with it, if one does."""
        self._recent.append(row)
        self._rows += 1
        before = self._rows - self._window
        return self._recent if before >= 0 and before % self._step == 0 else None
