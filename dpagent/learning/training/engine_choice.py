"""The fastest engine on this board, and in how many processes, found by a trial of a second or two.

All give the same sums, to the float64 error that the noise allows for, so the choice touches nothing but time
and memory. What is tried is public: made-up records and the seed's initial weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, Literal, TypeAlias

import numpy as np

from dpagent.errors import ConfigurationError, DpagentError
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import Engine
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.parallel_engine import ParallelEngine
from dpagent.norm import Norm

log = logging.getLogger(__name__)

EngineKind: TypeAlias = Literal["numpy", "onnx"]

_ROUNDS: Final = 5
_MICROBATCHES: Final = 4
_WORTHWHILE: Final = 1.1
"""How much faster more processes must be, since each takes memory."""
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
        views: of each record.
        groups: how many clip norms there are.
        norm: in which records are clipped.
        trusted: digests of graphs that the device's owner allows.
    """

    spec: ModelSpec
    graph: bytes | None = None
    microbatch: int = 32
    processes: int = 1
    views: int = 1
    groups: int = 1
    norm: Norm = Norm.L2
    trusted: Collection[str] = ()

    def make(self, kind: EngineKind, processes: int = 1) -> Engine:
        """The engine of that kind, checked on this board; in one process if no others can be started.

        Raises:
            UnsuitableEngineError: it cannot be made here, or a record's numbers would depend on others.
        """
        engine = self._made(kind)
        if not engine.is_batch_invariant():
            raise UnsuitableEngineError(
                f"the {kind} engine's numbers for a record depend on its neighbours on this board, so the"
                f" guarantee would not hold; use another build of {_PACKAGES[kind]}"
            )
        return in_processes(engine, processes)

    def _made(self, kind: EngineKind) -> Engine:
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


def in_processes(engine: Engine, processes: int) -> Engine:
    """An engine that computes in so many processes; in one if no others can be started."""
    if processes == 1:
        return engine
    try:
        return ParallelEngine(engine, processes)
    except OSError as error:
        log.warning("training has one process, since no other can be started: %s", error)
        return engine


def choose_engine(
    bench: Bench, kinds: Sequence[EngineKind] = ("numpy", "onnx")
) -> tuple[Engine, tuple[Trial, ...]]:
    """The fastest engine that can be used on this board, and how each kind did, in the processes it takes.

    Args:
        bench: what it is for.
        kinds: to choose from.

    Raises:
        UnsuitableEngineError: none can be used.
    """
    engines: dict[EngineKind, Engine] = {}
    why_not: dict[EngineKind, str] = {}
    for kind in kinds:
        try:
            engines[kind] = bench.make(kind)
        except UnsuitableEngineError as error:
            why_not[kind] = str(error)
    if not engines:
        raise UnsuitableEngineError("; ".join(why_not.values()))
    counts = sorted({1, min(2, bench.processes), bench.processes})
    made = [(kind, in_processes(engine, count)) for kind, engine in engines.items() for count in counts]
    candidates = {(kind, engine.processes): engine for kind, engine in made}
    # Alternately, so that a busy moment of the board hits all.
    times: dict[tuple[EngineKind, int], list[float]] = {key: [] for key in candidates}
    lot = _Trial(bench)
    for _ in range(_ROUNDS):
        for key, engine in candidates.items():
            times[key].append(lot.seconds(engine))
    speeds = {key: lot.records / min(seconds) for key, seconds in times.items()}
    trials = []
    for kind in kinds:
        count = 1
        for more in counts:
            if speeds.get((kind, more), 0.0) > _WORTHWHILE * speeds.get((kind, count), 0.0):
                count = more
        trials.append(Trial(kind, speeds.get((kind, count), 0.0), why_not.get(kind, ""), count))
    best = max(trials, key=lambda trial: trial.examples_per_s)
    chosen = candidates[best.kind, best.processes]
    for engine in candidates.values():
        if isinstance(engine, ParallelEngine) and engine is not chosen:
            engine.close()
    return chosen, tuple(trials)


class _Trial:
    """A small lot of made-up records."""

    def __init__(self, bench: Bench) -> None:
        self.records = _MICROBATCHES * bench.microbatch * bench.processes
        generator = np.random.default_rng(0)
        shape = bench.spec.input_shape if bench.views == 1 else (bench.views, *bench.spec.input_shape)
        self._inputs = generator.random((self.records, *shape), np.float32)
        self._labels = generator.integers(0, bench.spec.classes, self.records)
        self._weights = bench.spec.initial_weights(0)
        self._norms = [1.0] * bench.groups

    def seconds(self, engine: Engine) -> float:
        """How long the lot takes."""
        began = time.perf_counter()
        engine.clipped_sum(self._weights, self._inputs, self._labels, self._norms)
        return time.perf_counter() - began
