"""A residual: two branches from one signal, and their sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpagent.learning.training.numpy_engine.stages import Stage
from dpagent.learning.training.numpy_engine.workspaces import Floats, Signal


class ForkStage(Stage):
    """The start of the branches: they read the same values, and their gradients are added."""

    def __init__(self, source: Signal, entries: Sequence[Signal]) -> None:
        self._gradients: tuple[Floats, ...] = ()
        if source.gradient is not None:
            first, second = (entry.gradient.whole for entry in entries if entry.gradient is not None)
            self._gradients = (first, second, source.gradient.whole)

    def forward(self) -> None:
        """The branches read where the source lies."""

    def backward(self) -> None:
        if self._gradients:
            first, second, total = self._gradients
            np.add(first, second, out=total)


class SumStage(Stage):
    """The sum of the branches."""

    def __init__(self, exits: Sequence[Signal], target: Signal) -> None:
        first, second = (branch.values.whole for branch in exits)
        self._values = (first, second, target.values.whole)
        self._incoming = target.gradient.whole if target.gradient else None
        self._gradients = [branch.gradient.whole for branch in exits if branch.gradient is not None]

    def forward(self) -> None:
        first, second, total = self._values
        np.add(first, second, out=total)

    def backward(self) -> None:
        if self._incoming is not None:
            for gradient in self._gradients:
                np.copyto(gradient, self._incoming)
