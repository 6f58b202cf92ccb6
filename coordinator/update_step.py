"""From counted updates to the next model: here the coordinator adds its noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coordinator.model_state import ModelState
from dpagent.learning.training.optimiser import Optimiser
from dpagent.protocol.updates import Updates


def take_update_step(
    release: Updates, total: NDArray[np.int64], model: ModelState, optimiser: Optimiser, learning_rate: float
) -> ModelState:
    """Step by the mean update, with fresh noise: of a round, no more than one such step may ever be seen.

    With a learning rate of 1 and no momentum, the mean update is added to the weights, as in federated
    averaging.

    Args:
        release: the round's.
        total: (parameters,) the exact sum of the updates, in grid units. Private.
        model: before it.
        optimiser: takes the step.
        learning_rate: of this step.
    """
    noisy = release.mechanism.add_noise(total)
    return model.stepped(
        optimiser, -release.mean_of(noisy), number=release.plan.round, learning_rate=learning_rate
    )
