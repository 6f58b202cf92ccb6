"""The price of each noise cap under a target.

``none`` and ``clamp`` do not change the guarantee; ``published`` has none. ``bounded`` has a cost:
it uses truncated Laplace noise (:mod:`dpagent.privacy.mechanisms.truncated_laplace`) instead of Gaussian
noise, and its ε follows from the tightness of the cap. Its charges
are the (ε, δ) of single noisy sums and add up (pure composition). So with T rounds of k local steps
each step has δ/(T·k), and the schedule's share of ε. A step on a lot sampled at
rate q costs ln(1 + q(e^ε − 1)) and qδ, where the lot itself costs ε and δ. So a step may use a δ of
δ/(T·k·q) before sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.accounting.amplification import unamplified_epsilon
from dpagent.privacy.accounting.composition import composed, exact_sum
from dpagent.privacy.mechanisms.bounded import BoundedCap, BoundedJob
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE, Query
from dpagent.privacy.mechanisms.published import NOT_PRIVATE, PublishedLaplace
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.privacy.schedules import Schedule
from dpagent.privacy.statement import BudgetStatement

#: Caps with a price in the table, in L1 clip norms.
_EXAMPLES: Final = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_MOST_DELTA: Final = 0.5
_L1_CLIPPING: Final = "Each record's gradient is clipped in L1."


@dataclass(frozen=True, slots=True)
class CapCost:
    """One kind of cap, and its guarantee.

    Attributes:
        kind: as ``fleet.yaml`` spells it.
        costs: in a few words.
        statement: of the whole job.
    """

    kind: str
    costs: str
    statement: BudgetStatement


@dataclass(frozen=True, slots=True)
class BoundedCost:
    """The cost of the ``bounded`` cap if no noise exceeds ``cap``.

    Attributes:
        cap: A, the largest noise of a step on a coordinate, in L1 clip norms.
        release_epsilon: of one step on a known lot, before sampling.
        step_epsilon: the same, amplified by sampling.
        job_epsilon: sum over all rounds and steps with this cap.
    """

    cap: float
    release_epsilon: float
    step_epsilon: float
    job_epsilon: float


@dataclass(frozen=True, slots=True)
class BoundedPrices:
    """The ``bounded`` cap under a target.

    Attributes:
        step_delta: δ of one step, sampling included.
        examples: prices of caps, tightest first, without caps that no ε can meet.
        first_allowed, last_allowed: the smallest A within the first and the last round's share of ε,
            in L1 clip norms; None where that noise is too large or too small for the sampler.
    """

    step_delta: float
    examples: tuple[BoundedCost, ...]
    first_allowed: float | None
    last_allowed: float | None


def cap_costs(statement: BudgetStatement) -> tuple[CapCost, ...]:
    """The four kinds of cap, cheapest first.

    Args:
        statement: of the job without a cap.
    """
    scope, assumptions = statement.scope, (*statement.assumptions, _L1_CLIPPING)
    bounded = BudgetStatement(
        *scope, TruncatedLaplace.name, statement.epsilon, statement.delta, assumptions=assumptions
    )
    nothing = BudgetStatement(*scope, PublishedLaplace.name, math.inf, 1.0, (NOT_PRIVATE,))
    return (
        CapCost("none", "0: no cap", statement),
        CapCost("clamp", "0: post-processing of a noisy mean", statement),
        CapCost("bounded", "its own ε each round, from the same total", bounded),
        CapCost("published", "no ε exists", nothing),
    )


def bounded_prices(
    schedule: Schedule, query: Query, *, epsilon: float, delta: float, rounds: int
) -> BoundedPrices:
    """Prices of the ``bounded`` cap, as devices charge them: with the sensitivity of their sums on the grid
    of such a job, and the share of δ left out that pays for inexact noise.

    Args:
        schedule: its shares apply to ε here.
        query: of every round, with a clip norm of 1.
        epsilon: of the whole job.
        delta: of the whole job.
        rounds: of the job.
    """
    steps, rate = rounds * query.steps, query.sampling_rate
    step_delta = delta * (1 - NOISE_SHARE) / steps
    release_delta = min(step_delta / rate, _MOST_DELTA)
    terms = (rate, query.dimension)
    resolution = _resolution(schedule, query, epsilon, delta, rounds)

    def price(cap: float) -> BoundedCost | None:
        try:
            mechanism = TruncatedLaplace.for_cap(
                query.clip_norm, cap * query.clip_norm, release_delta, *terms,
                resolution=resolution, accumulation_slack=query.accumulation_slack,
            )  # fmt: skip
        except (ParameterError, PlanError):
            return None
        step = composed(mechanism.event)
        return BoundedCost(cap, mechanism.epsilon, step.epsilon, exact_sum([(step.epsilon, steps)]))

    def allowed(share: float) -> float | None:
        try:
            of_step = unamplified_epsilon(share * epsilon / query.steps, rate)
            mechanism = TruncatedLaplace.for_delta(
                query.clip_norm, of_step, release_delta, *terms,
                resolution=resolution, accumulation_slack=query.accumulation_slack,
            )  # fmt: skip
        except (ParameterError, PlanError):
            return None
        return mechanism.cap / query.clip_norm

    shares = schedule.shares(rounds)
    return BoundedPrices(
        step_delta,
        tuple(cost for cap in _EXAMPLES if (cost := price(cap)) is not None),
        allowed(float(shares[0])),
        allowed(float(shares[-1])),
    )


def _resolution(schedule: Schedule, query: Query, epsilon: float, delta: float, rounds: int) -> int | None:
    """The grid of such a job; None, for one of the mechanism's own, where none could run."""
    try:
        job = BoundedJob(epsilon, delta, rounds, schedule, BoundedCap(1.0, 1.0), 1.0)
        return job.resolution(query.sampling_rate, query.steps)
    except (ParameterError, PlanError):
        return None
