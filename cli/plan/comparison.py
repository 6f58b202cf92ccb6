"""The same target on every schedule: noise, spending, and the noise on the fleet's mean.

The coordinator adds the sums of n devices with k local steps each and divides by n·k·L; L is the
expected lot. Let a device's noise have the standard deviation s on each coordinate (slightly above σ clip
norms, since the sensitivity of the mechanism as implemented is slightly above one). Then each coordinate of
the mean gradient has noise of s/(L·√(n·k)), and the whole vector noise of about √d times that in L2 norm. A
mean of clipped gradients is at most one clip norm long. Rounding for the wire adds less than 0.8 % to the
noise; these figures omit it.

Where the coordinator adds the noise (``central``), it adds s once to the sum of n updates, and divides by n:
each coordinate of the mean update has noise of s/n. A clip norm that follows a quantile adds 3 % in L2 and
25 % in L1; these figures are without. If devices add noise of t each besides, that is √(s² + n·t²)/n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cli.notation import plain
from cli.plan.target import PlanTarget
from coordinator.update_planning import update_grid
from dpagent.errors import ParameterError
from dpagent.privacy.calibration import BudgetPlan
from dpagent.privacy.mechanisms.cap_costs import BoundedPrices, CapCost, bounded_prices, cap_costs
from dpagent.privacy.mechanisms.job_noise import JobNoise, calibrated_noise
from dpagent.privacy.mechanisms.mechanism import CalibratedMechanism
from dpagent.privacy.schedules import Schedule
from dpagent.privacy.statement import BudgetStatement, delta_warning


@dataclass(frozen=True, slots=True)
class Candidate:
    """One schedule that meets the target.

    Attributes:
        plan: noise multipliers and ε of every round.
        shares: of the budget (in zCDP, or in ε for Laplace noise), for every round; they add up to 1.
        coordinate_noise: standard deviation on one coordinate of the fleet's mean gradient, in clip
            norms, for every round.
        mean_noise: expected L2 norm of the noise on the whole mean gradient, in clip norms, for every round.
        chosen: whether it is the requested schedule.
        device: noise and ε, without trust, of what devices add to their updates besides; None without such
            noise.
    """

    plan: BudgetPlan
    shares: tuple[float, ...]
    coordinate_noise: tuple[float, ...]
    mean_noise: tuple[float, ...]
    chosen: bool
    device: BudgetPlan | None = None

    @property
    def name(self) -> str:
        """The schedule's kind."""
        return self.plan.schedule.kind


@dataclass(frozen=True, slots=True)
class Comparison:
    """The content of ``dpagent plan``, before formatting.

    Attributes:
        target: the request.
        candidates: one per schedule of the target, in its order.
        statement: the guarantee, the same for all candidates.
        caps: the cost of each kind of noise cap.
        bounded: prices of the ``bounded`` cap, on the chosen schedule; None where the coordinator adds noise.
        remarks: warnings for the operator, one sentence each.
    """

    target: PlanTarget
    candidates: tuple[Candidate, ...]
    statement: BudgetStatement
    caps: tuple[CapCost, ...]
    bounded: BoundedPrices | None
    remarks: tuple[str, ...]

    @property
    def shares_epsilon(self) -> bool:
        """Whether a schedule shares out ε, as for Laplace noise, and not zCDP."""
        return self.target.mechanism.family(self.target.sampling_rate).shared == "epsilon"

    @property
    def chosen(self) -> Candidate:
        """The requested schedule."""
        return next(candidate for candidate in self.candidates if candidate.chosen)

    @property
    def device_statement(self) -> BudgetStatement | None:
        """The guarantee of the noise that devices add besides, which trusts nobody; None without it."""
        target = self.target
        if (own := target.device_mechanism) is None:
            return None
        return own.job_statement(target.device_noise or 0.0, target.delta)

    @property
    def uniform(self) -> Candidate:
        """The schedule with equal shares, as a reference."""
        return self.candidates[0]

    @property
    def milestones(self) -> tuple[int, ...]:
        """The rounds after a quarter, a half and all of the job; fewer in a short one."""
        rounds = self.target.rounds
        return tuple(sorted({math.ceil(rounds / 4), math.ceil(rounds / 2), rounds}))


