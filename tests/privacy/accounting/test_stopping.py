"""Jobs that end early: what the ε that they have spent is a bound for."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.events import GaussianEvent

DELTA, ROUNDS, SIGMA = 1e-5, 10, 4.0


def attained(epsilons: NDArray[np.float64]) -> float:
    """The δ that whoever ends a job of Gaussian rounds at will attains beside these ε, one for each round.

    The loss goes a normal step in each round, whose mean is half its variance. Ending at a loss of l, after a
    round that states ε, gains 1 − e^(ε−l): the best moments follow by induction from the last round back.
    """
    deviation, cell = 1 / SIGMA, 1 / SIGMA / 40
    losses = np.arange(-4.0, epsilons[-1] + 6.0, cell)
    steps = np.arange(-9 * deviation, 9 * deviation, cell)
    weights = norm.pdf(steps, deviation**2 / 2, deviation)
    weights /= weights.sum()
    value = np.zeros_like(losses)
    for epsilon in epsilons[::-1]:
        # Beyond the ends lies nothing worth ending for, or going on.
        going_on = sum(
            weight * np.interp(losses + step, losses, value, left=0.0)
            for step, weight in zip(steps, weights, strict=True)
        )
        value = np.maximum(going_on, -np.expm1(np.minimum(epsilon - losses, 0.0)))
    first = [np.interp(step, losses, value, left=0.0) for step in steps]
    return math.fsum(weights * first)


def test_what_was_spent_is_no_bound_for_whoever_ends_the_job() -> None:
    spent = PldAccountant().running_epsilon([GaussianEvent(SIGMA)] * ROUNDS, DELTA)
    whole = np.full(ROUNDS, spent[-1])
    assert attained(spent) > 4 * DELTA
    assert attained(whole) <= DELTA * 1.01, "what the job reserves is"
    last_alone = np.where(np.arange(ROUNDS) < ROUNDS - 1, math.inf, spent[-1])
    assert DELTA * 0.9 < attained(last_alone) <= DELTA * 1.01, "so is a moment that was fixed before"
