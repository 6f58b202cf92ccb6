"""Measures models in child processes, one per engine, so that each has its own memory figure.

A crash of a child (an onnxruntime that this processor cannot run, too little memory) is also a result.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from cli.interpreter import program
from dpagent.errors import ConfigurationError
from dpagent.extras import install_command
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine_choice import EngineKind

_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a measurement.

    Attributes:
        engines: to measure.
        lot: records per lot.
        microbatch, processes: as of :class:`~dpagent.learning.training.engine_choice.Bench`.
    """

    engines: tuple[EngineKind, ...]
    lot: int
    microbatch: int
    processes: int


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine on one model.

    Attributes:
        engine: its kind.
        examples_per_s: summed clipped gradients per second; None where the engine cannot run.
        peak_mib: peak resident memory of a process that does only this; None where unknown.
        lots: number of lots behind the median time.
        why_not: the reason why it cannot run, or empty.
    """

    engine: EngineKind
    examples_per_s: float | None = None
    peak_mib: float | None = None
    lots: int = 0
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """All engines on one model.

    Attributes:
        name: of the model.
        parameters: their number.
        has_front_end: whether the model has a front end, which the timing excludes.
        engines: figures per engine.
        auto: the agent's choice; None if not determined, or if no engine can run.
        auto_examples_per_s: from the agent's own short trials, by engine.
        graph_digest: SHA-256 of the training graph, if there is one.
    """

    name: str
    parameters: int
    has_front_end: bool
    engines: tuple[EngineFigures, ...]
    auto: EngineKind | None
    auto_examples_per_s: dict[str, float]
    graph_digest: str | None


def measure(spec: ModelSpec, terms: Terms, say: Callable[[str], None]) -> ModelFigures:
    """Measure one model; ``say`` receives progress messages."""
    graph, digest = _graph(spec, terms.engines)
    job = {
        "model": spec.describe(),
        "graph": None if graph is None else base64.b64encode(graph).decode(),
        "trusted": [] if digest is None else [digest],
        "microbatch": terms.microbatch,
        "processes": terms.processes,
        "lot": terms.lot,
        "seconds": _SECONDS,
        "parent": os.getpid(),
    }
    figures = []
    for kind in terms.engines:
        if kind == "onnx" and graph is None and find_spec("onnxruntime") is not None:
            figures.append(EngineFigures(kind, why_not=_no_onnx()))
            continue
        say(f"{spec.name}: {kind} …")
        found = _run(job | {"task": "measure", "engine": kind})
        figures.append(EngineFigures(kind, **found))
    choice: dict[str, Any] = {}
    if len(terms.engines) > 1:
        say(f"{spec.name}: the choice of `auto` …")
        choice = _run(job | {"task": "choose"})
    return ModelFigures(
        spec.name,
        spec.parameter_count,
        bool(spec.front_end),
        tuple(figures),
        choice.get("engine"),
        choice.get("examples_per_s", {}),
        digest,
    )


def require_any(results: Sequence[ModelFigures]) -> None:
    """Raise :class:`ConfigurationError` if no engine could be measured at all."""
    engines = [figures for result in results for figures in result.engines]
    if all(figures.examples_per_s is None for figures in engines):
        raise ConfigurationError(f"No engine can be used here: {engines[0].why_not}.")


def _graph(spec: ModelSpec, engines: Sequence[EngineKind]) -> tuple[bytes | None, str | None]:
    if "onnx" not in engines or find_spec("onnx") is None:
        return None, None
    from dpagent.learning.training.onnx_graph.build import build_training_graph
    from dpagent.learning.training.onnx_graph.signature import graph_digest

    graph = build_training_graph(spec.head)
    return graph, graph_digest(graph)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """Run the job in a child process, which never outlives the call."""
    process = subprocess.Popen(
        program("cli.bench.worker"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        output, complaint = process.communicate(json.dumps(job).encode())
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        return {"why_not": _how_it_died(process.returncode, complaint)}
    found: dict[str, Any] = json.loads(output)
    return found


def _how_it_died(code: int, complaint: bytes) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = {"SIGILL": ": a library uses instructions that this processor lacks",
                "SIGKILL": ": perhaps the system ran out of memory"}.get(name, "")  # fmt: skip
        return f"its process was ended by {name}{hint}"
    lines = complaint.decode("utf-8", "replace").strip().splitlines()
    return f"its process failed: {lines[-1][:300] if lines else f'exit code {code}'}"


def _no_onnx() -> str:
    return (
        "training graphs come from the coordinator; to build one here, install the extra 'coordinator': "
        f"{install_command('coordinator')}"
    )
