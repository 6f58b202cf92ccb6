"""From a privacy target to the noise multiplier of every round, or to the rounds it affords.

A schedule fixes the rounds' shares of the zCDP budget, hence the noise multipliers up to one
factor: σ_t = s/√share_t. The total ε falls as s rises; the s at which it meets the target is
found by bracketing and false position.

The search is for speed alone. By Rényi divergences it looks at few orders, closing in on the best one;
by privacy-loss distributions at few representative rounds, and then mends the scale by what the whole
comes to. The plan returned carries figures of the accountant itself, with all orders or all rounds,
and is returned only if these meet the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, PlanError, require_between, require_count
from dpagent.privacy.accounting.pld import MIN_DELTA, PldAccountant, running_pld_epsilon
from dpagent.privacy.accounting.rdp import (
    ORDERS,
    conversion_offsets,
    cumulants,
    running_epsilon,
)
from dpagent.privacy.events import MAX_STEPS, PrivacyLossEvent
from dpagent.privacy.schedules import MAX_ROUNDS, Schedule

AccountantName = Literal["pld", "rdp"]

MIN_EPSILON: Final = 1e-6
MAX_EPSILON: Final = 1000.0

# A plan's ε lies within these relative distances below its target. The nearer one keeps it
# clear of rounding; the search aims between the two.
_MARGIN: Final = 1e-6
_TOLERANCE: Final = 1e-5
_AIM: Final = 4e-6
_AIM_TOLERANCE: Final = 3e-6
_COARSE_TOLERANCE: Final = 1e-2

# The same for privacy-loss distributions, whose figures are themselves a grid's width apart.
_PLD_TOLERANCE: Final = 1e-4
_PLD_AIM: Final = 4e-5
_REPRESENTATIVES: Final = 16
_MENDINGS: Final = 12
_SLOPE_STEP: Final = 1e-2  # of log s
_LEAST_SLOPE: Final = 0.2
_MOST_DIFFERENT: Final = 2_048

# At the least noise multiplier, one release costs more than MAX_EPSILON at any sampling rate
# above 1e-300; at the greatest, what is left of ε comes from the number of rounds and from δ.
_SIGMA_RANGE: Final = (0.01, 1e6)

_COARSE_ORDERS: Final[tuple[float, ...]] = (
    *(1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0),
    *(24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0, 1024.0),
)
_WINDOW: Final = 12  # orders looked at while closing in
_REFINEMENTS: Final = 8
_NEARLY_ZERO: Final = 1e-12


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """What a job will spend, round by round. Public; fixed before the first round.

    Attributes:
        schedule: how the budget is spread.
        noise_multipliers: σ_t of each round, in order.
        accountant: what prices it: ``pld`` (tight) or ``rdp``.
        epsilon_by_round: the ε spent after each round, at ``delta``; the last is the total.
        epsilon_target: the ε asked for; ``epsilon_by_round[-1]`` is at most this.
        delta: the δ at which all ε are stated, for add-or-remove-one-record adjacency.
        sampling_rate: probability with which each record enters a lot.
        steps: noisy steps in each round.
    """

    schedule: Schedule
    noise_multipliers: tuple[float, ...]
    epsilon_by_round: tuple[float, ...]
    epsilon_target: float
    delta: float
    sampling_rate: float
    steps: int
    accountant: AccountantName = "pld"

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.noise_multipliers)


def calibrate(
    schedule: Schedule,
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    sampling_rate: float,
    steps: int = 1,
    accountant: AccountantName | None = None,
) -> BudgetPlan:
    """The least noise with which ``rounds`` rounds on ``schedule`` meet (``epsilon``, ``delta``).

    Args:
        schedule: how the budget is spread over the rounds.
        epsilon: target, in [1e-6, 1000]; met from below, to within a relative 1e-4 (``rdp``: 1e-5) unless
            the least noise there is, σ = 0.01 in some round, already costs less.
        delta: in [1e-200, 1); keep it well below one over the number of records.
        rounds: in [1, 1,000,000].
        sampling_rate: in (0, 1].
        steps: noisy steps in each round, at least 1.
        accountant: ``pld`` for the tight price, ``rdp`` for Rényi divergences (more noise for the same ε).
            By default the former, unless more than 2,048 rounds all differ and that would take too long.

    Raises:
        ParameterError: a value is out of its range.
        PlanError: no noise multiplier up to 1e6 meets the target.
    """
    _check_terms(epsilon, delta, sampling_rate, steps, accountant)
    if not isinstance(schedule, Schedule):
        raise ParameterError(f"schedule is a {type(schedule).__name__}; expected a Schedule.")
    require_count("rounds", rounds, maximum=MAX_ROUNDS)
    relative = 1 / np.sqrt(schedule.shares(rounds))
    accountant = accountant or accountant_for(relative.tolist())
    interval = (
        math.log(_SIGMA_RANGE[0] / relative.min()),
        math.log(_SIGMA_RANGE[1] / relative.max()),
    )

    def plan_at(log_scale: float) -> BudgetPlan:
        sigmas = (relative * math.exp(log_scale)).tolist()
        return price(
            sigmas, schedule=schedule, epsilon_target=epsilon, delta=delta,
            sampling_rate=sampling_rate, steps=steps, accountant=accountant,
        )  # fmt: skip

    total = _Total(relative, sampling_rate, steps, delta)
    few = _FewRounds(relative, sampling_rate, steps, delta)
    least = few.epsilon(interval[1]) if accountant == "pld" else total.epsilon(interval[1], ORDERS)[0]
    if least > epsilon * (1 - _TOLERANCE):
        raise PlanError(
            f"epsilon {epsilon:g} at delta {delta:g} cannot be met: {rounds} rounds of {steps} steps at "
            f"sampling rate {sampling_rate:g} cost {least:.3g} even with a noise multiplier of "
            f"{_SIGMA_RANGE[1]:g}. Raise epsilon or delta, or lower the rounds or the sampling rate."
        )
    guess = math.log(max(1.0, sampling_rate * math.sqrt(steps * math.log(1 / delta)) / min(epsilon, 1.0)))
    guess = min(max(guess, interval[0]), interval[1])
    if accountant == "rdp":
        plan = _search_orders(total, plan_at, epsilon, guess, interval)
    else:
        plan = _search_few_rounds(few, plan_at, epsilon, guess, interval)
    if plan is None:
        raise PlanError(
            f"the search for epsilon {epsilon:g} at delta {delta:g} over {rounds} rounds at sampling rate "
            f"{sampling_rate:g} did not end within 0.01 % of it. Change epsilon slightly."
        )
    return plan


def price(
    noise_multipliers: Sequence[float],
    *,
    delta: float,
    sampling_rate: float,
    steps: int = 1,
    accountant: AccountantName | None = None,
    schedule: Schedule | None = None,
    epsilon_target: float | None = None,
) -> BudgetPlan:
    """What rounds with these noise multipliers cost.

    Args:
        noise_multipliers: σ of each round, in order; at least one, each in [1e-6, 1e12].
        delta, sampling_rate, steps, accountant: as for :func:`calibrate`.
        schedule: carried into the result; uniform if left out.
        epsilon_target: likewise; the cost itself if left out.

    Raises:
        ParameterError: a value is out of its range, or there is no round.
    """
    if not noise_multipliers:
        raise ParameterError("noise multipliers are empty; expected one for each round.")
    _check_terms(MAX_EPSILON, delta, sampling_rate, steps, accountant)
    accountant = accountant or accountant_for(noise_multipliers)
    events = [PrivacyLossEvent(sigma, sampling_rate, steps) for sigma in noise_multipliers]
    running = running_pld_epsilon if accountant == "pld" else running_epsilon
    spent = tuple(running(events, delta).tolist())
    return BudgetPlan(
        schedule or Schedule("uniform"),
        tuple(noise_multipliers),
        spent,
        float(spent[-1] if epsilon_target is None else epsilon_target),
        float(delta),
        float(sampling_rate),
        steps,
        accountant,
    )


def affordable_rounds(
    noise_multiplier: float,
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int = 1,
    accountant: AccountantName | None = None,
) -> int:
    """The largest number of rounds, all with this noise, that cost at most ``epsilon``; at most 1,000,000.

    Args:
        noise_multiplier: σ of every round.
        epsilon, delta, sampling_rate, steps, accountant: as for :func:`calibrate`.

    Raises:
        ParameterError: a value is out of its range.
        PlanError: a single round costs more.
    """
    _check_terms(epsilon, delta, sampling_rate, steps, accountant)

    def cost(rounds: int) -> float:
        event = PrivacyLossEvent(noise_multiplier, sampling_rate, steps * rounds)
        if accountant == "rdp":
            return float(running_epsilon([event], delta)[0])
        return PldAccountant().epsilon_after([event], delta)

    if (first := cost(1)) > epsilon:
        raise PlanError(
            f"noise multiplier {noise_multiplier:g} cannot keep epsilon {epsilon:g} at delta {delta:g}: one "
            f"round of {steps} steps at sampling rate {sampling_rate:g} costs {first:.3g}. Raise the noise "
            "multiplier or epsilon, or lower the sampling rate."
        )
    low, high = 1, 2
    while high <= MAX_ROUNDS and cost(high) <= epsilon:
        low, high = high, 2 * high
    high = min(high, MAX_ROUNDS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= epsilon else (low, middle)
    return low


def accountant_for(noise_multipliers: Sequence[float]) -> AccountantName:
    """What prices these rounds unless it is said: ``pld``, or ``rdp`` if more than 2,048 are different."""
    return "pld" if len(set(noise_multipliers)) <= _MOST_DIFFERENT else "rdp"


def _check_terms(
    epsilon: float, delta: float, sampling_rate: float, steps: int, accountant: AccountantName | None
) -> None:
    require_between("epsilon", epsilon, MIN_EPSILON, MAX_EPSILON)
    require_between("delta", delta, MIN_DELTA, 1.0, high_open=True)
    require_between("sampling rate", sampling_rate, 1e-300, 1.0)
    require_count("steps", steps, maximum=MAX_STEPS)
    if accountant is not None and accountant not in get_args(AccountantName):
        raise ParameterError(
            f"accountant is {accountant!r}; expected one of {', '.join(get_args(AccountantName))}."
        )


def _search_orders(
    total: _Total,
    plan_at: Callable[[float], BudgetPlan],
    epsilon: float,
    guess: float,
    interval: tuple[float, float],
) -> BudgetPlan | None:
    """The plan by Rényi divergences; None if the search does not close in on the target."""
    orders, reach = _COARSE_ORDERS, math.log(2)
    for attempt in range(_REFINEMENTS + 1):
        if attempt == _REFINEMENTS:
            orders = ORDERS  # slow and certain
        closed_in = _is_gapless(orders)
        guess = _root(
            lambda log_scale, orders=orders: math.log(  # type: ignore[misc]
                max(total.epsilon(log_scale, orders)[0], _NEARLY_ZERO) / (epsilon * (1 - _AIM))
            ),
            guess,
            reach=reach,
            interval=interval,
            tolerance=_AIM_TOLERANCE if closed_in else _COARSE_TOLERANCE,
        )
        if closed_in:
            plan = plan_at(guess)
            if epsilon * (1 - _TOLERANCE) <= plan.epsilon_by_round[-1] <= epsilon * (1 - _MARGIN):
                return plan
            orders = ORDERS  # the best order is outside the window: find it, and look there
        orders, reach = _window(total.epsilon(guess, orders)[1], orders), 0.02
    return None


def _search_few_rounds(
    few: _FewRounds,
    plan_at: Callable[[float], BudgetPlan],
    epsilon: float,
    guess: float,
    interval: tuple[float, float],
) -> BudgetPlan | None:
    """The plan by privacy-loss distributions; None if mending does not end within the tolerance."""
    aim = epsilon * (1 - _PLD_AIM)

    def excess(log_scale: float) -> float:
        return math.log(max(few.epsilon(log_scale), _NEARLY_ZERO) / aim)

    log_scale = _root(excess, guess, reach=math.log(2), interval=interval, tolerance=_PLD_AIM)
    if log_scale <= interval[0]:  # δ alone allows to give away every record that is used
        plan = plan_at(interval[0])
        return plan if plan.epsilon_by_round[-1] <= epsilon else None
    slope = (excess(log_scale + _SLOPE_STEP) - excess(log_scale)) / _SLOPE_STEP
    for _ in range(_MENDINGS):
        plan = plan_at(log_scale)
        spent = plan.epsilon_by_round[-1]
        if epsilon * (1 - _PLD_TOLERANCE) <= spent <= epsilon * (1 - _MARGIN):
            return plan
        log_scale -= math.log(max(spent, _NEARLY_ZERO) / aim) / min(slope, -_LEAST_SLOPE)
        log_scale = min(max(log_scale, interval[0]), interval[1])
    return None


class _FewRounds:
    """Nearly the ε of a whole job as a function of log s, from at most 16 representative rounds.

    Each stands for its share of the rounds, in the order of their noise, with their mean ρ.
    """

    def __init__(self, relative: NDArray[np.float64], rate: float, steps: int, delta: float) -> None:
        groups = np.array_split(np.sort(relative), min(_REPRESENTATIVES, len(relative)))
        self._rounds = [(float(np.mean(group**-2.0) ** -0.5), len(group) * steps) for group in groups]
        self._rate, self._delta = rate, delta

    def epsilon(self, log_scale: float) -> float:
        """The tight ε of the representatives."""
        scale = math.exp(log_scale)
        events = [PrivacyLossEvent(ratio * scale, self._rate, count) for ratio, count in self._rounds]
        return PldAccountant().epsilon_after(events, self._delta)


class _Total:
    """The ε of a whole job as a function of log s, from as many Rényi orders as one likes."""

    def __init__(self, relative: NDArray[np.float64], rate: float, steps: int, delta: float) -> None:
        self._relative, counts = np.unique(relative, return_counts=True)
        self._compositions = counts * float(steps)
        self._rate = rate
        self._delta = delta

    def epsilon(self, log_scale: float, orders: Sequence[float]) -> tuple[float, float]:
        """The least ε over ``orders`` (not below 0), and the order at which it is found."""
        bounds = cumulants(self._relative * math.exp(log_scale), self._rate, orders)
        alpha = np.array(orders)
        epsilons = self._compositions @ bounds / (alpha - 1) + conversion_offsets(alpha, self._delta)
        best = int(epsilons.argmin())
        return max(float(epsilons[best]), 0.0), orders[best]


def _is_gapless(orders: Sequence[float]) -> bool:
    first = ORDERS.index(orders[0])
    return tuple(orders) == ORDERS[first : first + len(orders)]


def _window(best: float, orders: Sequence[float]) -> tuple[float, ...]:
    """At most _WINDOW of ORDERS around ``best``, spread over the two next on either side."""
    place = orders.index(best)
    low, high = orders[max(place - 2, 0)], orders[min(place + 2, len(orders) - 1)]
    inside = [order for order in ORDERS if low <= order <= high]
    if len(inside) <= _WINDOW:
        return tuple(inside)
    picks = np.linspace(0, len(inside) - 1, _WINDOW).round().astype(int)
    return tuple(inside[i] for i in picks)


def _root(
    f: Callable[[float], float],
    guess: float,
    *,
    reach: float,
    interval: tuple[float, float],
    tolerance: float,
) -> float:
    """An x with |f(x)| ≤ ``tolerance``, for a falling f that changes sign in ``interval``.

    Brackets outwards from ``guess`` in growing steps, then false position (Illinois variant),
    with a bisection step now and then so that the bracket always shrinks.
    """
    left = right = guess
    f_left = f_right = f(guess)
    while f_left < -tolerance and left > interval[0]:
        right, f_right = left, f_left
        left, reach = max(interval[0], left - reach), 2 * reach
        f_left = f(left)
    while f_right > tolerance and right < interval[1]:
        left, f_left = right, f_right
        right, reach = min(interval[1], right + reach), 2 * reach
        f_right = f(right)
    if abs(f_left) <= tolerance:
        return left
    side = 0
    weight_left, weight_right = f_left, f_right
    x, value = right, f_right
    for step in range(1, 200):
        if abs(value) <= tolerance:
            break
        if step % 5 == 0 or weight_left <= weight_right:
            x = (left + right) / 2
        else:
            x = (left * weight_right - right * weight_left) / (weight_right - weight_left)
        value = f(x)
        if value > 0:
            left, weight_left = x, value
            weight_right, side = (weight_right / 2 if side > 0 else weight_right), 1
        else:
            right, weight_right = x, value
            weight_left, side = (weight_left / 2 if side < 0 else weight_left), -1
    return x
