"""Tight accounting, by composition of privacy-loss distributions.

Rényi accounting (:mod:`dpagent.privacy.accounting.rdp`) is cheap and loses something in its conversion to
(ε, δ), most where rounds differ: for 1,000 rounds at q = 0.01 with σ falling from 2.0 to 0.8 it says
2.17 where 1.53 is true. Here the distribution of the loss itself is composed
(:mod:`dpagent.privacy.accounting.composed_loss`), in both directions of add-or-remove-one adjacency, and the
worse is reported.

The loss of a single run, and the choice of the grid that it is put on, is in
:mod:`dpagent.privacy.accounting.gaussian_loss`.

**Time.** It grows with the transforms, one for each different mechanism, and with their cells. Anybody may
announce a schedule, so a grid that is chosen here has no more than 70 million cells over all transforms, in
both directions together: some 15 ns each. What a law takes besides counts as 32 transforms. (The looks at a
history, on the grid that was pinned for it, have 200 million; where they would have more, there are fewer of
them.) Where the grid of that text has more, a coarser one is taken. It proves a larger ε: every grid gives a
bound. Schedules of up to 2,000 different Gaussian mechanisms that we plan stay within it, and of up to 300
Laplace ones: their prices do not change. Where no grid within its range is coarse enough, this accountant
states Rényi's bound, if there is one, and no ε otherwise.

>>> from dpagent.privacy.events import GaussianEvent, poisson_sampled
>>> rounds = poisson_sampled(GaussianEvent(2.25), 0.1, count=100)
>>> accountant = PldAccountant()
>>> accountant.compose(rounds)
>>> round(accountant.epsilon(delta=1e-5), 3)
1.998
>>> accountant.epsilon_after([rounds], delta=1e-5) > 1.998
True
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between
from dpagent.privacy.accounting.accountant import Accountant, FloatArray
from dpagent.privacy.accounting.basic import basic_composition
from dpagent.privacy.accounting.composed_loss import ComposedLoss, GridTooFineError
from dpagent.privacy.accounting.composition import running_sums
from dpagent.privacy.accounting.gaussian_loss import (
    CELLS_TO_EPSILON,
    GRID_RANGE,
    coarse_step,
    fine_step,
    on_grid,
)
from dpagent.privacy.accounting.normal_form import (
    Component,
    Runs,
    SampledGaussian,
    UnsupportedEventError,
    canonical,
    counted,
)
from dpagent.privacy.accounting.rdp import rdp_composition
from dpagent.privacy.events import MAX_EVENT_EPSILON, ApproximateEvent, Event, NonPrivateEvent
from dpagent.privacy.ranges import AccountantName

_MAX_STAGES: Final = 2048
_MOST_WORK: Final = 70_000_000  # cells over all transforms of one price
_MOST_RUNNING_WORK: Final = 200_000_000  # the same, over all looks at a history of charges
_SPARE: Final = 1.1
_FINER: Final = 8.0
_NEARLY: Final = 0.8  # of a step: a finer one, but coarser than this share, is not worth the time
_MANY_CELLS: Final = 2**16  # of all mechanisms: beyond, a coarser grid is considered
# An ε above which, and a sampling rate below which, Rényi divergence may do better in extreme cases.
_FAR_OUT: Final = 10.0
_RARE: Final = 1e-3
_ROUNDING: Final = 1e-9
_TAIL_SHARE: Final = 1e-4  # of δ, to be cut off from all runs together
_DELTA_AT_EPSILON: Final = 1e-12  # for which the grid is chosen where ε is given


class PldAccountant(Accountant):
    """Composes privacy-loss distributions; prices every event.

    Args:
        grid: step of the losses, in [1e-7, 1]; None chooses it anew for every figure (see
            :mod:`dpagent.privacy.accounting.gaussian_loss`).

    Raises:
        ParameterError: ``grid`` is out of its range.
    """

    name: ClassVar[AccountantName] = "pld"
    least_delta: ClassVar[float] = 1e-200

    def __init__(self, *, grid: float | None = None) -> None:
        super().__init__()
        self.grid = None if grid is None else require_between("grid", grid, *GRID_RANGE)

    @classmethod
    def priced(cls, events: Iterable[Event], delta: float) -> tuple[Self, float]:
        """An empty accountant whose grid is the one chosen for these events at ``delta``, and their ε.

        For jobs whose rounds are charged one by one: a part is then priced on the grid of the whole.

        Raises:
            ParameterError: ``delta`` is not in [1e-200, 1), or there is no event.
            GridTooFineError: no grid is coarse enough to price them in a reasonable time.
        """
        cls()._require_delta(delta)
        charges = canonical(counted(events))
        if not charges:
            raise ParameterError("events are none; expected at least one.")
        if _simple_bounds(charges, delta)[-1] == 0:
            return cls(grid=GRID_RANGE[1]), 0.0  # on any grid
        worse, step = _evaluated(charges, None, delta, lambda loss: loss.epsilon(delta))
        accountant = cls(grid=min(max(step, GRID_RANGE[0]), GRID_RANGE[1]))
        if accountant.grid != step:
            return accountant, accountant.epsilon_after(events, delta)
        return accountant, _least_bound(charges, delta, float(worse))

    def delta(self, epsilon: float) -> float:
        """The δ at an ε in [0, 1000]; 0.0 if nothing was charged.

        Raises:
            ParameterError: ``epsilon`` is out of its range.
        """
        require_between("epsilon", epsilon, 0.0, MAX_EVENT_EPSILON)
        if not self._counts:
            return 0.0
        charges, below = canonical(self._counts), epsilon / (1 + _ROUNDING)
        tail = _tail(charges, _DELTA_AT_EPSILON)
        step = self.grid or fine_step(charges, _DELTA_AT_EPSILON, tail)[0]
        return max(loss.delta(below) for loss in _composed(charges, step, _DELTA_AT_EPSILON))

    def _require_supported(self, mechanism: Component) -> None:
        if isinstance(mechanism, NonPrivateEvent):
            raise UnsupportedEventError("an event is a NonPrivateEvent; it has no privacy losses.")

    def _epsilon(self, charges: Sequence[Runs], delta: float) -> float:
        if _simple_bounds(charges, delta)[-1] == 0:
            return 0.0
        try:
            worse, _ = _evaluated(charges, self.grid, delta, lambda loss: loss.epsilon(delta))
        except GridTooFineError:
            if self.grid is not None:
                raise
            worse = math.inf
        return _least_bound(charges, delta, float(worse))

    def _running_epsilon(self, charges: Sequence[Runs], delta: float) -> FloatArray:
        """As the base class says.

        Of more than 2,048 charges only some 1,024, evenly spaced, are looked at after, and fewer where their
        losses have many cells; for the others, the figure is the ε after the next that is. Where even one
        look, whose window holds all that comes before, takes too long, the figure of all is the ε after all.
        """
        stride = 1 if len(charges) <= _MAX_STAGES else math.ceil(2 * len(charges) / _MAX_STAGES)
        while True:
            try:
                return self._running_at(charges, delta, stride)
            except GridTooFineError as error:
                if self.grid is None:
                    raise
                if stride >= len(charges):
                    return np.full(len(charges), self._after_all(charges, delta))
                stride = min(len(charges), max(2 * stride, math.ceil(_SPARE * error.excess * stride)))

    def _after_all(self, charges: Sequence[Runs], delta: float) -> float:
        """The ε after all charges, on the grid that was given.

        Raises:
            GridTooFineError: that takes too long, too.
        """
        assert self.grid is not None
        merged = _merged(charges)
        losses = _composed(merged, self.grid, delta, most_work=_MOST_RUNNING_WORK)
        return _least_bound(merged, delta, max(loss.epsilon(delta) for loss in losses))

    def _running_at(self, charges: Sequence[Runs], delta: float, stride: int) -> FloatArray:
        """The same, with a look after each ``stride`` charges and the last.

        Raises:
            GridTooFineError: so many looks on this grid take too long, or it is too fine for any.
        """
        merged = _merged(charges)
        row_of = {mechanism: row for row, (mechanism, _) in enumerate(merged)}
        stages = []
        for start in range(0, len(charges), stride):
            stage: Counter[int] = Counter()
            for mechanism, count in charges[start : start + stride]:
                stage[row_of[mechanism]] += count
            stages.append(sorted(stage.items()))
        ends = _ends(len(charges), stride)
        running = _simple_bounds(charges, delta)[ends]
        if running[-1] > 0:
            worse, _ = _evaluated(merged, self.grid, delta, lambda loss: loss.running_epsilon(delta), stages)
            running = np.minimum((1 + _ROUNDING) * worse, running)
            if running[-1] > _FAR_OUT or _is_rare(charges):
                running = np.minimum(running, _renyi_bounds(charges, delta)[ends])
        return np.asarray(np.repeat(np.maximum.accumulate(running), stride)[: len(charges)])


def _merged(charges: Sequence[Runs]) -> list[Runs]:
    """Charges with equal mechanisms together, in canonical order."""
    counts: Counter[Component] = Counter()
    for mechanism, count in charges:
        counts[mechanism] += count
    return canonical(counts)


def _least_bound(charges: Sequence[Runs], delta: float, composed: float) -> float:
    """The least ε that is proven, given the one that the composed losses have."""
    tight, other = (1 + _ROUNDING) * composed, float(_simple_bounds(charges, delta)[-1])
    if tight > _FAR_OUT or _is_rare(charges):
        other = min(other, float(_renyi_bounds(charges, delta)[-1]))
    return min(tight, other)


def _ends(count: int, length: int) -> NDArray[np.intp]:
    """Where stages end: the last charge of each."""
    return np.minimum(np.arange(length - 1, count + length - 1, length), count - 1)


def _evaluated(
    charges: Sequence[Runs],
    grid: float | None,
    delta: float,
    figure: Callable[[ComposedLoss], Any],
    stages: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> tuple[Any, float]:
    """The worse ε of record removed and added, and the step: of the grid given, or of one that will do.

    Raises:
        GridTooFineError: the grid given is too fine, or none is coarse enough.
    """
    most_work = _MOST_RUNNING_WORK if grid and stages else math.inf if grid or stages else _MOST_WORK

    def worse_on(step: float) -> tuple[Any, float]:
        """The figure, and the share of the work that it took."""
        losses = _composed(charges, step, delta, stages, most_work)
        return np.max([figure(loss) for loss in losses], axis=0), max(loss.work for loss in losses)

    finest, cells = (grid, 0) if grid else fine_step(charges, delta, _tail(charges, delta))
    step = finest if cells < _MANY_CELLS else max(finest, coarse_step(charges, delta))
    while True:
        try:
            worse, work = worse_on(step)
        except GridTooFineError as error:
            if grid is not None or step >= GRID_RANGE[1]:
                raise
            finest = step = min(_SPARE * error.excess * step, GRID_RANGE[1])
            continue
        if step <= finest:
            return worse, step
        # Work grows with the cells: to find by trial how fine a grid may be took many times as long.
        allowed = _SPARE * work * step
        needed = max(finest, allowed, _needed_step(charges, delta, step, float(np.max(worse))))
        if needed >= _NEARLY * step:
            return worse, step
        step = needed


def _needed_step(charges: Sequence[Runs], delta: float, step: float, epsilon: float) -> float:
    """The step that the ε found on ``step`` calls for, at most that; Rényi's may have been far too large."""
    if epsilon == 0:
        return step
    if epsilon < CELLS_TO_EPSILON * step:
        return step / _FINER
    return min(step, coarse_step(charges, delta, epsilon))


