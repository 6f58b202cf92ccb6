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

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from agent.child_programs import environment
from agent.data_settings import DataSettings
from agent.decoding import Order, limits_of, require_address_space
from agent.leash import end_with_pipe
from agent.row_files import COUNTS_AFTER_S
from agent.rows import RowStore
from dpagent.errors import ConfigurationError, DataError, DpagentError, ExitCode, StorageError, said
from dpagent.learning.data.checking import count_non_finite
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.derived import Unfailing
from dpagent.learning.data.stored import require_readable
from dpagent.learning.front_end.features import forget_features
from dpagent.wording import counted

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

CACHED_BYTES: Final = 64 << 20
"""Files of decoded records, and of features, of up to so much are read when the agent starts, and then are in
memory; of larger ones, each record counts with a read of the disk."""
_MOST_SAID: Final = 20
_GIVEN_UP: Final = 4
"""A look that goes on after so many times as long as it takes to count is ended: it may wait for ever."""
_LEFT_OUT: Final = "left out"
_ERRORS: Final[dict[int, type[DpagentError]]] = {
    each.exit_code: each for each in (ConfigurationError, DataError, StorageError)
}


class Records:
    """The records that ``settings`` describe.

    Args:
        settings: of the data.
        state_dir: where decoded records are kept.
        decoded: Another process of this device has just decoded them, and told their owner: take them as they
            are, and read none.

    Attributes:
        dataset: the records as last adopted. Reading it never fails.
        counts_after_s: what a look found counts so long after its beginning (:mod:`agent.decoding`).
        look_group: the process group of the last look that has begun; None: there was none.

    Raises:
        ConfigurationError: Something is not declared.
        DataError: The records cannot be opened, or there are too many.
        StorageError: The disk has no room for decoded records.
    """

    def __init__(self, settings: DataSettings, state_dir: Path, *, decoded: bool = False) -> None:
        self._settings, self._state_dir = settings, state_dir
        self.counts_after_s = COUNTS_AFTER_S
        self.look_group: int | None = None
        self._store = RowStore(state_dir, settings)
        self._unreadable: set[str] = set()
        self._said: dict[str, set[str]] = {}
        self._look: _Look | None = None
        self._looked_at = -math.inf
        self._held_since: float | None = None
        self._held_s = 0.0
        """For which the last look stood still, before that."""
        require_address_space(settings)
        if decoded:
            self._store.take_found()  # Of a process that ended after it began to count.
            self.dataset = self._newest()
            self._said[_LEFT_OUT] = set(self.dataset.origin.left_out)  # by that process
        else:
            self._require_rows()
            self.dataset = self._newest()
            self._introduce()

    @property
    def is_due(self) -> bool:
        """Whether what the last look found counts by now. Public: it follows from when that began."""
        return self._look is not None and self._lasts_s() >= self.counts_after_s

    def _lasts_s(self) -> float:
        """Time since the last look began, without that in which it stood still. Public."""
        now = time.monotonic()
        return now - self._looked_at - self._held_s - (now - (self._held_since or now))

    def adopt(self) -> None:
        """Take the records as the last look found them, if they count by now. Raises nothing, and waits for
        nothing."""
        look = self._look
        if look is None or not self.is_due:
            return
        before = self.dataset
        try:
            # Whatever comes of it: after a crash, what has to be computed yet would tell of the look.
            forget_features(self._state_dir)
            if look.goes_on():
                if self._lasts_s() >= _GIVEN_UP * self.counts_after_s:
                    self._look = None
                    look.kill()
                    log.error("a look at the data did not end, and was given up; what is new waits")
                return
            self._look = None
            look.wait()
            self._store.take_found()
            self.dataset = self._newest()  # Also where it found nothing, so that this takes as long.
        except Exception as error:
            log.debug("the details", exc_info=True)
            log.error("the records are those of before: %s", said(error))
            return
        if len(self.dataset) != len(before):
            # Only for the owner of the device: the numbers are private.
            log.info("the data changed: %s, %d before", counted(len(self.dataset), "record"), len(before))
        self._say_left_out()

    def look(self) -> None:
        """Begin to decode what is new, unless what the last look found has not been adopted yet.

        Call it when a round has read the records. Raises nothing, and returns at once.
        """
        # A look overwrites rows that an index before the newest may tell of.
        if self._look is not None:
            return
        try:
            self._look = _Look(Order(self._settings, self._state_dir, at_once=False))
            self.look_group = self._look.group
        except OSError as error:
            log.error("the data cannot be looked at again: %s", error)
        self._looked_at, self._held_s = time.monotonic(), 0.0

    def hold_look(self, *, is_held: bool) -> None:
        """Let a look stand still, or go on. Raises nothing.

        What it found counts later by as much, whether it was done by then or not.
        """
        if is_held == (self._held_since is not None):
            return
        now = time.monotonic()
        if self._held_since is not None:
            self._held_s += now - self._held_since
        self._held_since = now if is_held else None
        if self._look is not None:
            self._look.hold(is_held=is_held)

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
    forget_features(state_dir)
    _Look(Order(settings, state_dir, at_once=True)).wait()


class _Look:
    """A process that decodes what is new, and ends with this object.

    Attributes:
        group: the id of its process group.
        kill: ends it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, order: Order) -> None:
        with contextlib.ExitStack() as opened:
            orders = opened.enter_context(open(os.memfd_create("order"), "r+b"))  # noqa: PTH123 - a descriptor
            orders.write(order.as_line())
            orders.seek(0)
            theirs, ours = os.pipe()
            opened.callback(os.close, theirs)
            # It ends when this process does, however that is.
            self._pipe = open(ours, "wb")  # noqa: PTH123, SIM115 - likewise
            opened.push(lambda kind, *_: self._pipe.close() if kind else None)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agent.decoding", str(theirs)],
                stdin=orders,
                stdout=subprocess.PIPE,
                pass_fds=[theirs],
                # A fork takes along no thread of numpy's.
                env=environment() | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                process_group=0,
            )
            # Here, too: it may be let stand still before it has come so far, and this process end then.
            with contextlib.suppress(ProcessLookupError):
                end_with_pipe(theirs, self._process.pid)
        self.group = self._process.pid
        self.kill = weakref.finalize(self, _end, self._process, self._pipe)

    def goes_on(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def hold(self, *, is_held: bool) -> None:
        """Let it stand still, and the fork that it decodes in, or go on."""
        if self.goes_on():  # so that nobody else has its number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGSTOP if is_held else signal.SIGCONT)

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            DpagentError: it could not be finished; the text gives the reason.
        """
        assert self._process.stdout is not None
        with self._process.stdout:
            said = self._process.stdout.read().decode(errors="replace").strip()
        code = self._process.wait()
        if code != ExitCode.OK:
            raise _ERRORS.get(code, DataError)(said or f"Decoding the records ended with exit code {code}.")


def _end(process: subprocess.Popen[bytes], pipe: BinaryIO) -> None:
    """End a process that decodes, and the fork that it decodes in."""
    if process.poll() is None:  # so that nobody else has its number
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    pipe.close()
    if process.stdout is not None:
        process.stdout.close()
