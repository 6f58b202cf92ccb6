"""Attacks by the time that a sampler takes: how long a draw took tells what was drawn.

After Jin, McMurtry, Rubinstein, Ohrimenko (IEEE S&P 2022), section on timing. An exact sampler that loops
until a geometric number is drawn, as that of Canonne, Kamath and Steinke does (*The discrete Gaussian for
differential privacy*, NeurIPS 2020), takes a time that grows with what it returns. An observer of y = f + n
who also sees the time has an estimate of |n|, and takes the candidate f for which |y − f| is nearer to it.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_UNIT: Final = 1 << 53
Draw = Callable[[], int]


def looping_laplace(scale: int) -> Draw:
    """Discrete Laplace noise, P(n) ∝ e^(−|n|/scale), by counting trials until one fails.

    Args:
        scale: A whole number of at least 1.
    """
    go_on = round(math.exp(-1 / scale) * _UNIT)

    def draw() -> int:
        while True:
            count = 0
            while secrets.randbelow(_UNIT) < go_on:
                count += 1
            sign = secrets.randbelow(2)
            if count or sign:  # or zero would come twice as often
                return count if sign else -count

    return draw


@dataclass(frozen=True, slots=True)
class TimedOutcome:
    """What the time tells.

    Attributes:
        correlation: Of the time of a draw and the size of what was drawn.
        without: Share of the releases for which the best guess from the output alone is right.
        success: Share with a guess from output and time.
    """

    correlation: float
    without: float
    success: float


def timed_attack(draw: Draw, shift: int, *, releases: int) -> TimedOutcome:
    """Tell the candidates 0 and ``shift`` apart, by output and time.

    The observer has drawn as many numbers himself, on this machine, from which he knows how long which takes.

    Args:
        draw: Gives one number, symmetric around 0 and the rarer the larger.
        shift: Between the candidates.
        releases: How many are attacked.
    """
    numbers, seconds = _timed(draw, 2 * releases)
    known, attacked = slice(None, releases), slice(releases, None)
    sizes = np.abs(numbers)
    estimate = np.poly1d(np.polyfit(seconds[known], sizes[known], 1))
    truth = np.random.default_rng().random(releases) < 0.5
    outputs = numbers[attacked] + shift * truth
    by_time = estimate(seconds[attacked])
    distances = [np.abs(np.abs(outputs - candidate) - by_time) for candidate in (0, shift)]
    by_output = np.abs(outputs - shift) < np.abs(outputs)
    is_clear = np.abs(np.corrcoef(seconds[known], sizes[known])[0, 1]) > 0.2
    guess = distances[1] < distances[0] if is_clear else by_output
    return TimedOutcome(
        correlation=float(np.corrcoef(seconds, sizes)[0, 1]),
        without=float((by_output == truth).mean()),
        success=float((guess == truth).mean()),
    )


def _timed(draw: Draw, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Numbers drawn, and the processor time of each in seconds: what an observer of the clock sees at
    best, when no other program runs. The longest twentieth of the times is cut down to the others."""
    numbers, seconds = np.empty(count), np.empty(count)
    for place in range(count):
        began = time.thread_time_ns()
        numbers[place] = draw()
        seconds[place] = (time.thread_time_ns() - began) * 1e-9
    return numbers, np.minimum(seconds, np.quantile(seconds, 0.95))
