"""Our engines, as the benchmark runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import SingleEngine
from dpagent.learning.training.engine_choice import in_processes
from dpagent.learning.training.numpy_engine.engine import NumpyEngine

ClippedSumOf = Callable[[NDArray[np.float32], NDArray[Any], NDArray[np.int64]], NDArray[np.float64]]
"""The clipped sum ``(d,)`` of weights ``(d,)``, inputs and labels."""

CLIP_NORM = 1.0
NAMES = ("numpy", "onnx")

# In a process of its own: a device gets the graph as bytes, and never loads its builder.
_BUILD = (
    "import sys; from dpagent.learning.models.built_ins import built_in;"
    " from dpagent.learning.training.onnx_graph.build import build_training_graph;"
    " sys.stdout.buffer.write(build_training_graph(built_in(sys.argv[1])))"
)


def made(name: str, spec: ModelSpec, microbatch: int) -> SingleEngine:
    """The engine called ``name`` on a built-in model."""
    if name == "numpy":
        return NumpyEngine(spec, microbatch=microbatch)
    from dpagent.learning.training.onnx_engine import OnnxEngine

    build = subprocess.run([sys.executable, "-c", _BUILD, spec.name], capture_output=True, check=True)
    return OnnxEngine(spec, build.stdout, microbatch=microbatch)


def engine(name: str, spec: ModelSpec, microbatch: int, processes: int) -> ClippedSumOf:
    """The same in so many processes, clipping whole gradients to :data:`CLIP_NORM`."""
    chosen = in_processes(made(name, spec, microbatch), processes)

    def clipped_sum(
        weights: NDArray[np.float32], inputs: NDArray[Any], labels: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return chosen.clipped_sum(weights, inputs, labels, [CLIP_NORM]).total

    return clipped_sum
