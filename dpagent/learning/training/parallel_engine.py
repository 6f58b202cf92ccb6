"""An engine in several processes: each takes microbatches while there are any, and the sums are added.

The other processes are forks of this one, made when the engine is. They have the engine as it was made, in
the form that was chosen for each of its products, so a record's numbers are the same bits in each of them;
and what none of them changes is in memory once. Threads would share all of it, but small models spend a good
part of their time under the interpreter's lock. Weights, records and sums pass through shared memory.

**The work.** Each process has a microbatch of its own in any batch that is long enough, so what it takes of
memory shows in a trial; the others are taken by whoever comes first
(:mod:`~dpagent.learning.training.work_queue`), so none waits long for one whose core is busy.

**The sum.** A process computes whole microbatches, so a record has the neighbours that it has in one process,
and the float32 sums are the same bits. Float64 adds them up in another order, which is a matter of time: the
bound on that error holds for any (:mod:`dpagent.learning.training.engine`).

**What fails.** Where another process has ended, fails, or does not answer within a bound, this one computes
what that one has taken, and ends one that did not answer: the sum is the same, only later. No record can
cause any of that alone, since this process computes what the others do. The bound is public, and so long
that an engine which is as slow as a trial allows keeps it. The other processes end when this one does,
however it ends.

**Memory.** What a process and its fork share, the system copies when either writes to it. What this process
has freed and keeps for itself (:mod:`agent.child_programs`) would so be taken anew as it is used again, and
how much of it is used may be a matter of records: so a fork lets go of it at once.
"""

from __future__ import annotations

import logging
import math
import mmap
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_count
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.arguments import require_inputs, require_labels
from dpagent.learning.training.bounds import MAX_PROCESSES
from dpagent.learning.training.engine import MICROBATCH_S, ClippedSum, SingleEngine
from dpagent.learning.training.forks import end, forked
from dpagent.learning.training.lots import AT_ONCE
from dpagent.learning.training.work_queue import LONGEST, WorkQueue
from dpagent.norm import Norm

log = logging.getLogger(__name__)

_PIECE_S: Final = 1.0
"""An answer is waited for in so many seconds at a time: a time for which this process is stopped meanwhile,
as the others are then (a pause of training), counts as one of them at most."""
_ANSWER: Final = struct.Struct("<?d")
"""Whether all is computed that was taken, and the processor time that the process has spent, in seconds. The
numbers of the microbatches follow, a byte each."""
_MICROBATCHES: Final = 4
"""As long as so many take, an answer is waited for. No process has more than one left to compute then, since
there are none to take any more; but that may be all that it had time for in a trial, which takes as long."""
_WATCH_S: Final = 0.001
"""A message is looked for so long before its reader sleeps: to be woken takes a tenth of a millisecond, and a
batch of a small model two."""
_LONGEST: Final = 1 << 16
"""Bytes of a question: a clip norm for each of as many layers as a model may have, and more."""


