"""The coordinator's step on noisy means, and how its length changes over the rounds.

Post-processing of noisy sums, so it costs no privacy.

* ``Sgd``: w ← w − η·g; with momentum μ Polyak's heavy ball in the form common in deep learning, v ← μ·v + g,
  w ← w − η·v (Sutskever et al., "On the importance of initialization and momentum in deep
  learning", ICML 2013, equation 1, with the learning rate outside of v).
* ``Adam``: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1. The noise
  enters its second moment too, and where noise dominates makes all coordinates' steps alike.

State is kept in float64 and passed in and out, so that a run continued from its stored state
takes the same steps as one that never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count, require_positive

Weights = NDArray[np.float32]
State = NDArray[np.float64]
Mean = NDArray[np.float64]


class Optimiser(Protocol):
    """Hyperparameters of a step. The state is ``(rows, d)`` with the optimiser's own number of rows."""

    @property
    def rows(self) -> int:
        """Vectors of state."""

    def step(
        self, weights: Weights, state: State, gradient: Mean, *, number: int, learning_rate: float
    ) -> tuple[Weights, State]:
        """One step, which leaves its arguments alone.

        Args:
            weights: ``(d,)``.
            state: ``(rows, d)``, zeros before the first step.
            gradient: ``(d,)``, the mean.
            number: of the step, from 1.
            learning_rate: η of this step, above 0.

        Returns:
            New weights and state.

        Raises:
            ParameterError: the lengths differ, or the gradient is not finite.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sgd:
    """Gradient descent.

    Args:
        momentum: μ in [0, 1); 0 is plain gradient descent.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        require_between("momentum", self.momentum, 0.0, 1.0, high_open=True)

    @property
    def rows(self) -> int:
        """One: the velocity."""
        return 1

    def step(
        self, weights: Weights, state: State, gradient: Mean, *, number: int, learning_rate: float
    ) -> tuple[Weights, State]:
        """As :meth:`Optimiser.step`.

        >>> weights, state = np.zeros(2, np.float32), np.zeros((1, 2))
        >>> Sgd().step(weights, state, np.array([1.0, -2.0]), number=1, learning_rate=0.5)[0].tolist()
        [-0.5, 1.0]
        """
        _check(weights, state, gradient, self.rows, number, learning_rate)
        velocity = self.momentum * state[0] + gradient
        return (weights - learning_rate * velocity).astype(np.float32), velocity[np.newaxis]


@dataclass(frozen=True, slots=True)
class Adam:
    """Steps scaled by running moments of the gradient.

    Args:
        first, second: β₁ and β₂, the moments' decay, in [0, 1).
        epsilon: added to the root of the second moment, above 0.
    """

    first: float = 0.9
    second: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        require_between("first", self.first, 0.0, 1.0, high_open=True)
        require_between("second", self.second, 0.0, 1.0, high_open=True)
        require_positive("epsilon", self.epsilon)

    @property
    def rows(self) -> int:
        """Two: the moments."""
        return 2

    def step(
        self, weights: Weights, state: State, gradient: Mean, *, number: int, learning_rate: float
    ) -> tuple[Weights, State]:
        """As :meth:`Optimiser.step`."""
        _check(weights, state, gradient, self.rows, number, learning_rate)
        mean = self.first * state[0] + (1 - self.first) * gradient
        square = self.second * state[1] + (1 - self.second) * gradient**2
        unbiased = mean / (1 - self.first**number)
        size = np.sqrt(square / (1 - self.second**number)) + self.epsilon
        return (weights - learning_rate * unbiased / size).astype(np.float32), np.stack([mean, square])


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Linear decay to a constant.

    Args:
        start: η of the first round, above 0.
        end: η after the decay, above 0; by default it stays at ``start``.
        decay_rounds: rounds over which it falls, at least 1.
    """

    start: float
    end: float | None = None
    decay_rounds: int = 1

    def __post_init__(self) -> None:
        require_positive("learning_rate", self.start)
        if self.end is not None:
            require_positive("final_learning_rate", self.end)
        require_count("decay_rounds", self.decay_rounds)

    def at(self, round_number: int) -> float:
        """η of a round, counted from 1.

        >>> [LearningRate(0.5, end=0.25, decay_rounds=2).at(number) for number in (1, 2, 3, 9)]
        [0.5, 0.375, 0.25, 0.25]
        """
        if self.end is None:
            return self.start
        done = min(1.0, (round_number - 1) / self.decay_rounds)
        return self.start + (self.end - self.start) * done


def _check(
    weights: Weights, state: State, gradient: Mean, rows: int, number: int, learning_rate: float
) -> None:
    require_count("number", number)
    require_positive("learning_rate", learning_rate)
    if weights.shape != gradient.shape or state.shape != (rows, *gradient.shape):
        raise ParameterError(
            f"The weights have shape {weights.shape}, the state {state.shape}, the gradient {gradient.shape};"
            f" expected (d,), ({rows}, d) and (d,)."
        )
    if not np.isfinite(gradient).all():
        raise ParameterError(
            f"The gradient has {np.count_nonzero(~np.isfinite(gradient))} values that are not finite;"
            " expected none. Leave this round out."
        )
