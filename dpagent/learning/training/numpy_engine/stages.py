"""A step of the network, bound once to the memory it works on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from dpagent.blank_rows import blank_all_but
from dpagent.learning.models.part import Shape
from dpagent.learning.models.spec import Node
from dpagent.learning.training.engine import NORM_RUN
from dpagent.learning.training.numpy_engine.power_sums import PowerSums
from dpagent.learning.training.numpy_engine.products import Choice
from dpagent.learning.training.numpy_engine.workspaces import Floats, aligned, round_up
from dpagent.norm import Norm


class Stage(ABC):
    """One step over a whole microbatch, from one signal to another.

    Attributes:
        choices: parts of it that can be computed in several forms, by purpose.
    """

    choices: Mapping[str, Choice] = MappingProxyType({})

    @abstractmethod
    def forward(self) -> None:
        """Compute the values of the output from those of the input."""

    @abstractmethod
    def backward(self) -> None:
        """Compute the gradient by the input, if it has one, from the gradient by the output.

        The gradient by the output may be overwritten.
        """


class TrainedStage(Stage):
    """A step with parameters: it also knows each record's gradient by them.

    Args:
        node: the layer in its place.

    Attributes:
        path: the layer's name.
        parameters: where its parameters lie in the flat vector.
    """

    def __init__(self, node: Node) -> None:
        self.path = node.path
        self.parameters = node.parameters

    @abstractmethod
    def load(self, weights: Floats) -> None:
        """Take over this layer's weight and bias, as they lie in the flat vector, and begin a new sum."""

    @abstractmethod
    def power_sums(self) -> NDArray[np.float64]:
        """Σ|gradient|^p of each record by these parameters, ``(records,)``, after ``backward``.

        p is 1 where records are clipped in L1, and 2 in L2.
        """

    @abstractmethod
    def add_clipped(self, factors: Floats, usable: NDArray[np.bool_]) -> None:
        """Add Σ factor·gradient to the sum of the microbatch, in float32.

        Args:
            factors: ``(records,)``.
            usable: ``(records,)``; the others must add exact zeros, for any gradients.
        """

    @abstractmethod
    def finish(self) -> None:
        """Add the sum of the microbatch, in float32, to that of the lot, in float64, and begin a new one."""

    @abstractmethod
    def total(self) -> NDArray[np.float64]:
        """The sum of the lot, as it lies in the flat vector: of all since ``load``."""

    @abstractmethod
    def evidence(self) -> list[Floats]:
        """All that the gradient of a record consists of, ``(records, …)`` each."""


class RecordGradients:
    """The gradient of each record by a matrix of parameters, written out, and their clipped sum.

    Args:
        records: how many.
        shape: of the matrix.
        norm: in which the gradients are measured.

    Attributes:
        power_sums: gives Σ|gradient|^p of each.
    """

    def __init__(self, records: int, shape: Shape, norm: Norm) -> None:
        size = math.prod(shape)
        runs = -(-size // NORM_RUN)
        run = round_up(-(-size // runs))
        # Filled up with zeros to a whole number of equal runs.
        self._runs = aligned(records * runs * run).reshape(records, runs, run)
        self._all = self._runs.reshape(records, runs * run)
        self.rows = self._all[:, :size]
        self.matrices = self.rows.reshape((records, *shape), copy=False)
        self._sum, self._part = aligned(runs * run), aligned(runs * run)
        self._total = np.zeros(runs * run)
        self._shape, self._is_empty = shape, True
        self.power_sums = PowerSums.of_runs(self._runs, size, norm)

    def begin(self) -> None:
        """Forget the sums so far."""
        self._is_empty = True
        self._total.fill(0)

    def add_clipped(self, factors: Floats, usable: NDArray[np.bool_]) -> None:
        """As :meth:`TrainedStage.add_clipped`."""
        # Zero times infinity is not zero: numbers that must add nothing are overwritten.
        blank_all_but(usable, self._all)
        if self._is_empty:
            np.matmul(factors, self._all, out=self._sum)
            self._is_empty = False
        else:
            np.matmul(factors, self._all, out=self._part)
            np.add(self._sum, self._part, out=self._sum)

    def finish(self) -> None:
        """As :meth:`TrainedStage.finish`."""
        if not self._is_empty:
            np.add(self._total, self._sum, out=self._total)
            self._is_empty = True

    @property
    def total(self) -> NDArray[np.float64]:
        """The sum of the lot, of the matrix's shape."""
        return self._total[: math.prod(self._shape)].reshape(self._shape)


class WrittenOutStage(TrainedStage):
    """A step whose gradients are written out, record by record, in ``self._gradients``."""

    _gradients: RecordGradients

    def power_sums(self) -> NDArray[np.float64]:
        return self._gradients.power_sums()

    def add_clipped(self, factors: Floats, usable: NDArray[np.bool_]) -> None:
        self._gradients.add_clipped(factors, usable)

    def finish(self) -> None:
        self._gradients.finish()

    def evidence(self) -> list[Floats]:
        return [self._gradients.rows]
