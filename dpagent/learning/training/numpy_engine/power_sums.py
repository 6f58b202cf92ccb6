"""Σ|x|^p over the numbers of each record: what its L1 norm (p = 1) or its L2 norm (p = 2) is made of.

Both are inner products, of a row with itself or of its magnitudes with ones, in float32 over runs of bounded
length, and in float64 over the runs, as :mod:`dpagent.learning.training.engine` asks for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.training.engine import LARGEST_SUM, NORM_RUN, UNDERFLOW
from dpagent.learning.training.numpy_engine.workspaces import AT_ONCE, Floats, aligned, round_up
from dpagent.norm import Norm


class PowerSums:
    """Of the rows of a matrix, bound once to its memory.

    Args:
        rows: ``(records, size)``, each from a cache line on.
        norm: whose power p it is.
        run: numbers that a sum in float32 has at most.
    """

    def __init__(self, rows: Floats, norm: Norm, run: int = NORM_RUN) -> None:
        records, size = rows.shape
        self._lost = size * UNDERFLOW
        whole = size - size % run
        parts = [rows[:, :whole].reshape((records, -1, run), copy=False)] if whole else []
        if whole < size:
            parts.append(rows[:, np.newaxis, whole:])
        self._sums = [_SquareSums(part) if norm is Norm.L2 else _MagnitudeSums(part) for part in parts]

    @classmethod
    def of_runs(cls, runs: Floats, size: int, norm: Norm) -> PowerSums:
        """Of records that are cut into runs ``(records, runs, run)``, ``size`` numbers each besides zeros."""
        records, number, run = runs.shape
        sums = cls(runs.reshape((records, number * run), copy=False), norm, run)
        sums._lost = size * UNDERFLOW
        return sums

    def __call__(self) -> NDArray[np.float64]:
        """``(records,)``, with a bound on what underflow took off."""
        total = self._sums[0]()
        for part in self._sums[1:]:
            total += part()
        total += self._lost
        return total


class _SquareSums:
    """Σx² of ``(records, runs, run)`` numbers."""

    def __init__(self, runs: Floats) -> None:
        self._runs = runs

    def __call__(self) -> NDArray[np.float64]:
        return _over_runs(np.vecdot(self._runs, self._runs))


class _MagnitudeSums:
    """Σ|x| of ``(records, runs, run)`` numbers.

    Magnitudes are written for as many records at a time as stay in a core's cache.
    """

    def __init__(self, runs: Floats) -> None:
        self._runs = runs
        records, number, run = runs.shape
        pitch = round_up(run)
        self._at_once = min(records, max(1, AT_ONCE // (number * pitch)))
        scratch = aligned(self._at_once * number * pitch).reshape(self._at_once, number, pitch)
        self._magnitudes = scratch[..., :run]
        self._ones = aligned(run)
        self._ones.fill(1)
        self._sums = np.empty((records, number), np.float32)

    def __call__(self) -> NDArray[np.float64]:
        for start in range(0, len(self._runs), self._at_once):
            part = self._runs[start : start + self._at_once]
            magnitudes = np.abs(part, out=self._magnitudes[: len(part)])
            np.vecdot(magnitudes, self._ones, out=self._sums[start : start + len(part)])
        total = _over_runs(self._sums)
        return np.where(total >= LARGEST_SUM, np.inf, total)


def _over_runs(sums: Floats) -> NDArray[np.float64]:
    """The sum in float64 of each record's runs ``(records, runs)``."""
    if sums.shape[1] == 1:
        return sums[:, 0].astype(np.float64)
    total: NDArray[np.float64] = np.add.reduce(sums, axis=1, dtype=np.float64)
    return total
