"""The device's records in its programs: opened as they are declared, and decoded ahead of rounds.

Nothing is inferred on a board: ``agent.yaml`` declares what the records are, so that one record changes the
meaning of no other, and whether the board starts depends on no record. With more records than declared the
agent does not start: that is settled here, before any plan.

**Training costs the same for any record.** Another process decodes each into a row of a file, before the
agent first starts and between rounds (:mod:`agent.decoding`). A round reads rows (:mod:`agent.rows`), and no
file of the data: neither what somebody does to one meanwhile, nor how long it takes to read, reaches a round.

**A restart costs the same for any record.** An agent that has rows starts with them and looks for what is new
after a round, like one that never stopped: how long its start takes, and whether it starts, shows nothing of
what came meanwhile. Its owner can have all of that decoded before (``dpagent data decode``).

An unreadable record must stay invisible. Participation in a round must not depend on a private record, so
no record makes a round fail: an unreadable record adds nothing, as if it did not exist, and the log
tells the owner. This also holds if no record is readable. If a board declined then, the last
readable record would decide; so a board with a failed disk sends noise, and its log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from agent.data_settings import DataSettings
from agent.decoding import limits_of, require_address_space
from agent.looks import Look, LookOrder, LookResult
from agent.row_files import CACHED_BYTES
from agent.rows import RowStore
from dpagent.errors import StorageError, said
from dpagent.learning.data.checking import count_non_finite
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.derived import Unfailing
from dpagent.learning.data.stored import require_readable
from dpagent.learning.front_end.features import forget_features
from dpagent.wording import counted

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_MOST_SAID: Final = 20
_LEFT_OUT: Final = "left out"


class Records:
    """The records that ``settings`` describe.

    Args:
        settings: of the data.
        state_dir: where decoded records are kept.
        decoded: Another process of this device has just decoded them, and told their owner: take them as they
            are, and read none.

    Attributes:
        dataset: the records as last adopted. Reading it never fails.

    Raises:
        ConfigurationError: Something is not declared.
        DataError: The records cannot be opened, or there are too many.
        StorageError: The disk has no room for decoded records.
    """

    def __init__(self, settings: DataSettings, state_dir: Path, *, decoded: bool = False) -> None:
        self._settings, self._state_dir = settings, state_dir
        self._store = RowStore(state_dir, settings)
        self._unreadable: set[str] = set()
        self._said: dict[str, set[str]] = {}
        require_address_space(settings)
        if decoded:
            self.dataset = self._newest()
            self._said[_LEFT_OUT] = set(self.dataset.origin.left_out)  # by that process
        else:
            self._require_rows()
            self.dataset = self._newest()
            self._introduce()

    def adopt(self, found: LookResult) -> None:
        """Take the records as a look found them whose result counts. Raises nothing, and waits for nothing.

        Args:
            found: of the look.
        """
        before = self.dataset
        try:
            # Whatever comes of it: after a crash, what has to be computed yet would tell of the look.
            forget_features(self._state_dir)
            if found.why_not is not None:
                log.error("a look at the data failed, and what is new waits: %s", found.why_not)
            if found.goes_on:
                return
            # Also where it found nothing, or failed, so that this takes as long.
            self._store.take_found()
            self.dataset = self._newest()
        except Exception as error:
            log.debug("the details", exc_info=True)
            log.error("the records are those of before: %s", said(error))
            return
        if len(self.dataset) != len(before):
            # Only for the owner of the device: the numbers are private.
            log.info("the data changed: %s, %d before", counted(len(self.dataset), "record"), len(before))
        self._say_left_out()

    def attempt(self, work: Callable[[Dataset], ResultT]) -> ResultT:
        """The result of ``work`` on the records; the log names the unreadable ones.

        Raises:
            Exception: whatever ``work`` raises.
        """
        self._unreadable.clear()
        try:
            return work(self.dataset)
        finally:
            self._say("cannot be read and does not count", sorted(self._unreadable))

    def _require_rows(self) -> None:
        if not self._store.is_complete(repr(limits_of(self._settings))):
            log.info("data %s: decoding the records, which takes a while this once", self._settings.name)
            decode_at_once(self._settings, self._state_dir)
            return
        require_readable(self._settings.path)
        self._store.drop_found()  # Of a look that was cut short.

    def _newest(self) -> Dataset:
        index = self._store.load()
        if index is None:
            raise StorageError(f"{self._state_dir} holds no decoded records. Start the agent again.")
        return Unfailing(self._store.open(index), self._unreadable.add)

    def _introduce(self) -> None:
        """Tell the owner what was found."""
        if not len(self.dataset):
            log.warning(
                "data %s: there are no records; none counts in what this board sends", self._settings.name
            )
        for warning in self.dataset.origin.warnings:
            log.warning("data %s: %s", self._settings.name, warning)
        self._say_left_out()
        assert self._settings.max_records is not None
        if (
            self._settings.max_records * self.dataset.record_bytes <= CACHED_BYTES
        ):  # However many there are. Of more, `dpagent data check` does that.
            self.attempt(self._count_unusable)

    def _count_unusable(self, dataset: Dataset) -> None:
        if unusable := count_non_finite(dataset):
            total = counted(len(dataset), "record")
            log.warning("%d of %s contain NaN or infinity and do not count", unusable, total)

    def _say_left_out(self) -> None:
        self._say(_LEFT_OUT, self.dataset.origin.left_out)

    def _say(self, what: str, sentences: Sequence[str]) -> None:
        """Log the sentences that were not logged last time."""
        new = [sentence for sentence in sentences if sentence not in self._said.get(what, ())]
        for sentence in new[:_MOST_SAID]:
            log.warning("%s: %s", what, sentence)
        if len(new) > _MOST_SAID:
            log.warning("%s: %d more; `dpagent data check` lists them", what, len(new) - _MOST_SAID)
        self._said[what] = set(sentences)


def decode_at_once(settings: DataSettings, state_dir: Path) -> None:
    """Decode all that is new into rows that count from now on, however long it takes.

    The agent must not run.

    Raises:
        ConfigurationError: Something is not declared.
        DataError: The records cannot be opened, or there are too many.
        StorageError: The disk has no room for decoded records.
    """
    # Whatever comes of it: how many features are missing afterwards depends on the records.
    forget_features(state_dir, all_of_them=True)
    Look(LookOrder(settings, state_dir, at_once=True)).wait()
