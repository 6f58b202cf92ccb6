"""What the coordinator would plan for a run, asked of it before anything starts."""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError

from coordinator.planning import (
    FragmentsTooLargeError,
    budget_plan,
    clipping_of,
    gradient_steps,
    plan_round,
    require_every_round_fits,
)
from coordinator.settings import FleetSettings
from coordinator.store import Job, OpenRound
from dpagent.errors import PlanError
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.clipping import Clipping
from dpagent.protocol.fragments import weights_to_bytes
from dpagent.protocol.messages import Plan
from dpagent.wording import named

_SEALING_KEY: Final = bytes(32)
_FEWEST_FRAGMENTS: Final = 16
_MOST_FRAGMENTS: Final = 4096


def job_of(fleet: FleetSettings) -> Job:
    """The job with its noise, under an id that no real job has.

    Raises:
        PlanError: No noise meets the target.
    """
    budget = budget_plan(fleet)
    return Job(bytes(16), {}, budget.noise_multipliers, budget.epsilon_by_round)


def first_clipping(fleet: FleetSettings, spec: ModelSpec) -> Clipping:
    """How the job's first gradients are clipped."""
    return clipping_of(fleet, spec)


def steps_of(fleet: FleetSettings, spec: ModelSpec) -> int:
    """Rounds of the job that step the model."""
    return gradient_steps(fleet, spec)


def plan_of_round(
    fleet: FleetSettings,
    job: Job,
    number: int,
    spec: ModelSpec,
    weights: bytes,
    clip_norm: float | None = None,
) -> Plan:
    """What the coordinator announces for a round.

    Args:
        fleet: Its settings.
        job: See :func:`job_of`.
        number: Of the round, from 1.
        spec: The model.
        weights: The model's bytes.
        clip_norm: Of this round, where it follows a quantile.

    Raises:
        pydantic.ValidationError: No device would accept such a plan.
    """
    return plan_round(fleet, job, OpenRound(number, 0, 0), spec, weights, _SEALING_KEY, clip_norm=clip_norm)


def fewest_fragments(fleet: FleetSettings, job: Job, spec: ModelSpec) -> int:
    """As few fragments as hold an update, but not fewer than usual.

    Raises:
        PlanError: Devices would decline a round, with however many fragments.
    """
    count = _FEWEST_FRAGMENTS
    while True:
        try:
            require_every_round_fits(fleet.model_copy(update={"fragments_per_update": count}), job, spec)
        except FragmentsTooLargeError:
            if count >= _MOST_FRAGMENTS:
                raise
            count *= 2
        else:
            return count


def require_acceptable(fleet: FleetSettings, job: Job, spec: ModelSpec) -> None:
    """Refuse what every device would decline.

    Raises:
        PlanError: Naming what is out of range.
    """
    weights = weights_to_bytes(spec.initial_weights(fleet.model.seed))
    try:
        plan_of_round(fleet, job, 1, spec, weights)
    except ValidationError as error:
        raise PlanError(_unacceptable(fleet, job, error)) from error


def _unacceptable(fleet: FleetSettings, job: Job, error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    epsilon, rounds = fleet.privacy.epsilon, fleet.rounds
    # Both are at their limits where the noise is too large.
    if {"noise_multipliers", "fine_steps"} & set(problem["loc"]):
        return (
            f"ε = {epsilon:g} in {rounds} rounds takes noise of up to {max(job.noise_multipliers):,.0f} "
            f"times the clip norm, more than a plan can state. Choose a larger {named('epsilon')} or fewer "
            f"{named('rounds')}."
        )
    where = ".".join(map(str, problem["loc"])) or "plan"
    return (
        f"No device would accept a plan for ε = {epsilon:g} in {rounds} rounds: {where}: {problem['msg']}. "
        f"Choose another {named('epsilon')} or fewer {named('rounds')}."
    )
