"""One ONNX graph for a microbatch of private training: forward, backward, norms, clip and sum.

The coordinator builds it (``build``, which needs the ``onnx`` package), a device runs it
(:class:`~dpagent.learning.onnx_engine.OnnxEngine`, which needs ONNX Runtime). What is imported
here needs neither: what goes in and what comes out, and which graphs a device may run.
"""

from __future__ import annotations

from dpagent.learning.training_graph.signature import (
    LARGEST_SQUARE,
    MAX_VIEWS,
    RECORDS,
    Signature,
    Tensor,
    graph_digest,
    known_digests,
    layers_with_parameters,
    matrix_shape,
    signature,
    sum_of,
)

__all__ = [
    "LARGEST_SQUARE",
    "MAX_VIEWS",
    "RECORDS",
    "Signature",
    "Tensor",
    "graph_digest",
    "known_digests",
    "layers_with_parameters",
    "matrix_shape",
    "signature",
    "sum_of",
]
