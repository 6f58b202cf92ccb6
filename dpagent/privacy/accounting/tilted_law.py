"""The law of a sum of losses after tilting, and the (ε, δ) that it proves.

Part of :mod:`dpagent.privacy.accounting.composed_loss`, whose text has the maths.
"""

from __future__ import annotations

import math
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
_Number = TypeVar("_Number", np.float64, np.complex128)

#: Rounding of one operation, relative.
EPS: Final = 2.0**-52
#: Of e, without overflow, with room for a factor.
MAX_EXPONENT: Final = 700.0


class LossWindow:
    """The stretch of losses in which a sum's law is computed, and what laws on it share."""

    def __init__(self, first: int, step: float, cells: int, tilt: float) -> None:
        self.first, self.cells, self.step, self.tilt = first, cells, step, tilt
        self.start = max(0, -first)  # the column of loss 0
        self.losses = (first + np.arange(self.start, cells)) * step
        with np.errstate(under="ignore"):
            self._decay = np.exp(-(step * np.arange(self.losses.size)))
            self._tilt_decay = np.exp(-(tilt * step * np.arange(self.losses.size)))
        self._reach, self._tilt_reach = self._reach_of(step), self._reach_of(tilt * step)

    def column(self, loss: float) -> int:
        """The last column with a loss of at most ``loss``; the first or last if it lies outside."""
        return min(max(math.floor(loss / self.step) - self.first - self.start, 0), self.losses.size - 1)

    def untilted(self, column: int) -> tuple[int, FloatArray]:
        """e^(tilt·(t_column − t_j)) from the first j on for which it does not overflow."""
        return self._around(self._tilt_decay, self._tilt_reach, column)

    def discount(self, column: int) -> tuple[int, FloatArray]:
        """e^(t_column − t_j) likewise."""
        return self._around(self._decay, self._reach, column)

    def _reach_of(self, decay: float) -> int:
        """Over how many columns, of which each has e^−decay of the one before, nothing overflows."""
        return (
            self.losses.size if self.losses.size * decay < MAX_EXPONENT else math.ceil(MAX_EXPONENT / decay)
        )

    def _around(self, decay: FloatArray, reach: int, column: int) -> tuple[int, FloatArray]:
        begin = max(0, column - reach + 1)
        below = 1 / decay[column - begin : 0 : -1]
        return begin, np.concatenate((below, decay[: self.losses.size - column]))


class TiltedLaw:
    """P's masses of a sum of losses, from loss 0 on, each raised by as much as rounding may have taken."""

    def __init__(
        self, window: LossWindow, product: NDArray[np.complex128], error: FloatArray,
        cumulant: float, centre: float, greatest: float, lost: float,
    ) -> None:  # fmt: skip
        cells = window.cells
        noise = _mean_of_half(error, cells) + transform_rounding(cells) * _mean_of_half(
            np.abs(product), cells
        )
        tilted = np.fft.irfft(product, cells)
        # The window's first column stands at first mod cells: turn so that loss 0 comes first.
        zero = (window.first + window.start) % cells
        tilted = np.concatenate((tilted[zero:], tilted[:zero]))[: window.losses.size]
        column = window.column(centre)
        begin, untilted = window.untilted(column)
        exponent = cumulant - window.tilt * float(window.losses[column])
        scale = math.exp(max(exponent, -MAX_EXPONENT)) if exponent < MAX_EXPONENT else math.inf
        with np.errstate(under="ignore", over="ignore", invalid="ignore"):
            untilted *= scale
            masses = (np.maximum(tilted[begin:], 0.0) + noise) * untilted
        # No mass is above 1; that is what those have, far below the centre, for which nothing is known.
        self._masses = np.ones(window.losses.size)
        np.fmin(masses, 1.0, out=self._masses[begin:])
        self._masses[max(0, int(greatest) + 1 - window.first - window.start) :] = 0.0
        self._window, self._lost = window, lost

    def delta(self, epsilon: float) -> float:
        """δ at an ε of at least 0."""
        beyond = np.maximum(self._window.losses - epsilon, 0.0)
        return min(1.0, float(self._masses @ -np.expm1(-beyond)) + self._lost)

    def epsilon(self, delta: float) -> float:
        """The least ε at least 0 with this δ."""
        wanted, window, masses = delta - self._lost, self._window, self._masses
        if wanted <= 0:
            return math.inf
        # The first column above which less than δ lies is no less than ε: measure from there.
        above = np.cumsum(masses[::-1])[::-1]
        last = int(np.count_nonzero(above > wanted))
        if last == masses.size:
            return math.inf
        begin, discount = window.discount(last)
        with np.errstate(under="ignore"):
            discounted = np.cumsum((masses[begin:] * discount)[::-1])[::-1]
        # δ at the loss t_i is Σ_{j>i} p_j (1 − e^(t_i − t_j)), which falls with i.
        inside = last - begin
        deltas = above[begin + 1 : last + 1] - discounted[1 : inside + 1] / discount[:inside]
        beyond = int(np.count_nonzero(deltas > wanted))
        if beyond == 0:
            return float(window.losses[begin])  # of which nothing less is known
        # Between t_(c−1) and t_c the sum runs over j ≥ c; c is the first with δ(t_c) ≤ wanted.
        column = begin + beyond
        ratio = (float(above[column]) - wanted) / float(discounted[beyond])
        return max(0.0, float(window.losses[last]) + math.log(ratio))


def transform_size(least: int) -> int:
    """The least 2^n, 1.25·2^n or 1.5·2^n of at least ``least``: quick to transform, and even."""
    power = max(16, 1 << (least - 1).bit_length())
    return next(size for size in (power * 5 // 8, power * 3 // 4, power) if size >= least)


def transform_rounding(cells: int) -> float:
    """How far an entry of a computed transform may be off, relative to the sum of what is transformed."""
    return 8 * math.log2(cells) * EPS


def power(values: NDArray[_Number], exponent: int) -> NDArray[_Number]:
    """Integer powers by squaring, which keeps the phase exact where ``**`` takes a logarithm, and quicker."""
    result = np.ones_like(values)
    while exponent:
        if exponent & 1:
            result = result * values
        exponent >>= 1
        if exponent:
            values = values * values
    return result


def _mean_of_half(values: FloatArray, cells: int) -> float:
    """Mean over all frequencies of a magnitude given for the non-negative ones."""
    return float(2 * values.sum()) / cells
