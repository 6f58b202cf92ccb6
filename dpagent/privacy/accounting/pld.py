"""The tight price of a sequence of releases fixed in advance: accounting by privacy-loss distributions.

Rényi accounting (:mod:`dpagent.privacy.accounting.rdp`) is cheap and loses something in its conversion to
(ε, δ), most where rounds differ: for 1,000 rounds at q = 0.01 with σ falling from 2.0 to 0.8 it says
2.17 where 1.53 is true. Here the distribution of the loss itself is composed
(:mod:`dpagent.privacy.accounting.composed_loss`), in both directions of add-or-remove-one adjacency, and the
worse is reported.

What a single release's loss is, and on which grid, is in :mod:`dpagent.privacy.accounting.gaussian_loss`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between
from dpagent.privacy.accounting.composed_loss import ComposedLoss, GridTooFineError
from dpagent.privacy.accounting.gaussian_loss import (
    CELLS_TO_EPSILON,
    GRID_RANGE,
    Event,
    coarse_step,
    fine_step,
    on_grid,
    with_steps,
)
from dpagent.privacy.accounting.rdp import read_hex, require_state, running_epsilon
from dpagent.privacy.events import ApproximateEvent, PrivacyLossEvent

FloatArray = NDArray[np.float64]

#: Least δ that is priced.
MIN_DELTA: Final = 1e-200

_STATE_VERSION: Final = 1
_MAX_STAGES: Final = 2048
_COARSER: Final = 4.0
_MANY_CELLS: Final = 2**16  # of all releases: beyond, a coarser grid is considered
# An ε above which, and a sampling rate below which, Rényi divergence may do better in extreme cases.
_FAR_OUT: Final = 10.0
_RARE: Final = 1e-3
_ROUNDING: Final = 1e-9
_TAIL_SHARE: Final = 1e-6  # of δ, for what is cut off from all releases together


class PldAccountant:
    """Composes privacy-loss distributions of charges fixed in advance, and converts to (ε, δ).

    Adjacency: add or remove one record. The state is the multiset of charges, so neither the order
    nor the grouping of :meth:`compose` matters, to the last bit.

    Args:
        grid: step of the losses, in [1e-7, 1]; None chooses it (see
        :mod:`dpagent.privacy.accounting.gaussian_loss`).
    """

    def __init__(self, *, grid: float | None = None) -> None:
        self._grid = None if grid is None else require_between("grid", grid, *GRID_RANGE)
        self._steps: Counter[Event] = Counter()

    def compose(self, event: Event, *more: Event) -> None:
        """Charge the events."""
        self._steps.update(_counted((event, *more)))

    @property
    def events(self) -> tuple[Event, ...]:
        """What was charged, in canonical order, equal charges together."""
        return tuple(with_steps(kind, steps) for kind, steps in _canonical(self._steps))

    def epsilon(self, delta: float) -> float:
        """The ε spent so far, at ``delta`` in [1e-200, 1). 0.0 if nothing was composed.

        Infinite if the charges' own δ add up to ``delta`` or more.
        """
        return self.epsilon_after((), delta)

    def epsilon_after(self, events: Iterable[Event], delta: float) -> float:
        """What :meth:`epsilon` would become with ``events`` charged as well. Charges nothing."""
        require_between("delta", delta, MIN_DELTA, 1.0, high_open=True)
        steps = self._steps + _counted(events)
        if not steps:
            return 0.0
        kinds = _canonical(steps)
        charges = [with_steps(kind, count) for kind, count in kinds]
        other = float(_simple_bounds(charges, delta)[-1])
        if other == 0:
            return 0.0
        worse, _ = _evaluated(kinds, self._grid, delta, lambda loss: loss.epsilon(delta))
        tight = (1 + _ROUNDING) * float(worse)
        if tight > _FAR_OUT or _is_rare(charges):
            other = min(other, float(_renyi_bounds(charges, delta)[-1]))
        return min(tight, other)

    def delta(self, epsilon: float) -> float:
        """The δ at an ε in [0, 1000]. 0.0 if nothing was composed."""
        require_between("epsilon", epsilon, 0.0, 1000.0)
        if not self._steps:
            return 0.0
        kinds, below = _canonical(self._steps), epsilon / (1 + _ROUNDING)
        step = self._grid or fine_step(kinds, _tail(kinds, 1e-12))[0]
        return max(loss.delta(below) for loss in _composed(kinds, step, 1e-12))

    def to_state(self) -> dict[str, Any]:
        """The state, to be kept as JSON; :meth:`from_state` gives back an equal accountant."""
        return {
            "accountant": "pld",
            "version": _STATE_VERSION,
            "grid": None if self._grid is None else self._grid.hex(),
            "events": [_event_state(event) for event in self.events],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PldAccountant:
        """Restore what :meth:`to_state` gave.

        Raises:
            ParameterError: the state is of another accountant or version, or malformed.
        """
        require_state(state, _STATE_VERSION, ("accountant", "grid", "events"))
        if state["accountant"] != "pld" or not isinstance(state["events"], list):
            raise ParameterError("the state is of another accountant, or has no list of events.")
        try:
            grid = None if state["grid"] is None else read_hex("grid", state["grid"])
            events = [_event_of(item) for item in state["events"]]
        except ParameterError:
            raise
        except (TypeError, ValueError) as error:
            raise ParameterError(f"events in the state are malformed: {str(error)[:100]}") from error
        accountant = cls(grid=grid)
        accountant._steps.update(_counted(events))
        if len(accountant._steps) < len(events):
            raise ParameterError("the state holds a charge twice; expected equal ones together.")
        return accountant

    def __copy__(self) -> PldAccountant:
        accountant = PldAccountant(grid=self._grid)
        accountant._steps.update(self._steps)
        return accountant


def running_pld_epsilon(events: Sequence[Event], delta: float, *, grid: float | None = None) -> FloatArray:
    """The ε spent after each of the events, in order: shape (len(events),), never falling.

    Of more than 2,048 events only some 1,024, evenly spaced, are looked at after; of the others, what is
    said is what will be spent after the next that is.

    Raises:
        ParameterError: ``delta`` is not in [1e-200, 1), or ``grid`` not in [1e-7, 1].
    """
    require_between("delta", delta, MIN_DELTA, 1.0, high_open=True)
    if grid is not None:
        require_between("grid", grid, *GRID_RANGE)
    if not events:
        return np.zeros(0)
    kinds = _canonical(_counted(events))
    row_of = {kind: row for row, (kind, _) in enumerate(kinds)}
    stride = _stage_length(len(events))
    stages = []
    for start in range(0, len(events), stride):
        stage: Counter[int] = Counter()
        for event in events[start : start + stride]:
            stage[row_of[with_steps(event, 1)]] += event.steps
        stages.append(sorted(stage.items()))
    ends = _ends(len(events))
    running = _simple_bounds(events, delta)[ends]
    if running[-1] > 0:
        worse, _ = _evaluated(kinds, grid, delta, lambda loss: loss.running_epsilon(delta), stages)
        running = np.minimum((1 + _ROUNDING) * worse, running)
        if running[-1] > _FAR_OUT or _is_rare(events):
            running = np.minimum(running, _renyi_bounds(events, delta)[ends])
    return np.asarray(np.repeat(np.maximum.accumulate(running), stride)[: len(events)])


def _stage_length(count: int) -> int:
    """Of that many charges, after every how many :func:`running_pld_epsilon` looks at what is spent."""
    return 1 if count <= _MAX_STAGES else math.ceil(2 * count / _MAX_STAGES)


def _ends(count: int) -> NDArray[np.intp]:
    """Where stages end: the last charge of each."""
    length = _stage_length(count)
    return np.minimum(np.arange(length - 1, count + length - 1, length), count - 1)


def loss_grid(events: Iterable[Event], delta: float) -> float:
    """The grid step that is chosen for these charges; to be kept by who is to price a part of them alike.

    Raises:
        ParameterError: ``delta`` is not in [1e-200, 1), or there is no event.
    """
    require_between("delta", delta, MIN_DELTA, 1.0, high_open=True)
    kinds = _canonical(_counted(events))
    if not kinds:
        raise ParameterError("events are none; expected at least one.")
    _, step = _evaluated(kinds, None, delta, lambda loss: loss.epsilon(delta))
    return min(max(step, GRID_RANGE[0]), GRID_RANGE[1])


def _evaluated(
    kinds: Sequence[tuple[Event, int]],
    grid: float | None,
    delta: float,
    figure: Callable[[ComposedLoss], Any],
    stages: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> tuple[Any, float]:
    """The worse ε of record removed and added, and the step: of the grid given, or of one that will do."""
    finest, cells = (grid, 0) if grid else fine_step(kinds, _tail(kinds, delta))
    step = finest if cells < _MANY_CELLS else max(finest, coarse_step(kinds, delta))
    while True:
        try:
            removed, added = _composed(kinds, step, delta, stages)
            worse = np.maximum(figure(removed), figure(added))
        except GridTooFineError:
            if grid is not None:
                raise
            finest = step = _COARSER * step
            continue
        if step > finest and 0 < float(np.max(worse)) < CELLS_TO_EPSILON * step:
            step = max(finest, step / 8)
            continue
        return worse, step


def _composed(
    kinds: Sequence[tuple[Event, int]],
    step: float,
    delta: float,
    stages: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> tuple[ComposedLoss, ComposedLoss]:
    """The composition with the record removed, and with it added."""
    tail = _tail(kinds, delta)
    events = [kind for kind, _ in kinds]
    order = stages or [[(row, steps) for row, (_, steps) in enumerate(kinds)]]
    removed, added = on_grid(events, step, tail)
    return ComposedLoss(step, removed, order), ComposedLoss(step, added, order)


def _tail(kinds: Sequence[tuple[Event, int]], delta: float) -> float:
    """What may be cut off from each release."""
    return delta * _TAIL_SHARE / sum(steps for _, steps in kinds)


def _is_rare(charges: Sequence[Event]) -> bool:
    """Whether a record is hardly ever in a lot: great losses, rare ones, decide then."""
    return all(isinstance(event, PrivacyLossEvent) and event.sampling_rate < _RARE for event in charges)


def _renyi_bounds(charges: Sequence[Event], delta: float) -> FloatArray:
    """The ε after each charge by Rényi divergence; infinite if not all are Gaussian."""
    gaussian = [event for event in charges if isinstance(event, PrivacyLossEvent)]
    if len(gaussian) < len(charges):
        return np.full(len(charges), math.inf)
    return np.asarray(running_epsilon(gaussian, delta), dtype=np.float64)


def _simple_bounds(charges: Sequence[Event], delta: float) -> FloatArray:
    """The ε after each charge by what can be added up by hand; infinite if nothing holds.

    While all charges are Gaussian, nothing where even a record's chance of ever being in a lot is
    within δ; while all are (ε, δ), the sum of ε if the δ fit.
    """
    gaussian = [event for event in charges if isinstance(event, PrivacyLossEvent)]
    if len(gaussian) == len(charges):
        chances = np.cumsum([event.sampling_rate * event.steps for event in gaussian])
        return np.where(chances * (1 + _ROUNDING) <= delta, 0.0, math.inf)
    pure = [event if isinstance(event, ApproximateEvent) else None for event in charges]
    counts = np.array([event.steps for event in charges], dtype=np.float64)
    epsilons = np.cumsum(counts * [math.inf if event is None else event.epsilon for event in pure])
    deltas = np.cumsum(counts * [0.0 if event is None else event.delta for event in pure])
    return np.where(deltas * (1 + _ROUNDING) <= delta, epsilons * (1 + _ROUNDING), math.inf)


def _counted(events: Iterable[Event]) -> Counter[Event]:
    steps: Counter[Event] = Counter()
    for event in events:
        steps[with_steps(event, 1)] += event.steps
    return steps


def _canonical(steps: Mapping[Event, int]) -> list[tuple[Event, int]]:
    def key(item: tuple[Event, int]) -> tuple[int, float, float]:
        event = item[0]
        if isinstance(event, ApproximateEvent):
            return (1, event.epsilon, event.delta)
        return (0, event.noise_multiplier, event.sampling_rate)

    return sorted(steps.items(), key=key)


def _event_state(event: Event) -> list[Any]:
    if isinstance(event, ApproximateEvent):
        return ["approximate", event.epsilon.hex(), event.delta.hex(), event.steps]
    return ["gaussian", event.noise_multiplier.hex(), event.sampling_rate.hex(), event.steps]


def _event_of(state: Sequence[Any]) -> Event:
    kind, first, second, steps = state
    if kind not in ("gaussian", "approximate"):
        raise ValueError(f"charge kind {str(kind)[:20]!r} is unknown")
    make = PrivacyLossEvent if kind == "gaussian" else ApproximateEvent
    return make(read_hex("a charge", first), read_hex("a charge", second), steps)
