"""Activations, from their output's point of view: both slopes are functions of it.

They run over the workspaces of many records at once, which is several times faster than record by
record; :mod:`~dpagent.learning.training.numpy_engine.workspaces` says why a record's bits do not depend on
its place all the same. Where nothing else needs the input, the output takes its memory. The gradient is
always changed in place.
"""

from __future__ import annotations

import numpy as np

from dpagent.learning.training.numpy_engine.products import fastest
from dpagent.learning.training.numpy_engine.stages import Stage
from dpagent.learning.training.numpy_engine.workspaces import AT_ONCE, Floats, Memory, Signal
from dpagent.learning.trial_numbers import TrialNumbers

SIGN = np.int32(31)
"""How far to the right the sign bit of a float32 is spread to make a mask of the whole word."""

LEAST_EXPONENT = np.float32(-80)
"""Of an exponential, whose argument is no larger than its opposite either. From ±86 on, near the ends of what
float32 holds, libraries take other ways, which take longer, and weights may be such that one record does.
"""


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
        np.clip(result, LEAST_EXPONENT, -LEAST_EXPONENT, out=result)
        np.exp(result, out=result)
        np.add(result, np.float32(1), out=result)
        np.divide(np.float32(2), result, out=result)
        np.subtract(np.float32(1), result, out=result)

    def calibrate(self, numbers: TrialNumbers) -> None:
        """Choose the form. Overwrites argument and result."""
        seconds = {}
        for form in ("library", "exponential"):
            self.form = form
            self._argument[...] = numbers.normal(self._argument.shape)
            seconds[form] = fastest(self)
        self.form = "exponential" if seconds["exponential"] < seconds["library"] / 2 else "library"


class TanhStage(Stage):
    """Hyperbolic tangent."""

    def __init__(self, source: Signal, target: Signal, memory: Memory) -> None:
        self._tangent = Tangent(source.values.whole, target.values.whole)
        self.choices = {"tangent": self._tangent}
        self._parts = _slopes(target, memory)

    def forward(self) -> None:
        self._tangent()

    def backward(self) -> None:
        for output, gradient, slope in self._parts:
            np.multiply(output, output, out=slope)
            np.subtract(np.float32(1), slope, out=slope)
            np.multiply(gradient, slope, out=gradient)


class ReluStage(Stage):
    """max(x, 0)."""

    def __init__(self, source: Signal, target: Signal, memory: Memory) -> None:
        self._input, self._output = source.values.whole, target.values.whole
        self._parts = _slopes(target, memory)

    def forward(self) -> None:
        np.maximum(self._input, np.float32(0), out=self._output)

    def backward(self) -> None:
        for output, gradient, slope in self._parts:
            mask, bits = slope.view(np.int32), gradient.view(np.int32)
            # 0 - y is below zero exactly where the gradient passes.
            np.subtract(np.float32(0), output, out=slope)
            np.right_shift(mask, SIGN, out=mask)
            np.bitwise_and(bits, mask, out=bits)


def _slopes(target: Signal, memory: Memory) -> list[tuple[Floats, Floats, Floats]]:
    """Outputs, their gradients and room for the slopes, some records at a time; nothing if not trained."""
    return [
        (part.values.whole, part.gradient.whole, memory.floats(len(part.values.whole), shared="mask"))
        for part in map(target.part, target.parts(AT_ONCE))
        if part.gradient is not None
    ]
