"""The job's plan: what the operator's settings come to, and what each round announces."""

from __future__ import annotations

import os
from typing import Literal

from coordinator.settings import FleetSettings
from coordinator.store import Job, OpenRound
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
    expected_lot = privacy.sampling_rate * settings.records_per_device
    mechanism = DiscretisedGaussian(
        clip_norm=privacy.clip_norm,
        noise_multiplier=job.noise_multipliers[current.number - 1],
        sampling_rate=privacy.sampling_rate,
        dimension=spec.parameter_count,
        steps=privacy.local_steps,
    )
    shift = wire_shift(mechanism.sigma_steps)
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
            expected_lot=expected_lot,
            delta=privacy.delta,
        ),
        cap=CapTerms(**settings.cap.model_dump()),
        wire=WireTerms(
            block=-(-spec.parameter_count // settings.fragments_per_update),
            width=wire_width(mechanism, expected_lot, shift),
            shift=shift,
        ),
        sealing_key=sealing_key,
        deadline=current.deadline,
        compute_slot_s=settings.round.compute_slot_s,
        jitter_window_s=settings.round.jitter_window_s,
    )
