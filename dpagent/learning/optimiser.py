"""The coordinator's step: gradient descent with momentum on noisy means.

Post-processing of what the devices released, so it costs no privacy. Polyak's heavy ball in
the form common in deep learning: v ← μ·v + g, w ← w − η·v (Sutskever et al., "On the
importance of initialization and momentum in deep learning", ICML 2013, equation 1, with the
learning rate outside of v). The velocity is kept in float64, so that a run continued from
its stored state takes the same steps as one that never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_positive


@dataclass(frozen=True, slots=True)
class MomentumSgd:
    """Hyperparameters of the step; the state is passed in and out.

    Args:
        learning_rate: η, above 0.
        momentum: μ in [0, 1); 0 is plain gradient descent.
    """

    learning_rate: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        require_positive("learning_rate", self.learning_rate)
        require_between("momentum", self.momentum, 0.0, 1.0, high_open=True)

    def initial_velocity(self, size: int) -> NDArray[np.float64]:
        """The velocity before the first step."""
        return np.zeros(size, np.float64)

    def step(
        self, weights: NDArray[np.float32], velocity: NDArray[np.float64], gradient: NDArray[np.float64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """One step from ``(d,)`` arrays, which it leaves alone; returns new weights and velocity.

        Raises:
            ParameterError: the lengths differ, or the gradient is not finite.
        """
        if not weights.shape == velocity.shape == gradient.shape:
            raise ParameterError(
                f"The weights have shape {weights.shape}, the velocity {velocity.shape}, the gradient"
                f" {gradient.shape}; expected three alike."
            )
        if not np.isfinite(gradient).all():
            raise ParameterError(
                f"The gradient has {np.count_nonzero(~np.isfinite(gradient))} values that are not finite;"
                " expected none. Leave this round out."
            )
        new_velocity = self.momentum * velocity.astype(np.float64) + gradient
        new_weights = weights.astype(np.float64) - self.learning_rate * new_velocity
        return new_weights.astype(np.float32), new_velocity
