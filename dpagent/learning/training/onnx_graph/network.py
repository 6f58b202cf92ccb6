"""The network in the graph: its layers in turn, and the way back through them.

Every layer is a function that appends its forward pass and returns its activations together with a
function that appends its backward pass. Before that, the places that each layer reads of its
input are found from the last layer to the first (``feature_map``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, assert_never

from dpagent.learning.models.layers import (
    Activation,
    AveragePool,
    Convolution,
    Dense,
    GroupNorm,
    MaxPool,
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


class _Step(NamedTuple):
    """One layer, before anything is appended.

    Attributes:
        append: from the activations it reads and the places it is to give.
        reads: the places of its input that it reads to give some of its output, in the order it likes best.
        takes_any_order: whether it takes them in any order.
    """

    append: Callable[[FeatureMap, Places], Passed]
    reads: Callable[[Places], Places]
    takes_any_order: bool = False


def sequence(
    graph: Graph, gradients: Gradients, nodes: Sequence[Node], x: FeatureMap, write: Places
) -> Passed:
    """The layers ``nodes`` one after the other; the last gives the places ``write``."""
    order = pooled_first(nodes)
    steps = [_step(graph, gradients, node) for node in order]
    reads = [write]
    for step in reversed(steps):
        reads.insert(0, step.reads(reads[0]))
    passed = Passed(x, lambda gradient: gradient)
    for node, step, read, places in zip(order, steps, reads, reads[1:], strict=False):
        passed = _then(graph, passed, node, step, read, places)
    return passed


def pooled_first(nodes: Sequence[Node]) -> list[Node]:
    """The layers, each maximum before the activation that it follows.

    No activation ever falls: the result is the same, and there is less of it to compute.
    """
    order = list(nodes)
    for index, (node, following) in enumerate(pairwise(nodes)):
        if isinstance(node.layer, Activation) and isinstance(following.layer, MaxPool):
            order[index], order[index + 1] = following, node
    return order


def _then(graph: Graph, before: Passed, node: Node, step: _Step, read: Places, write: Places) -> Passed:
    """One layer more: its input brought into the order it reads, and its way back before the others'."""
    graph.scope = node.path
    x, arrange_back = before.output, None
    if not step.takes_any_order:
        x, arrange_back = arranged(graph, x, read)
    after = step.append(x, write)

    def backward(gradient: str) -> str | None:
        graph.scope = f"{node.path}/back"
        current: str | None = gradient
        for way_back in (after.backward, arrange_back, before.backward):
            if current is None:
                return None
            if way_back is not None:
                current = way_back(current)
        return current

    return Passed(after.output, backward)


def _step(graph: Graph, gradients: Gradients, node: Node) -> _Step:
    shape = node.input_shape

    def everything(write: Places) -> Places:
        del write
        return all_places(shape)

    layer = node.layer
    match layer:
        case Convolution():
            over = layer.windows(shape)
            return _Step(
                lambda x, write: convolution.convolution(graph, gradients, node, over, x, write),
                lambda write: convolution.places_read(node, over, write),
                takes_any_order=True,
            )
        case MaxPool():
            over = layer.windows(shape)
            return _Step(
                lambda x, write: max_pooling.max_pool(graph, over, x, write),
                lambda write: max_pooling.places_read(over, write),
            )
        case AveragePool():
            over = layer.windows(shape)
            return _Step(
                lambda x, write: average_pooling.average_pool(graph, over, x, write),
                lambda write: average_pooling.places_read(over, write),
            )
        case Tanh():
            return _Step(lambda x, _: elementwise.tanh(graph, x), lambda write: write)
        case Relu():
            return _Step(lambda x, _: elementwise.relu(graph, x), lambda write: write)
        case GroupNorm():
            groups = layer.groups
            return _Step(lambda x, write: group_norm.group_norm(graph, groups, x, write), everything)
        case Dense():
            return _Step(lambda x, _: dense.dense(graph, gradients, node, x), everything)
        case Residual():
            return _Step(lambda x, write: _residual(graph, gradients, node, x, write), everything)
        case _:
            assert_never(layer)


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
