"""Training on one device: so many steps, whatever the records are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fleets import DIGITS, records
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.training.engine import ClippedSum
from dpagent.learning.training.local_sgd import LocalSgd
from dpagent.learning.training.lots import Filling, Room
from dpagent.learning.training.numpy_engine.engine import NumpyEngine

ENGINE = NumpyEngine(DIGITS, microbatch=4)
WEIGHTS = DIGITS.initial_weights(0)
SGD = LocalSgd(steps=3, batch=8, learning_rate=0.5, largest_gradient=1e6)


class Counting(NumpyEngine):
    """An engine that knows how many rows it computed at each call."""

    def __init__(self) -> None:
        super().__init__(DIGITS, microbatch=4)
        self.rows: list[int] = []

    def clipped_sum(self, *given: Any) -> ClippedSum:
        self.rows.append(len(given[1]))
        return super().clipped_sum(*given)


def trained(data: ArrayDataset, sgd: LocalSgd = SGD) -> tuple[NDArray[np.float32], list[int]]:
    engine, filling = Counting(), Filling(sgd.batch, 100, records(32), Room(32, DIGITS.input_shape))
    return sgd.train(engine, WEIGHTS, data, filling), engine.rows


def test_steps_follow_the_mean_gradient() -> None:
    """With one record, every batch is that record: plain gradient descent."""
    data = records(1)
    expected = WEIGHTS.copy()
    for _ in range(3):
        gradient = ENGINE.clipped_sum(expected, *data.batch(np.array([0])), [1e9]).total
        expected = (expected - 0.5 * gradient).astype(np.float32)
    found, rows = trained(data)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert rows == [8, 8, 8]
    np.testing.assert_allclose(SGD.train(ENGINE, WEIGHTS, data), expected, rtol=1e-5, atol=1e-6)


def test_weights_change_with_the_records_and_the_arguments_do_not() -> None:
    before, data = WEIGHTS.copy(), records(30)
    inputs = data.inputs.copy()
    found, _ = trained(data)
    assert not np.array_equal(found, WEIGHTS)
    np.testing.assert_array_equal(WEIGHTS, before)
    np.testing.assert_array_equal(data.inputs, inputs)


def test_without_records_weights_stay_and_every_step_is_computed_with_made_up_ones() -> None:
    found, rows = trained(records(0))
    np.testing.assert_array_equal(found, WEIGHTS)
    assert rows == [8, 8, 8]
    np.testing.assert_array_equal(SGD.train(ENGINE, WEIGHTS, records(0)), WEIGHTS)


def test_a_record_that_is_not_finite_counts_as_one_without_a_gradient() -> None:
    spoilt = records(1)
    spoilt.inputs[:] = np.nan
    found, rows = trained(spoilt)
    np.testing.assert_array_equal(found, WEIGHTS)
    assert rows == [8, 8, 8]


def test_training_that_runs_away_raises_nothing() -> None:
    found, rows = trained(records(5), LocalSgd(steps=8, batch=4, learning_rate=1000.0, largest_gradient=1e6))
    assert found.shape == WEIGHTS.shape
    assert rows == [4] * 8


@pytest.mark.parametrize(
    ("values", "text"),
    [((0, 8, 0.1), "steps is 0"), ((10_001, 8, 0.1), "steps"), ((1, 0, 0.1), "batch is 0"),
     ((1, 65_537, 0.1), "batch"), ((1, 1, 0.0), "learning_rate is 0"),
     ((1, 1, float("nan")), "learning_rate")],
)  # fmt: skip
def test_values_out_of_range_are_named(values: tuple[int, int, float], text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        LocalSgd(*values, largest_gradient=1e6)
