"""The layers' definition: the activations of one record, in plain numpy.

Each layer is written as it is defined, and nothing here is fast. Frozen random layers are computed by it,
since a record passes them once. It is also the reference for all that is fast: the gradients of the engines
are checked against differences of it in float64, and exported models against its activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, assert_never

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

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
)
from dpagent.learning.models.spec import Node
from dpagent.learning.models.windows import Windows

Floats: TypeAlias = NDArray[np.floating[Any]]


def forward(nodes: Sequence[Node], weights: Floats, record: Floats) -> Floats:
    """The activations of one record after the layers ``nodes``.

    Args:
        nodes: consecutive layers of one model.
        weights: the model's flat vector ``(d,)``, float32 or float64.
        record: ``(*input_shape)`` of the first layer, of the type of the weights.

    Returns:
        ``(*output_shape)`` of the last layer, of the same type.

    >>> from dpagent.learning.models.built_ins import built_in
    >>> spec = built_in("digits")
    >>> forward(spec.nodes, spec.initial_weights(seed=0), np.zeros((8, 8, 1), np.float32)).shape
    (10,)
    """
    values = record
    for node in nodes:
        values = _after(node, weights, values)
    return values


def _after(node: Node, weights: Floats, x: Floats) -> Floats:
    layer = node.layer
    match layer:
        case Convolution():
            over = layer.windows(node.input_shape)
            rows = _patches(x, over).reshape(over.positions, over.taps)
            return _affine(node, weights, rows).reshape(node.output_shape)
        case MaxPool():
            patches = _patches(x, layer.windows(node.input_shape))
            return np.asarray(patches.max(axis=(2, 3)).reshape(node.output_shape))
        case AveragePool():
            patches = _patches(x, layer.windows(node.input_shape))
            return np.asarray(patches.mean(axis=(2, 3)).reshape(node.output_shape))
        case Dense():
            return _affine(node, weights, x.reshape(1, -1)).reshape(node.output_shape)
        case Tanh():
            return np.tanh(x)
        case Relu():
            return np.maximum(x, 0)
        case GroupNorm():
            grouped = x.reshape(-1, layer.groups, x.shape[-1] // layer.groups)
            centred = grouped - grouped.mean(axis=(0, 2), keepdims=True)
            variance = np.square(centred).mean(axis=(0, 2), keepdims=True)
            deviation = np.sqrt(variance + x.dtype.type(GROUP_NORM_EPSILON))
            return np.asarray((centred / deviation).reshape(x.shape))
        case Residual():
            return forward(node.body, weights, x) + forward(node.shortcut, weights, x)
        case _:
            assert_never(layer)


def _affine(node: Node, weights: Floats, rows: Floats) -> Floats:
    weight, bias = (
        weights[block.offset : block.offset + block.size].reshape(block.shape) for block in node.blocks
    )
    return np.asarray(rows @ weight.reshape(-1, len(bias)) + bias)


def _patches(x: Floats, over: Windows) -> Floats:
    """The windows of one record, (down, across, kernel down, kernel across, channels)."""
    image = x.reshape(over.image)
    padded = np.pad(image, ((over.padding[0],) * 2, (over.padding[1],) * 2, (0, 0)))
    patches = sliding_window_view(padded, over.kernel, axis=(0, 1))
    # A view of windows has the channels before the kernel's axes.
    return np.moveaxis(patches[:: over.stride[0], :: over.stride[1]], 2, -1)