def compare(target: PlanTarget) -> Comparison:
    """Find the least noise with which each schedule meets the target.

    Raises:
        ParameterError: a value is out of range.
        PlanError: no noise meets the target.
    """
    mechanism, own = target.mechanism, target.device_mechanism

    def planned(schedule: Schedule, kind: type[CalibratedMechanism], epsilon: float) -> BudgetPlan:
        return calibrated_noise(
            kind, schedule, epsilon=epsilon, delta=target.delta, rounds=target.rounds,
            sampling_rate=target.sampling_rate, steps=target.local_steps,
        )  # fmt: skip

    candidates = tuple(
        _candidate(
            planned(schedule, mechanism, target.epsilon),
            None if own is None else planned(schedule, own, target.device_noise or 0.0),
            target,
        )
        for schedule in target.schedules()
    )
    statement = mechanism.job_statement(target.epsilon, target.delta)
    chosen = next(candidate for candidate in candidates if candidate.chosen)
    if target.sums_updates:
        caps, bounded = cap_costs(statement)[:1], None
    else:
        caps = cap_costs(statement)
        bounded = bounded_prices(
            chosen.plan.schedule,
            target.query,
            epsilon=target.epsilon,
            delta=target.delta,
            rounds=target.rounds,
        )
    return Comparison(target, candidates, statement, caps, bounded, tuple(_remarks(target, chosen)))


def _candidate(plan: BudgetPlan, device: BudgetPlan | None, target: PlanTarget) -> Candidate:
    noise, own = _noises(target, plan, device)
    drawn = _deviations(noise, target)
    if own is not None:
        added = (math.sqrt(target.devices) * each for each in _deviations(own, target))
        drawn = [math.hypot(each, more) for each, more in zip(drawn, added, strict=True)]
    coordinate_noise = tuple(each / target.averaged_over for each in drawn)
    return Candidate(
        plan,
        shares=tuple(plan.schedule.shares(plan.rounds).tolist()),
        coordinate_noise=coordinate_noise,
        mean_noise=tuple(noise * math.sqrt(target.parameters) for noise in coordinate_noise),
        chosen=plan.schedule.kind == target.schedule,
        device=device,
    )


def _noises(
    target: PlanTarget, plan: BudgetPlan, device: BudgetPlan | None
) -> tuple[JobNoise, JobNoise | None]:
    """The job's noise as a coordinator chooses it, and that of devices besides, if there is any."""
    kind, own = target.mechanism, target.device_mechanism
    if kind.norm is None or not target.sums_updates:
        return JobNoise.chosen(kind.name, plan.noise_multipliers), None
    grid = update_grid(kind.norm, target.parameters, plan, device)
    noise = JobNoise(kind, plan.noise_multipliers, grid)
    if device is None or own is None:
        return noise, None
    return noise, JobNoise(own, device.noise_multipliers, grid)


def _deviations(noise: JobNoise, target: PlanTarget) -> list[float]:
    """Of the noise on a coordinate as it is drawn, in clip norms, for every round."""
    mechanisms = (noise.at(number, target.query) for number in range(1, noise.rounds + 1))
    return [each.deviation_units * each.granularity for each in mechanisms]


def _remarks(target: PlanTarget, chosen: Candidate) -> Iterator[str]:
    noises = _noises(target, chosen.plan, chosen.device)
    for noise, plan in zip(noises, (chosen.plan, chosen.device), strict=True):
        if noise is None or plan is None:
            continue
        try:
            noise.require_acceptable(lambda _: target.query, plan.epsilon_by_round[-1], target.delta)
        except ParameterError as error:
            yield f"No device would accept this plan. Its {error}"
    if target.cap == "bounded":
        yield (
            "The schedules are priced as if no cap acted. Under the bounded cap of this fleet, a round costs "
            "its share of ε, or more where the cap is tighter; the rounds' costs add up, and the job ends "
            "where what is left meets the cap of no further round."
        )
    units = target.devices if target.sums_updates else target.records_per_device
    if (warning := delta_warning(target.delta, units, target.mechanism.unit)) is not None:
        yield warning
    if (worst := max(chosen.mean_noise)) >= 1:
        summand, more = (
            ("update", "More devices")
            if target.sums_updates
            else ("gradient", "More devices, more records, a higher sampling rate")
        )
        yield (
            f"The noise on the mean {summand} is up to {plain(worst)} clip norms long, the {summand} at "
            f"most 1: a single step is mostly noise. {more} or a higher ε reduce it; a smaller learning rate "
            "averages it out."
        )
