"""Group normalisation without parameters and without statistics of anyone's data.

Sums over positions and channels are products with constant vectors, a record at a time: y = (x - μ)/s with
μ and s those of the group. With ⟨·⟩ the mean over the group, the gradient goes back as
(g - ⟨g⟩ - y·⟨g·y⟩)/s (Wu and He, "Group Normalization", ECCV 2018; the derivative as for batch
normalisation, Ioffe and Szegedy, ICML 2015, section 3).
"""

from __future__ import annotations

import math

import numpy as np

from dpagent.learning.models.layers import GROUP_NORM_EPSILON
from dpagent.learning.training.numpy_engine.stages import Stage
from dpagent.learning.training.numpy_engine.workspaces import Floats, Memory, Signal, aligned


class GroupNormStage(Stage):
    """Brings each group of channels of each record to mean 0 and variance 1."""

    def __init__(self, groups: int, source: Signal, target: Signal, memory: Memory) -> None:
        records, views, *places, channels = source.values.values.shape
        positions = math.prod(places)
        shape = (records, views, positions, channels)
        self._input = source.values.values.reshape(shape, copy=False)
        self._output = target.values.values.reshape(shape, copy=False)
        self._ones = aligned(positions).reshape(1, positions)
        self._ones.fill(1)
        members = channels // groups
        together = np.arange(channels) // members
        self._averaging = aligned(channels * channels).reshape(channels, channels)
        self._averaging[...] = (together[:, np.newaxis] == together) / np.float32(members * positions)
        self._sums, self._mean, self._other, self._scale = (
            memory.workspace((1, channels)).values for _ in range(4)
        )
        self._incoming = self._back = None
        self._scratch = memory.workspace(shape[2:], shared="mask").values
        if source.gradient is not None and target.gradient is not None:
            self._incoming = target.gradient.values.reshape(shape, copy=False)
            self._back = source.gradient.values.reshape(shape, copy=False)

    def forward(self) -> None:
        self._average(self._input, self._mean)
        np.subtract(self._input, self._mean, out=self._output)
        np.multiply(self._output, self._output, out=self._scratch)
        self._average(self._scratch, self._scale)
        np.add(self._scale, np.float32(GROUP_NORM_EPSILON), out=self._scale)
        np.sqrt(self._scale, out=self._scale)
        np.divide(np.float32(1), self._scale, out=self._scale)
        np.multiply(self._output, self._scale, out=self._output)

    def backward(self) -> None:
        if self._incoming is None or self._back is None:
            return
        self._average(self._incoming, self._mean)
        np.multiply(self._incoming, self._output, out=self._back)
        self._average(self._back, self._other)
        np.multiply(self._output, self._other, out=self._back)
        np.subtract(self._incoming, self._back, out=self._back)
        np.subtract(self._back, self._mean, out=self._back)
        np.multiply(self._back, self._scale, out=self._back)

    def _average(self, values: Floats, out: Floats) -> None:
        """The mean of each group, written to each of its channels."""
        np.matmul(self._ones, values, out=self._sums)
        np.matmul(self._sums, self._averaging, out=out)