class ParallelEngine:
    """Computes what an engine computes, in several processes; see :class:`Engine` for its attributes.

    Args:
        engine: that computes; it is not to be used beside this one.
        processes: this one and its forks, in ``2..MAX_PROCESSES``.
        microbatch_s: in which another process that is still of use computes a microbatch, by the clock.

    Raises:
        ParameterError: the number is out of its range.
        OSError: no further process can be started.

    The engine is not thread-safe: one call at a time.
    """

    def __init__(self, engine: SingleEngine, processes: int, microbatch_s: float = MICROBATCH_S) -> None:
        require_count("processes", processes, minimum=2, maximum=MAX_PROCESSES)
        self._engine = engine
        self.spec: ModelSpec = engine.spec.head
        self.microbatch, self.views = engine.microbatch, engine.views
        self._work = _Work(engine)
        self._forks: list[_Fork] = []
        try:
            for number in range(1, processes):
                self._forks.append(_Fork(engine, self._work, number, microbatch_s))
        except OSError:
            self.close()
            raise

    @property
    def norm(self) -> Norm:
        """As of the engine."""
        return self._engine.norm

    @property
    def elsewhere_s(self) -> float:
        """Processor time that the other processes have spent so far, in seconds."""
        return sum(fork.spent_s for fork in self._forks)

    @property
    def processes(self) -> int:
        """This one and its forks."""
        return 1 + len(self._forks)

    @property
    def forks(self) -> list[int]:
        """The ids of the other processes."""
        return [fork.process for fork in self._forks]

    @property
    def is_whole(self) -> bool:
        """Whether no process has ended."""
        return all(fork.is_there() for fork in self._forks)

    def close(self) -> None:
        """End the other processes; all is computed here from then on."""
        for fork in self._forks:
            fork.end()

    def clipped_sum(
        self,
        weights: NDArray[np.float32],
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
        clip_norms: Sequence[float],
    ) -> ClippedSum:
        """Clip each record's gradient and add up; see :meth:`Engine.clipped_sum`."""
        self.spec.require_weights(weights)
        require_inputs(self.spec, inputs, self.views)
        require_labels(self.spec, labels, len(inputs))
        np.copyto(self._work.weights, weights)
        at_once = AT_ONCE * self.microbatch
        shares = (
            share
            for start in range(0, max(len(labels), 1), at_once)
            for share in self._in_shares(
                weights, inputs[start : start + at_once], labels[start : start + at_once], clip_norms
            )
        )
        total, within, excluded = next(shares)  # Of this process, which keeps no sum.
        for share in shares:
            total += share.total
            within += share.within
            excluded += share.excluded
        return ClippedSum(total, within, excluded)

    def is_batch_invariant(self, seed: int | None = None) -> bool:
        """As of the engine, in this process: the others compute with its very copies."""
        return self._engine.is_batch_invariant(seed)

    def _in_shares(
        self,
        weights: NDArray[np.float32],
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
        clip_norms: Sequence[float],
    ) -> list[ClippedSum]:
        """The sums of this process and of the others, in that order."""
        work, taken = self._work, bytearray()
        microbatches = range(-(-len(labels) // self.microbatch))
        question = work.offered(inputs, labels, clip_norms, microbatches[self.processes :])
        asked = [fork for fork in self._forks[: len(microbatches[1:])] if fork.ask(question)]
        mine = _noted(chain(microbatches[:1], work.queue.taken()), taken)
        try:
            found = [self._engine.clipped_sum(weights, inputs, labels, clip_norms, mine)]
        finally:  # A process that has answered can be asked again.
            work.queue.fill(range(0))  # Where this one fails, none begins another microbatch.
            answers = [fork.answer(len(clip_norms)) for fork in asked]
        for numbers, part in filter(None, answers):
            taken += numbers
            found.append(part)
        if left := sorted(set(microbatches).difference(taken)):
            found.append(self._engine.clipped_sum(weights, inputs, labels, clip_norms, left))
        return found


class _Work:
    """A batch in memory that all processes share, and the queue of its microbatches."""

    def __init__(self, engine: SingleEngine) -> None:
        spec = engine.spec.head
        rows = AT_ONCE * engine.microbatch
        shape = (rows, engine.views, *spec.input_shape) if engine.views > 1 else (rows, *spec.input_shape)
        whole = _shared(shape, np.float32)
        bytes_of_whole = whole.reshape(-1).view(np.uint8)
        self._inputs = {"f": whole, "B": bytes_of_whole[: whole.size].reshape(shape)}
        """By the character of their type: one memory."""
        self._labels = _shared((rows,), np.int64)
        self.weights = _shared((spec.parameter_count,), np.float32)
        self.queue = WorkQueue()

    def offered(
        self,
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
        clip_norms: Sequence[float],
        microbatches: range,
    ) -> bytes:
        """The question for the sum of a batch, of which these microbatches are for whoever comes first."""
        count = len(labels)
        np.copyto(self._inputs[inputs.dtype.char][:count], inputs)
        np.copyto(self._labels[:count], labels)
        self.queue.fill(microbatches)
        return struct.pack(f"<cI{len(clip_norms)}d", inputs.dtype.char.encode(), count, *clip_norms)

    def asked(self, question: bytes) -> tuple[NDArray[Any], NDArray[np.int64], list[float]]:
        """Inputs, labels and clip norms of a question."""
        dtype, count, *clip_norms = struct.unpack(f"<cI{(len(question) - 5) // 8}d", question)
        return self._inputs[dtype.decode()][:count], self._labels[:count], clip_norms


class _Fork:
    """Another process, the memory in which its sum is, and the socket between both."""

    def __init__(self, engine: SingleEngine, work: _Work, number: int, microbatch_s: float) -> None:
        self._number = number
        """Of the microbatch that is its own in any case."""
        self._pieces = math.ceil(_MICROBATCHES * microbatch_s / _PIECE_S)
        """That its answer is waited for."""
        self._total = _shared(work.weights.shape, np.float64)
        self._within = _shared((_LONGEST // 8,), np.int64)
        self._excluded = _shared((1,), np.int64)
        self.is_over, self.spent_s = False, 0.0
        self._owes = False
        """An answer, which the next question would get: nobody has taken it, if anything failed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            kept = theirs.fileno(), work.queue.descriptor
            try:
                self.process = forked(lambda: self._serve(engine, work, theirs), *kept)
            except OSError:
                ours.close()
                raise
        self._socket = ours
        self._ended = weakref.finalize(self, end, self.process, ours)

    def is_there(self) -> bool:
        """Whether the process can be asked: it has not ended, and owes no answer."""
        if self._owes:
            self.end()
        elif not self.is_over:
            try:
                if not self._socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK):
                    self.end()
            except BlockingIOError:
                pass
            except OSError:
                self.end()
        return not self.is_over

    def ask(self, question: bytes) -> bool:
        """Have the process take a part of the work; False if it has ended, as one does now that owes an
        answer."""
        if self._owes:
            self.end()
        elif not self.is_over:
            self._owes = True
            try:
                self._socket.send(question)
            except OSError:
                self.end()
        return not self.is_over

    def answer(self, groups: int) -> tuple[bytes, ClippedSum] | None:
        """The numbers of the microbatches that it has taken, and their sum; None if the process has failed at
        one, has ended, or does not answer, which ends it."""
        try:
            message = _received(self._socket, _ANSWER.size + LONGEST, self._pieces)
        except TimeoutError:
            log.warning(
                "process %d of training has not answered for %g s, and is ended; its part of the work is done"
                " here, later, and counts",
                self.process, self._pieces * _PIECE_S,
            )  # fmt: skip
            message = b""
        except OSError:
            message = b""
        if not message:
            self.end()
            return None
        is_computed, self.spent_s = _ANSWER.unpack_from(message)
        self._owes = False
        if not is_computed:
            return None
        return message[_ANSWER.size :], ClippedSum(self._total, self._within[:groups], int(self._excluded[0]))

    def end(self) -> None:
        """End the process, whatever it is at."""
        self.is_over = True
        self._ended()

    def _serve(self, engine: SingleEngine, work: _Work, theirs: socket.socket) -> None:
        """Take part in batches until the other side hangs up. In the fork."""
        while question := _received(theirs, _LONGEST):
            inputs, labels, clip_norms = work.asked(question)
            taken = bytearray()
            mine = _noted(chain([self._number], work.queue.taken()), taken)
            try:
                found = engine.clipped_sum(work.weights, inputs, labels, clip_norms, mine)
            except Exception:  # noqa: BLE001 - the other side computes what was taken, and meets it again
                is_computed = False
            else:
                self._total[...], self._within[: len(clip_norms)] = found.total, found.within
                self._excluded[0], is_computed = found.excluded, True
            theirs.send(_ANSWER.pack(is_computed, time.process_time()) + taken)


def _noted(numbers: Iterable[int], taken: bytearray) -> Iterator[int]:
    """The same numbers, of which those that were asked for are noted."""
    for number in numbers:
        taken.append(number)
        yield number


def _received(connection: socket.socket, size: int, pieces: int | None = None) -> bytes:
    """The next message, of at most ``size`` bytes; empty if the other side has hung up.

    Args:
        connection: to the other side.
        size: bytes.
        pieces: of :data:`_PIECE_S`, that it is waited for; None: however long it takes.

    Raises:
        TimeoutError: none has come.
        OSError: as of :meth:`socket.socket.recv`.
    """
    until = time.perf_counter() + _WATCH_S
    while time.perf_counter() < until:
        with suppress(BlockingIOError):
            return connection.recv(size, socket.MSG_DONTWAIT)
    if pieces is not None:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not any(poll.poll(1_000 * _PIECE_S) for _ in range(pieces)):
            raise TimeoutError
    return connection.recv(size)


def _shared(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that forks share."""
    return np.frombuffer(mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(shape)
