"""How a model does on held-out data: its answers by class, and their loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a model does on a dataset.

    Attributes:
        confusion: ``(classes, classes)``, records by their label (row) and the model's answer (column).
        loss: mean cross-entropy, in nats; not finite where the model's scores are not.
    """

    confusion: NDArray[np.int64]
    loss: float

    @property
    def accuracy(self) -> float:
        """The fraction of records whose largest score is that of their label."""
        return int(np.trace(self.confusion)) / int(self.confusion.sum())
