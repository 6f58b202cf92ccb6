"""Group normalisation without parameters, record by record.

All sums are matrix products: ONNX Runtime's ``ReduceSum`` over the last axis begins at the next
aligned address, so that a record's sum could depend on the record's place.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpagent.learning.models.layers import GROUP_NORM_EPSILON
from dpagent.learning.training.onnx_graph.feature_map import FeatureMap, Passed, Places, arranged
from dpagent.learning.training.onnx_graph.graph import Graph


def group_norm(graph: Graph, groups: int, x: FeatureMap, write: Places) -> Passed:
    """Each group to mean 0 and variance 1. With r = 1/√(variance + ε), y = r·(x − mean(x)), and back

    dx = r·(dy − mean(dy) − y·mean(dy·y)).
    """
    size = x.channels // groups
    # One product sums over the places, the next takes the mean of each group to all of its channels.
    ones = graph.constant(np.ones((1, len(x.places))))
    spread = np.kron(np.eye(groups), np.full((size, size), 1 / (size * len(x.places))))
    averages = graph.constant(spread)

    def mean(values: str) -> str:
        return graph.product(graph.add("MatMul", ones, values), averages, x.channels)

    centred = graph.add("Sub", x.name, mean(x.name))
    variance = mean(graph.add("Mul", centred, centred))
    deviation = graph.add("Sqrt", graph.add("Add", variance, graph.constant(GROUP_NORM_EPSILON)))
    scale = graph.add("Reciprocal", deviation)
    y = graph.add("Mul", centred, scale)
    output, arrange_back = arranged(graph, replace(x, name=y), write)

    def backward(gradient: str) -> str | None:
        if not x.needs_gradient:
            return None
        dy = arrange_back(gradient)
        assert dy is not None
        along = graph.add("Mul", y, mean(graph.add("Mul", dy, y)))
        across = graph.add("Sub", graph.add("Sub", dy, mean(dy)), along)
        return graph.add("Mul", across, scale)

    return Passed(output, backward)
