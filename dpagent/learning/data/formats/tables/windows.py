"""Which rows make a record: one each, or all windows over the rows of one group."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from dpagent.learning.data.formats.tables.settings import CsvSettings

ItemT = TypeVar("ItemT")


class Windows(Generic[ItemT]):
    """Gathers the rows of one file, in any representation of a row.

    Args:
        form: its window and stride.

    Attributes:
        group: of the row that was added last.
    """

    def __init__(self, form: CsvSettings) -> None:
        self._window, self._step = form.window or 1, form.step
        self._recent: deque[ItemT] = deque(maxlen=self._window)
        self._run = 0
        self.group = ""

    def add(self, row: ItemT, group: str | None) -> Sequence[ItemT] | None:
        """Take a row; return the rows of the record that ends with it, if one does.

        Args:
            row: its representation.
            group: None: it cannot be told, and is taken to be that of the row before.
        """
        if group is not None and group != self.group:
            self.group, self._run = group, 0
            self._recent.clear()
        self._recent.append(row)
        self._run += 1
        before = self._run - self._window
        return self._recent if before >= 0 and before % self._step == 0 else None
