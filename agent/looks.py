"""Looks at the data while the agent runs: processes that decode what is new (:mod:`agent.decoding`).

The agent begins one after a round, lets it stand still while the next is decided on, prepared and trained
(:mod:`agent.worker`), and tells the training process when what it found counts. So a look needs no training
process, which may end with its round.

**Whether a round takes in what a look found** follows from the agent's clock alone (:attr:`Looks.is_due`),
and is settled with the order to prepare the round, before the charge. Whether the look has ended by then
depends on the records: that is asked for after the charge (:meth:`Looks.result`), and handed to the training
process with the question for the update.
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
from pathlib import Path
from typing import BinaryIO, Final

from agent.child_programs import environment
from agent.data_settings import DataSettings
from agent.leash import end_with_pipe
from agent.look_messages import NICENESS, LookOrder, LookResult
from agent.orphans import Orphans
from agent.row_files import COUNTS_AFTER_S
from dpagent.errors import (
    ChildProcessError,
    ConfigurationError,
    DataError,
    DpagentError,
    ExitCode,
    StorageError,
)

log = logging.getLogger(__name__)

_PROGRAM: Final = "agent.decoding"
_ENDING_S: Final = 1.0
_STILL_S: Final = 10.0
"""An agent that does not go on for so long stands still, and so does its look, as in a container that is
paused: the clock goes on, and the look's work does not."""
_GIVEN_UP: Final = 4
"""A look that goes on after so many times as long as it takes to count is ended: it may wait for ever."""
_ERRORS: Final[dict[int, type[DpagentError]]] = {
    each.exit_code: each for each in (ConfigurationError, DataError, StorageError)
}


class Look:
    """A process that decodes what is new, and ends with this object, or with this program.

    Args:
        order: to be carried out.

    Attributes:
        group: the id of its process group.
        kill: ends it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, order: LookOrder) -> None:
        with contextlib.ExitStack() as opened:
            orders = opened.enter_context(open(os.memfd_create("order"), "r+b"))  # noqa: PTH123 - a descriptor
            orders.write(order.to_bytes())
            orders.seek(0)
            theirs, ours = os.pipe()
            opened.callback(os.close, theirs)
            # It ends when this process does, however that is.
            self._pipe = open(ours, "wb")  # noqa: PTH123, SIM115 - likewise
            opened.push(lambda kind, *_: self._pipe.close() if kind else None)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM, str(theirs)],
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
        """Whether it has not ended. If it has, what is left of its group is ended, too: a fork whose parent
        the system has ended, for want of memory, would go on beside a round."""
        if self._process.poll() is None:
            return True
        self._pipe.close()
        return False

    def hold(self, *, is_held: bool) -> None:
        """Let it stand still, with the fork that it decodes in, or go on."""
        if self.goes_on():  # so that nobody else has its number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGSTOP if is_held else signal.SIGCONT)

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            DpagentError: it could not be finished; the text gives the reason.
        """
        code = self._process.wait()
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            os.set_blocking(stream.fileno(), False)  # A fork of it may have been left, and have the pipe.
            said = (stream.read() or b"").decode(errors="replace").strip()
        if code < 0:  # It may pass, and what is decoded stays: a service starts again.
            raise ChildProcessError(
                f"Decoding the records was ended by signal {-code} ({signal.strsignal(-code)}), perhaps by "
                "the system, for want of memory. What is decoded stays."
            )
        if code != ExitCode.OK:
            raise _ERRORS.get(code, DataError)(said or f"Decoding the records ended with exit code {code}.")


def _end(process: subprocess.Popen[bytes], pipe: BinaryIO) -> None:
    """End a process that decodes, and the fork that it decodes in."""
    if process.poll() is None:  # so that nobody else has its number
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # The system may wait for a disk in its name.
            process.wait(_ENDING_S)
    pipe.close()
    if process.stdout is not None:
        process.stdout.close()


