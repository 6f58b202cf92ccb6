"""The model between two rounds."""

from __future__ import annotations

import json
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

    def stored(self) -> tuple[bytes, bytes, float, str]:
        """Weights, moments, clip norm and radii as they are stored."""
        return self.weights.tobytes(), self.moments.tobytes(), self.clip_norm, json.dumps(self.radii)

    @classmethod
    def read(cls, weights: bytes, moments: bytes, clip_norm: float, radii: str) -> ModelState:
        """Inverse of :meth:`stored`."""
        exact = np.frombuffer(weights, np.float32).copy()
        rows = np.frombuffer(moments, np.float64).reshape(-1, len(exact)).copy()
        return cls(exact, rows, clip_norm, tuple(json.loads(radii)))
