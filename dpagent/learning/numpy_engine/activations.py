"""Activations, from their output's point of view: both slopes are functions of it.

They run over the whole workspace of a microbatch at once, which is several times faster than record by
record; :mod:`~dpagent.learning.numpy_engine.workspaces` says why a record's bits do not depend on its place
all the same. Where nothing else needs the input, the output takes its memory. The gradient is always changed
in place.
"""

from __future__ import annotations

import numpy as np

from dpagent.learning.numpy_engine.products import fastest
from dpagent.learning.numpy_engine.stages import Stage
from dpagent.learning.numpy_engine.workspaces import Floats, Memory, Signal

SIGN = np.int32(31)
"""How far to the right the sign bit of a float32 is spread to make a mask of the whole word."""


class Tangent:
    """Hyperbolic tangent of an array, by the library's function or by its exponential.

    tanh x = 1 - 2/(exp 2x + 1), which is off by at most 2e-7. Numpy has vector code for both functions on
    most processors; where it has not, its exponential is still fast and its tangent seven times as slow.
    """

    def __init__(self, argument: Floats, result: Floats) -> None:
        self._argument, self._result = argument, result
        self.form = "library"

    def __call__(self) -> None:
        result = self._result
        if self.form == "library":
            np.tanh(self._argument, out=result)
            return
        np.add(self._argument, self._argument, out=result)
        np.exp(result, out=result)
        np.add(result, np.float32(1), out=result)
        np.divide(np.float32(2), result, out=result)
        np.subtract(np.float32(1), result, out=result)

    def calibrate(self, generator: np.random.Generator) -> None:
        """Choose the form. Overwrites argument and result."""
        seconds = {}
        for form in ("library", "exponential"):
            self.form = form
            self._argument[...] = generator.standard_normal(len(self._argument), np.float32)
            seconds[form] = fastest(self)
        self.form = "exponential" if seconds["exponential"] < seconds["library"] / 2 else "library"


class TanhStage(Stage):
    """Hyperbolic tangent."""

    def __init__(self, source: Signal, target: Signal, memory: Memory) -> None:
        self._output = target.values.whole
        self.tangent = Tangent(source.values.whole, self._output)
        self._gradient = target.gradient.whole if target.gradient else None
        self._slope = memory.floats(len(self._output), shared="mask")

    def forward(self) -> None:
        self.tangent()

    def backward(self) -> None:
        if self._gradient is not None:
            np.multiply(self._output, self._output, out=self._slope)
            np.subtract(np.float32(1), self._slope, out=self._slope)
            np.multiply(self._gradient, self._slope, out=self._gradient)


class ReluStage(Stage):
    """max(x, 0)."""

    def __init__(self, source: Signal, target: Signal, memory: Memory) -> None:
        self._input, self._output = source.values.whole, target.values.whole
        self._gradient = target.gradient.whole.view(np.int32) if target.gradient else None
        self._slope = memory.floats(len(self._output), shared="mask")
        self._mask = self._slope.view(np.int32)

    def forward(self) -> None:
        np.maximum(self._input, np.float32(0), out=self._output)

    def backward(self) -> None:
        if self._gradient is not None:
            # 0 - y is below zero exactly where the gradient passes.
            np.subtract(np.float32(0), self._output, out=self._slope)
            np.right_shift(self._mask, SIGN, out=self._mask)
            np.bitwise_and(self._gradient, self._mask, out=self._gradient)
