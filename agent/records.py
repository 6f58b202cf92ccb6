"""The device's records as its daemon uses them: opened once, refreshed between rounds.

A record that cannot be read any more must not show. Whether a round takes part may not depend on a private
record, so the record is left out and the round's update is made anew, from a fresh lot of the others: that
lot is distributed as if the record had never been there, and nothing of the first was released.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from agent.settings import DataSettings
from dpagent.errors import DataError
from dpagent.learning import Dataset, open_dataset
from dpagent.learning.data import count_non_finite

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_READ_AT_START_BYTES: Final = 64 << 20
"""More than this is not read at the start to count what is not finite: ``dpagent data check`` does."""
_ATTEMPTS: Final = 20
_MOST_SAID: Final = 20


class Records:
    """The records that ``settings`` describe.

    Attributes:
        dataset: as they were at the last refresh.

    Raises:
        ConfigurationError, DataError: They cannot be opened.
    """

    def __init__(self, settings: DataSettings) -> None:
        self.dataset: Dataset = open_dataset(settings)
        self._said: set[str] = set()
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
        """The result of ``work`` on the records; if one cannot be read, on the rest.

        Raises:
            DataError: Leaving out what cannot be read did not help.
        """
        for _ in range(_ATTEMPTS):
            before = self.dataset
            try:
                return work(before)
            except DataError as error:
                log.warning("%s", error)
                self.refresh()
                if self.dataset is before:
                    raise
        return work(self.dataset)

    def _count_unusable(self, dataset: Dataset) -> None:
        if unusable := count_non_finite(dataset):
            log.warning("%d of %d records hold NaN or infinity and will not count", unusable, len(dataset))

    def _say_left_out(self) -> None:
        new = [sentence for sentence in self.dataset.origin.left_out if sentence not in self._said]
        for sentence in new[:_MOST_SAID]:
            log.warning("left out: %s", sentence)
        if len(new) > _MOST_SAID:
            log.warning("left out: %d more; `dpagent data check` lists them", len(new) - _MOST_SAID)
        self._said = set(self.dataset.origin.left_out)
