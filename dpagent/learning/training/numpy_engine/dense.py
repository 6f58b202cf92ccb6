"""Dense layers: the gradient of a record is an outer product, and need not be written out.

With a the input, one more input of constant one for the bias, and g the gradient of the loss by the
output, the record's gradient by the parameters is (a, 1)·gᵀ. So its squared L2 norm is (‖a‖² + 1)·‖g‖²
(Goodfellow, "Efficient Per-Example Gradient Computations", 2015), and its L1 norm, Σ|a_i·g_j| over all pairs,
is (‖a‖₁ + 1)·‖g‖₁. The clipped sum is one product over the records of the microbatch, (A, 1)ᵀ·(c·G).

Each of the two factors is summed in runs of half of ``NORM_RUN``, so that their product is no
further off than one sum of ``NORM_RUN`` numbers.

With several views of a record its gradient is a sum of outer products, whose norm has no such form: it is
written out.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from dpagent.blank_rows import blank_all_but
from dpagent.learning.models.spec import Node
from dpagent.learning.training.engine import NORM_RUN
from dpagent.learning.training.numpy_engine.power_sums import PowerSums
from dpagent.learning.training.numpy_engine.products import Choice, Product
from dpagent.learning.training.numpy_engine.stages import (
    RecordGradients,
    TrainedStage,
    WrittenOutStage,
)
from dpagent.learning.training.numpy_engine.workspaces import Floats, Signal, aligned
from dpagent.norm import Norm


class _DenseStage(TrainedStage):
    """The common base of both ways of finding the gradient."""

    def __init__(self, node: Node, source: Signal, target: Signal) -> None:
        super().__init__(node)
        records, views = source.values.values.shape[:2]
        self._input = source.values.values.reshape((records, views, -1), copy=False)
        self._output = target.values.values
        inputs, units = self._input.shape[-1], self._output.shape[-1]
        if target.gradient is None:
            raise AssertionError("what has parameters has a gradient")
        self._incoming = target.gradient.values
        self._weights = aligned(inputs * units).reshape(inputs, units)
        self._bias = aligned(units)
        self._forward = Product(self._input, self._weights, self._output)
        choices: dict[str, Choice] = {"forward": self._forward}
        self._back, self._transposed = None, None
        if source.gradient is not None:
            back = source.gradient.values.reshape(self._input.shape, copy=False)
            self._transposed = aligned(inputs * units).reshape(units, inputs)
            self._back = Product(self._incoming, self._transposed, back)
            choices["input gradient"] = self._back
        self.choices = choices

    def load(self, weights: Floats) -> None:
        self._begin()
        matrix = weights.reshape(-1, len(self._bias))
        self._weights[...], self._bias[...] = matrix[:-1], matrix[-1]
        if self._transposed is not None:
            self._transposed[...] = matrix[:-1].T

    @abstractmethod
    def _begin(self) -> None:
        """Forget the sum so far."""

    def forward(self) -> None:
        self._forward()
        np.add(self._output, self._bias, out=self._output)

    def backward(self) -> None:
        if self._back is not None:
            self._back()


class DenseStage(_DenseStage):
    """A dense layer that sees one view of each record.

    Inputs and clipped gradients of a whole microbatch are kept for the one product that adds them up.
    """

    def __init__(self, node: Node, source: Signal, target: Signal, norm: Norm, microbatch: int) -> None:
        super().__init__(node, source, target)
        self._inputs, self._gradients = self._input[:, 0], self._incoming[:, 0]
        self._factors = [PowerSums(part, norm, NORM_RUN // 2) for part in (self._inputs, self._gradients)]
        inputs, units = self._weights.shape
        self._kept_inputs = aligned(microbatch * inputs).reshape(microbatch, inputs)
        self._clipped = aligned(microbatch * units).reshape(microbatch, units)
        self._kept = 0
        self._sum = aligned((inputs + 1) * units).reshape(inputs + 1, units)
        self._total = np.zeros((inputs + 1, units))

    def _begin(self) -> None:
        self._kept = 0
        self._total.fill(0)

    def power_sums(self) -> NDArray[np.float64]:
        inputs, gradients = self._factors
        return (inputs() + 1) * gradients()

    def add_clipped(self, factors: Floats, usable: NDArray[np.bool_]) -> None:
        count = min(len(factors), len(self._clipped) - self._kept)
        place = slice(self._kept, self._kept + count)
        self._kept += count
        clipped, inputs = self._clipped[place], self._kept_inputs[place]
        np.multiply(self._gradients[:count], factors[:count, np.newaxis], out=clipped)
        np.copyto(inputs, self._inputs[:count])
        # Zero times infinity is not zero: numbers that must add nothing are overwritten.
        for rows in (clipped, inputs):
            blank_all_but(usable[:count], rows)

    def finish(self) -> None:
        inputs, clipped = self._kept_inputs[: self._kept], self._clipped[: self._kept]
        np.matmul(inputs.T, clipped, out=self._sum[:-1])
        np.add.reduce(clipped, axis=0, out=self._sum[-1])
        self._kept = 0
        np.add(self._total, self._sum, out=self._total)

    def total(self) -> NDArray[np.float64]:
        return self._total.reshape(-1)

    def evidence(self) -> list[Floats]:
        return [self._inputs, self._gradients]


class AveragedDenseStage(_DenseStage, WrittenOutStage):
    """A dense layer that sees several views of each record."""

    def __init__(self, node: Node, source: Signal, target: Signal, norm: Norm) -> None:
        super().__init__(node, source, target)
        inputs, units = self._weights.shape
        self._gradients = RecordGradients(len(self._input), (inputs + 1, units), norm)

    def _begin(self) -> None:
        self._gradients.begin()

    def backward(self) -> None:
        super().backward()
        matrices = self._gradients.matrices
        np.matmul(self._input.swapaxes(1, 2), self._incoming, out=matrices[:, :-1])
        np.add.reduce(self._incoming, axis=1, out=matrices[:, -1])

    def total(self) -> NDArray[np.float64]:
        return self._gradients.total.reshape(-1)
