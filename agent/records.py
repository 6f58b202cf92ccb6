"""The device's records in its daemon: opened once as they are declared, refreshed between rounds.

Nothing is inferred on a board: ``agent.yaml`` declares what the records are, so that one record changes the
meaning of no other, and whether the board starts depends on no record. With more records than declared the
agent does not start: that is settled here, before any plan.

An unreadable record must stay invisible. Participation in a round must not depend on a private record, so
no record makes a round fail: an unreadable record adds nothing, as if it did not exist, and the log
tells the owner. This also holds if no record is readable. If a board declined then, the last
readable record would decide; so a board with a failed disk sends noise, and its log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from agent.settings import DataSettings
from dpagent.learning.data.checking import count_non_finite
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.derived import Unfailing
from dpagent.learning.data.opening import open_declared
from dpagent.wording import counted

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_READ_AT_START_BYTES: Final = 64 << 20
"""Larger data are not searched for non-finite values at the start; ``dpagent data check`` does that."""
_MOST_SAID: Final = 20


class Records:
    """The records that ``settings`` describe.

    Attributes:
        dataset: the records at the last refresh. Reading it never fails.

    Raises:
        ConfigurationError: Something is not declared.
        DataError: The records cannot be opened, or there are too many.
    """

    def __init__(self, settings: DataSettings) -> None:
        self._unreadable: set[str] = set()
        self.dataset: Dataset = Unfailing(open_declared(settings), self._unreadable.add)
        self._said: dict[str, set[str]] = {}
        if not len(self.dataset):
            log.warning("data %s: there are no records; this board sends noise alone", settings.name)
        for warning in self.dataset.origin.warnings:
            log.warning("data %s: %s", settings.name, warning)
        self._say_left_out()
        if len(self.dataset) * self.dataset.record_bytes <= _READ_AT_START_BYTES:
            self.attempt(self._count_unusable)

    def refresh(self) -> None:
        """Add new records and drop missing ones."""
        before, self.dataset = self.dataset, self.dataset.refresh()
        if self.dataset is not before:
            # Only for the owner of the device: the numbers are private.
            log.info("the data changed: %s, %d before", counted(len(self.dataset), "record"), len(before))
        self._say_left_out()

    def attempt(self, work: Callable[[Dataset], ResultT]) -> ResultT:
        """The result of ``work`` on the records; the log names the unreadable ones."""
        self._unreadable.clear()
        try:
            return work(self.dataset)
        finally:
            self._say("cannot be read and does not count", sorted(self._unreadable))

    def _count_unusable(self, dataset: Dataset) -> None:
        if unusable := count_non_finite(dataset):
            total = counted(len(dataset), "record")
            log.warning("%d of %s contain NaN or infinity and do not count", unusable, total)

    def _say_left_out(self) -> None:
        self._say("left out", self.dataset.origin.left_out)

    def _say(self, what: str, sentences: Sequence[str]) -> None:
        """Log the sentences that were not logged last time."""
        new = [sentence for sentence in sentences if sentence not in self._said.get(what, ())]
        for sentence in new[:_MOST_SAID]:
            log.warning("%s: %s", what, sentence)
        if len(new) > _MOST_SAID:
            log.warning("%s: %d more; `dpagent data check` lists them", what, len(new) - _MOST_SAID)
        self._said[what] = set(sentences)
