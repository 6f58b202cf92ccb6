"""Sums over lots: what fails when the board has too little memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fleets import DIGITS, records

from dpagent.learning.training.engine import ClippedSum
from dpagent.learning.training.lots import Filling, Room, sum_over_lot
from dpagent.learning.training.numpy_engine.engine import NumpyEngine

MOST = 8
"""Rows that fit the memory."""


class Cramped(NumpyEngine):
    """An engine on a board with memory for a few rows."""

    def clipped_sum(self, weights: Any, inputs: Any, *rest: Any) -> ClippedSum:
        if len(inputs) > MOST:
            raise MemoryError
        return super().clipped_sum(weights, inputs, *rest)


@pytest.mark.parametrize("size", [0, 1, MOST, MOST + 1])
def test_lack_of_memory_leaves_no_record_out(size: int) -> None:
    """Whatever the lot."""
    engine, data = Cramped(DIGITS, microbatch=2), records(20)
    filling = Filling(MOST + 1, 20, records(16), Room(16, DIGITS.input_shape))
    with pytest.raises(MemoryError):
        sum_over_lot(engine, DIGITS.initial_weights(0), data, np.arange(size), [1.0], filling=filling)
