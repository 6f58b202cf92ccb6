"""A dense layer: its gradient is the outer product of its input and the gradient by its output."""

from __future__ import annotations

import math

from dpagent.learning.models.spec import Node
from dpagent.learning.training.onnx_graph.feature_map import FeatureMap, Passed
from dpagent.learning.training.onnx_graph.gradients import Gradients
from dpagent.learning.training.onnx_graph.graph import Graph


def dense(graph: Graph, gradients: Gradients, node: Node, x: FeatureMap) -> Passed:
    """x·W + b of the flattened input."""
    inputs, units = math.prod(node.input_shape), node.output_shape[0]
    weight, bias = gradients.parameters(node)
    flat = graph.reshape(x.name, -1, inputs)
    y = graph.reshape(graph.product(flat, weight, units, bias=bias), -1, 1, units)

    def backward(gradient: str) -> str | None:
        incoming = graph.reshape(gradient, -1, units)
        gradients.outer_product(node, flat, incoming)
        if not x.needs_gradient:
            return None
        back = graph.product(incoming, weight, inputs, is_transposed=True)
        return graph.reshape(back, -1, len(x.places), x.channels)

    return Passed(FeatureMap(y, (0,), units, needs_gradient=True), backward)
