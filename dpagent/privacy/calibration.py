"""From a privacy target to the noise multiplier of every round.

A job runs one family of mechanisms: its rounds differ in the noise multiplier alone. A schedule fixes the
rounds' shares of the budget, hence the noise multipliers up to one factor; the total ε falls as that factor
rises, and the one at which it meets the target is found by bracketing and false position.

The search is for speed alone. It looks at few representative rounds, first by Rényi divergences, then by the
job's accountant, and then corrects the factor by the cost of the whole job. The plan returned carries the
accountant's own figures for all rounds, and is returned only if these meet the target.

>>> from dpagent.privacy.schedules import Schedule
>>> plan = calibrate(
...     Schedule("uniform"), gaussian_family(sampling_rate=0.1), epsilon=2.0, delta=1e-5, rounds=100
... )
>>> round(plan.noise_multipliers[0], 2), plan.accountant
(2.25, 'pld')
>>> 1.999 < plan.epsilon_by_round[-1] <= 2.0
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, PlanError, require_between, require_count, require_positive
from dpagent.privacy.accounting.choice import accountant_name, accountant_named, priced
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.events import ApproximateEvent, Event, GaussianEvent, SelfComposedEvent, poisson_sampled
from dpagent.privacy.ranges import NOISE_RANGE, AccountantName
from dpagent.privacy.schedules import MAX_ROUNDS, Schedule
from dpagent.wording import counted

#: Targets that are calibrated to.
EPSILON_RANGE: Final = (1e-6, 1000.0)

# A plan's ε lies within these relative distances below its target. The nearer one keeps it clear of rounding;
# the search aims between the two. Figures by privacy-loss distributions are a grid's width apart.
_MARGIN: Final = 1e-6
_TOLERANCE: Final = 1e-4
_AIM: Final = 4e-5
_FIRST_TOLERANCE: Final = 1e-2
_REPRESENTATIVES: Final = 16
_CORRECTIONS: Final = 12
_SLOPE_STEP: Final = 1e-2  # of the factor's logarithm
_LEAST_SLOPE: Final = 0.2
_NEARLY_ZERO: Final = 1e-12


@dataclass(frozen=True, slots=True)
class EventFamily:
    """Mechanisms that differ in their noise alone; :func:`calibrate` chooses one for every round. Public.

    Attributes:
        event: the event of one round, all its steps and its sampling included, as a function of the noise
            multiplier (the noise's parameter over the sensitivity): it costs less the more noise there is.
        shared: the budget that adds up over rounds and that a schedule shares out. ``rho`` is that of zCDP,
            which falls with the square of the noise (Gaussian); ``epsilon`` falls with the noise itself
            (Laplace).
        noise_range: least and greatest noise multiplier to choose.
    """

    event: Callable[[float], Event]
    shared: Literal["rho", "epsilon"]
    noise_range: tuple[float, float] = NOISE_RANGE

    @property
    def power(self) -> int:
        """The shared budget is inversely proportional to this power of the noise multiplier."""
        return 2 if self.shared == "rho" else 1


def gaussian_family(sampling_rate: float, steps: int = 1) -> EventFamily:
    """Rounds of ``steps`` Gaussian mechanisms each, every one on a Poisson sample of its own."""
    return EventFamily(lambda noise: poisson_sampled(GaussianEvent(noise), sampling_rate, steps), "rho")


def laplace_family(sampling_rate: float, steps: int = 1) -> EventFamily:
    """Likewise for pure mechanisms whose ε is one over the noise multiplier, such as Laplace noise."""
    return EventFamily(
        lambda noise: poisson_sampled(ApproximateEvent(1 / noise), sampling_rate, steps), "epsilon"
    )


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """The noise and the cost of a job, round by round. Public; fixed before the first round.

    Attributes:
        schedule: how the budget is spread.
        noise_multipliers: of each round, in order.
        epsilon_by_round: the ε spent after each round, at ``delta``; the last is the total, at most the
            target, and at least what a device reserves for all rounds.
        delta: the δ at which all ε are stated, for add-or-remove-one-record adjacency.
        accountant: name of the accountant that prices it.
    """

    schedule: Schedule
    noise_multipliers: tuple[float, ...]
    epsilon_by_round: tuple[float, ...]
    delta: float
    accountant: AccountantName

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.noise_multipliers)


def calibrate(
    schedule: Schedule,
    family: EventFamily,
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    accountant: AccountantName | None = None,
) -> BudgetPlan:
    """The least noise with which ``rounds`` rounds on ``schedule`` meet (``epsilon``, ``delta``).

    Args:
        schedule: how the budget is spread over the rounds.
        family: the mechanism of a round, but for its noise.
        epsilon: target, in [1e-6, 1000]; met from below, to within a relative 1e-4 unless the least noise
            there is, in some round, already costs less.
        delta: in [1e-200, 1), or 0 for pure mechanisms; keep it well below one over the number of records
            (:func:`~dpagent.privacy.statement.delta_warning`).
        rounds: in [1, 1,000,000].
        accountant: by default the one that
            :func:`~dpagent.privacy.accounting.choice.accountant_name` names.

    Raises:
        ParameterError: a value is out of its range.
        PlanError: no noise in the family's range meets the target.
    """
    require_between("epsilon", epsilon, *EPSILON_RANGE)
    require_between("delta", delta, 0.0, 1.0, high_open=True)
    require_count("rounds", rounds, maximum=MAX_ROUNDS)
    if not isinstance(schedule, Schedule):
        raise ParameterError(f"schedule is a {type(schedule).__name__}; expected a Schedule.")
    relative = np.asarray(schedule.shares(rounds) ** (-1 / family.power))
    interval = _factors(family, relative, rounds)
    events = [family.event(noise) for noise in set(_noise(family, relative, interval[0]))]
    is_as_on_devices = accountant is None
    accountant = accountant or accountant_name(events, delta)

    def plan_at(log_factor: float) -> BudgetPlan:
        noise = _noise(family, relative, log_factor)
        spent = price(noise, family, delta=delta, accountant=accountant)
        if is_as_on_devices:
            # They price the whole job at once: a bound that differs in its last digits. The higher one is
            # stated, so that no device reserves more than that.
            whole = priced(map(family.event, noise), delta)[1]
            spent = (*spent[:-1], max(spent[-1], whole))
        return BudgetPlan(schedule, tuple(noise), spent, float(delta), accountant)

    few = _FewRounds(relative, family, delta)
    if (least := few.least_epsilon(interval, accountant, epsilon * (1 - _MARGIN))) is not None:
        raise PlanError(
            f"epsilon {epsilon:g} at delta {delta:g} cannot be met: {counted(rounds, 'round')} cost "
            f"{least:.3g} even with the largest noise multiplier that devices accept, "
            f"{family.noise_range[1]:g}. Raise epsilon or delta, or lower the rounds, their local steps or "
            "the sampling rate."
        )
    plan = _search(few, plan_at, accountant, epsilon, interval)
    if plan is None:
        raise PlanError(
            f"the search for epsilon {epsilon:g} at delta {delta:g} over {counted(rounds, 'round')} did not "
            "end within 0.01 % of it. Change epsilon slightly."
        )
    return plan


def price(
    noise_multipliers: Sequence[float],
    family: EventFamily,
    *,
    delta: float,
    accountant: AccountantName | None = None,
) -> tuple[float, ...]:
    """The ε spent after each round of a job with these noise multipliers.

    >>> spent = price([2.25] * 100, gaussian_family(sampling_rate=0.1), delta=1e-5)
    >>> len(spent), round(spent[-1], 3)
    (100, 1.998)

    Args:
        noise_multipliers: of each round, in order; at least one.
        family: the mechanism of a round, but for its noise.
        delta, accountant: as for :func:`calibrate`.

    Raises:
        ParameterError: a value is out of its range, or there is no round.
    """
    events = [family.event(noise) for noise in noise_multipliers]
    used = accountant_named(accountant or accountant_name(events, delta))
    return tuple(used.running_epsilon(events, delta).tolist())


def _factors(family: EventFamily, relative: NDArray[np.float64], rounds: int) -> tuple[float, float]:
    """Logarithms of the least and the greatest factor that keep all rounds within the range of noise."""
    low = math.log(require_positive("least noise multiplier", family.noise_range[0]) / relative.min())
    high = math.log(require_positive("greatest noise multiplier", family.noise_range[1]) / relative.max())
    if not low <= high:
        raise PlanError(
            f"the noise of {counted(rounds, 'round')} on this schedule differs by a factor of "
            f"{relative.max() / relative.min():.4g}; expected at most "
            f"{family.noise_range[1] / family.noise_range[0]:g}. Choose a less steep schedule."
        )
    return low, high


def _noise(family: EventFamily, relative: NDArray[np.float64], log_factor: float) -> list[float]:
    """Noise multipliers at a factor, kept within their range where rounding would carry them beyond it."""
    noise = np.clip(relative * math.exp(log_factor), *family.noise_range)
    return [float(sigma) for sigma in noise]


def _search(
    few: _FewRounds,
    plan_at: Callable[[float], BudgetPlan],
    accountant: AccountantName,
    epsilon: float,
    interval: tuple[float, float],
) -> BudgetPlan | None:
    """The plan that meets the target; None if correcting does not end within the tolerance."""
    aim = epsilon * (1 - _AIM)

    @cache
    def excess(log_factor: float, name: AccountantName = accountant) -> float:
        return math.log(max(few.epsilon(log_factor, name), _NEARLY_ZERO) / aim)

    log_factor = few.noise_of_one(interval)
    if few.has_divergences:
        log_factor = _root(lambda at: excess(at, "rdp"), log_factor, math.log(2), interval, _FIRST_TOLERANCE)
    log_factor = found = _root(excess, log_factor, math.log(1.1), interval, _AIM)
    for _ in range(_CORRECTIONS):
        plan = plan_at(log_factor)
        spent = plan.epsilon_by_round[-1]
        close = epsilon * (1 - _TOLERANCE) <= spent or log_factor == interval[0]
        if close and spent <= epsilon * (1 - _MARGIN):
            return plan
        slope = (excess(found + _SLOPE_STEP) - excess(found)) / _SLOPE_STEP
        log_factor -= math.log(max(spent, _NEARLY_ZERO) / aim) / min(slope, -_LEAST_SLOPE)
        log_factor = min(max(log_factor, interval[0]), interval[1])
    return None


class _FewRounds:
    """Nearly the ε of a whole job as a function of the factor's logarithm, from at most 16 rounds.

    Each represents its share of the rounds, in the order of their noise, with their mean budget.
    """

    def __init__(self, relative: NDArray[np.float64], family: EventFamily, delta: float) -> None:
        groups = np.array_split(np.sort(relative), min(_REPRESENTATIVES, len(relative)))
        power = family.power
        self._rounds = [(float(np.mean(group**-power) ** (-1 / power)), len(group)) for group in groups]
        self._family, self._delta = family, delta
        self.has_divergences = delta > 0 and all(map(RdpAccountant().supports, self._events(0.0)))

    def noise_of_one(self, interval: tuple[float, float]) -> float:
        """The factor's logarithm at which a round's noise multiplier is 1, or the nearest in ``interval``."""
        return min(max(-math.log(self._rounds[0][0]), interval[0]), interval[1])

    def least_epsilon(
        self, interval: tuple[float, float], accountant: AccountantName, target: float
    ) -> float | None:
        """The ε at the greatest factor, where it is above the target."""
        # Divergences, which take less time, prove most targets to be met.
        if self.has_divergences and self.epsilon(interval[1], "rdp") <= target:
            return None
        least = self.epsilon(interval[1], accountant)
        return least if least > target else None

    def epsilon(self, log_factor: float, accountant: AccountantName) -> float:
        """The ε of the representatives."""
        return accountant_named(accountant).epsilon_after(self._events(log_factor), self._delta)

    def _events(self, log_factor: float) -> list[Event]:
        low, high = self._family.noise_range
        factor = math.exp(log_factor)
        noise = [(min(max(ratio * factor, low), high), count) for ratio, count in self._rounds]
        return [SelfComposedEvent(self._family.event(sigma), count) for sigma, count in noise]


def _root(
    f: Callable[[float], float],
    guess: float,
    reach: float,
    interval: tuple[float, float],
    tolerance: float,
) -> float:
    """An x with |f(x)| ≤ ``tolerance``, for a falling f; an end of ``interval`` if f keeps its sign there.

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
    if f_left <= tolerance:
        return left
    if f_right > tolerance:
        return right
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
