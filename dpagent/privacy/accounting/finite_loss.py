"""Privacy losses with finitely many values, brought onto a grid for composition.

The pairs (P, Q) of :mod:`dpagent.privacy.accounting.shuffling` have finitely many atoms. Here they are
brought onto the grid on which :mod:`dpagent.privacy.accounting.composed_loss` composes; what a dominating
pair is, and why the product of such pairs bounds the composition, is said there.

An atom with masses p, q has the loss l = log(p/q). It is split between the grid points left and right
of l so that both masses are kept: with h the step and u the distance from the left point, the share
(1 − e^(−u))/(1 − e^(−h)) of p goes right. Merging the two again is post-processing, so the new pair
dominates. A loss l that is known but for some 2⁻⁵⁰(1+|l|) is taken to be larger by as much: that much
more of p, in steps, goes right. The variance of the loss rises by at most h²/4, with 64 steps to the
root mean square of a mechanism's loss by less than 1 in 10⁴; where that makes too many cells, steps are
wider. Cells at either end that hold less than 10⁻²⁶ together are cut off: upper ones count as an
infinite loss, lower ones as the lowest loss kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_count
from dpagent.privacy.accounting.composed_loss import ComposedLoss, LossBlock

FloatArray = NDArray[np.float64]

#: Grid steps to the root mean square of a mechanism's loss.
STEPS_TO_SIZE: Final = 64

_EPS: Final = 2.0**-52
_NEGLIGIBLE: Final = 1e-26
_MOST_STEPS: Final = 2**22  # of a sum of losses
_MAX_CELLS: Final = 2**25  # of losses of single mechanisms: 256 MiB


@dataclass(frozen=True, slots=True, eq=False)
class FiniteLoss:
    """A pair (P, Q) as its atoms: each with a mass under P and the loss log(P/Q). Public.

    Attributes:
        losses: finite, shape (atoms,).
        masses: P's masses, not negative, of a sum of 1 or a little more, shape (atoms,).
    """

    losses: FloatArray
    masses: FloatArray

    @property
    def size(self) -> float:
        """Root mean square of the loss under P: the scale on which a grid has to resolve it."""
        return math.sqrt(float(self.masses @ self.losses**2))

    def delta(self, epsilon: float) -> float:
        """H(P‖Q) at e^ε: the least δ for this ε, of either sign."""
        return min(1.0, float(self.masses @ -np.expm1(np.minimum(epsilon - self.losses, 0.0))))

    def on_grid(self, step: float) -> tuple[NDArray[np.int64], FloatArray]:
        """Cells, in steps and rising, and P's masses, of a dominating pair on multiples of ``step``."""
        index = np.floor(self.losses / step)
        share = np.expm1(np.minimum(index * step - self.losses, 0.0)) / math.expm1(-step)
        share += (8 * _EPS / step) * (1 + np.abs(self.losses))
        right = np.minimum(share, 1.0) * self.masses
        cells, inverse = np.unique(np.concatenate((index, index + 1)), return_inverse=True)
        masses = np.bincount(inverse, weights=np.concatenate((self.masses - right, right)))
        return cells.astype(np.int64), np.asarray(masses, dtype=np.float64)


def compose(parts: Sequence[tuple[FiniteLoss, int]]) -> ComposedLoss:
    """The composition of pairs, each a number of times.

    Raises:
        ParameterError: there are no parts, a count is below 1, all losses are 0, or losses are so
            many and so unlike each other that they do not fit the memory on one grid.
    """
    if not parts:
        raise ParameterError("no privacy losses to compose; expected at least one.")
    counts = [require_count("number of compositions", count) for _, count in parts]
    square = math.fsum(count * loss.size**2 for (loss, _), count in zip(parts, counts, strict=True))
    if not square > 0:
        raise ParameterError("all privacy losses are 0; expected mechanisms that use their input.")
    step = math.sqrt(square / sum(counts)) / STEPS_TO_SIZE
    # the sum has a mean of about square/2; a window of it takes some ten deviations more
    step = max(step, (square / 2 + 20 * math.sqrt(square)) / _MOST_STEPS)
    blocks = [_block(*loss.on_grid(step)) for loss, _ in parts]
    total = sum(block.masses.size for block in blocks)
    if total > _MAX_CELLS:
        raise ParameterError(
            f"{len(parts)} different mechanisms take {total:,} grid cells; expected at most {_MAX_CELLS:,}. "
            "Compose fewer different mechanisms, or mechanisms more alike."
        )
    return ComposedLoss(step, blocks, [list(enumerate(counts))])


def _block(cells: NDArray[np.int64], masses: FloatArray) -> LossBlock:
    """All cells from first to last, without negligible ends."""
    low = int(np.searchsorted(np.cumsum(masses), _NEGLIGIBLE, side="right"))
    high = masses.size - int(np.searchsorted(np.cumsum(masses[::-1]), _NEGLIGIBLE, side="right"))
    dense = np.zeros((1, int(cells[high - 1] - cells[low]) + 1))
    dense[0, cells[low:high] - cells[low]] = masses[low:high]
    dense[0, 0] += masses[:low].sum()
    return LossBlock(int(cells[low]), dense, np.array([masses[high:].sum()]))
