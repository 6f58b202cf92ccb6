"""Convolutions as matrix products over gathered windows.

With U the windows of one record as rows (im2col) and G the gradient by its output, forward is
U·W + b and the weight's gradient Uᵀ·G. The gradient by the input is a convolution of G as well: with
stride s, the s×s places of one block of the (padded) input see the same outputs, so one product
gives all of a block from the windows of G, with the weights sorted by their place in the block.
"""

from __future__ import annotations

import numpy as np

from dpagent.learning.models.spec import Node
from dpagent.learning.models.windows import Windows
from dpagent.learning.training.onnx_graph.feature_map import (
    FeatureMap,
    Passed,
    Places,
    all_places,
    gathered,
    rows_of,
)
from dpagent.learning.training.onnx_graph.geometry import places_in_windows
from dpagent.learning.training.onnx_graph.gradients import Gradients
from dpagent.learning.training.onnx_graph.graph import Graph

# Gather copies a place's channels at a time: with fewer than these, copying is slower than a product.
_FEW_CHANNELS = 3


def places_read(node: Node, over: Windows, write: Places) -> Places:
    """Every place under a window of ``write`` once; the first one where they all lie in the padding."""
    if _unfolds(over, node.output_shape[-1]):
        return all_places(node.input_shape)
    taps = places_in_windows(over, write)
    return tuple(np.unique(taps[taps >= 0]).tolist()) or (0,)


def convolution(
    graph: Graph, gradients: Gradients, node: Node, over: Windows, x: FeatureMap, write: Places
) -> Passed:
    """The cross-correlation with zero padding at the places ``write``; takes ``x`` in any order."""
    filters = node.output_shape[-1]
    weight, bias = gradients.parameters(node)
    if x.places == all_places(node.input_shape) and _unfolds(over, filters):
        windows_ = _unfolded(graph, x, over, write)
    else:
        rows = rows_of(x.places, places_in_windows(over, write))
        windows_ = gathered(graph, x.name, len(x.places), rows)
    y = graph.product(graph.reshape(windows_, -1, over.taps), weight, filters, bias=bias)

    def backward(gradient: str) -> str | None:
        inputs = graph.reshape(windows_, -1, len(write), over.taps)
        gradients.correlation(node, inputs, gradient, len(write))
        if not x.needs_gradient:
            return None
        return _input_gradient(graph, weight, over, x, write, gradient, filters)

    output = graph.reshape(y, -1, len(write), filters)
    return Passed(FeatureMap(output, write, filters, needs_gradient=True), backward)


def _input_gradient(
    graph: Graph, weight: str, over: Windows, x: FeatureMap, write: Places, gradient: str, filters: int
) -> str:
    """The gradient by ``x`` from the gradient by the places ``write`` of the output."""
    (down, across), (height, width) = over.stride, over.kernel
    reach = (-(-height // down), -(-width // across))  # Windows that see one block, down and across.
    padded = np.stack(np.divmod(np.array(x.places), over.image[1]), axis=1) + over.padding
    blocks, phases = padded // over.stride, padded % over.stride
    if down * across == 1:
        block_of = np.arange(len(blocks))
    else:
        blocks, block_of = np.unique(blocks, axis=0, return_inverse=True)

    seen_by = blocks[:, None, None] - np.moveaxis(np.mgrid[: reach[0], : reach[1]], 0, -1)
    exists = ((seen_by >= 0) & (seen_by < over.count)).all(axis=-1)
    numbers = np.where(exists, seen_by[..., 0] * over.count[1] + seen_by[..., 1], -1)
    collected = gathered(graph, gradient, len(write), rows_of(write, numbers))
    collected = graph.reshape(collected, -1, reach[0] * reach[1] * filters)

    channels = over.image[2]
    matrix = graph.reshape(weight, height, width, channels, filters)
    surplus = (reach[0] * down - height, reach[1] * across - width)
    if any(surplus):
        matrix = graph.add("Pad", matrix, graph.constant([0, 0, 0, 0, *surplus, 0, 0], np.int64))
    matrix = graph.reshape(matrix, reach[0], down, reach[1], across, channels, filters)
    matrix = graph.add("Transpose", matrix, perm=[1, 3, 4, 0, 2, 5])
    matrix = graph.reshape(matrix, down * across * channels, reach[0] * reach[1] * filters)

    back = graph.product(collected, matrix, down * across * channels, is_transposed=True)
    back = graph.reshape(back, -1, len(blocks) * down * across, channels)
    rows = (block_of.ravel() * down + phases[:, 0]) * across + phases[:, 1]
    return gathered(graph, back, len(blocks) * down * across, rows.astype(np.int64))


def _unfolds(over: Windows, filters: int) -> bool:
    """Whether :func:`_unfolded` is worth its while: it is for small images of few channels."""
    strip = _strip(over)
    size = strip * over.image[1] * over.image[2] * over.count[1] * strip * over.kernel[1] * over.image[2]
    strips = -(-(over.image[0] + 2 * over.padding[0]) // strip)
    return over.image[2] < _FEW_CHANNELS and strips * size <= 2 * over.positions * over.taps * filters


def _strip(over: Windows) -> int:
    """Rows of the image that are unfolded together: windows begin at every such strip, and end with one."""
    return 1 if over.kernel[0] % over.stride[0] else over.stride[0]


def _unfolded(graph: Graph, x: FeatureMap, over: Windows, write: Places) -> str:
    """The windows ``write`` of an image of few channels, ``(rows, windows·taps, 1)``.

    A product with a matrix of zeros and ones first unfolds strips of the image along the row, which is
    exact. After it, the part of a window in one strip lies side by side.
    """
    strip = _strip(over)
    height, width, channels = over.image
    rows, columns = np.divmod(np.array(write), over.count[1])
    used = int(columns.max()) + 1
    strips = int(rows.max()) * over.stride[0] // strip + over.kernel[0] // strip
    below = strips * strip - over.padding[0] - height
    values = graph.reshape(x.name, -1, height, width * channels)
    if over.padding[0] or below:  # A negative number cuts off rows that no window reads.
        values = graph.add("Pad", values, graph.constant([0, over.padding[0], 0, 0, below, 0], np.int64))
    values = graph.reshape(values, -1, strip * width * channels)

    unfold = np.zeros((strip, width, channels, used, strip, over.kernel[1], channels))
    for column in range(used):
        for tap in range(over.kernel[1]):
            place = column * over.stride[1] + tap - over.padding[1]
            if 0 <= place < width:
                for row in range(strip):
                    unfold[row, place, :, column, row, tap, :] = np.eye(channels)
    block = strip * over.kernel[1] * channels
    values = graph.product(values, graph.constant(unfold.reshape(-1, used * block)), used * block)
    values = graph.reshape(values, -1, strips * used, block)
    first = rows * over.stride[0] // strip
    wanted = (first[:, None] + np.arange(over.kernel[0] // strip)) * used + columns[:, None]
    return gathered(graph, values, strips * used, wanted)
