"""The network in the graph: its layers in turn, and the way back through them.

Every layer is a function that appends its forward pass and returns its activations together with a
function that appends its backward pass. Before that, the places that each layer reads of its
input are found from the last layer to the first (``feature_map``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from dpagent.learning.models.layers import (
    AveragePool1d,
    AveragePool2d,
    Conv1d,
    Conv2d,
    Dense,
    GroupNorm,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Residual,
    Tanh,
)
from dpagent.learning.models.spec import Node
from dpagent.learning.training.onnx_graph import (
    average_pooling,
    convolution,
    dense,
    elementwise,
    group_norm,
    max_pooling,
)
from dpagent.learning.training.onnx_graph.feature_map import (
    FeatureMap,
    Passed,
    Places,
    all_places,
    arranged,
)
from dpagent.learning.training.onnx_graph.gradients import Gradients
from dpagent.learning.training.onnx_graph.graph import Graph


def sequence(
    graph: Graph, gradients: Gradients, nodes: Sequence[Node], x: FeatureMap, write: Places
) -> Passed:
    """The layers ``nodes`` one after the other; the last gives the places ``write``."""
    order = pooled_first(nodes)
    reads = [write]
    for node in reversed(order):
        reads.insert(0, _places_read(node, reads[0]))
    passed = Passed(x, lambda gradient: gradient)
    for node, read, places in zip(order, reads, reads[1:], strict=False):
        passed = _then(graph, gradients, passed, node, read, places)
    return passed


def pooled_first(nodes: Sequence[Node]) -> list[Node]:
    """The layers, each maximum before the activation that it follows.

    Both activations are monotone: the result is the same, and there is less of it to compute.
    """
    order = list(nodes)
    for index, (node, following) in enumerate(pairwise(nodes)):
        if isinstance(node.layer, Tanh | Relu) and isinstance(following.layer, MaxPool1d | MaxPool2d):
            order[index], order[index + 1] = following, node
    return order


def _then(
    graph: Graph, gradients: Gradients, before: Passed, node: Node, read: Places, write: Places
) -> Passed:
    """One layer more: its input brought into the order it reads, and its way back before the others'."""
    graph.scope = node.path
    x, arrange_back = before.output, None
    if not isinstance(node.layer, Conv1d | Conv2d):  # A convolution collects its rows from any order.
        x, arrange_back = arranged(graph, x, read)
    after = _layer(graph, gradients, node, x, write)

    def backward(gradient: str) -> str | None:
        graph.scope = f"{node.path}/back"
        steps = (after.backward, arrange_back, before.backward)
        current: str | None = gradient
        for step in steps:
            if current is None:
                return None
            if step is not None:
                current = step(current)
        return current

    return Passed(after.output, backward)


def _places_read(node: Node, write: Places) -> Places:
    """The places of its input that ``node`` reads in order to give ``write``, as it likes them best."""
    match node.layer:
        case Conv1d() | Conv2d():
            return convolution.places_read(node, write)
        case MaxPool1d() | MaxPool2d():
            return max_pooling.places_read(node, write)
        case AveragePool1d() | AveragePool2d():
            return average_pooling.places_read(node, write)
        case Tanh() | Relu():
            return write
        case GroupNorm() | Dense() | Residual():
            return all_places(node.input_shape)


def _layer(graph: Graph, gradients: Gradients, node: Node, x: FeatureMap, write: Places) -> Passed:
    match node.layer:
        case Conv1d() | Conv2d():
            return convolution.convolution(graph, gradients, node, x, write)
        case MaxPool1d() | MaxPool2d():
            return max_pooling.max_pool(graph, node, x, write)
        case AveragePool1d() | AveragePool2d():
            return average_pooling.average_pool(graph, node, x, write)
        case Tanh():
            return elementwise.tanh(graph, x)
        case Relu():
            return elementwise.relu(graph, x)
        case GroupNorm():
            return group_norm.group_norm(graph, node, x, write)
        case Dense():
            return dense.dense(graph, gradients, node, x)
        case Residual():
            return _residual(graph, gradients, node, x, write)


def _residual(graph: Graph, gradients: Gradients, node: Node, x: FeatureMap, write: Places) -> Passed:
    body = sequence(graph, gradients, node.body, x, write)
    shortcut = (
        sequence(graph, gradients, node.shortcut, x, write) if node.shortcut else arranged(graph, x, write)
    )
    graph.scope = node.path
    total = graph.add("Add", body.output.name, shortcut.output.name)

    def backward(gradient: str) -> str | None:
        branches = [branch.backward(gradient) for branch in (body, shortcut)]
        graph.scope = f"{node.path}/back"
        parts = [part for part in branches if part is not None]
        return graph.add("Add", *parts) if len(parts) == 2 else None

    needs = body.output.needs_gradient or shortcut.output.needs_gradient
    return Passed(replace(body.output, name=total, needs_gradient=needs), backward)
