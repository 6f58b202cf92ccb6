"""The rounds of a job under a ``bounded`` noise cap, as its plans announce them."""

from __future__ import annotations

import numpy as np

from coordinator.settings import FleetSettings
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import ACCUMULATION_SLACK
from dpagent.privacy.mechanisms.bounded import BoundedCap, BoundedJob
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.mechanism import Query
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.protocol.terms import BoundedTerms, ScheduleTerms
from dpagent.protocol.weights import weights_from_bytes


def bounded_rounds(settings: FleetSettings) -> tuple[JobNoise, tuple[float, ...]]:
    """The noise of all rounds, and the ε that each brings the job to, as if no cap acted.

    Raises:
        ParameterError: A round's ε is too small.
    """
    job, privacy = _job(settings), settings.privacy
    lots = privacy.sampling_rate, privacy.local_steps
    noise = JobNoise(TruncatedLaplace, job.multipliers(*lots), {"resolution": job.resolution(*lots)})
    *running, _ = np.cumsum(job.schedule.budgets(job.epsilon, job.rounds)).tolist()
    # All together what devices reserve, to the last bit.
    return noise, (*running, job.epsilon)


def bounded_round(
    settings: FleetSettings,
    spec: ModelSpec,
    noise: JobNoise,
    number: int,
    weights: bytes | None,
    spent: float,
) -> tuple[TruncatedLaplace, BoundedTerms]:
    """The mechanism of a round, and the terms of its cap.

    Args:
        settings: The fleet's.
        spec: The model.
        noise: As the job began with it.
        number: Of the round.
        weights: As they are sent; None at the end of the job, when no cap acts, as nobody draws that noise.
        spent: ε of the rounds before.

    Raises:
        CapNotMetError: What is left of ε meets no cap of this round.
    """
    job, privacy, cap = _job(settings), settings.privacy, settings.cap
    at = None
    if weights is not None:
        at = weights_from_bytes(weights, spec.parameter_count, settings.model.precision)
    query = Query(
        privacy.clip_norm,
        ACCUMULATION_SLACK,
        spec.parameter_count,
        privacy.sampling_rate,
        privacy.local_steps,
    )
    found = job.round(
        number,
        query,
        at,
        spent=0.0 if weights is None else spent,
        resolution=int(noise.parameters["resolution"]),
    )
    schedule = privacy.spending
    terms = BoundedTerms(
        kind="bounded",
        regularisation=cap.regularisation,
        floor=cap.floor,
        epsilon=job.epsilon,
        rounds=job.rounds,
        schedule=ScheduleTerms(
            kind=schedule.kind,
            step=schedule.step,
            ratio=schedule.ratio,
            weights=list(schedule.weights),
        ),
        spent=spent,
    )
    return found.mechanism, terms


def _job(settings: FleetSettings) -> BoundedJob:
    privacy, cap = settings.privacy, settings.cap
    return BoundedJob(
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        rounds=settings.rounds,
        schedule=privacy.spending,
        cap=BoundedCap(cap.regularisation, cap.floor),
        expected_lot=privacy.sampling_rate * settings.records_per_device,
    )
