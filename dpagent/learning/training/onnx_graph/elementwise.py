"""Activations, value by value."""

from __future__ import annotations

from dataclasses import replace

from dpagent.learning.training.onnx_graph.feature_map import FeatureMap, Passed
from dpagent.learning.training.onnx_graph.graph import FLOAT, Graph


def tanh(graph: Graph, x: FeatureMap) -> Passed:
    """Hyperbolic tangent; its slope is found from its value."""
    y = graph.add("Tanh", x.name)

    def backward(gradient: str) -> str | None:
        if not x.needs_gradient:
            return None
        slope = graph.add("Sub", graph.constant(1.0), graph.add("Mul", y, y))
        return graph.add("Mul", gradient, slope)

    return Passed(replace(x, name=y), backward)


def relu(graph: Graph, x: FeatureMap) -> Passed:
    """max(x, 0); nothing passes back where that is 0."""
    y = graph.add("Relu", x.name)

    def backward(gradient: str) -> str | None:
        if not x.needs_gradient:
            return None
        passes = graph.add("Cast", graph.add("Greater", y, graph.constant(0.0)), to=FLOAT)
        return graph.add("Mul", gradient, passes)

    return Passed(replace(x, name=y), backward)
