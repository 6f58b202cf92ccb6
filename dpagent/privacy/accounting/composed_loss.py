"""The privacy loss of many mechanisms together: composition of loss distributions on one grid.

A pair (P, Q) of distributions *dominates* a mechanism if H(P‖Q) = sup_S P(S) − e^ε·Q(S) is at least
that of the mechanism's outputs on any two neighbours, for every ε of either sign. Products of
dominating pairs dominate the composition, also if later mechanisms are chosen among those
dominated in the light of earlier outputs (Zhu, Dong, Wang, *Optimal accounting of differential
privacy via characteristic function*, AISTATS 2022). So it is enough to know the distribution of
the loss L = log(P/Q) under P, mechanism by mechanism; losses add up, and δ(ε) = E_P[(1 − e^(ε−L))₊].

**Grid.** A stretch of losses between two grid points t, t+h with masses a under P and b under Q
becomes two atoms, one at either end, of the same masses in all: under P

    v = (a − b·e^t) / (1 − e^(−h)) at t+h, and a − v at t.

Merging the two again is post-processing, so the new pair dominates the old. Doroshenko,
Ghazi, Kamath, Kumar and Manurangsi call connecting the dots (PoPETs 2022); it raises the variance of
the loss by h²/6 or so, at most h²/4, where rounding up would move its mean by h/2. Raising a loss, or
calling it infinite, dominates as well; that is done with tails. Losses of infinity have their mass
added to δ.

**Composition.** With K(θ) = Σ log E_P[e^(θL)] and E_θ the mean under P tilted by e^(θL),

    δ(ε) = e^(K(θ)−θε) · E_θ[e^(−θ(L−ε)) (1 − e^(ε−L)) ; L > ε].

The tilted law is the inverse Fourier transform of a product of transforms. θ is chosen for its mass to
lie near the ε asked for, so that tiny δ come out with a small relative error. Whatever θ is, what
is returned is a bound, since all that is neglected is bounded and added:

- the transform is circular. Mass above its window would count as a lower loss: under P it is at most
  e^(K(s)−s·top) for any s > 0 (Markov), which is added to δ. Mass below counts as a higher loss, or is
  left out where it is known to be lower than the ε asked for. A tilted mass from above the window comes back
  at a lower loss, and grows there by e^(θ·width): a bound still, but one that leaps if the window is narrower
  than the greatest loss of a rare run. So a window is made wider, by up to 2²⁰ cells, and 2²² over all
  transforms;
- a computed transform of masses w is off by at most e = 8·log2(N)·2⁻⁵²·Σw in each entry (each output is
  a sum over a tree of depth log2 N, at a few roundings a level; four times what radix 2 needs, which
  covers the rounding of w itself and of products, too). With a product G off by E, another
  factor F makes it off by (E·|F| + e·|G| + e·E)(1 + 2⁻⁵⁰), kept entry by entry. A cell of the inverse
  transform is then off by at most the mean of E and of 8·log2(N)·2⁻⁵²·|G|: this is added to each cell. At
  a loss t it counts for e^(K(θ)−θt) times as much. Where sampling is rare, single great losses hold θ down,
  so below a δ of 1e-12 or so rounding may decide ε, the more so the finer the grid.

Numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.tilted_law import (
    EPS,
    MAX_EXPONENT,
    LossWindow,
    TiltedLaw,
    power,
    transform_rounding,
    transform_size,
)

FloatArray = NDArray[np.float64]

_MAX_CELLS: Final = 2**22
_MARKOV_SHARES: Final = (0.25, 1.0)
_MARKOV_ORDERS: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)  # without a tilt, for rare great losses
_LOG_OUTSIDE: Final = -35.0  # of a tilted law's mass that may come in from outside its window
_MARKOV_DEVIATIONS: Final = (1.0, 2.0, 3.0, 4.0, 6.0, 8.5)
_CLEAR_CELLS: Final = 2**20  # that are spent on a clear centre, fewer than _LOW_CELLS
_CLEAR_WORK: Final = 2**22  # over all transforms
_LOW_CELLS: Final = 2**21
_TAIL_SHARE: Final = 1e-6  # of δ, that a window may leave above it
_LEAST_DELTA: Final = 1e-12  # to which a δ is computed, give or take that share of it
_GREATEST_TILT_STEPS: Final = 4.0
_LEAST_TILT: Final = 1e-9
_NEAR_NOTHING: Final = 16.0  # grid steps
_HALVINGS: Final = 5
_BACK_OFF: Final = 0.8
_FIXED_WORK: Final = 32  # of a law, in transforms
_TINY: Final = 1e-300
_LEAST_EXACT: Final = 1e-290
_SMALL: Final = 1e-200


class GridTooFineError(ParameterError):
    """Losses on this grid would take more memory or time than is reasonable; a coarser one would do.

    Attributes:
        excess: about how much coarser.
    """

    def __init__(self, text: str, excess: float) -> None:
        super().__init__(text)
        self.excess = excess


@dataclass(frozen=True, slots=True, eq=False)
class LossBlock:
    """Losses of a few mechanisms of like width: mechanism r has mass ``masses[r, i]`` at (first + i)·step.

    Attributes:
        first: the first column's loss, in grid steps.
        masses: under P, not negative, shape (mechanisms, cells).
        infinite: masses of an infinite loss, shape (mechanisms,).
    """

    first: int
    masses: FloatArray
    infinite: FloatArray

    @property
    def cells(self) -> NDArray[np.int64]:
        """The columns' losses in grid steps, shape (cells,)."""
        return self.first + np.arange(self.masses.shape[1])


