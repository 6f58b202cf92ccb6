"""The two ends of the network: the preprocessing of the input, and the gradient of the loss."""

from __future__ import annotations

import math

import numpy as np

from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.onnx_graph.graph import FLOAT, Graph


def centred(graph: Graph, spec: ModelSpec, inputs: str) -> str:
    """(x − offset) / scale, ``(rows, places, channels)``."""
    graph.scope = "input"
    channels = spec.input_shape[-1]
    x = inputs
    for operator, numbers, neutral in (("Sub", spec.input_offset, 0.0), ("Div", spec.input_scale, 1.0)):
        if np.any(np.not_equal(numbers, neutral)):
            # Over rows as long as can be: of a last axis of one, the runtime makes a loop of calls.
            row = math.prod(spec.input_shape) if np.ndim(numbers) == 0 else channels
            x = graph.add(operator, graph.reshape(x, -1, row), graph.constant(numbers))
    return graph.reshape(x, -1, math.prod(spec.input_shape[:-1]), channels)


def loss_gradient(graph: Graph, logits: str, labels: str, *, classes: int, views: int) -> str:
    """The gradient of the loss by the logits, ``(rows, 1, classes)``; the loss is a mean over views."""
    graph.scope = "loss"
    flat = graph.reshape(logits, -1, views, classes)
    probabilities = graph.add("Softmax", flat, axis=-1)
    targets = graph.add(
        "Equal", graph.reshape(labels, -1, 1, 1), graph.constant(np.arange(classes), np.int64)
    )
    gradient = graph.add("Sub", probabilities, graph.add("Cast", targets, to=FLOAT))
    if views > 1:
        gradient = graph.add("Mul", gradient, graph.constant(1 / views))
    return graph.reshape(gradient, -1, 1, classes)
