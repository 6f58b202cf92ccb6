"""The ``bounded`` noise cap: noise never exceeds a public bound, and the ledger is charged for this.

Not wired: no program imports this yet.

``docs/decisions/2026-11-22-bounded-cap-by-a-filter.md`` says how plans will announce it.

It keeps the aims of Algorithm 1 of Luo, Xu and Guan (2022), no absurdly large noise, and a
schedule that restarts with the remaining budget. Unlike that algorithm, it is differentially private (see
:mod:`dpagent.privacy.mechanisms.published`). Departures:

- the cap of a round is one number A_t for all coordinates, from the *public* weights of the global
  model, never from the device's own, nor from the data;
- noise is not drawn first and replaced if it is too large: it is drawn from the truncated Laplace
  distribution on [−A_t, A_t] (:mod:`dpagent.privacy.mechanisms.truncated_laplace`), and the ε charged is that
  of the distribution, by inverting its cost;
- sensitivity is that of the whole vector, in L1.

A round is scheduled an ε_t. If noise for ε_t, at the round's δ, stays within A_t anyway, the round costs
ε_t. If not, it costs the larger ε at which the noise stays within A_t. Either way the
schedule restarts over the rounds left with the remainder (:meth:`Schedule.reallocated`); a job in
which no cap acts keeps its schedule.

*Validity.* Costs are chosen as the job goes on, but from public values and earlier noisy sums alone.
(ε, δ) of such mechanisms add up as long as the sum is kept within a bound fixed in advance (Rogers,
Roth, Ullman, Vadhan, NeurIPS 2016: basic composition is a privacy filter), which
:meth:`BoundedBudget.next_round` does: it refuses a round that does not fit, before anything is drawn.
All ε and δ in a budget are those after Poisson sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import (
    ParameterError,
    PlanError,
    require_between,
    require_count,
    require_positive,
)
from dpagent.privacy.accounting.amplification import unamplified_epsilon
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.discretised_laplace import MAX_EPSILON
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.privacy.schedules import MAX_ROUNDS, Schedule
from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit

_SAFE: Final = 1 - 2.0**-40


@dataclass(frozen=True, slots=True)
class BoundedCap:
    """A_t as a function of public weights: the largest pull of the regulariser. Public.

    Attributes:
        regularisation: γ, above 0: the derivative of the L2 penalty is γ·w.
        floor: least bound on the noise of a mean gradient, above 0.

    Raises:
        ParameterError: an attribute is not above 0.
    """

    regularisation: float
    floor: float

    def __post_init__(self) -> None:
        require_positive("regularisation", self.regularisation)
        require_positive("floor", self.floor)

    def bound(self, weights: NDArray[np.floating[Any]], expected_lot: float) -> float:
        """max(γ·max|w_j|, floor), as a bound on noise in the *sum* over a lot, in gradient units.

        Args:
            weights: public global weights of the round before, shape (d,).
            expected_lot: public expectation of the number of records in a lot, above 0.

        Raises:
            ParameterError: weights are empty or not finite, or the lot is not above 0.
        """
        lot = require_positive("expected lot", expected_lot)
        if weights.ndim != 1 or not weights.size or not np.isfinite(weights).all():
            raise ParameterError(f"weights have shape {weights.shape}; expected a vector of finite numbers.")
        return lot * max(self.regularisation * float(np.abs(weights).max()), self.floor)


@dataclass(frozen=True, slots=True)
class BoundedBudget:
    """The budget and the charges of a job under the ``bounded`` cap. Public; a new one after each
    round.

    Attributes:
        epsilon: total ε of the job, in (0, 1000].
        delta: total δ, in (0, 1); each round may spend an equal part.
        rounds: T, in [1, 1,000,000].
        sampling_rate: q, in [1e-300, 1].
        schedule: how ε is spread over the rounds.
        steps: noisy local steps in each round.
        spent: charges of the rounds so far.

    Raises:
        ParameterError: an attribute is out of its range.
    """

    epsilon: float
    delta: float
    rounds: int
    sampling_rate: float
    schedule: Schedule
    steps: int = 1
    spent: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        require_positive("epsilon", self.epsilon, maximum=MAX_EPSILON)
        require_between("delta", self.delta, 0.0, 1.0, low_open=True, high_open=True)
        require_count("rounds", self.rounds, maximum=MAX_ROUNDS)
        require_between("sampling rate", self.sampling_rate, 1e-300, 1.0)
        require_count("steps", self.steps)

    @property
    def spent_epsilon(self) -> float:
        """ε of the rounds so far."""
        return composed(*self.spent).epsilon if self.spent else 0.0

    @property
    def spent_delta(self) -> float:
        """δ of the rounds so far."""
        return composed(*self.spent).delta if self.spent else 0.0

    @property
    def remaining_epsilon(self) -> float:
        """ε that is left."""
        return max(0.0, self.epsilon - self.spent_epsilon)

    @property
    def rounds_left(self) -> int:
        """Rounds not yet charged."""
        return self.rounds - len(self.spent)

    def planned(self) -> NDArray[np.float64]:
        """ε_t of each round left, by the schedule restarted with the remainder, shape (rounds_left,).

        Raises:
            PlanError: no round is left, or no budget.
        """
        costs = [composed(event).epsilon for event in self.spent]
        return self.schedule.reallocated(self.epsilon, costs, self.rounds)

    def next_round(
        self,
        cap: float,
        *,
        clip_norm: float,
        dimension: int,
        resolution: int | None = None,
        accumulation_slack: float | None = None,
    ) -> BoundedRound:
        """The mechanism of the next round, and its cost. Charges nothing: see ``after``.

        Args:
            cap: A_t, bound on one step's noise in the sum over a lot, in gradient units, as of
                :meth:`BoundedCap.bound`; infinity for none.
            clip_norm: C, in L1.
            dimension: d.
            resolution: grid units to one clip norm; by default they follow from d.
            accumulation_slack: of sums, or None where records are rounded.

        Raises:
            ParameterError: a value is out of its range.
            PlanError: the budget is spent, or no remaining ε meets the cap; the text names a sufficient one.
        """
        planned, remaining = float(self.planned()[0]), self.remaining_epsilon
        delta = min(self.delta / self.rounds / self.steps / self.sampling_rate, 0.5) * _SAFE
        terms = (self.sampling_rate, dimension)
        mechanism = TruncatedLaplace.for_delta(
            clip_norm,
            self._of_a_step(planned),
            delta,
            *terms,
            steps=self.steps,
            resolution=resolution,
            accumulation_slack=accumulation_slack,
        )
        capped = not mechanism.cap <= cap
        if capped:
            try:
                mechanism = TruncatedLaplace.for_cap(
                    clip_norm,
                    cap,
                    delta,
                    *terms,
                    steps=self.steps,
                    resolution=resolution,
                    accumulation_slack=accumulation_slack,
                    max_epsilon=self._of_a_step(remaining),
                )
            except ParameterError:
                raise
            except PlanError as error:
                raise PlanError(
                    f"Round {len(self.spent) + 1} of {self.rounds}, with epsilon {remaining:.3g} of "
                    f"{self.epsilon:g} left: {error} Or give the job more epsilon."
                ) from error
        after = replace(self, spent=(*self.spent, mechanism.event))
        if after.spent_epsilon > self.epsilon or after.spent_delta > self.delta:
            raise PlanError(
                f"Round {len(after.spent)} would bring the job to epsilon {after.spent_epsilon:g} and delta "
                f"{after.spent_delta:g}, above {self.epsilon:g} and {self.delta:g}. Raise the cap."
            )
        return BoundedRound(mechanism, planned, capped, after)

    def statement(self) -> BudgetStatement:
        """The guarantee of the whole job, for any caps."""
        return BudgetStatement(
            Unit.RECORD,
            Adjacency.ADD_OR_REMOVE_ONE,
            Trust.NONE,
            TruncatedLaplace.name,
            self.epsilon,
            self.delta,
            (
                "The cap of each round follows from public values alone.",
                "Noise is ideal up to the statistical distance that each round's mechanism states.",
            ),
        )

    def _of_a_step(self, epsilon: float) -> float:
        """The ε before sampling of one step, if all steps of a round may cost ``epsilon``."""
        return min(unamplified_epsilon(epsilon * _SAFE / self.steps, self.sampling_rate), MAX_EPSILON)


@dataclass(frozen=True, slots=True)
class BoundedRound:
    """A round under the ``bounded`` cap. Public.

    Attributes:
        mechanism: of the round; ``mechanism.event`` is the charge.
        planned_epsilon: ε_t by the schedule.
        capped: whether the cap made it cost more than that.
        after: the budget once the round is charged.
    """

    mechanism: TruncatedLaplace
    planned_epsilon: float
    capped: bool
    after: BoundedBudget
