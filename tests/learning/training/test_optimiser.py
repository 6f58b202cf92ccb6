"""The optimisers' steps against their formulas by hand, the learning rate's course, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.learning.training.optimiser import Adam, LearningRate, Optimiser, Sgd

OPTIMISERS = [Sgd(), Sgd(0.9), Adam()]
each = pytest.mark.parametrize("optimiser", OPTIMISERS, ids=repr)


def zeros(optimiser: Optimiser, size: int) -> NDArray[np.float64]:
    return np.zeros((optimiser.rows, size))


def test_two_steps_with_momentum_by_hand() -> None:
    optimiser = Sgd(momentum=0.5)
    weights, gradient = np.array([1.0, -2.0], np.float32), np.array([2.0, 4.0])
    weights, state = optimiser.step(weights, zeros(optimiser, 2), gradient, number=1, learning_rate=0.5)
    assert weights.tolist() == [0.0, -4.0]
    assert state.tolist() == [[2.0, 4.0]]
    weights, state = optimiser.step(weights, state, gradient, number=2, learning_rate=0.25)
    assert state.tolist() == [[3.0, 6.0]]
    assert weights.tolist() == [-0.75, -5.5]


def test_plain_descent_forgets() -> None:
    weights, state = np.zeros(1, np.float32), np.full((1, 1), 7.0)
    weights, _ = Sgd().step(weights, state, np.array([1.0]), number=9, learning_rate=0.5)
    assert weights.tolist() == [-0.5]


def test_adam_by_hand() -> None:
    """Algorithm 1 of Kingma and Ba, in plain floats."""
    optimiser = Adam(0.8, 0.9, 1e-3)
    weights, state = np.array([1.0], np.float32), zeros(optimiser, 1)
    w, m, v = 1.0, 0.0, 0.0
    for number, g in enumerate([3.0, -1.0, 0.5], start=1):
        weights, state = optimiser.step(weights, state, np.array([g]), number=number, learning_rate=0.1)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w -= 0.1 * (m / (1 - 0.8**number)) / (math.sqrt(v / (1 - 0.9**number)) + 1e-3)
        assert weights[0] == pytest.approx(w, rel=1e-6)
        assert state[:, 0] == pytest.approx([m, v])


@each
def test_the_arguments_are_left_alone_and_types_kept(optimiser: Optimiser) -> None:
    weights, state, gradient = np.ones(3, np.float32), np.ones((optimiser.rows, 3)), np.ones(3)
    after, new_state = optimiser.step(weights, state, gradient, number=1, learning_rate=0.1)
    assert weights.tolist() == gradient.tolist() == [1, 1, 1]
    assert (state == 1).all()
    assert after.dtype == np.float32
    assert new_state.dtype == np.float64
    assert new_state.shape == state.shape


def test_the_learning_rate_falls_linearly_to_a_constant() -> None:
    rate = LearningRate(0.1, 0.052, decay_rounds=10)
    assert [rate.at(number) for number in (1, 6, 11, 12, 500)] == pytest.approx(
        [0.1, 0.076, 0.052, 0.052, 0.052]
    )
    assert LearningRate(0.3).at(77) == 0.3
    assert LearningRate(0.1, 0.2, 1).at(2) == 0.2


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Sgd(1.0), "momentum is 1"),
        (lambda: Sgd(-0.1), "momentum"),
        (lambda: Adam(first=1.0), "first is 1"),
        (lambda: Adam(second=math.nan), "second is nan"),
        (lambda: Adam(epsilon=0.0), "epsilon is 0"),
        (lambda: LearningRate(0.0), "learning_rate is 0"),
        (lambda: LearningRate(1.0, -1.0), "final_learning_rate is -1"),
        (lambda: LearningRate(1.0, 0.5, 0), "decay_rounds is 0"),
    ],
)
def test_hyperparameters_out_of_range_are_named(make: object, text: str) -> None:
    assert callable(make)
    with pytest.raises(ParameterError, match=text):
        make()


@each
def test_what_does_not_fit_is_refused(optimiser: Optimiser) -> None:
    weights, state = np.zeros(2, np.float32), zeros(optimiser, 2)
    with pytest.raises(ParameterError, match="1 values that are not finite"):
        optimiser.step(weights, state, np.array([np.nan, 1.0]), number=1, learning_rate=0.1)
    with pytest.raises(ParameterError, match=r"expected \(d,\)"):
        optimiser.step(weights, state, np.zeros(3), number=1, learning_rate=0.1)
    with pytest.raises(ParameterError, match="learning_rate is 0"):
        optimiser.step(weights, state, np.zeros(2), number=1, learning_rate=0.0)
    with pytest.raises(ParameterError, match="number is 0"):
        optimiser.step(weights, state, np.zeros(2), number=0, learning_rate=0.1)
