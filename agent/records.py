"""The device's records as its daemon uses them: opened once, refreshed between rounds.

A record that cannot be read must not show. Whether a round takes part may not depend on a private record, so
none makes a round fail: one that cannot be read adds nothing, as if it had never been there, and the owner
finds it in the log. That holds for all of them alike. Were a board to decline when no record at all can be
read, the last one that can would decide; so a board whose disk is gone sends noise, and its log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from agent.settings import DataSettings
from dpagent.learning.data.checking import count_non_finite
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.derived import Unfailing
from dpagent.learning.data.opening import open_dataset

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_READ_AT_START_BYTES: Final = 64 << 20
"""More than this is not read at the start to count what is not finite: ``dpagent data check`` does."""
_MOST_SAID: Final = 20


class Records:
    """The records that ``settings`` describe.

    Attributes:
        dataset: as they were at the last refresh. No record makes it fail.

    Raises:
        ConfigurationError, DataError: They cannot be opened.
    """

    def __init__(self, settings: DataSettings) -> None:
        self._unreadable: set[str] = set()
        self.dataset: Dataset = Unfailing(open_dataset(settings), self._unreadable.add)
        self._said: dict[str, set[str]] = {}
        for warning in self.dataset.origin.warnings:
            log.warning("data %s: %s", settings.name, warning)
        self._say_left_out()
        if len(self.dataset) * self.dataset.record_bytes <= _READ_AT_START_BYTES:
            self.attempt(self._count_unusable)

    def refresh(self) -> None:
        """Take in what is new, leave out what is gone."""
        before, self.dataset = self.dataset, self.dataset.refresh()
        if self.dataset is not before:
            # For the owner of the device alone: the numbers are private.
            log.info("the data changed: %d records, %d before", len(self.dataset), len(before))
        self._say_left_out()

    def attempt(self, work: Callable[[Dataset], ResultT]) -> ResultT:
        """The result of ``work`` on the records; the owner is told which of them could not be read."""
        self._unreadable.clear()
        try:
            return work(self.dataset)
        finally:
            self._say("cannot be read and does not count", sorted(self._unreadable))

    def _count_unusable(self, dataset: Dataset) -> None:
        if unusable := count_non_finite(dataset):
            log.warning("%d of %d records hold NaN or infinity and will not count", unusable, len(dataset))

    def _say_left_out(self) -> None:
        self._say("left out", self.dataset.origin.left_out)

    def _say(self, what: str, sentences: Sequence[str]) -> None:
        """Log what was not logged the last time."""
        new = [sentence for sentence in sentences if sentence not in self._said.get(what, ())]
        for sentence in new[:_MOST_SAID]:
            log.warning("%s: %s", what, sentence)
        if len(new) > _MOST_SAID:
            log.warning("%s: %d more; `dpagent data check` lists them", what, len(new) - _MOST_SAID)
        self._said[what] = set(sentences)
