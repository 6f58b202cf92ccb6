"""The device's records as rounds see them: rows that were decoded ahead.

**Training costs the same for any record.** Another process decodes each into a row of a file, before the
agent first starts (:mod:`agent.first_rows`) and between rounds (:mod:`agent.decoding`). A round reads rows
(:mod:`agent.rows`), and no file of the data: neither what somebody does to one meanwhile, nor how long it
takes to read, reaches a round.

An unreadable record must stay invisible. Participation in a round must not depend on a private record, so
no record makes a round fail: an unreadable record adds nothing, as if it did not exist, and the log
tells the owner. This also holds if no record is readable. If a board declined then, the last
readable record would decide; so a board with a failed disk sends noise, and its log says why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from agent.child_log import SAID_ONCE
from agent.data_settings import DataSettings
from agent.look_messages import LookResult
from agent.row_index import ROW, Header, Index
from agent.row_reads import rows_in
from agent.rows import Rows, RowStore
from dpagent.errors import StorageError, said
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.derived import Unfailing
from dpagent.learning.front_end.features import forget_features
from dpagent.wording import counted

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_MOST_SAID: Final = 20
_LEFT_OUT: Final = "left out"


class Reads:
    """Records, read so that none fails, and what the log says of those that cannot be.

    Attributes:
        dataset: the records as last adopted. Reading it never fails.
    """

    dataset: Dataset

    def __init__(self) -> None:
        self._unreadable: set[str] = set()
        self._said: dict[str, set[str]] = {}

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

    def _say(self, what: str, sentences: Sequence[str]) -> None:
        """Log the sentences that were not logged last time, nor by the process before this one."""
        new = [sentence for sentence in sentences if sentence not in self._said.get(what, ())]
        for sentence in new[:_MOST_SAID]:
            log.warning("%s: %s", what, sentence, extra=SAID_ONCE)
        if len(new) > _MOST_SAID:
            more = len(new) - _MOST_SAID
            log.warning("%s: %d more; `dpagent data check` lists them", what, more, extra=SAID_ONCE)
        self._said[what] = set(sentences)


class Nobodys(Reads):
    """No records, for a round that the device sits out: what is done with them are the steps that are done
    with those of a device which has none.

    Args:
        header: of the index that such a device would have.
        most: records that there may be.
        features: of none, where a front end makes them.
    """

    def __init__(self, header: Header, most: int, features: Dataset | None) -> None:
        super().__init__()
        self.features = features
        file = rows_in(Path("nobody's rows"), os.memfd_create("nobody's rows"))
        self.dataset = Unfailing(Rows(Index(header, np.zeros(most, ROW)), file), self._unreadable.add)


class Records(Reads):
    """The records that are decoded.

    Args:
        settings: of the data.
        state_dir: where their rows are.
        is_told: whether their owner knows already which are left out; else the log says so.

    Raises:
        StorageError: No record was ever decoded here, or the disk fails.
    """

    def __init__(self, settings: DataSettings, state_dir: Path, *, is_told: bool = True) -> None:
        super().__init__()
        self._state_dir = state_dir
        self._store = RowStore(state_dir, settings)
        self.dataset = self._newest()
        if is_told:
            self._said[_LEFT_OUT] = set(self.dataset.origin.left_out)
        else:
            self._say_left_out()

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

    def _newest(self) -> Dataset:
        index = self._store.load()
        if index is None:
            raise StorageError(f"{self._state_dir} holds no decoded records. Start the agent again.")
        return Unfailing(self._store.open(index), self._unreadable.add)

    def _say_left_out(self) -> None:
        self._say(_LEFT_OUT, self.dataset.origin.left_out)
