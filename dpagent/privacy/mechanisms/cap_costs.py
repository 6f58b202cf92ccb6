"""The price of each noise cap under a target.

``none`` and ``clamp`` leave the guarantee as it is; ``published`` has none. ``bounded`` is paid
for: in place of Gaussian noise it releases truncated Laplace noise
(:mod:`dpagent.privacy.mechanisms.truncated_laplace`), whose ε follows from how tight the cap is. Its charges
are the (ε, δ) of single releases and add up (pure composition). So with T rounds of k local steps
each step has δ/(T·k), and its share of ε is the schedule's; and because a step on a lot sampled at
rate q costs ln(1 + q(e^ε − 1)) and qδ where the lot itself costs ε and δ, a step may take a δ of
δ/(T·k·q) before sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.accounting.amplification import unamplified_epsilon
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.mechanisms.published import NOT_PRIVATE, PublishedCap
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.privacy.schedules import Schedule
from dpagent.privacy.statement import BudgetStatement

#: Caps, in L1 clip norms, whose price is shown.
_EXAMPLES: Final = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_MOST_DELTA: Final = 0.5
_L1_CLIPPING: Final = "Each record's gradient is clipped in L1."


@dataclass(frozen=True, slots=True)
class CapCost:
    """One kind of cap, and what is guaranteed with it.

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
    """What the ``bounded`` cap costs when no noise exceeds ``cap``.

    Attributes:
        cap: A, the most noise of a step on a coordinate, in L1 clip norms.
        release_epsilon: of one step on a known lot, before sampling.
        step_epsilon: the same, amplified by sampling.
        job_epsilon: of all rounds and steps with this cap, added up.
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
        examples: prices of caps, tight ones first; a cap that no ε can meet is left out.
        first_allowed, last_allowed: the least A that the first and the last round's share of ε pays
            for, in L1 clip norms; None where that noise would be too large or small to be drawn.
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
    nothing = BudgetStatement(*scope, PublishedCap.name, math.inf, 1.0, (NOT_PRIVATE,))
    return (
        CapCost("none", "0: nothing is capped", statement),
        CapCost("clamp", "0: it acts on what is private already", statement),
        CapCost("bounded", "its own ε each round, from the same total", bounded),
        CapCost("published", "no price buys it a guarantee", nothing),
    )


def bounded_prices(
    schedule: Schedule,
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    sampling_rate: float,
    dimension: int,
    local_steps: int = 1,
) -> BoundedPrices:
    """Prices of the ``bounded`` cap.

    Args:
        schedule: whose shares are of ε here.
        epsilon: of the whole job.
        delta: likewise.
        rounds: of the job.
        sampling_rate: q, in (0, 1].
        dimension: d, of an update.
        local_steps: noisy steps of a round.
    """
    steps, rate = rounds * local_steps, sampling_rate
    step_delta = delta / steps
    release_delta = min(step_delta / rate, _MOST_DELTA)

    def price(cap: float) -> BoundedCost | None:
        try:
            mechanism = TruncatedLaplace.for_cap(1.0, cap, release_delta, rate, dimension)
        except (ParameterError, PlanError):
            return None
        step = composed(mechanism.event).epsilon
        return BoundedCost(cap, mechanism.epsilon, step, steps * step)

    def allowed(share: float) -> float | None:
        try:
            of_step = unamplified_epsilon(share * epsilon / local_steps, rate)
            return TruncatedLaplace.for_delta(1.0, of_step, release_delta, rate, dimension).cap
        except (ParameterError, PlanError):
            return None

    shares = schedule.shares(rounds)
    return BoundedPrices(
        step_delta,
        tuple(cost for cap in _EXAMPLES if (cost := price(cap)) is not None),
        allowed(float(shares[0])),
        allowed(float(shares[-1])),
    )
