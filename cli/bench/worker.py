"""A child process of ``dpagent bench``: one engine trains one model, or both compete.

``python -m cli.bench.worker`` reads a job as JSON from standard input and writes the result as JSON to
standard output. It imports only the training code, because its memory is measured.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpagent.learning.models.description import from_description
from dpagent.learning.training.engine_choice import Bench, UnsuitableEngineError, preferred, try_engines

_FEWEST_LOTS: Final = 3
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Do the job that standard input describes."""
    # Ctrl-C reaches the whole process group: this process ends at once, the command reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    job = json.load(sys.stdin)
    _die_with(job["parent"])
    bench = _bench(job)
    try:
        found = _choice(bench) if job["task"] == "choose" else _measured(bench, job)
    except UnsuitableEngineError as error:
        found = {"why_not": str(error)}
    json.dump(found, sys.stdout)


def _bench(job: dict[str, Any]) -> Bench:
    graph = None if job["graph"] is None else base64.b64decode(job["graph"])
    return Bench(
        spec=from_description(job["model"]).head,
        graph=graph,
        microbatch=job["microbatch"],
        processes=job["processes"],
        trusted=job["trusted"],
    )


def _choice(bench: Bench) -> dict[str, Any]:
    """What the agent's own calibration says."""
    trials = try_engines(bench)
    return {
        "engine": preferred(trials).kind,
        "examples_per_s": {trial.kind: trial.examples_per_s for trial in trials},
    }


def _measured(bench: Bench, job: dict[str, Any]) -> dict[str, Any]:
    """Median time of a lot of made-up records, and the peak of this process's memory."""
    engine = bench.make(job["engine"], bench.processes)
    spec, lot = bench.spec, job["lot"]
    generator = np.random.default_rng(0)
    shape = (lot, *spec.input_shape)
    # As records lie in memory: pictures as bytes, readings and features as floats.
    if len(spec.input_shape) == 3 and spec.input_shape[-1] in (1, 3):
        inputs: Any = generator.integers(0, 256, shape, np.uint8)
    else:
        inputs = generator.random(shape, np.float32)
    labels = generator.integers(0, spec.classes, lot)
    weights = spec.initial_weights(0)
    few = bench.microbatch * bench.processes
    engine.clipped_sum(weights, inputs[:few], labels[:few], [1.0])
    times = list(
        _times(lambda: engine.clipped_sum(weights, inputs, labels, [1.0]), job["seconds"], job["parent"])
    )
    return {
        "examples_per_s": lot / statistics.median(times),
        "lots": len(times),
        "peak_mib": _peak_mib(),
    }


def _times(step: Any, least_s: float, parent: int) -> Iterator[float]:
    """Seconds a step, for so long, and not less than three times."""
    total, count = 0.0, 0
    while total < least_s or count < _FEWEST_LOTS:
        if os.getppid() != parent:
            sys.exit(1)  # Nobody waits for it any more.
        began = time.perf_counter()
        step()
        taken = time.perf_counter() - began
        total, count = total + taken, count + 1
        yield taken


def _peak_mib() -> float | None:
    """Peak of the resident memory (VmHWM), where the system tells it."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _die_with(parent: int) -> None:
    """On Linux the kernel ends this process should the command itself be killed."""
    import ctypes

    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):
        return  # The look at the parent between two lots is left.
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
