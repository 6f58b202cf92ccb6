"""Decode records apart from the program: one that breaks, blocks or bloats its decoder costs itself alone.

Decoding runs in a fork of this process with limits that the kernel keeps: memory (``RLIMIT_AS``), and
processor time for each record (``setitimer``, whose signal ends the fork also within a decoder). Time by the
clock is counted in pieces by this process, which waits for reports: so a time for which both are stopped, as
while a round is prepared, counts as one of them at most. The fork goes through the records and reports each.
One that fails, or with which the fork ends, is tried once more alone in a fork of its own, unless its time
was over: so whether a record can be decoded depends on that record, and not on what an earlier one left
behind in memory. There are at most two forks more for a failing record than for a whole one.

The process must have no thread but its own: a fork takes along no other.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dpagent.errors import DpagentError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.stored import ChangedError
from dpagent.storage import overwrite

log = logging.getLogger(__name__)

ATTEMPTS: Final = 2
"""A record that fails takes so many times its limit of time at most."""
PATIENCE: Final = 30.0
"""Seconds by the clock for each of processor time that a record may take, where nothing waits for the end:
other programs have priority on a busy board."""
_PIECES: Final = 20
_LONGEST: Final = 1_000
"""Characters of a sentence: a report fits the pipe at once."""
_REPORTS_BYTES: Final = 65_536
_FAILED: Final = 1
_CANNOT_WRITE: Final = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What decoding one record may take.

    Attributes:
        memory_bytes: of address space, besides that of the process before it began.
        seconds: of processor time.
    """

    memory_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a record.

    Attributes:
        checksum: CRC-32 of its row; 0 where it is unusable.
        problem: why it is, or empty.
        is_final: whether the record is the reason, and not a file that has changed meanwhile, or a disk or a
            board that did not answer in time.
        has_moved: whether it does not stand where it was listed; it costs no time to find that.
    """

    checksum: int
    problem: str = ""
    is_final: bool = True
    has_moved: bool = False


def decode_apart(
    dataset: Dataset,
    numbers: Sequence[int],
    rows: Sequence[int],
    descriptor: int,
    limits: Limits,
    patience: float = PATIENCE,
) -> Generator[Outcome, None, None]:
    """Decode records into rows of a file.

    Args:
        dataset: the records.
        numbers: which of them, and
        rows: the row of each.
        descriptor: of the file.
        limits: for each record.
        patience: seconds by the clock for each of processor time that a record may take.

    Yields:
        The outcome of each, in order.
    """
    start, alone, longest_s = 0, False, patience * limits.seconds
    while start < len(numbers):
        stop = start + 1 if alone else len(numbers)
        some, places = numbers[start:stop], rows[start:stop]
        worker = _Worker(dataset, some, places, descriptor, limits, longest_s, alone=alone)
        try:
            for outcome in worker.outcomes():
                start += 1
                yield outcome
        except BaseException:  # Nobody takes the rest.
            worker.kill()
            raise
        status = worker.ended()
        if start == stop:
            alone = False
        elif os.WIFEXITED(status) and os.WEXITSTATUS(status) == _CANNOT_WRITE:
            why = f"its row {rows[start]} cannot be written. Check the disk of state_dir. It is tried again."
            yield Outcome(0, f"{dataset.place_of(numbers[start])}: {why}", is_final=False)
            start, alone = start + 1, False
        elif alone or _is_late(status):
            is_final = not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM)
            why = _reason(status, limits, longest_s)
            yield Outcome(0, f"{dataset.place_of(numbers[start])}: {why}", is_final)
            start, alone = start + 1, False
        else:
            alone = True


class _Worker:
    """A fork that decodes, and reports over a pipe."""

    def __init__(
        self,
        dataset: Dataset,
        numbers: Sequence[int],
        rows: Sequence[int],
        descriptor: int,
        limits: Limits,
        longest_s: float,
        *,
        alone: bool,
    ) -> None:
        self._reports, reports = os.pipe()
        self._piece_ms = 1_000 * longest_s / _PIECES
        """Each report is waited for so many times so long."""
        try:
            self._process = os.fork()
        except OSError:
            os.close(self._reports)
            os.close(reports)
            raise
        if not self._process:
            code = _FAILED
            try:
                os.close(self._reports)  # So that it ends at its next report when this process has ended.
                code = _work(dataset, numbers, rows, descriptor, limits, reports, alone=alone)
            finally:
                os._exit(code)
        os.close(reports)

    def outcomes(self) -> Iterator[Outcome]:
        """Those that it reports, until it ends."""
        poll, rest = select.poll(), b""
        poll.register(self._reports, select.POLLIN)
        with os.fdopen(self._reports, "rb", buffering=0) as stream:
            while True:
                if not any(poll.poll(self._piece_ms) for _ in range(_PIECES)):
                    os.kill(self._process, signal.SIGALRM)
                    return
                if not (data := stream.read(_REPORTS_BYTES)):
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    yield Outcome(*json.loads(line))

    def kill(self) -> None:
        """End it."""
        os.kill(self._process, signal.SIGKILL)
        self.ended()

    def ended(self) -> int:
        """How it ended, as of :func:`os.waitpid`."""
        return os.waitpid(self._process, 0)[1]


def _work(
    dataset: Dataset,
    numbers: Sequence[int],
    rows: Sequence[int],
    descriptor: int,
    limits: Limits,
    reports: int,
    *,
    alone: bool,
) -> int:
    """The fork's work; returns its exit code."""
    for late in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(late, signal.SIG_DFL)  # They end the process at once, whatever it is in.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most, hard = address_space() + limits.memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for number, row in zip(numbers, rows, strict=True):
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        try:
            data = np.ascontiguousarray(dataset.batch(np.array([number]))[0]).tobytes()
        except ChangedError as error:  # Whoever is asked, and after whatever else.
            _report(reports, Outcome(0, _sentence(dataset, number, error), is_final=False, has_moved=True))
            continue
        except Exception as error:
            log.debug("a record cannot be decoded", exc_info=True)
            if not alone:
                return _FAILED
            _report(reports, Outcome(0, _sentence(dataset, number, error)))
            return 0
        try:
            overwrite(descriptor, data, row * len(data))
        except OSError:
            return _CANNOT_WRITE
        _report(reports, Outcome(zlib.crc32(data)))
    return 0


def _sentence(dataset: Dataset, number: int, error: Exception) -> str:
    if isinstance(error, DpagentError) and str(error):
        return str(error)
    return f"{dataset.place_of(number)}: {type(error).__name__}: {error}"


def _report(pipe: int, outcome: Outcome) -> None:
    values = outcome.checksum, outcome.problem[:_LONGEST], outcome.is_final, outcome.has_moved
    os.write(pipe, json.dumps(values).encode() + b"\n")


def address_space() -> int:
    """Bytes that this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _is_late(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)


def _reason(status: int, limits: Limits, longest_s: float) -> str:
    """Why a fork ended with a record that has so much time by the clock, in words for its owner."""
    advice = "Remove it, or raise data.decoding in agent.yaml."
    if not os.WIFSIGNALED(status):
        return f"its decoder failed, maybe for want of memory. {advice}"
    match os.WTERMSIG(status):
        case signal.SIGPROF:
            return f"decoding it takes more than {limits.seconds:g} s of processor time. {advice}"
        case signal.SIGALRM:
            return f"it is not decoded after {longest_s:g} s. It is tried again."
        case number:
            return f"its decoder was ended by signal {number} ({signal.strsignal(number)}). {advice}"
