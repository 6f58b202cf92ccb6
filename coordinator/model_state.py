"""The model between two rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.training.optimiser import Optimiser


@dataclass(frozen=True, slots=True)
class ModelState:
    """All that one round leaves to the next.

    Attributes:
        weights: (parameters,), exact.
        moments: the optimiser's state, (rows, parameters).
        clip_norm: of the next round, if it follows a quantile.
        radii: of the next round's reports, for each tensor.
    """

    weights: NDArray[np.float32]
    moments: NDArray[np.float64]
    clip_norm: float
    radii: tuple[float, ...]

    def stepped(
        self, optimiser: Optimiser, gradient: NDArray[np.float64], *, number: int, learning_rate: float
    ) -> ModelState:
        """The model after the optimiser's step ``number``, from 1, against a gradient, (parameters,)."""
        weights, moments = optimiser.step(
            self.weights, self.moments, gradient, number=number, learning_rate=learning_rate
        )
        return replace(self, weights=weights, moments=moments)