def _composed(
    charges: Sequence[Runs],
    step: float,
    delta: float,
    stages: Sequence[Sequence[tuple[int, int]]] | None = None,
    most_work: float = math.inf,
) -> list[ComposedLoss]:
    """The composition with the record removed, and with it added; one of the two where they are alike."""
    tail = _tail(charges, delta)
    order = stages or [[(row, count) for row, (_, count) in enumerate(charges)]]
    removed, added = on_grid([mechanism for mechanism, _ in charges], step, tail)
    has_gaussian = any(isinstance(mechanism, SampledGaussian) for mechanism, _ in charges)
    directions = [removed, added] if has_gaussian else [removed]
    share = most_work / len(directions)
    return [ComposedLoss(step, blocks, order, most_work=share) for blocks in directions]


def _tail(charges: Sequence[Runs], delta: float) -> float:
    """The probability that may be cut off from each run."""
    return delta * _TAIL_SHARE / sum(count for _, count in charges)


def _is_rare(charges: Sequence[Runs]) -> bool:
    """Whether a record is hardly ever in a lot: great losses, rare ones, decide then."""
    return all(isinstance(part, SampledGaussian) and part.sampling_rate < _RARE for part, _ in charges)


def _renyi_bounds(charges: Sequence[Runs], delta: float) -> FloatArray:
    """The ε after each charge by Rényi divergence; infinite if not all are Gaussian."""
    if not all(isinstance(part, SampledGaussian) for part, _ in charges):
        return np.full(len(charges), math.inf)
    return rdp_composition(charges, delta)


def _simple_bounds(charges: Sequence[Runs], delta: float) -> FloatArray:
    """The ε after each charge by simple sums; infinite where none holds.

    While all charges are (ε, δ)-DP, basic composition. If all are Gaussian, nothing where even a record's
    chance of ever being in a lot is within δ: n lots at a rate q hold it with a probability of
    1 − (1−q)ⁿ ≤ nq, and if none does, the outputs have the law that they have without the record; so
    P(S) ≤ Q(S) + nq and Q(S) ≤ P(S) + nq for every S, also if rates vary, with their sum.
    """
    bounds = np.full(len(charges), math.inf)
    rates = [(part.sampling_rate, count) for part, count in charges if isinstance(part, SampledGaussian)]
    if len(rates) == len(charges):
        bounds[np.array([*running_sums(rates)]) <= delta] = 0.0
    leading = [*takewhile(lambda charge: isinstance(charge[0], ApproximateEvent), charges)]
    bounds[: len(leading)] = basic_composition(leading, delta)
    return bounds
