"""Training on one device without noise: a fixed number of plain steps on batches of a fixed size.

For methods whose noise comes after training, on the weights or on their change. The work does not depend on
the records: each step draws as many of them as the plan says, with replacement, however many there are; where
there are none, its rows are blank, and it comes to nothing. What comes out is private, and exact in nothing:
mechanisms that follow bound it themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_between, require_count

if TYPE_CHECKING:
    from dpagent.learning.data.dataset import Dataset
    from dpagent.learning.training.engine import Engine
    from dpagent.learning.training.lots import Filling

_MAX_STEPS = 10_000
_MAX_BATCH = 65_536
_SEED_BYTES = 16


@dataclass(frozen=True, slots=True)
class LocalSgd:
    """Plain gradient descent on one device. Public.

    Args:
        steps: on a batch each, in 1..10,000.
        batch: records of a step, drawn uniformly with replacement, in 1..65,536.
        learning_rate: of every step, in (0, 1000].
        largest_gradient: norm to which a record's gradient is clipped: one that no sane record reaches.

    Raises:
        ParameterError: a value is out of its range.
    """

    steps: int
    batch: int
    learning_rate: float
    largest_gradient: float

    def __post_init__(self) -> None:
        require_count("steps", self.steps, maximum=_MAX_STEPS)
        require_count("batch", self.batch, maximum=_MAX_BATCH)
        require_between("learning_rate", self.learning_rate, 0.0, 1000.0, low_open=True)

    def train(
        self,
        engine: Engine,
        weights: NDArray[np.float32],
        dataset: Dataset,
        filling: Filling | None = None,
        *,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> NDArray[np.float32]:
        """Weights ``(d,)`` after all steps. Private; they need not be finite.

        A record that cannot be read, or that the engine cannot compute, counts as one without a gradient.
        Without records the weights stay as they are.

        Args:
            engine: computes gradients, with one clip norm for all layers.
            weights: ``(d,)`` to begin with; they are left alone.
            dataset: the device's records, as the engine takes them.
            filling: takes the place of records that there are not, or that cannot be read, so that the work
                is the same.
            entropy: of the batches; to be replaced in tests and simulations only.

        Raises:
            ConfigurationError, StorageError: the board fails, which is no record's doing.
        """
        import random  # as the trials before the charge did: no memory for numpy's has been had

        from dpagent.learning.training.lots import sum_over_lot  # which the agent itself never loads

        # By a number: from bytes, Python 3.13 makes one by a module that it loads then.
        seed = int.from_bytes(entropy(_SEED_BYTES), "little")
        generator, local = random.Random(seed), weights.copy()
        for _ in range(self.steps):
            drawn = np.frombuffer(generator.randbytes(8 * self.batch), np.uint64)
            # Without records, the index 0 is nobody's.
            batch = (drawn % np.uint64(max(len(dataset), 1))).astype(np.intp)
            total = sum_over_lot(
                engine, local, dataset, batch, [self.largest_gradient], filling=filling
            ).total
            local = self.moved(local, total)
        return local

    def moved(self, local: NDArray[np.float32], total: NDArray[np.float64]) -> NDArray[np.float32]:
        """Weights ``(d,)`` after a step with a batch whose gradients add up to ``total``, ``(d,)``."""
        with np.errstate(over="ignore", invalid="ignore"):
            change = self.learning_rate / self.batch * total
            return local - change.astype(np.float32)
