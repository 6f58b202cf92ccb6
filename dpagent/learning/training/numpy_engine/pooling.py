"""Pooling: the maximum of each window, across first and then down.

A maximum that occurs more than once in a window passes its gradient to the first in row-major order, so
the gradient of a flat background is one and the same everywhere. Who was greater is read off
the sign bit of a difference, spread over the word as a mask: that selects gradients bit by bit, and a zero
times an infinity never occurs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.part import Shape
from dpagent.learning.models.windows import Windows
from dpagent.learning.training.numpy_engine.activations import SIGN
from dpagent.learning.training.numpy_engine.stages import Stage
from dpagent.learning.training.numpy_engine.workspaces import AT_ONCE, Floats, Memory, Signal


class MaximumStage(Stage):
    """Maxima across and then down, some records at a time: the second pass finds the first one's results in
    the cache.

    Args:
        between: the memory between the two, or None if there is only one.
    """

    def __init__(self, source: Signal, between: Signal | None, target: Signal, memory: Memory) -> None:
        self._parts = [
            self._steps(source.part(records), between and between.part(records), target.part(records), memory)
            for records in source.parts(AT_ONCE)
        ]

    @abstractmethod
    def _steps(
        self, source: Signal, between: Signal | None, target: Signal, memory: Memory
    ) -> list[_Maximum]:
        """The maximum across, and the one down if there is one."""

    def forward(self) -> None:
        for steps in self._parts:
            for step in steps:
                step.forward()

    def backward(self) -> None:
        for steps in self._parts:
            for step in reversed(steps):
                step.backward()


class MaxPoolStage(MaximumStage):
    """Maximum over windows of a ``(height, width, channels)`` image."""

    def __init__(self, over: Windows, source: Signal, target: Signal, memory: Memory) -> None:
        self._over = over
        height, _, channels = over.image
        between = between_of(memory, (height, over.count[1], channels), source) if height > 1 else None
        super().__init__(source, between, target, memory)

    def _steps(
        self, source: Signal, between: Signal | None, target: Signal, memory: Memory
    ) -> list[_Maximum]:
        over = self._over
        records = source.values.values.shape[:2]
        wide, out = (*records, *over.image), (*records, *over.count, over.image[2])
        across, tiled = taps_along(1, over), _is_tiled(over, 1)
        if between is None:
            return [_maximum(source, wide, across, target, out, tiled=tiled, memory=memory)]
        narrow = between.values.values.shape
        return [
            _maximum(source, wide, across, between, narrow, tiled=tiled, memory=memory),
            _maximum(
                between, narrow, taps_along(0, over), target, out, tiled=_is_tiled(over, 0), memory=memory
            ),
        ]


class GroupedMaxPoolStage(MaximumStage):
    """Maximum over ``(rows, columns, down, across, channels)``, as a grouped convolution gives it."""

    def __init__(self, source: Signal, target: Signal, memory: Memory) -> None:
        rows, _, *rest = source.values.values.shape[2:]
        between = between_of(memory, (rows, *rest), source) if rows > 1 else None
        super().__init__(source, between, target, memory)

    def _steps(
        self, source: Signal, between: Signal | None, target: Signal, memory: Memory
    ) -> list[_Maximum]:
        wide = source.values.values.shape
        records, views, rows, columns, *rest = wide
        across = [(*(slice(None),) * 3, tap) for tap in range(columns)]
        down = [(*(slice(None),) * 2, tap) for tap in range(rows)]
        out = (records, views, *rest)
        if between is None:
            return [_maximum(source, wide, across, target, (*out[:2], 1, *rest), tiled=True, memory=memory)]
        narrow = between.values.values.shape
        return [
            _maximum(source, wide, across, between, narrow, tiled=True, memory=memory),
            _maximum(between, narrow, down, target, out, tiled=True, memory=memory),
        ]


class SlidingMaxPoolStage(MaximumStage):
    """Maximum over windows of stride one, whose result lies in the place of the windows' first pixels.

    The result keeps the rows and columns of the input, and its records are one run of memory: to move
    a window is to move along it. The last columns and rows then hold maxima over no true window, across
    the edge of an image or even of a record; nothing reads them, and their gradient is zero.
    """

    def __init__(self, over: Windows, source: Signal, target: Signal, memory: Memory) -> None:
        self._over = over
        records, views = source.values.values.shape[:2]
        between = between_of(memory, over.image, source) if over.image[0] > 1 else None
        super().__init__(source, between, target, memory)
        self._no_windows: list[Floats] = []
        if target.gradient is not None:
            gradient = target.gradient.values.reshape((records, views, *over.image), copy=False)
            self._no_windows = [gradient[:, :, over.count[0] :], gradient[:, :, :, over.count[1] :]]

    def _steps(
        self, source: Signal, between: Signal | None, target: Signal, memory: Memory
    ) -> list[_Maximum]:
        down, across = self._over.kernel
        _, width, channels = self._over.image
        if between is None:
            return [_sliding(source, across, channels, target, memory)]
        return [
            _sliding(source, across, channels, between, memory),
            _sliding(between, down, width * channels, target, memory),
        ]

    def backward(self) -> None:
        for gradient in self._no_windows:
            gradient.fill(0)
        super().backward()


class CopyStage(Stage):
    """Copies rows and columns out of larger images, without gaps."""

    def __init__(self, source: Signal, target: Signal) -> None:
        self._values = (target.values.values, source.values.values)
        self._gradients: tuple[Floats, Floats] | None = None
        if source.gradient is not None and target.gradient is not None:
            self._gradients = (source.gradient.values, target.gradient.values)

    def forward(self) -> None:
        np.copyto(*self._values)

    def backward(self) -> None:
        if self._gradients is not None:
            np.copyto(*self._gradients)


class _Maximum:
    """Maximum of several taps, number by number: of the first two, of that and the third, and so on.

    Args:
        taps: values, alike in shape.
        result: where the greatest go.
        gradients: by the taps, or nothing.
        incoming: the gradient by the result.
        rest: the memory of the gradients under no first tap.
        tiled: whether no two taps share memory.
    """

    def __init__(
        self,
        taps: Sequence[Floats],
        result: Floats,
        gradients: Sequence[Floats],
        incoming: Floats | None,
        rest: Sequence[Floats],
        *,
        tiled: bool,
        memory: Memory,
    ) -> None:
        kept = [memory.floats(result.size).reshape(result.shape) for _ in taps[2:]]
        # (the greatest so far, the next tap, the greater of the two)
        self._pairs = list(zip([taps[0], *kept], taps[1:], [*kept, result], strict=True)) if taps[1:] else []
        self._copy = None if self._pairs else (result, taps[0])
        self._incoming, self._gradients, self._rest = incoming, gradients, rest
        self._tiled = tiled
        self._masks = [
            memory.floats(result.size, shared=f"mask{number or ''}").reshape(result.shape)
            for number in range(len(self._pairs))
        ]

    def forward(self) -> None:
        if self._copy is not None:
            np.copyto(*self._copy)
        for greatest, following, result in self._pairs:
            np.maximum(greatest, following, out=result)

    def backward(self) -> None:
        if self._incoming is None or not self._gradients:
            return
        for memory in self._rest:
            memory.fill(0)
        if self._copy is not None:
            np.copyto(self._gradients[0], self._incoming)
        left: NDArray[np.int32] = self._incoming.view(np.int32)
        first: NDArray[np.int32] = self._gradients[0].view(np.int32)
        for index in range(len(self._pairs) - 1, -1, -1):
            greatest, following, _ = self._pairs[index]
            mask: NDArray[np.int32] = self._masks[index].view(np.int32)
            np.subtract(greatest, following, out=self._masks[index])
            np.right_shift(mask, SIGN, out=mask)
            part: NDArray[np.int32] = self._gradients[index + 1].view(np.int32) if self._tiled else mask
            np.bitwise_and(left, mask, out=part)
            np.bitwise_xor(left, part, out=left if index else first)
        if not self._tiled:
            for gradient, selected in zip(self._gradients[1:], self._masks, strict=True):
                np.add(gradient, selected, out=gradient)


def between_of(memory: Memory, shape: Shape, source: Signal) -> Signal:
    """Room for the results of the maximum or mean across, before the one down."""
    gradient = memory.workspace(shape, shared="between") if source.gradient else None
    return Signal(memory.workspace(shape), gradient)


def _is_tiled(over: Windows, axis: int) -> bool:
    stride = over.stride[axis]
    return over.kernel[axis] == stride and over.image[axis] == over.count[axis] * stride


def taps_along(axis: int, over: Windows) -> list[tuple[slice, ...]]:
    """For each tap of the windows along axis 0 (down) or 1 (across), the part of an image under it."""
    before = (slice(None),) * (2 + axis)
    stride, count = over.stride[axis], over.count[axis]
    return [(*before, slice(tap, tap + stride * (count - 1) + 1, stride)) for tap in range(over.kernel[axis])]


def _maximum(
    source: Signal,
    shape: Shape,
    taps: Sequence[tuple[slice | int, ...]],
    target: Signal,
    out: Shape,
    *,
    tiled: bool,
    memory: Memory,
) -> _Maximum:
    """The maximum of parts of ``source``."""
    image = source.values.values.reshape(shape, copy=False)
    values = [image[tap] for tap in taps]
    result = target.values.values.reshape(out, copy=False)
    if source.gradient is None or target.gradient is None:
        return _Maximum(values, result, (), None, (), tiled=tiled, memory=memory)
    pixels = source.gradient.values.reshape(shape, copy=False)
    incoming = target.gradient.values.reshape(out, copy=False)
    rest = () if tiled else (source.gradient.whole,)
    return _Maximum(values, result, [pixels[tap] for tap in taps], incoming, rest, tiled=tiled, memory=memory)


def _sliding(source: Signal, kernel: int, step: int, target: Signal, memory: Memory) -> _Maximum:
    """The maximum of ``kernel`` numbers, ``step`` apart in memory."""
    values, result = source.values.whole, target.values.whole
    count = len(values) - (kernel - 1) * step
    taps = [slice(tap * step, tap * step + count) for tap in range(kernel)]
    if source.gradient is None or target.gradient is None:
        return _Maximum(
            [values[tap] for tap in taps], result[:count], (), None, (), tiled=False, memory=memory
        )
    gradient = source.gradient.whole
    parts = [gradient[tap] for tap in taps]
    return _Maximum(
        [values[tap] for tap in taps],
        result[:count],
        parts,
        target.gradient.whole[:count],
        [gradient[count:]],
        tiled=False,
        memory=memory,
    )
