"""Ordinary layers with weights that stay as a seed draws them, one record at a time.

Random convolutions are features that cost nothing: no data went into them. Their weights are those that
:meth:`ModelSpec.initial_weights` draws for a model of the same layers. Nothing here is in a hurry, since a
record passes once; so each layer is written as it is defined.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dpagent.learning.front_end.stages import RandomLayers
from dpagent.learning.models.layers import (
    GROUP_NORM_EPSILON,
    AveragePool1d,
    AveragePool2d,
    Conv1d,
    Conv2d,
    Dense,
    GroupNorm,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Shape,
    Tanh,
    Windows,
    windows,
)
from dpagent.learning.models.spec import ModelSpec, Node

Floats = NDArray[np.float32]


def random_model(stage: RandomLayers, shape: Shape) -> ModelSpec:
    """A model whose first layers, and their initial weights, are the stage's."""
    return ModelSpec("random", shape, 2, (*stage.layers, Dense(2)))


class RandomFeatures:
    """The stage as a function of one record.

    Args:
        stage: layers and seed.
        shape: of a record.
    """

    def __init__(self, stage: RandomLayers, shape: Shape) -> None:
        model = random_model(stage, shape)
        self._nodes = model.nodes[:-1]
        self._weights = model.initial_weights(stage.seed)

    def __call__(self, values: Floats) -> Floats:
        """The features of one record."""
        for node in self._nodes:
            values = self._after(node, values)
        return values

    def _after(self, node: Node, values: Floats) -> Floats:
        match node.layer:
            case Conv1d() | Conv2d() as layer:
                over = windows(layer, node.input_shape)
                patches = _patches(values, over).reshape(over.positions, over.taps)
                return self._affine(node, patches).reshape(node.output_shape)
            case Dense():
                return self._affine(node, values.reshape(1, -1)).reshape(node.output_shape)
            case MaxPool1d() | MaxPool2d() as layer:
                patches = _patches(values, windows(layer, node.input_shape))
                return np.asarray(patches.max(axis=(2, 3)).reshape(node.output_shape))
            case AveragePool1d() | AveragePool2d() as layer:
                patches = _patches(values, windows(layer, node.input_shape))
                return np.asarray(patches.mean(axis=(2, 3), dtype=np.float32).reshape(node.output_shape))
            case GroupNorm(groups=groups):
                grouped = values.reshape(-1, groups, node.input_shape[-1] // groups)
                centred = grouped - grouped.mean(axis=(0, 2), keepdims=True)
                variance = np.square(centred).mean(axis=(0, 2), keepdims=True)
                return np.asarray(
                    (centred / np.sqrt(variance + np.float32(GROUP_NORM_EPSILON))).reshape(values.shape)
                )
            case Tanh():
                return np.tanh(values)
            case Relu():
                return np.maximum(values, np.float32(0))
        raise TypeError(f"{node.path} is no plain layer")

    def _affine(self, node: Node, rows: Floats) -> Floats:
        weight, bias = (
            self._weights[block.offset : block.offset + block.size].reshape(block.shape)
            for block in node.blocks
        )
        return np.asarray(rows @ weight.reshape(-1, len(bias)) + bias)


def _patches(values: Floats, over: Windows) -> Floats:
    """The windows of one record, (down, across, kernel down, kernel across, channels)."""
    image = values.reshape(over.image)
    padded = np.pad(image, ((over.padding[0],) * 2, (over.padding[1],) * 2, (0, 0)))
    patches = sliding_window_view(padded, over.kernel, axis=(0, 1))
    # The channels come before the kernel's axes in a view of windows.
    return np.moveaxis(patches[:: over.stride[0], :: over.stride[1]], 2, -1)
