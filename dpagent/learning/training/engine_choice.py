"""The faster engine on this board, found by a trial of a second or two.

Both engines give the same sums, so the choice touches nothing but time and memory. What is tried
is public: made-up records and the seed's initial weights.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, Literal, TypeAlias

import numpy as np

from dpagent.errors import ConfigurationError, DpagentError
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import Engine
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.norm import Norm

EngineKind: TypeAlias = Literal["numpy", "onnx"]

_ROUNDS: Final = 5
_MICROBATCHES: Final = 4
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
    """

    kind: EngineKind
    examples_per_s: float
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings that an engine is made for.

    Args:
        spec: the architecture, without a front end.
        graph: the coordinator's training graph, for the ``onnx`` engine; None where there is none.
        microbatch: as of :class:`~dpagent.learning.training.engine.Engine`.
        threads: that the engine may use.
        views: of each record.
        groups: how many clip norms there are.
        norm: in which records are clipped.
        trusted: digests of graphs that the device's owner allows.
    """

    spec: ModelSpec
    graph: bytes | None = None
    microbatch: int = 32
    threads: int = 1
    views: int = 1
    groups: int = 1
    norm: Norm = Norm.L2
    trusted: Collection[str] = ()

    def make(self, kind: EngineKind) -> Engine:
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

    def _made(self, kind: EngineKind) -> Engine:
        if kind == "numpy":
            return NumpyEngine(
                self.spec,
                microbatch=self.microbatch,
                threads=self.threads,
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
            engine = OnnxEngine(
                self.spec, self.graph, microbatch=self.microbatch, threads=self.threads, trusted=self.trusted
            )
        except ConfigurationError as error:
            raise UnsuitableEngineError(str(error)) from error
        if (engine.views, engine.groups) != (self.views, self.groups):
            raise UnsuitableEngineError(
                f"the training graph is made for {engine.views} views and {engine.groups} clip norms; the"
                f" plan has {self.views} and {self.groups}"
            )
        return engine


def choose_engine(bench: Bench) -> tuple[Engine, tuple[Trial, ...]]:
    """The fastest engine that can be used on this board, and how each did.

    Raises:
        UnsuitableEngineError: none can be used.
    """
    engines: dict[EngineKind, Engine] = {}
    why_not: dict[EngineKind, str] = {}
    kinds: tuple[EngineKind, ...] = ("numpy", "onnx")
    for kind in kinds:
        try:
            engines[kind] = bench.make(kind)
        except UnsuitableEngineError as error:
            why_not[kind] = str(error)
    if not engines:
        raise UnsuitableEngineError("; ".join(why_not.values()))
    # Alternately, so that a busy moment of the board hits both.
    times: dict[EngineKind, list[float]] = {kind: [] for kind in engines}
    trial = _Trial(bench)
    for _ in range(_ROUNDS):
        for kind, engine in engines.items():
            times[kind].append(trial.seconds(engine))
    speeds = {kind: trial.records / min(seconds) for kind, seconds in times.items()}
    trials = tuple(Trial(kind, speeds.get(kind, 0.0), why_not.get(kind, "")) for kind in kinds)
    return engines[max(speeds, key=speeds.__getitem__)], trials


class _Trial:
    """A small lot of made-up records."""

    def __init__(self, bench: Bench) -> None:
        self.records = _MICROBATCHES * bench.microbatch * bench.threads
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
