"""The engine for this board, and in how many processes, found by a trial of a second or two: the fastest that
is worth its memory.

All give the same sums, to the float64 error that the noise allows for, so the choice touches nothing but time
and memory. What is tried is public: made-up records and the seed's initial weights. Engines that take more
memory than they may are left out, and so are more processes than fit.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from dpagent.errors import ConfigurationError, DpagentError
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import MICROBATCH_S, Engine, SingleEngine
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.process_memory import own_mib, shared_mib
from dpagent.learning.trial_numbers import TrialNumbers
from dpagent.norm import Norm

if TYPE_CHECKING:
    import socket

    from dpagent.learning.training.parallel_engine import ParallelEngine

log = logging.getLogger(__name__)

EngineKind: TypeAlias = Literal["numpy", "onnx"]
_Seconds: TypeAlias = dict[int, float]
"""That a small lot of made-up records takes, by the number of processes."""

_ROUNDS: Final = 5
_TRIED_S: Final = 0.5
_MICROBATCHES: Final = 4
_WORTHWHILE: Final = 1.1
"""How much faster more processes must be, since each takes memory."""
_WORTHWHILE_PACKAGE: Final = 1.5
"""How much faster an engine must be whose package nothing else needs: ONNX Runtime takes 45 MiB."""
_TRIAL_S: Final = _MICROBATCHES * MICROBATCH_S
"""For one timing. An emulated board imports onnxruntime in ten seconds, and takes more to check an engine."""
_LONGEST: Final = 1 << 16
"""Bytes of a fork's answer, at most."""
_PACKAGES: Final[dict[EngineKind, str]] = {"numpy": "numpy", "onnx": "onnxruntime"}


class UnsuitableEngineError(DpagentError):
    """No engine can be used on this board; the text says why."""


