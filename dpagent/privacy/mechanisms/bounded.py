"""The ``bounded`` noise cap: noise never exceeds a public bound, and the ledger is charged for this.

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
Roth, Ullman, Vadhan, NeurIPS 2016: basic composition is a privacy filter). That filter is each device's own
ledger, which admits a round only if its cost fits the rest of the job's reservation. It trusts nothing here:
:meth:`BoundedJob.round` is how the coordinator chooses a round, and how a device sees that it kept to the
rule. All ε and δ of a job are those after Poisson sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from dpagent.privacy.mechanisms.discretised_laplace import MAX_EPSILON, finest_resolution, multiplier_for
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE, Query
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.privacy.ranges import NOISE_RANGE
from dpagent.privacy.schedules import MAX_ROUNDS, Schedule

_SAFE: Final = 1 - 2.0**-40
_SPARE: Final = 8.0
"""How many times the noise of the first round the grid has room for: a round that costs more leaves less for
the others."""
_ALIKE: Final = 1e-4
"""Relative difference of two figures that are the same but for the arithmetic of two boards."""


class CapNotMetError(PlanError):
    """What is left of a job's ε meets the cap of no further round."""


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
class BoundedJob:
    """A job under the ``bounded`` cap, as its first plan announces it. Public.

    Attributes:
        epsilon: ε that the job reserves, in (0, 1000].
        delta: δ of the job, in (0, 1); each round may spend an equal part.
        rounds: T, in [1, 1,000,000].
        schedule: how ε is spread over the rounds.
        cap: what bounds the noise.
        expected_lot: public expectation of the number of records in a lot, above 0.

    Raises:
        ParameterError: an attribute is out of its range.
    """

    epsilon: float
    delta: float
    rounds: int
    schedule: Schedule
    cap: BoundedCap
    expected_lot: float

    def __post_init__(self) -> None:
        require_positive("epsilon", self.epsilon, maximum=MAX_EPSILON)
        require_between("delta", self.delta, 0.0, 1.0, low_open=True, high_open=True)
        require_count("rounds", self.rounds, maximum=MAX_ROUNDS)
        require_positive("expected lot", self.expected_lot)

    def multipliers(self, sampling_rate: float, steps: int) -> tuple[float, ...]:
        """The noise multiplier of each round, if no cap acts.

        Raises:
            ParameterError: a round's ε is too small.
        """
        budgets = self.schedule.budgets(self.epsilon, self.rounds).tolist()
        return tuple(multiplier_for(_of_a_step(budget, sampling_rate, steps)) for budget in budgets)

    def resolution(self, sampling_rate: float, steps: int) -> int:
        """Grid units to one clip norm, for all rounds.

        The finest on which the wire takes eight times the noise of any round in which no cap acts.

        Raises:
            ParameterError: a round's ε is too small.
        """
        return finest_resolution(_SPARE * max(self.multipliers(sampling_rate, steps)))

    def round(
        self,
        number: int,
        query: Query,
        weights: NDArray[np.floating[Any]] | None,
        *,
        spent: float,
        resolution: int,
    ) -> BoundedRound:
        """The mechanism of a round, and its cost: a function of public values.

        Args:
            number: of the round, from 1.
            query: of every round.
            weights: the model's, shape (d,), as they are sent for the round; None for no cap.
            spent: ε of the rounds before, at least 0.
            resolution: as :meth:`resolution` gives it.

        Raises:
            ParameterError: a value is out of its range.
            CapNotMetError: the budget is spent, or no remaining ε meets the cap; the text names a sufficient
                one.
        """
        try:
            planned = self.schedule.reallocated(self.epsilon, spent, over=number - 1, rounds=self.rounds)
        except ParameterError:
            raise
        except PlanError as error:
            raise CapNotMetError(str(error)) from error
        delta = self.delta * (1 - NOISE_SHARE) / self.rounds / query.steps / query.sampling_rate
        delta = min(delta, 0.5) * _SAFE
        cap = math.inf if weights is None else self.cap.bound(weights, self.expected_lot)
        terms = (query.sampling_rate, query.dimension)
        mechanism = TruncatedLaplace.for_delta(
            query.clip_norm,
            _of_a_step(float(planned[0]), query.sampling_rate, query.steps),
            delta,
            *terms,
            steps=query.steps,
            resolution=resolution,
            accumulation_slack=query.accumulation_slack,
        )
        if is_capped := not mechanism.cap <= cap:
            try:
                mechanism = TruncatedLaplace.for_cap(
                    query.clip_norm,
                    cap,
                    delta,
                    *terms,
                    steps=query.steps,
                    resolution=resolution,
                    accumulation_slack=query.accumulation_slack,
                    max_epsilon=_of_a_step(self.epsilon - spent, query.sampling_rate, query.steps),
                )
            except ParameterError:
                raise
            except PlanError as error:
                raise CapNotMetError(
                    f"Round {number} of {self.rounds}, with epsilon {self.epsilon - spent:.3g} of "
                    f"{self.epsilon:g} left: {error} Or give the job more epsilon."
                ) from error
        return BoundedRound(mechanism, float(planned[0]), is_capped, composed(mechanism.event).epsilon)


@dataclass(frozen=True, slots=True)
class BoundedRound:
    """A round under the ``bounded`` cap. Public.

    Attributes:
        mechanism: of the round; ``mechanism.event`` is the charge.
        planned_epsilon: ε_t by the schedule.
        is_capped: whether the cap made it cost more than that.
        epsilon: what it costs, sampling included.
    """

    mechanism: TruncatedLaplace
    planned_epsilon: float
    is_capped: bool
    epsilon: float

    def require_announced(self, mechanism: TruncatedLaplace) -> None:
        """See that an announced mechanism is this one, but for the last digits of another board's arithmetic.

        Raises:
            PlanError: naming the figure that differs.
        """
        for name in ("noise_multiplier", "bound_units"):
            found, derived = getattr(mechanism, name), getattr(self.mechanism, name)
            if not math.isclose(found, derived, rel_tol=_ALIKE):
                raise PlanError(
                    f"{name.replace('_', ' ')} is {found:.9g}; the public weights and the schedule give "
                    f"{derived:.9g}."
                )


def _of_a_step(epsilon: float, sampling_rate: float, steps: int) -> float:
    """The ε before sampling of one step, if all steps of a round may cost ``epsilon``."""
    of_step = unamplified_epsilon(min(epsilon, MAX_EPSILON) * _SAFE / steps, sampling_rate)
    return min(of_step, 1 / NOISE_RANGE[0] * _SAFE)
