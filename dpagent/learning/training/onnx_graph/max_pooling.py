"""Maxima over windows; where one occurs twice in a window, the first in row-major order takes the gradient.

Windows that do not overlap read their input tap by tap: first every window's first place, then
every second one. The maximum then runs over blocks of memory, and the way back is a mask over the same
blocks. Windows that overlap are taken along the rows and then down the columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.windows import Windows
from dpagent.learning.training.onnx_graph.feature_map import (
    Backward,
    FeatureMap,
    Passed,
    Places,
    arranged,
    gathered,
)
from dpagent.learning.training.onnx_graph.geometry import places_in_windows
from dpagent.learning.training.onnx_graph.graph import FLOAT, Graph


def places_read(over: Windows, write: Places) -> Places:
    """Tap by tap where the windows do not overlap, else the corner of the image that holds all windows."""
    if _overlap(over):
        height, width = _corner(over, write)
        rows = [
            (count - 1) * stride + kernel
            for count, stride, kernel in zip((height, width), over.stride, over.kernel, strict=True)
        ]
        return tuple(y * over.image[1] + x for y in range(rows[0]) for x in range(rows[1]))
    return tuple(places_in_windows(over, write).T.ravel().tolist())


def max_pool(graph: Graph, over: Windows, x: FeatureMap, write: Places) -> Passed:
    """The maximum of each window; ``x`` holds the places of :func:`places_read`."""
    if not _overlap(over):
        return _tiles(graph, x, write, over.kernel[0] * over.kernel[1])
    height, width = _corner(over, write)
    stored = len(x.places) // ((width - 1) * over.stride[1] + over.kernel[1])
    rows = graph.reshape(x.name, -1, len(x.places) // stored, x.channels)
    narrow, across = _line(graph, rows, width, over.kernel[1], over.stride[1])
    narrow = graph.reshape(narrow, -1, stored, width * x.channels)
    y, down = _line(graph, narrow, height, over.kernel[0], over.stride[0])
    y = graph.reshape(y, -1, height * width, x.channels)
    places = tuple(row * over.count[1] + column for row in range(height) for column in range(width))
    corner = FeatureMap(y, places, x.channels, x.needs_gradient)
    output, arrange_back = arranged(graph, corner, write)

    def backward(gradient: str) -> str | None:
        if not x.needs_gradient:
            return None
        current = arrange_back(gradient)
        assert current is not None
        current = down(graph.reshape(current, -1, height, width * x.channels))
        assert current is not None
        current = across(graph.reshape(current, -1, width, x.channels))
        assert current is not None
        return graph.reshape(current, -1, len(x.places), x.channels)

    return Passed(output, backward)


def _tiles(graph: Graph, x: FeatureMap, write: Places, taps: int) -> Passed:
    blocks = graph.reshape(x.name, -1, taps, len(write) * x.channels)
    largest = graph.add("ReduceMax", blocks, graph.constant([1], np.int64), keepdims=1)

    def backward(gradient: str) -> str | None:
        if not x.needs_gradient:
            return None
        incoming = graph.reshape(gradient, -1, 1, len(write) * x.channels)
        first = graph.add("Cast", _first(graph, blocks, largest, taps), to=FLOAT)
        return graph.reshape(graph.add("Mul", first, incoming), -1, len(x.places), x.channels)

    y = graph.reshape(largest, -1, len(write), x.channels)
    return Passed(FeatureMap(y, write, x.channels, x.needs_gradient), backward)


def _first(graph: Graph, blocks: str, largest: str, taps: int) -> str:
    """Of each window, the tap that holds the maximum first; boolean, of the shape of ``blocks``."""
    equal = graph.add("Equal", blocks, largest)
    if taps == 1:
        return equal
    names = [graph.new_name("tap") for _ in range(taps)]
    equals = graph.add_several("Split", [equal], names, axis=1, num_outputs=taps)
    first, seen = [equals[0]], equals[0]
    for tap in equals[1:-1]:
        first.append(graph.add("And", tap, graph.add("Not", seen)))
        seen = graph.add("Or", seen, tap)
    first.append(graph.add("Not", seen))
    return graph.add("Concat", *first, axis=1)


def _line(graph: Graph, x: str, count: int, kernel: int, stride: int) -> tuple[str, Backward]:
    """Maxima over ``count`` windows along axis 1 of ``(rows, places, block)``."""
    size = (count - 1) * stride + kernel
    taps = [_tap(graph, x, start, count, stride) for start in range(kernel)]
    largest = graph.add("Max", *taps) if kernel > 1 else taps[0]

    def backward(gradient: str) -> str | None:
        left, total = gradient, ""
        for start, tap in enumerate(taps):
            taken = left
            if start < kernel - 1:
                # The first tap that holds the maximum takes all that is left; the others get zero.
                holds = graph.add("Cast", graph.add("Equal", tap, largest), to=FLOAT)
                taken = graph.add("Mul", left, holds)
                left = graph.add("Sub", left, taken)
            part = _placed(graph, taken, start, count, stride, size)
            total = graph.add("Add", total, part) if total else part
        return total

    return largest, backward


def _tap(graph: Graph, x: str, start: int, count: int, stride: int) -> str:
    if stride == 1:
        return graph.slice(x, 1, start, start + count)
    return graph.gather(x, 1, start + stride * np.arange(count))


def _placed(graph: Graph, part: str, start: int, count: int, stride: int, size: int) -> str:
    """Rows for the windows put where their tap ``start`` lies in ``size`` rows of zeros."""
    if stride == 1:
        after = size - count - start
        return graph.add("Pad", part, graph.constant([0, start, 0, 0, after, 0], np.int64))
    rows: NDArray[np.int64] = np.full(size, -1)
    rows[start + stride * np.arange(count)] = np.arange(count)
    return gathered(graph, part, count, rows)


def _overlap(over: Windows) -> bool:
    return any(kernel > stride for kernel, stride in zip(over.kernel, over.stride, strict=True))


def _corner(over: Windows, write: Places) -> tuple[int, int]:
    """Rows and columns of windows that hold all of ``write``."""
    rows, columns = np.divmod(np.array(write), over.count[1])
    return int(rows.max()) + 1, int(columns.max()) + 1
