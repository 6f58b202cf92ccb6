"""How a job's privacy budget is spread over its rounds.

A schedule spreads a budget that adds up over rounds. For pure mechanisms (Laplace, two-point) that
is ε: a round with the share s gets s·ε. For Gaussian ones it is the zCDP parameter ρ (Bun and
Steinke, 2016), which adds up as ε does: a round with the share s has a noise multiplier σ ∝ 1/√s, and
:mod:`dpagent.privacy.calibration` solves for the one factor that is left. This holds for every kind of
schedule; a schedule itself knows shares only.

Sources: ``incrementing`` is Luo, Xu and Guan, *Differential privacy budget optimization based
on deep learning in IoT* (2022); ``linear`` is the "pri-enhanced" schedule of Gong, Feng and
Xie (2020), from a least to a greatest budget; ``uniform`` splits evenly (Wang, 2019); ``custom``
takes the weights it is given.

Departures from Luo, Xu and Guan, whose formulas carry two errors:

- their closed form for ε_t has the sign of the step reversed, so it falls with t. The rising
  schedule of their own recursion is ``ε_t = ε/T + (t − (T+1)/2)·d``;
- they bound the step by ``2/(T(T−1))``, which is right for ε = 1 only. The first round stays
  non-negative for ``0 ≤ d ≤ 2ε/(T(T−1))``; here d stays below that, so that every round gets something.

Their formulas spread a pure-ε budget only; with Gaussian noise ρ takes the place of ε.

*Reallocation.* When a round has cost more or less than planned, the remainder is spread over the remaining
rounds. For ``incrementing`` this is the restart of their Algorithm 1, ``ε_{t+1} = ε_rem/(T−t) −
(T−t−1)d/2``, again rising by d. Two departures: the cost of a round is that of its mechanism and
not of a noise value, which has none; and where the remainder is too small to rise by d, d is lowered
to 0.99 of its greatest value 2·ε_rem/((T−t)(T−t−1)). The other kinds keep the proportions of the
remaining rounds. A job that went as planned goes on as planned, for every kind of schedule.

Budgets that depend on the cost of earlier rounds are chosen adaptively. That is sound where those
costs are functions of public values, and a filter limits the total: basic composition for ε,
:class:`~dpagent.privacy.accounting.filters.ZcdpFilter` for ρ,
:class:`~dpagent.privacy.accounting.filters.RenyiFilter` with sampling.

>>> schedule = Schedule("incrementing", step=0.5)
>>> schedule.budgets(3.0, rounds=4).round(3).tolist()
[0.375, 0.625, 0.875, 1.125]
>>> schedule.reallocated(3.0, spent=1.0, over=1, rounds=4).round(3).tolist()
[0.417, 0.667, 0.917]
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, PlanError, require_between, require_count, require_positive
from dpagent.privacy.ranges import MAX_SCHEDULE_STEP, ScheduleKind
from dpagent.wording import counted

MAX_ROUNDS: Final = 1_000_000
_BUDGET_RANGE: Final = (1e-12, 1e12)
_WEIGHT_RATIO: Final = 1e6
_NOTHING: Final = 1e-12  # of a total: a remainder below it is rounding


def kind_given_by(settings: Collection[str]) -> ScheduleKind | None:
    """The kind that settings are for, by their names; None where they are for none alone.

    >>> kind_given_by({"step"}), kind_given_by({"weights"})
    ('incrementing', None)
    """
    kinds: tuple[tuple[str, ScheduleKind], ...] = (("step", "incrementing"), ("ratio", "linear"))
    return next((kind for setting, kind in kinds if setting in settings), None)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A rule that gives every round its share of the budget. Public; holds no data.

    Attributes:
        kind: ``uniform`` (equal shares), ``incrementing`` (shares rise by a fixed step, centred
            on the equal share), ``linear`` (from a least to a greatest share, given by their
            ratio) or ``custom`` (shares in proportion to the weights). The middle two are both
            arithmetic progressions, parametrised differently.
        step: ``incrementing`` only: the step as a fraction, in [0, 0.99], of its greatest
            allowed value 2ε/(T(T−1)). The last share is (1+step)/(1−step) times the first; at
            1 the first round would have no budget at all.
        ratio: ``linear`` only: the last round's share over the first's, in [1, 100].
        weights: ``custom`` only, one for each round: positive, the greatest at most a million times the
            least.

    Raises:
        ParameterError: an attribute is out of its range (all are checked, for every kind; step
            and ratio are ignored where they do not apply, weights are refused).
    """

    kind: ScheduleKind = "incrementing"
    step: float = 0.3
    ratio: float = 3.0
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ParameterError(
                f"schedule kind is {self.kind!r}; expected one of {', '.join(get_args(ScheduleKind))}."
            )
        require_between("schedule step", self.step, 0.0, MAX_SCHEDULE_STEP)
        require_between("schedule ratio", self.ratio, 1.0, 100.0)
        if not isinstance(self.weights, tuple):
            raise ParameterError(f"schedule weights are {self.weights!r}; expected a tuple of numbers.")
        for weight in self.weights:
            require_positive("schedule weight", weight)
        if self.kind == "custom":
            require_count("number of schedule weights", len(self.weights), maximum=MAX_ROUNDS)
            if max(self.weights) / _WEIGHT_RATIO > min(self.weights):
                raise ParameterError(
                    f"schedule weights run from {min(self.weights)!r} to {max(self.weights)!r}; "
                    f"expected a ratio of at most {_WEIGHT_RATIO:g}."
                )
        elif self.weights:
            raise ParameterError(
                f"schedule weights are given for the kind {self.kind}; expected none, or the kind custom."
            )

    def shares(self, rounds: int) -> NDArray[np.float64]:
        """Each round's share of the total: shape (rounds,), positive, sum 1; custom ones may fall.

        Raises:
            ParameterError: ``rounds`` is not a whole number in [1, 1,000,000], or not the number
                of custom weights.
        """
        require_count("rounds", rounds, maximum=MAX_ROUNDS)
        if self.kind == "custom":
            if rounds != len(self.weights):
                raise ParameterError(
                    f"rounds is {rounds}; expected {len(self.weights)}, the number of schedule weights."
                )
            weights = np.array(self.weights, dtype=np.float64)
            weights /= weights.max()  # so that no sum overflows
        else:
            slope = {
                "uniform": 0.0,
                "incrementing": self.step,
                "linear": (self.ratio - 1.0) / (self.ratio + 1.0),
            }[self.kind]
            weights = _progression(slope, rounds)
        return np.asarray(weights / weights.sum(), dtype=np.float64)

    def budgets(self, total: float, rounds: int) -> NDArray[np.float64]:
        """Each round's budget, ε or ρ as ``total`` is: shape (rounds,), positive, sum ``total``.

        For ``incrementing``, ε/T + (t − (T+1)/2)·d with d as :meth:`increment` gives it.

        Args:
            total: in [1e-12, 1e12].
            rounds: as for :meth:`shares`.

        Raises:
            ParameterError: a value is out of its range.
        """
        require_between("total", total, *_BUDGET_RANGE)
        return np.asarray(total * self.shares(rounds))

    def increment(self, total: float, rounds: int) -> float:
        """The step d of the ``incrementing`` kind: ``step`` times 2·total/(T(T−1)); 0 for one round.

        Raises:
            ParameterError: the kind is another, or a value is out of the range of :meth:`budgets`.
        """
        require_between("total", total, *_BUDGET_RANGE)
        require_count("rounds", rounds, maximum=MAX_ROUNDS)
        if self.kind != "incrementing":
            raise ParameterError(
                f"schedule kind is {self.kind}; expected incrementing, for it to have a step."
            )
        return self.step * 2 * total / (rounds * (rounds - 1)) if rounds > 1 else 0.0

    def reallocated(self, total: float, spent: float, *, over: int, rounds: int) -> NDArray[np.float64]:
        """Budgets of the remaining rounds, given the cost of those before.

        A function of its arguments alone, which have to be public.

        Args:
            total: of all rounds, in [1e-12, 1e12].
            spent: the cost of the rounds so far, at least 0, in the unit of ``total``.
            over: their number.
            rounds: of the whole job, as for :meth:`shares`.

        Returns:
            Shape (rounds − over,), positive, sum ``total`` less ``spent``.

        Raises:
            ParameterError: a value is out of its range.
            PlanError: nothing is left, or no round.
        """
        require_between("total", total, *_BUDGET_RANGE)
        shares = self.shares(rounds)
        require_between("spent", spent, 0.0, _BUDGET_RANGE[1])
        require_count("rounds over", over, minimum=0)
        left, rounds_left = total - spent, rounds - over
        if rounds_left < 1:
            raise PlanError(
                f"{over} of {counted(rounds, 'round')} are over, so none is left to spread a budget "
                "over. Start a new job."
            )
        if left <= _NOTHING * total:
            raise PlanError(
                f"{over} of {counted(rounds, 'round')} have spent {spent:g} of {total:g}, "
                "so nothing is left for the others. End the job, or start one with a greater budget."
            )
        if self.kind == "incrementing":
            # d relative to the greatest that the rounds left allow, 2·left/(n(n−1))
            greatest = 2 * left / (rounds_left * (rounds_left - 1)) if rounds_left > 1 else math.inf
            weights = _progression(
                min(self.increment(total, rounds) / greatest, MAX_SCHEDULE_STEP), rounds_left
            )
        else:
            weights = shares[over:]
        return np.asarray(left * (weights / weights.sum()))


def _progression(slope: float, rounds: int) -> NDArray[np.float64]:
    """An arithmetic progression 1 + slope·position, with the position running from −1 to 1.

    With the total ε and d = slope·2ε/(T(T−1)), the term (t − (T+1)/2)·d of the closed form is
    slope·position·ε/T, as t − (T+1)/2 is position·(T−1)/2: so these are its budgets over ε/T.
    """
    if rounds == 1:
        return np.ones(1)
    return np.asarray(1.0 + slope * np.linspace(-1.0, 1.0, rounds))