def split_masses(p: FloatArray, q: FloatArray, left: FloatArray, step: float) -> FloatArray:
    """How much of P's mass goes to the right end of each cell; the rest goes to the left end.

    Args:
        p: P's mass of each cell.
        q: Q's mass of each cell.
        left: loss at each cell's left end, in a shape that broadcasts.
        step: h.
    """
    # The difference cancels all but a share h of p: the part that rounding may hide is added to the right.
    # Where e^left would overflow, q has vanished; a smaller e^left errs to the right.
    likelihood = np.exp(np.minimum(left, MAX_EXPONENT))
    # So does no mass of Q where it is so small that it may be subnormal, and wrong by any share of itself.
    q = np.where(q < _LEAST_EXACT, 0.0, q)
    right = (p - q * likelihood) / -math.expm1(-step) + (8 * EPS / step) * p
    return np.asarray(np.clip(right, 0.0, p))


class ComposedLoss:
    """The composition of mechanisms, each a number of times. Public; holds no data.

    Args:
        step: the grid's h, above 0.
        blocks: losses of the mechanisms, which are numbered through in this order.
        stages: which mechanisms, and how often, stage by stage: (number, count) with counts of at least 1.
        most_work: cells that the transforms of one law may have in all, each law counted as 32 more.

    Attributes:
        work: share of ``most_work`` that the largest law so far has taken.

    Raises:
        ParameterError: there is no stage, or nothing in one.
    """

    def __init__(
        self,
        step: float,
        blocks: Sequence[LossBlock],
        stages: Sequence[Sequence[tuple[int, int]]],
        *,
        most_work: float = math.inf,
    ) -> None:
        if not stages or not all(stages):
            raise ParameterError("no privacy losses to compose; expected at least one.")
        self._step, self._blocks, self._most_work = step, blocks, most_work
        self._known_moments: dict[float, tuple[FloatArray, FloatArray, FloatArray]] = {}
        self.work = 0.0
        self._place = [(block, row) for block in blocks for row in range(len(block.masses))]
        sequence = [entry for stage in stages for entry in stage]
        self._mechanisms = np.array([mechanism for mechanism, _ in sequence], dtype=np.intp)
        self._counts = np.array([count for _, count in sequence], dtype=np.float64)
        self._ends = frozenset(np.cumsum([len(stage) for stage in stages]).tolist())
        self._totals = np.bincount(self._mechanisms, weights=self._counts, minlength=len(self._place))
        self._infinite = np.concatenate([block.infinite for block in blocks])
        self._greatest = np.concatenate(
            [np.full(len(b.masses), b.cells[-1], dtype=np.float64) for b in blocks]
        )

    def delta(self, epsilon: float) -> float:
        """The least δ proven for an ε of at least 0, but for rounding of ε by a relative 2⁻⁵²."""
        tilt = self._tilt(lambda tilt, cumulant, mean: mean < epsilon)
        laws = self._laws(tilt, prefixes=False, delta=_LEAST_DELTA, reaching=epsilon)
        return next(laws).delta(epsilon)

    def epsilon(self, delta: float) -> float:
        """The least ε proven for a δ in (0, 1), at least 0; infinite if none is."""
        epsilon = next(self._laws(self.tilt_for(delta), prefixes=False, delta=delta)).epsilon(delta)
        if 0 < epsilon < _NEAR_NOTHING * self._step:
            # Rounding, untilted, may be all that is seen there: any tilt is valid, and none has less of it.
            epsilon = min(epsilon, next(self._laws(0.0, prefixes=False, delta=delta)).epsilon(delta))
        return epsilon

    def running_epsilon(self, delta: float) -> FloatArray:
        """The ε after each stage, in order, as :meth:`epsilon` gives it: shape (stages,)."""
        laws = self._laws(self.tilt_for(delta), prefixes=True, delta=delta)
        return np.array([law.epsilon(delta) for law in laws])

    def tilt_for(self, delta: float) -> float:
        """The tilt at which Chernoff's bound on δ at the tilted mean is ``delta``.

        For t > 0, 1 − e^−t ≤ e^(θt)/(1+θ), as the maximum over t of e^−θt − e^−(1+θ)t shows. So δ at an ε
        is at most e^(K(θ)−θε)/(1+θ).
        """
        log_delta = math.log(delta)
        return self._tilt(lambda tilt, cumulant, mean: cumulant - tilt * mean - math.log1p(tilt) > log_delta)

    def _tilt(self, rises: Callable[[float, float, float], bool]) -> float:
        """A little less than the tilt at which ``rises`` turns false; any tilt gives a valid bound.

        Less, for where rare losses are great, at some tilt the law leaps from the small ones to them.
        """

        def still(tilt: float) -> bool:
            log_moments, means, _ = self._moments(tilt)
            cumulant, mean = float(self._totals @ log_moments), float(self._totals @ means)
            return rises(tilt, cumulant, mean)

        low, high = 0.0, 1.0
        greatest, least = _GREATEST_TILT_STEPS / self._step, _LEAST_TILT

        def spread(tilt: float) -> bool:
            """Whether the tilted mass is not yet all in one place, at the greatest loss there is.

            Where sampling is rare and the grid coarse, it is in one place to begin with: near loss 0.
            """
            _, means, variances = self._moments(tilt)
            total = self._step * float(self._totals @ self._greatest)
            return float(self._totals @ variances) > self._step**2 or float(self._totals @ means) < total / 2

        if still(high):
            while high < greatest and still(high) and spread(high):
                low, high = high, 2 * high
        else:
            while high > least and not still(high / 2):
                high /= 2
            low = high / 2
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if still(middle) else (low, middle)
        return _BACK_OFF * high

    def _moments(self, tilt: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """log E[e^(θL)] of each mechanism, and mean and variance of its tilted loss; computed once."""
        if tilt not in self._known_moments:
            self._known_moments[tilt] = self._moments_at(tilt)
        return self._known_moments[tilt]

    def _moments_at(self, tilt: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        logs, means, variances = [], [], []
        for block in self._blocks:
            losses: FloatArray = block.cells.astype(np.float64) * self._step
            top = float(max(tilt * losses[0], tilt * losses[-1]))
            with np.errstate(under="ignore"):
                weights = np.exp(tilt * losses - top)
                sum_of_masses = block.masses @ weights
                weights *= losses
                sum_of_losses = block.masses @ weights
                weights *= losses
                sum_of_squares = block.masses @ weights
            total = np.maximum(sum_of_masses, _TINY)
            log_moments, mean = np.log(total) + top, sum_of_losses / total
            variance = sum_of_squares / total - mean**2
            for row in np.flatnonzero(sum_of_masses < _SMALL):  # far from the block's top: by itself
                log_moments[row], mean[row], variance[row] = _row_moments(block.masses[row], losses, tilt)
            logs.append(log_moments)
            means.append(mean)
            variances.append(np.maximum(variance, 0.0))
        return np.concatenate(logs), np.concatenate(means), np.concatenate(variances)

    def _laws(
        self, tilt: float, *, prefixes: bool, delta: float, reaching: float = math.inf
    ) -> Iterator[TiltedLaw]:
        """The tilted law of the sum of losses: after each stage, or only after all.

        Its window may begin above 0, but not above ``reaching``.
        """
        mechanisms = self._mechanisms if prefixes else np.flatnonzero(self._totals)
        counts = self._counts if prefixes else self._totals[mechanisms]

        def running(values: FloatArray) -> FloatArray:
            return np.cumsum(counts * values[mechanisms])

        log_moments, means, _ = self._moments(tilt)
        cumulants, centres = running(log_moments), running(means)
        window, above_window = self._window(
            tilt,
            running,
            slice(None) if prefixes else slice(-1, None),
            math.log(delta * _TAIL_SHARE),
            reaching,
        )
        work = (_FIXED_WORK + len(mechanisms)) * window.cells / self._most_work
        if work > 1:
            raise GridTooFineError(
                f"composing {len(mechanisms):,} mechanisms on {window.cells:,} cells each takes too long. "
                "Choose a coarser grid.",
                work,
            )
        self.work = max(self.work, work)
        lost = above_window + running(self._infinite)
        greatest = running(self._greatest)
        product = np.ones(window.cells // 2 + 1, dtype=np.complex128)
        error = np.zeros(window.cells // 2 + 1)
        rounding = transform_rounding(window.cells)
        for number, (mechanism, count) in enumerate(zip(mechanisms.tolist(), counts, strict=True)):
            transform = self._transform(mechanism, tilt, float(log_moments[mechanism]), window.cells)
            size = np.abs(transform)
            off: float | FloatArray = rounding
            if count > 1:
                with np.errstate(under="ignore"):
                    off = count * rounding * power(size + rounding, int(count) - 1) * (1 + 4 * count * EPS)
                    transform = power(transform, int(count))
                size = np.abs(transform)
            error = (error * (size + off) + off * np.abs(product)) * (1 + 4 * EPS)
            product = product * transform
            if number == len(mechanisms) - 1 or (prefixes and number + 1 in self._ends):
                yield TiltedLaw(
                    window, product, error,
                    float(cumulants[number]), float(centres[number]), float(greatest[number]),
                    float(lost[number]),
                )  # fmt: skip

    def _window(
        self,
        tilt: float,
        running: Callable[[FloatArray], FloatArray],
        seen: slice,
        log_tail: float,
        reaching: float,
    ) -> tuple[LossWindow, FloatArray]:
        """Where to look at sums, by Markov's inequality at the best of some tilts, and P's mass above.

        Args:
            tilt: θ.
            running: adds up a figure of single mechanisms, in order.
            seen: which of those sums are looked at.
            log_tail: of the mass of P that may lie above.
            reaching: a loss above which the window is not to begin.
        """
        log_moments, means, variances = self._moments(tilt)
        cumulants, centres = running(log_moments), running(means)
        deviation = math.sqrt(float(running(variances)[-1])) + self._step
        top, further, log_bounds = math.inf, tilt, cumulants
        lows, highs = np.full_like(centres, -math.inf), self._step * running(self._greatest)
        distances = [deviations / deviation for deviations in _MARKOV_DEVIATIONS]
        distances += [share * tilt for share in _MARKOV_SHARES] if tilt > 0 else _MARKOV_ORDERS
        for distance in distances:
            above = running(self._moments(tilt + distance)[0])
            if (float(above[-1]) - log_tail) / (tilt + distance) < top:
                top = (float(above[-1]) - log_tail) / (tilt + distance)
                further, log_bounds = tilt + distance, above
            below = running(self._moments(tilt - distance)[0])
            lows = np.maximum(lows, (_LOG_OUTSIDE + cumulants - below) / distance)
            highs = np.minimum(highs, (above - cumulants - _LOG_OUTSIDE) / distance)
        top = max(top, 0.0)
        bottom = min(float(lows[seen].min()), top)
        # Mass that comes in from above, untilted, has grown: it had better not get as far as the centre.
        # Neither this mass nor that from below is worth any number of cells.
        clear = float((highs - centres)[seen].max()) + bottom
        spare = min(_CLEAR_CELLS, _CLEAR_WORK // len(centres)) * self._step
        top = max(top, min(clear, bottom + spare))
        bottom = min(max(bottom, top - _LOW_CELLS * self._step), reaching)
        first = math.floor(bottom / self._step) - 1
        cells = transform_size(math.ceil(top / self._step) + 2 - first)
        most = _MAX_CELLS if len(lows[seen]) == 1 else 4 * _MAX_CELLS
        if cells > most:
            raise GridTooFineError(
                f"composing these mechanisms takes {cells:,} grid cells; expected at most {_MAX_CELLS:,}. "
                "Choose a coarser grid.",
                cells / most,
            )
        end = (first + cells - 1) * self._step
        with np.errstate(under="ignore"):
            above_window = np.exp(np.minimum(log_bounds - further * end, 0.0))
        return LossWindow(first, self._step, cells, tilt), above_window

    def _transform(
        self, mechanism: int, tilt: float, log_moment: float, cells: int
    ) -> NDArray[np.complex128]:
        """Fourier transform of a mechanism's tilted law."""
        block, row = self._place[mechanism]
        exponents = tilt * self._step * block.cells - log_moment
        with np.errstate(under="ignore"):
            weights = block.masses[row] * np.exp(np.minimum(exponents, MAX_EXPONENT))
        great = exponents > MAX_EXPONENT
        if great.any():  # of nothing, or of next to nothing
            with np.errstate(under="ignore", divide="ignore"):
                weights[great] = np.exp(np.minimum(np.log(block.masses[row][great]) + exponents[great], 0.0))
        if weights.size > cells or block.first % cells + weights.size > cells:
            weights = np.bincount(block.cells % cells, weights=weights, minlength=cells)
            return np.fft.rfft(weights)
        density = np.zeros(cells)
        density[block.first % cells : block.first % cells + weights.size] = weights
        return np.fft.rfft(density)


def _row_moments(masses: FloatArray, losses: FloatArray, tilt: float) -> tuple[float, float, float]:
    """log E[e^(θL)], and mean and variance of the tilted loss, of one mechanism, whatever their size."""
    there = masses > 0
    if not there.any():
        return -math.inf, 0.0, 0.0
    exponents = np.log(masses[there]) + tilt * losses[there]
    top = float(exponents.max())
    with np.errstate(under="ignore"):
        weights = np.exp(exponents - top)
    total = float(weights.sum())
    mean = float(weights @ losses[there]) / total
    return top + math.log(total), mean, float(weights @ (losses[there] - mean) ** 2) / total
