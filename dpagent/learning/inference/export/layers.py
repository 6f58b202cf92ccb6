"""Layers as ONNX operators, with the channels first, as ONNX has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.inference.export.graph import Graph
from dpagent.learning.models.layers import (
    GROUP_NORM_EPSILON,
    AveragePool,
    Convolution,
    Dense,
    GroupNorm,
    MaxPool,
    Relu,
    Residual,
    Tanh,
    Windowed,
)
from dpagent.learning.models.spec import Node


def append_layers(graph: Graph, nodes: Sequence[Node], weights: NDArray[np.float32], x: str) -> str:
    """Append layers in turn; each result is called like its node.

    Args:
        graph: is appended to.
        nodes: consecutive layers of one model.
        weights: the model's flat vector ``(d,)``.
        x: activations, the channels first.

    Returns:
        The activations after them, the channels first.
    """
    for node in nodes:
        x = _append(graph, node, weights, x)
    return x


def channels_first(graph: Graph, x: str, axes: int, name: str = "") -> str:
    """Records with the last of their ``axes`` first."""
    return graph.add("Transpose", x, name=name, perm=[0, axes, *range(1, axes)]) if axes > 1 else x


def channels_last(graph: Graph, x: str, axes: int, name: str = "") -> str:
    """Records with the first of their ``axes`` last."""
    return graph.add("Transpose", x, name=name, perm=[0, *range(2, axes + 1), 1]) if axes > 1 else x


def _append(graph: Graph, node: Node, weights: NDArray[np.float32], x: str) -> str:
    name, axes = node.path, len(node.input_shape)
    layer = node.layer
    match layer:
        case Convolution():
            window = _window(layer, node)
            return graph.add("Conv", x, *_parameters(graph, node, weights), name=name, **window)
        case MaxPool():
            return graph.add("MaxPool", x, name=name, **_window(layer, node))
        case AveragePool():
            return graph.add("AveragePool", x, name=name, **_window(layer, node))
        case Dense():
            # The weights are in the order of training, which is channels last.
            last = channels_last(graph, x, axes, f"{name}.channels_last")
            flat = graph.add("Flatten", last, name=f"{name}.flat", axis=1)
            return graph.add("Gemm", flat, *_parameters(graph, node, weights), name=name)
        case Tanh():
            return graph.add("Tanh", x, name=name)
        case Relu():
            return graph.add("Relu", x, name=name)
        case GroupNorm():
            return _group_norm(graph, node, layer.groups, x)
        case Residual():
            branches = [append_layers(graph, branch, weights, x) for branch in (node.body, node.shortcut)]
            return graph.add("Add", *branches, name=name)
        case _:
            assert_never(layer)


def _window(layer: Windowed, node: Node) -> dict[str, Any]:
    over, axes = layer.windows(node.input_shape), len(node.input_shape) - 1
    kernel, stride, padding = (list(both[-axes:]) for both in (over.kernel, over.stride, over.padding))
    return {"kernel_shape": kernel, "strides": stride, "pads": padding * 2}


def _group_norm(graph: Graph, node: Node, groups: int, x: str) -> str:
    """With the channels first, a group is a run of numbers: as if it were one channel of an instance."""
    name = node.path
    grouped = graph.reshape(x, 0, groups, -1, name=f"{name}.groups")
    scale = graph.constant(np.ones(groups), f"{name}.scale")
    shift = graph.constant(np.zeros(groups), f"{name}.shift")
    normed = graph.add(
        "InstanceNormalization", grouped, scale, shift, name=f"{name}.normalised", epsilon=GROUP_NORM_EPSILON
    )
    return graph.reshape(normed, 0, node.input_shape[-1], *node.input_shape[:-1], name=name)


def _parameters(graph: Graph, node: Node, weights: NDArray[np.float32]) -> list[str]:
    """Weight and bias; of a convolution with the filters and channels before the window."""
    names = []
    for block in node.blocks:
        values = weights[block.offset : block.offset + block.size].reshape(block.shape)
        if values.ndim > 2:
            values = np.moveaxis(values, (-1, -2), (0, 1))
        names.append(graph.constant(values, block.name))
    return names
