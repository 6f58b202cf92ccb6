"""An engine in several processes: each computes some microbatches of a batch, and the sums are added.

The other processes are forks of this one, made when the engine is. They have the engine as it was made, in
the form that was chosen for each of its products, so a record's numbers are the same bits in each of them;
and what none of them changes is in memory once. Threads would share all of it, but small models spend a good
part of their time under the interpreter's lock. Weights, records and sums pass through shared memory.

**The sum.** A batch is cut between microbatches, so a record has the neighbours that it has in one process,
and the float32 sums are the same bits. Float64 adds them up in another order: the bound on that error holds
for any (:mod:`dpagent.learning.training.engine`).

**What fails.** Where another process has ended, fails at its share, or does not answer within a bound, this
one computes the share itself, and ends one that did not answer: the sum is the same, only later. No record
can cause any of that alone, since this process computes what the others do. The bound is public, and so long
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_count
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.arguments import require_inputs, require_labels
from dpagent.learning.training.bounds import MAX_PROCESSES
from dpagent.learning.training.engine import MICROBATCH_S, ClippedSum, Engine
from dpagent.learning.training.forks import end, forked
from dpagent.learning.training.lots import AT_ONCE
from dpagent.norm import Norm

log = logging.getLogger(__name__)

_PIECE_S: Final = 1.0
"""An answer is waited for in so many seconds at a time: a time for which this process is stopped meanwhile,
as the others are then (a pause of training), counts as one of them at most."""
_ANSWER: Final = struct.Struct("<?d")
"""Whether a share is computed, and the processor time that the process has spent, in seconds."""
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

    def __init__(self, engine: Engine, processes: int, microbatch_s: float = MICROBATCH_S) -> None:
        require_count("processes", processes, minimum=2, maximum=MAX_PROCESSES)
        self._engine = engine
        self.spec: ModelSpec = engine.spec.head
        self.microbatch, self.views = engine.microbatch, engine.views
        self._weights = _shared((self.spec.parameter_count,), np.float32)
        self._most = -(-AT_ONCE // processes) * self.microbatch
        self._forks: list[_Fork] = []
        try:
            for _ in range(processes - 1):
                self._forks.append(_Fork(engine, self._weights, self._most, microbatch_s))
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
        """End the other processes; shares are computed here from then on."""
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
        np.copyto(self._weights, weights)
        at_once = self._most * self.processes
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
        microbatches, processes = -(-len(labels) // self.microbatch), self.processes
        ends = [-(-number * microbatches // processes) * self.microbatch for number in range(processes + 1)]
        own, *others = (slice(*ends[number : number + 2]) for number in range(processes))
        with self._no_answer_left():
            asked = [
                fork.ask(inputs[part], labels[part], clip_norms)
                for fork, part in zip(self._forks, others, strict=True)
            ]
        try:
            found = [self._engine.clipped_sum(weights, inputs[own], labels[own], clip_norms)]
        finally:
            with self._no_answer_left():
                answers = [
                    fork.answer(len(clip_norms)) if was_asked else None
                    for fork, was_asked in zip(self._forks, asked, strict=True)
                ]
        for part, answer in zip(others, answers, strict=True):
            if answer is None and len(labels[part]):
                answer = self._engine.clipped_sum(weights, inputs[part], labels[part], clip_norms)
            if answer is not None:
                found.append(answer)
        return found

    @contextmanager
    def _no_answer_left(self) -> Iterator[None]:
        """End the other processes if anything fails, whatever it is: the next question would get the answer
        to this one."""
        try:
            yield
        except BaseException:
            self.close()
            raise


class _Fork:
    """Another process, the memory that it shares with this one, and the socket between both."""

    def __init__(self, engine: Engine, weights: NDArray[np.float32], rows: int, microbatch_s: float) -> None:
        spec = engine.spec.head
        self._pieces = math.ceil(rows / engine.microbatch * microbatch_s / _PIECE_S)
        """That its answer is waited for."""
        shape = (rows, engine.views, *spec.input_shape) if engine.views > 1 else (rows, *spec.input_shape)
        whole = _shared(shape, np.float32)
        bytes_of_whole = whole.reshape(-1).view(np.uint8)
        self._inputs = {"f": whole, "B": bytes_of_whole[: whole.size].reshape(shape)}
        """By the character of their type: one memory."""
        self._labels = _shared((rows,), np.int64)
        self._total = _shared(weights.shape, np.float64)
        self._within = _shared((_LONGEST // 8,), np.int64)
        self._excluded = _shared((1,), np.int64)
        self._weights = weights
        self.is_over, self.spent_s = False, 0.0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self.process = forked(lambda: self._serve(engine, theirs), theirs)
            except OSError:
                ours.close()
                raise
        self._socket = ours
        self._ended = weakref.finalize(self, end, self.process, ours)

    def is_there(self) -> bool:
        """Whether the process has not ended; between an answer and the next question."""
        if not self.is_over:
            try:
                if not self._socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK):
                    self.end()
            except BlockingIOError:
                pass
            except OSError:
                self.end()
        return not self.is_over

    def ask(self, inputs: NDArray[Any], labels: NDArray[np.int64], clip_norms: Sequence[float]) -> bool:
        """Have the process compute a share; False if there is nothing to compute, or it has ended."""
        count = len(labels)
        if self.is_over or not count:
            return False
        np.copyto(self._inputs[inputs.dtype.char][:count], inputs)
        np.copyto(self._labels[:count], labels)
        question = struct.pack(f"<cI{len(clip_norms)}d", inputs.dtype.char.encode(), count, *clip_norms)
        try:
            self._socket.send(question)
        except OSError:
            self.end()
        return not self.is_over

    def answer(self, groups: int) -> ClippedSum | None:
        """The sum of the share that was asked for; None if the process has failed at it, has ended, or does
        not answer, which ends it."""
        try:
            message = _received(self._socket, _ANSWER.size, self._pieces)
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
        is_computed, self.spent_s = _ANSWER.unpack(message)
        if not is_computed:
            return None
        return ClippedSum(self._total, self._within[:groups], int(self._excluded[0]))

    def end(self) -> None:
        """End the process, whatever it is at."""
        self.is_over = True
        self._ended()

    def _serve(self, engine: Engine, theirs: socket.socket) -> None:
        """Compute shares until the other side hangs up. In the fork."""
        while question := _received(theirs, _LONGEST):
            dtype, count, *clip_norms = struct.unpack(f"<cI{(len(question) - 5) // 8}d", question)
            inputs = self._inputs[dtype.decode()][:count]
            try:
                found = engine.clipped_sum(self._weights, inputs, self._labels[:count], clip_norms)
            except Exception:  # noqa: BLE001 - the other side computes the share, and meets it again
                is_computed = False
            else:
                self._total[...], self._within[: len(clip_norms)] = found.total, found.within
                self._excluded[0], is_computed = found.excluded, True
            theirs.send(_ANSWER.pack(is_computed, time.process_time()))


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
