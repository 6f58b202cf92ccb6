"""Pooling: the mean of each window, across first and then down."""

from __future__ import annotations

import numpy as np

from dpagent.learning.models.windows import Windows
from dpagent.learning.training.numpy_engine.pooling import between_of, taps_along
from dpagent.learning.training.numpy_engine.stages import Stage
from dpagent.learning.training.numpy_engine.workspaces import Floats, Memory, Signal, Workspace


class AveragePoolStage(Stage):
    """Mean over windows of a ``(height, width, channels)`` image."""

    def __init__(self, over: Windows, source: Signal, target: Signal, memory: Memory) -> None:
        records, views = source.values.values.shape[:2]
        height, _, channels = over.image
        narrow = (height, over.count[1], channels)
        between = between_of(memory, narrow, source)
        shape, out = (records, views, *over.image), (records, views, *over.count, channels)
        self._scale = np.float32(1 / (over.kernel[0] * over.kernel[1]))
        self._forward: list[tuple[list[Floats], Floats]] = []
        self._backward: list[tuple[Floats, list[Floats], Workspace]] = []
        for axis, wide, before, narrow_shape, after in (
            (1, shape, source, between.values.values.shape, between),
            (0, between.values.values.shape, between, out, target),
        ):
            taps = taps_along(axis, over)
            image = before.values.values.reshape(wide, copy=False)
            self._forward.append(
                ([image[tap] for tap in taps], after.values.values.reshape(narrow_shape, copy=False))
            )
            if before.gradient is not None and after.gradient is not None:
                pixels = before.gradient.values.reshape(wide, copy=False)
                incoming = after.gradient.values.reshape(narrow_shape, copy=False)
                self._backward.append((incoming, [pixels[tap] for tap in taps], before.gradient))

    def forward(self) -> None:
        for taps, result in self._forward:
            np.copyto(result, taps[0])
            for tap in taps[1:]:
                np.add(result, tap, out=result)
        result = self._forward[-1][1]
        np.multiply(result, self._scale, out=result)

    def backward(self) -> None:
        if self._backward:
            incoming = self._backward[-1][0]
            np.multiply(incoming, self._scale, out=incoming)
        for incoming, taps, back in reversed(self._backward):
            back.whole.fill(0)
            for tap in taps:
                np.add(tap, incoming, out=tap)
