"""The same target on every schedule: noise, spending, and what the noise does to the fleet's mean.

A device's noise has the standard deviation σ·Δ on each coordinate, where Δ is the sensitivity of
the mechanism as implemented, a little above one clip norm
(:class:`~dpagent.privacy.mechanisms.mechanism.DiscretisedGaussian`). The coordinator adds the sums of
n devices with k local steps each and divides by n·k·L, L being the expected lot. So each coordinate
of the mean gradient carries noise of σ·Δ/(L·√(n·k)), and the whole vector noise of about
√d times that in L2 norm. A mean of clipped gradients is at most one clip norm long. Rounding for
the wire adds less than 0.8 % to the noise, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cli.notation import plain
from cli.plan.caps import BoundedPrices, CapCost, bounded_prices, cap_costs
from cli.plan.target import PlanTarget
from dpagent.errors import ParameterError
from dpagent.privacy.calibration import BudgetPlan, calibrate, gaussian_family
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.grid import FINE_STEPS
from dpagent.privacy.statement import BudgetStatement

_MUCH_DELTA: Final = 0.1  # in records of one device that may be published for all that δ forbids


@dataclass(frozen=True, slots=True)
class Candidate:
    """One schedule that meets the target.

    Attributes:
        plan: noise multipliers and ε of every round.
        shares: of the budget (in zCDP), for every round; they add up to 1.
        coordinate_noise: standard deviation on one coordinate of the fleet's mean gradient, in clip
            norms, for every round.
        mean_noise: L2 norm to expect of the noise on the whole mean gradient, likewise.
        chosen: whether it is the one asked for.
    """

    plan: BudgetPlan
    shares: tuple[float, ...]
    coordinate_noise: tuple[float, ...]
    mean_noise: tuple[float, ...]
    chosen: bool

    @property
    def name(self) -> str:
        """The schedule's kind."""
        return self.plan.schedule.kind


@dataclass(frozen=True, slots=True)
class Comparison:
    """What ``dpagent plan`` has to say, before it is put into words.

    Attributes:
        target: what was asked for.
        candidates: each schedule of the target, in its order.
        statement: the guarantee; all candidates have the same.
        caps: what each kind of noise cap costs.
        bounded: prices of the ``bounded`` cap, on the chosen schedule.
        remarks: what an operator should know about these numbers, a sentence each.
    """

    target: PlanTarget
    candidates: tuple[Candidate, ...]
    statement: BudgetStatement
    caps: tuple[CapCost, ...]
    bounded: BoundedPrices
    remarks: tuple[str, ...]

    @property
    def chosen(self) -> Candidate:
        """The one asked for."""
        return next(candidate for candidate in self.candidates if candidate.chosen)

    @property
    def uniform(self) -> Candidate:
        """The one with equal shares, to hold the others against."""
        return self.candidates[0]

    @property
    def milestones(self) -> tuple[int, ...]:
        """The rounds after a quarter, a half and all of the job; fewer in a short one."""
        rounds = self.target.rounds
        return tuple(sorted({math.ceil(rounds / 4), math.ceil(rounds / 2), rounds}))


def compare(target: PlanTarget) -> Comparison:
    """Solve for the least noise with which each schedule meets the target.

    Raises:
        ParameterError: a value is out of its range.
        PlanError: no noise meets the target.
    """
    candidates = tuple(
        _candidate(
            calibrate(
                schedule,
                gaussian_family(target.sampling_rate, target.local_steps),
                epsilon=target.epsilon,
                delta=target.delta,
                rounds=target.rounds,
            ),
            target,
        )
        for schedule in target.schedules()
    )
    statement = DiscretisedGaussian.job_statement(target.epsilon, target.delta)
    chosen = next(candidate for candidate in candidates if candidate.chosen)
    return Comparison(
        target,
        candidates,
        statement,
        cap_costs(statement),
        bounded_prices(target, chosen.plan.schedule),
        tuple(_remarks(target, chosen)),
    )


def _candidate(plan: BudgetPlan, target: PlanTarget) -> Candidate:
    divisor = target.expected_lot * math.sqrt(target.devices * target.local_steps)
    slack = _mechanism(target, 1.0).sensitivity_steps / FINE_STEPS
    coordinate_noise = tuple(sigma * slack / divisor for sigma in plan.noise_multipliers)
    return Candidate(
        plan,
        shares=tuple(plan.schedule.shares(plan.rounds).tolist()),
        coordinate_noise=coordinate_noise,
        mean_noise=tuple(noise * math.sqrt(target.parameters) for noise in coordinate_noise),
        chosen=plan.schedule.kind == target.schedule,
    )


def _mechanism(target: PlanTarget, noise_multiplier: float) -> DiscretisedGaussian:
    return DiscretisedGaussian(
        clip_norm=1.0,
        noise_multiplier=noise_multiplier,
        sampling_rate=target.sampling_rate,
        dimension=target.parameters,
        steps=target.local_steps,
    )


def _remarks(target: PlanTarget, chosen: Candidate) -> Iterator[str]:
    try:
        for sigma in (max(chosen.plan.noise_multipliers), min(chosen.plan.noise_multipliers)):
            _mechanism(target, sigma)
    except ParameterError as error:
        yield f"A device would refuse this plan: {error}"
    if target.delta * target.records_per_device >= _MUCH_DELTA:
        yield (
            f"δ = {plain(target.delta)} is not well below one over a device's records "
            f"({plain(1 / target.records_per_device)}): a mechanism that publishes some record now and then "
            "would be allowed. Choose a smaller δ."
        )
    if (worst := max(chosen.mean_noise)) >= 1:
        yield (
            f"The noise on the mean gradient is up to {plain(worst)} clip norms long, and the gradient at "
            "most 1: a single step says little. More devices, more records, a higher sampling rate or a "
            "higher ε bring it down; a smaller learning rate lets it average out."
        )