class Looks:
    """Begins looks, one after the other, and knows when what the last one found counts.

    Args:
        settings: of the data, declared.
        state_dir: where decoded records are kept.
        niceness: of training.

    Attributes:
        counts_after_s: what a look found counts so long after its beginning (:mod:`agent.decoding`).
    """

    def __init__(self, settings: DataSettings, state_dir: Path, niceness: int) -> None:
        self._order = LookOrder(settings, state_dir, at_once=False, niceness=niceness + NICENESS)
        self.counts_after_s = COUNTS_AFTER_S
        self._look: Look | None = None
        """The last one, until a round has taken in what it found."""
        self._result: LookResult | None = None
        """Of a look that has ended, once it was asked for."""
        self._went_on_s = 0.0
        """How long it had gone on when a round left it for a later one."""
        self._began_at = -math.inf
        self._held_since: float | None = None
        self._held_s = 0.0
        """For which the last look stood still, before that."""
        self._seen_at = time.monotonic()
        self._orphans = Orphans()

    @property
    def process(self) -> int | None:
        """The id of the last look's process, whether it has ended or not; None: a round has taken that in."""
        return None if self._look is None else self._look.group

    @property
    def is_due(self) -> bool:
        """Whether what the last look found counts by now. Public: it follows from when looks are asked for,
        and stand still."""
        return self._look is not None and self._lasts_s() >= self.counts_after_s

    def _lasts_s(self) -> float:
        """Time since the last look began, or was left for a later round, but for that in which it stood
        still. Public."""
        now = time.monotonic()
        return now - self._began_at - self._held_s - (now - (self._held_since or now))

    def tend(self) -> None:
        """Note that the agent goes on; call it often. Where it stood still for long, with all that it has
        started, what a look found counts later by as much: else one record that is slow to decode would keep
        all that came with it out of the round that follows.
        """
        now, before = time.monotonic(), self._seen_at
        self._seen_at = now
        stood_still_s = now - max(before, self._began_at)
        if stood_still_s >= _STILL_S and self._held_since is None:
            self._held_s += stood_still_s

    def begin(self) -> None:
        """Begin a look, unless no round has taken in yet what the last one found.

        Raises nothing, and returns at once.
        """
        # A look overwrites rows that an index before the newest may tell of.
        if self._look is not None:
            return
        self._orphans.wait()
        self._went_on_s = 0.0
        self._note_beginning()
        try:
            self._look = Look(self._order)
        except Exception as error:  # noqa: BLE001 - it fails no round
            log.error("the data cannot be looked at again: %s", error)
            return
        if self._held_since is not None:
            self._look.hold(is_held=True)

    def _note_beginning(self) -> None:
        self._began_at, self._held_s = time.monotonic(), 0.0
        if self._held_since is not None:
            self._held_since = self._began_at

    def hold(self) -> None:
        """Let a look stand still, if one goes on, until :meth:`go_on`. Raises nothing.

        What it found counts later by as much, whether it was done by then or not.
        """
        if self._held_since is None:
            self.tend()  # A round that waited may be the first thing after a pause.
            self._held_since = time.monotonic()
            if self._look is not None:
                self._look.hold(is_held=True)

    def go_on(self) -> None:
        """Let it go on. Raises nothing."""
        if self._held_since is not None:
            self._seen_at = time.monotonic()
            self._held_s += self._seen_at - self._held_since
            self._held_since = None
            if self._look is not None:
                self._look.hold(is_held=False)

    def result(self) -> LookResult:
        """What came of a look that is due. Private: call it after a charge, and hand it on.

        Raises nothing.
        """
        look = self._look
        assert look is not None  # it is due
        if self._result is None:
            if look.goes_on():
                if self._went_on_s + self._lasts_s() < _GIVEN_UP * self.counts_after_s:
                    return LookResult(goes_on=True)
                look.kill()
                self._result = LookResult(goes_on=True, why_not="it did not end, and was given up")
            else:
                try:
                    look.wait()
                    self._result = LookResult()
                except Exception as error:  # noqa: BLE001 - it fails no round
                    self._result = LookResult(why_not=str(error))
            self._orphans.add(look.group)
        return self._result

    def taken(self) -> None:
        """A round has taken in what the look found that has ended, if one has: another may begin.

        One that goes on counts anew as long after this as another would: that shows in later rounds.
        """
        if self._result is not None:
            self._look = self._result = None
        else:
            self._went_on_s += self._lasts_s()
            self._note_beginning()

    def end(self) -> None:
        """End a look that goes on. It has found nothing, whether it was done or not: how far it had come
        depends on how long its records take."""
        if self._look is not None:
            self._look.kill()
            self._orphans.add(self._look.group)
            self._look = self._result = None
