"""Softmax cross-entropy, where the gradients begin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.training.numpy_engine.activations import LEAST_EXPONENT
from dpagent.learning.training.numpy_engine.workspaces import Memory, Signal


class SoftmaxCrossEntropy:
    """The loss of the logits ``(records, views, classes)`` in ``signal``; its mean over a record's views."""

    def __init__(self, signal: Signal, memory: Memory) -> None:
        if signal.gradient is None:
            raise AssertionError("the last layer has parameters, so the logits have a gradient")
        self._logits, self._gradient = signal.values.values, signal.gradient
        records, views, classes = self._logits.shape
        self._shifted = memory.workspace((classes,))
        self._largest = memory.workspace((1,)).values
        self._sum = memory.workspace((1,)).values
        self._places = np.arange(records)[:, np.newaxis], np.arange(views)
        self._share = np.float32(1 / views)

    def backward(self, labels: NDArray[np.int64]) -> None:
        """Softmax minus the one-hot label, over the number of views; ``labels`` is ``(records,)``."""
        gradient = self._gradient.values
        np.maximum.reduce(self._logits, axis=-1, keepdims=True, out=self._largest)
        np.subtract(self._logits, self._largest, out=self._shifted.values)
        np.maximum(self._shifted.whole, LEAST_EXPONENT, out=self._shifted.whole)
        np.exp(self._shifted.whole, out=self._gradient.whole)
        np.add.reduce(gradient, axis=-1, keepdims=True, out=self._sum)
        np.divide(gradient, self._sum, out=gradient)
        gradient[*self._places, labels[:, np.newaxis]] -= np.float32(1)
        if len(self._places[1]) > 1:
            np.multiply(gradient, self._share, out=gradient)
