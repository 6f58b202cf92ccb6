"""The job's plan: what the operator's settings come to, and what each round announces."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import ValidationError

from coordinator.settings import FleetSettings
from coordinator.store import Job, OpenRound
from dpagent.errors import PlanError
from dpagent.learning import ModelSpec
from dpagent.privacy import FINE_STEPS, BudgetPlan, DiscretisedGaussian, calibrate, wire_shift, wire_width
from dpagent.protocol.fragments import model_digest
from dpagent.protocol.messages import (
    MODEL_CHUNK_BYTES,
    CapTerms,
    MechanismTerms,
    ModelTerms,
    Plan,
    WireTerms,
)


def budget_plan(settings: FleetSettings) -> BudgetPlan:
    """Noise multipliers that spend the target over the rounds.

    Raises:
        PlanError: No noise meets the target.
    """
    privacy = settings.privacy
    return calibrate(
        privacy.schedule.schedule(),
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        rounds=settings.rounds,
        sampling_rate=privacy.sampling_rate,
        steps=privacy.local_steps,
    )


def new_job(settings: FleetSettings) -> Job:
    """A job with a fresh random id."""
    budget = budget_plan(settings)
    return Job(os.urandom(16), settings.job_terms(), budget.noise_multipliers, budget.epsilon_by_round)


def require_every_round_fits(settings: FleetSettings, job: Job, spec: ModelSpec) -> None:
    """Refuse a job some of whose fragments would be too large.

    A round with less noise takes more bits on the wire, so a job whose first round can be
    announced could still die in a later one.

    Raises:
        PlanError: Naming the first such round and what to change.
    """
    for number, noise_multiplier in enumerate(job.noise_multipliers, start=1):
        try:
            _wire(settings, spec, _mechanism(settings, spec, noise_multiplier))
        except ValidationError as error:
            raise PlanError(
                f"No device would accept the plan of round {number}: "
                f"{error.errors(include_url=False)[0]['msg']}. Set fragments_per_update higher than "
                f"{settings.fragments_per_update}."
            ) from error


def plan_round(
    settings: FleetSettings,
    job: Job,
    current: OpenRound,
    spec: ModelSpec,
    weights: bytes,
    sealing_key: bytes,
    *,
    state: Literal["open", "finished"] = "open",
) -> Plan:
    """What is announced for a round.

    Raises:
        pydantic.ValidationError: The settings make a plan that no device would accept.
    """
    privacy = settings.privacy
    mechanism = _mechanism(settings, spec, job.noise_multipliers[current.number - 1])
    return Plan(
        version=1,
        kind="plan",
        fleet=settings.fleet,
        job=job.id,
        round=current.number,
        state=state,
        model=ModelTerms(
            name=spec.name,
            parameters=spec.parameter_count,
            architecture=spec.digest(),
            digest=model_digest(weights),
            chunks=-(-len(weights) // MODEL_CHUNK_BYTES),
        ),
        mechanism=MechanismTerms(
            name="discrete-gaussian",
            clip_norm=privacy.clip_norm,
            fine_steps=FINE_STEPS,
            noise_multipliers=list(job.noise_multipliers),
            sampling_rate=privacy.sampling_rate,
            local_steps=privacy.local_steps,
            local_learning_rate=privacy.local_learning_rate,
            expected_lot=_expected_lot(settings),
            delta=privacy.delta,
        ),
        cap=CapTerms(**settings.cap.model_dump()),
        wire=_wire(settings, spec, mechanism),
        sealing_key=sealing_key,
        deadline=current.deadline,
        compute_slot_s=settings.round.compute_slot_s,
        jitter_window_s=settings.round.jitter_window_s,
    )


def _expected_lot(settings: FleetSettings) -> float:
    return settings.privacy.sampling_rate * settings.records_per_device


def _mechanism(settings: FleetSettings, spec: ModelSpec, noise_multiplier: float) -> DiscretisedGaussian:
    return DiscretisedGaussian(
        clip_norm=settings.privacy.clip_norm,
        noise_multiplier=noise_multiplier,
        sampling_rate=settings.privacy.sampling_rate,
        dimension=spec.parameter_count,
        steps=settings.privacy.local_steps,
    )


def _wire(settings: FleetSettings, spec: ModelSpec, mechanism: DiscretisedGaussian) -> WireTerms:
    shift = wire_shift(mechanism.sigma_steps)
    return WireTerms(
        block=-(-spec.parameter_count // settings.fragments_per_update),
        width=wire_width(mechanism, _expected_lot(settings), shift),
        shift=shift,
    )
