"""The program that makes a model's ONNX files: ``python -m coordinator.model_program``, started by
:mod:`coordinator.model_making`, answers one request and ends."""

from __future__ import annotations

import pickle
import sys

import numpy as np

from coordinator.model_making import Request, TrainingGraph, Unfilled
from dpagent.errors import DpagentError
from dpagent.extras import extra_needed


def made(request: Request) -> bytes:
    """The file that is asked for.

    Raises:
        DpagentError: it cannot be made; the text gives the reason.
    """
    with extra_needed("coordinator", "The program that makes a model's files"):
        from dpagent.learning.inference.export.model import export_onnx
        from dpagent.learning.training.onnx_graph.build import build_training_graph

    match request:
        case TrainingGraph(spec, views, per_layer):
            return build_training_graph(spec, views=views, per_layer=per_layer)
        case Unfilled(spec, assets):
            nothing = np.zeros(spec.parameter_count, np.float32)
            return export_onnx(spec, nothing, metadata={}, assets=dict(assets))


def main() -> None:
    """Answer the request on standard input."""
    answer: bytes | DpagentError
    try:
        answer = made(pickle.load(sys.stdin.buffer))
    except DpagentError as error:
        answer = error
    sys.stdout.buffer.write(pickle.dumps(answer))


if __name__ == "__main__":
    main()