@dataclass(frozen=True, slots=True)
class Trial:
    """How an engine did.

    Attributes:
        kind: of the engine.
        examples_per_s: gradients computed, clipped and added up, or 0 where it cannot be used.
        why_not: why it cannot be used, or empty.
        processes: in how many it did so.
    """

    kind: EngineKind
    examples_per_s: float
    why_not: str = ""
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings that an engine is made for.

    Args:
        spec: the architecture, without a front end.
        graph: the coordinator's training graph, for the ``onnx`` engine; None where there is none.
        microbatch: as of :class:`~dpagent.learning.training.engine.Engine`.
        processes: that may compute side by side, at most.
        memory_mib: that an engine may take with all its processes, besides what the program has anyway; None
            if nothing limits it.
        views: of each record.
        groups: how many clip norms there are.
        norm: in which records are clipped.
        trusted: digests of graphs that the device's owner allows.
        processor_share: part of the time, in (0, 1], in which this process and its forks run at all. What is
            too slow is judged by the time in which they do.
    """

    spec: ModelSpec
    graph: bytes | None = None
    microbatch: int = 32
    processes: int = 1
    memory_mib: int | None = None
    views: int = 1
    groups: int = 1
    norm: Norm = Norm.L2
    trusted: Collection[str] = ()
    processor_share: float = 1.0

    @property
    def trial_s(self) -> float:
        """For one timing, by the clock."""
        return _TRIAL_S / self.processor_share

    def make(self, kind: EngineKind, processes: int = 1) -> Engine:
        """The engine of that kind, checked on this board; in one process if no others can be started.

        Raises:
            UnsuitableEngineError: as of :meth:`single`.
        """
        return self.in_processes(self.single(kind), processes)

    def single(self, kind: EngineKind) -> SingleEngine:
        """The engine of that kind, checked on this board.

        Raises:
            UnsuitableEngineError: it cannot be made here, or a record's numbers would depend on others.
        """
        engine = self._made(kind)
        if not engine.is_batch_invariant():
            raise UnsuitableEngineError(
                f"the {kind} engine's numbers for a record depend on its neighbours on this board, so the"
                f" guarantee would not hold; use another build of {_PACKAGES[kind]}"
            )
        return engine

    def in_processes(self, engine: SingleEngine, processes: int) -> Engine:
        """As :func:`in_processes`, on this board."""
        return in_processes(engine, processes, MICROBATCH_S / self.processor_share)

    def _made(self, kind: EngineKind) -> SingleEngine:
        if kind == "numpy":
            return NumpyEngine(
                self.spec,
                microbatch=self.microbatch,
                views=self.views,
                norm=self.norm,
            )
        if self.norm is not Norm.L2:
            raise UnsuitableEngineError(
                f"training graphs clip records in L2; the plan's mechanism needs {self.norm}, which the numpy"
                " engine can"
            )
        if find_spec("onnxruntime") is None:
            raise UnsuitableEngineError("onnxruntime is not installed on this board")
        if self.graph is None:
            raise UnsuitableEngineError("the coordinator sent no training graph")
        from dpagent.learning.training.onnx_engine import OnnxEngine

        try:
            engine = OnnxEngine(self.spec, self.graph, microbatch=self.microbatch, trusted=self.trusted)
        except ConfigurationError as error:
            raise UnsuitableEngineError(str(error)) from error
        if (engine.views, engine.groups) != (self.views, self.groups):
            raise UnsuitableEngineError(
                f"the training graph is made for {engine.views} views and {engine.groups} clip norms; the"
                f" plan has {self.views} and {self.groups}"
            )
        return engine


def in_processes(engine: SingleEngine, processes: int, microbatch_s: float = MICROBATCH_S) -> Engine:
    """An engine that computes in so many processes; in one if no others can be started.

    Args:
        engine: that computes.
        processes: at least 1.
        microbatch_s: as of :class:`~dpagent.learning.training.parallel_engine.ParallelEngine`.
    """
    if processes == 1:
        return engine
    from dpagent.learning.training.parallel_engine import ParallelEngine

    try:
        return ParallelEngine(engine, processes, microbatch_s)
    except OSError as error:
        log.warning("training has one process, since no other can be started: %s", error)
        return engine


def parallel(engine: Engine | None) -> ParallelEngine | None:
    """The engine if it computes in several processes."""
    if engine is None or engine.processes == 1:
        return None
    from dpagent.learning.training.parallel_engine import ParallelEngine

    return engine if isinstance(engine, ParallelEngine) else None


def choose_engine(
    bench: Bench, kinds: Sequence[EngineKind] = ("numpy", "onnx")
) -> tuple[Engine, tuple[Trial, ...]]:
    """The engine to use on this board, and how each kind did.

    Args:
        bench: what it is for.
        kinds: to choose from, the one that takes the least memory first.

    Raises:
        UnsuitableEngineError: none can be used.
    """
    trials = try_engines(bench, kinds)
    best = preferred(trials)
    return bench.make(best.kind, best.processes), trials


def preferred(trials: Iterable[Trial]) -> Trial:
    """The trial of the engine to take: of the first that can be used, or of one that is so much faster as to
    be worth its memory."""
    best, *others = [trial for trial in trials if trial.examples_per_s > 0]
    for trial in others:
        if trial.examples_per_s > _WORTHWHILE_PACKAGE * best.examples_per_s:
            best = trial
    return best


def try_engines(bench: Bench, kinds: Sequence[EngineKind] = ("numpy", "onnx")) -> tuple[Trial, ...]:
    """How each kind of engine does on this board, in as many processes as pay.

    A kind is tried in a process of its own, which ends with the trial, before the next one is. So its package
    takes no memory from then on, and one that is built for another processor ends that process alone.

    Args:
        bench: what they are for.
        kinds: to try.

    Raises:
        UnsuitableEngineError: none can be used.
    """
    counts = sorted({1, min(2, bench.processes), bench.processes})
    trials: list[Trial] = []
    for kind in kinds:
        try:
            trials.append(_trial(kind, bench, _timed(bench, kind, counts)))
        except UnsuitableEngineError as error:
            trials.append(Trial(kind, 0.0, str(error)))
    if all(trial.why_not for trial in trials):
        raise UnsuitableEngineError("; ".join(trial.why_not for trial in trials))
    return tuple(trials)


def _timed(bench: Bench, kind: EngineKind, counts: Sequence[int]) -> list[_Seconds]:
    """Timings of one kind: several, and for a while, of which the least counts.

    Raises:
        UnsuitableEngineError: the engine cannot be used.
    """
    with closing(_timings_elsewhere(bench, kind, counts)) as timings:
        found = [next(timings)]
        began = time.perf_counter()
        while len(found) < _ROUNDS or time.perf_counter() < began + _TRIED_S:
            found.append(next(timings))
    return found


def _trial(kind: EngineKind, bench: Bench, seconds: Sequence[_Seconds]) -> Trial:
    """How a kind did, in as many processes as pay."""
    records = _Lot.size(bench)
    speeds = {count: records / min(each[count] for each in seconds) for count in seconds[0]}
    best = 1
    for count in sorted(speeds):
        if speeds[count] > _WORTHWHILE * speeds[best]:
            best = count
    return Trial(kind, speeds[best], processes=best)


def _timings(bench: Bench, kind: EngineKind, counts: Sequence[int]) -> Iterator[_Seconds]:
    """The time that a small lot takes, again and again, in as many processes as fit into the memory.

    Raises:
        UnsuitableEngineError: the engine cannot be used.
    """
    before_mib = _own_mib_here() if bench.memory_mib is not None else 0.0
    engine, lot = bench.single(kind), _Lot(bench)
    if bench.memory_mib is not None:
        counts = _fitting(bench, engine, counts, lot, before_mib, bench.memory_mib)
    made = [bench.in_processes(engine, count) for count in counts]
    engines = {each.processes: each for each in made}
    while True:
        yield {count: lot.seconds(engine) for count, engine in engines.items()}


def _fitting(
    bench: Bench, engine: SingleEngine, counts: Sequence[int], lot: _Lot, before_mib: float, limit_mib: int
) -> list[int]:
    """The numbers of processes in which an engine takes no more memory than it may; one alone, where the
    system does not say.

    Raises:
        UnsuitableEngineError: it takes more in one.
    """
    lot.seconds(engine)
    alone = _own_mib_here() - before_mib
    if alone > limit_mib:
        raise UnsuitableEngineError(
            f"for this model it takes {math.ceil(alone)} MiB; engine_memory_mib of the profile is {limit_mib}"
        )
    fitting = [1]
    for count in [count for count in counts if count > 1]:
        if (made := parallel(bench.in_processes(engine, count))) is None:
            break
        lot.seconds(made)
        # What this process had alone, its forks have too now, until one of them writes to it.
        with suppress(OSError):
            if alone + own_mib(*made.forks) + shared_mib(os.getpid(), *made.forks) <= limit_mib:
                fitting.append(count)
        made.close()
    return fitting


def _own_mib_here() -> float:
    """Of this process; 0 where the system does not say."""
    try:
        return own_mib(os.getpid())
    except OSError:
        return 0.0


def _timings_elsewhere(bench: Bench, kind: EngineKind, counts: Sequence[int]) -> Generator[_Seconds]:
    """As :func:`_timings`, in a process of its own; in this one, if no other can be started."""
    import socket  # Neither does an engine need that is known.

    from dpagent.learning.training.forks import end, forked

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            try:
                process = forked(lambda: _answer(_timings(bench, kind, counts), theirs), theirs.fileno())
            except OSError as error:
                log.warning("engines are tried in this process, since no other can be started: %s", error)
                process = None
        if process is None:
            yield from _timings(bench, kind, counts)
            return
        try:
            ours.settimeout(bench.trial_s)
            while True:
                yield _answered(ours, kind, bench.trial_s)
        finally:
            end(process, ours)


def _answer(timings: Iterator[_Seconds], asked: socket.socket) -> None:
    """Send one timing for each question. In the fork."""
    logging.disable()  # The way to the log is the parent's.
    while asked.recv(1):
        try:
            answer: dict[str, Any] = {"seconds": [*next(timings).items()]}
        except UnsuitableEngineError as error:
            answer = {"why_not": str(error)}
        asked.send(json.dumps(answer).encode())


def _answered(asked: socket.socket, kind: EngineKind, trial_s: float) -> _Seconds:
    """The next timing of a fork, which may take so long.

    Raises:
        UnsuitableEngineError: there is none.
    """
    package = _PACKAGES[kind]
    try:
        asked.send(b"?")
        message = asked.recv(_LONGEST)
    except TimeoutError as error:
        raise UnsuitableEngineError(f"a trial of {package} did not end within {trial_s:g} s") from error
    except OSError:
        message = b""
    if not message:
        raise UnsuitableEngineError(
            f"a trial of {package} ended its process: it is built for another processor, or needs more "
            "memory than there is"
        )
    answer = json.loads(message)
    if "why_not" in answer:
        raise UnsuitableEngineError(answer["why_not"])
    return dict(answer["seconds"])


class _Lot:
    """A small lot of made-up records."""

    def __init__(self, bench: Bench) -> None:
        records = self.size(bench)
        numbers = TrialNumbers(0)
        shape = bench.spec.input_shape if bench.views == 1 else (bench.views, *bench.spec.input_shape)
        self._inputs = numbers.uniform((records, *shape))
        self._labels = numbers.integers(bench.spec.classes, records)
        self._weights = bench.spec.initial_weights(0)
        self._norms = [1.0] * bench.groups

    @staticmethod
    def size(bench: Bench) -> int:
        """Number of its records."""
        return _MICROBATCHES * bench.microbatch * bench.processes

    def seconds(self, engine: Engine) -> float:
        """How long the lot takes: by the clock, or in processor time where that is less, which other programs
        do not lengthen."""
        began, used = time.perf_counter(), time.process_time() + engine.elsewhere_s
        engine.clipped_sum(self._weights, self._inputs, self._labels, self._norms)
        took = time.perf_counter() - began
        return min(took, time.process_time() + engine.elsewhere_s - used)
