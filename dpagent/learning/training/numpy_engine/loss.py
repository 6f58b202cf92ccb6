"""Softmax cross-entropy, where the gradients begin and the losses end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.training.numpy_engine.workspaces import Floats, Memory, Signal


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
        self._exponentiate()
        gradient = self._gradient.values
        np.divide(gradient, self._sum, out=gradient)
        gradient[*self._places, labels[:, np.newaxis]] -= np.float32(1)
        if len(self._places[1]) > 1:
            np.multiply(gradient, self._share, out=gradient)

    def values(self, labels: NDArray[np.int64]) -> Floats:
        """The loss of each view, ``(records, views)``, in nats; ``labels`` has that shape."""
        self._exponentiate()
        logarithm = np.log(self._sum[..., 0], dtype=np.float64) + self._largest[..., 0]
        losses: Floats = (logarithm - self._logits[*self._places, labels]).astype(np.float32)
        return losses

    def _exponentiate(self) -> None:
        """exp(logit - largest) where the gradient will be, and its sum."""
        np.maximum.reduce(self._logits, axis=-1, keepdims=True, out=self._largest)
        np.subtract(self._logits, self._largest, out=self._shifted.values)
        np.exp(self._shifted.whole, out=self._gradient.whole)
        np.add.reduce(self._gradient.values, axis=-1, keepdims=True, out=self._sum)
