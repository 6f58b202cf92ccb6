"""The step of the optimiser against the formula, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest

from dpagent.errors import ParameterError
from dpagent.learning import MomentumSgd


def test_two_steps_by_hand() -> None:
    optimiser = MomentumSgd(learning_rate=0.5, momentum=0.5)
    weights = np.array([1.0, -2.0], np.float32)
    velocity = optimiser.initial_velocity(2)
    gradient = np.array([2.0, 4.0])
    weights, velocity = optimiser.step(weights, velocity, gradient)
    assert weights.tolist() == [0.0, -4.0]
    assert velocity.tolist() == [2.0, 4.0]
    weights, velocity = optimiser.step(weights, velocity, gradient)
    assert velocity.tolist() == [3.0, 6.0]
    assert weights.tolist() == [-1.5, -7.0]
    assert weights.dtype == np.float32
    assert velocity.dtype == np.float64


def test_the_arguments_are_left_alone() -> None:
    weights, velocity, gradient = np.ones(3, np.float32), np.ones(3), np.ones(3)
    MomentumSgd(0.1, 0.9).step(weights, velocity, gradient)
    assert weights.tolist() == velocity.tolist() == gradient.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("rate", "momentum", "text"),
    [
        (0.0, 0.9, "learning_rate is 0"),
        (-1.0, 0.9, "learning_rate"),
        (0.1, 1.0, "momentum is 1"),
        (0.1, -0.1, "mom"),
    ],
)
def test_hyperparameters_out_of_range_are_named(rate: float, momentum: float, text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        MomentumSgd(rate, momentum)


def test_a_gradient_that_is_not_finite_or_of_another_length_is_refused() -> None:
    optimiser = MomentumSgd(0.1)
    weights, velocity = np.zeros(2, np.float32), np.zeros(2)
    with pytest.raises(ParameterError, match="1 values that are not finite"):
        optimiser.step(weights, velocity, np.array([np.nan, 1.0]))
    with pytest.raises(ParameterError, match="expected three alike"):
        optimiser.step(weights, velocity, np.zeros(3))
