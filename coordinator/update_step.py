"""From counted updates to the next model: here the coordinator adds its noise."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.model_state import ModelState
from dpagent.learning.training.optimiser import Optimiser
from dpagent.privacy.noise.entropy import Entropy
from dpagent.protocol.updates import Updates


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """The outcome of a step.

    Attributes:
        model: behind it, still with the clip norm of this round.
        share_within: of the devices, within that norm, as the noisy sum tells it; None where they do not say.
    """

    model: ModelState
    share_within: float | None


def take_update_step(
    release: Updates,
    total: NDArray[np.int64],
    model: ModelState,
    optimiser: Optimiser,
    learning_rate: float,
    *,
    entropy: Entropy = os.urandom,
) -> UpdateStep:
    """Step by the mean update, with fresh noise: of a round, no more than one such step may ever be seen.

    With a learning rate of 1 and no momentum, the mean update is added to the weights, as in federated
    averaging.

    Args:
        release: the round's.
        total: (dimension,) the exact sum of the updates, in grid units. Private.
        model: before it.
        optimiser: takes the step.
        learning_rate: of this step.
        entropy: of the noise; to be replaced in tests and simulations only.
    """
    noisy = release.mechanism.add_noise(total, entropy=entropy)
    mean, parameters = release.mean_of(noisy), release.clipping.parameters
    # No warning either: it would say before the step is kept what this noise made of the weights.
    with np.errstate(over="ignore", invalid="ignore"):
        stepped = model.stepped(
            optimiser, -mean[:parameters], number=release.plan.round, learning_rate=learning_rate
        )
    share = release.clipping.share_within(float(mean[-1])) if release.clipping.count_weight else None
    return UpdateStep(stepped, share)
