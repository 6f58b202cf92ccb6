"""The job's plan: what the operator's settings come to, and what each round announces."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Literal

import cbor2
from pydantic import ValidationError

from coordinator.settings import FleetSettings
from coordinator.store import Job, OpenRound
from dpagent.errors import ConfigurationError, ParameterError, PlanError
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import ACCUMULATION_SLACK
from dpagent.privacy.calibration import BudgetPlan, calibrate
from dpagent.privacy.clipping import COUNT_WEIGHT, Clipping
from dpagent.privacy.covariance import SecondMoments
from dpagent.privacy.mechanisms.discretised_gaussian import (
    DiscretisedGaussian,
    fine_steps_for,
    require_noise_as_priced,
)
from dpagent.privacy.mechanisms.wire import wire_shift, wire_width
from dpagent.protocol.fragments import content_digest
from dpagent.protocol.messages import (
    MAX_WHOLE_BYTES,
    AssetTerms,
    AugmentationTerms,
    CapTerms,
    ClippingTerms,
    MechanismTerms,
    ModelTerms,
    Plan,
    ProjectionTerms,
    WireTerms,
)


class FragmentsTooLargeError(PlanError):
    """An update is cut into so few fragments that one does not fit a message."""


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


def clipping_of(settings: FleetSettings, spec: ModelSpec, norm: float | None = None) -> Clipping:
    """How gradients are clipped.

    Args:
        settings: The fleet's.
        spec: The model.
        norm: Of the round, where it follows a quantile; without it, the first round's.

    Raises:
        ConfigurationError: There are not as many norms as layers.
    """
    privacy = settings.privacy
    if privacy.clipping.kind == "layers":
        sizes = spec.layer_sizes
        norms = privacy.clipping.norms or [privacy.clip_norm / len(sizes) ** 0.5] * len(sizes)
        if len(norms) != len(sizes):
            raise ConfigurationError(
                f"privacy.clipping.norms has {len(norms)} numbers; model {spec.name} has {len(sizes)} layers "
                "with parameters. Give one for each."
            )
        return Clipping.layers(sizes, norms)
    weight = COUNT_WEIGHT if privacy.clipping.kind == "quantile" else 0.0
    return Clipping.whole(spec.parameter_count, norm or privacy.clip_norm, count_weight=weight)


def gradient_steps(settings: FleetSettings, spec: ModelSpec) -> int:
    """Rounds of the job that step the model: all but the one that finds the directions of a projection.

    Raises:
        PlanError: There is none.
    """
    steps = settings.rounds - (spec.projection is not None)
    if steps < 1:
        raise PlanError(
            f"rounds is {settings.rounds}; expected at least 2: the first one finds the directions that "
            f"model {spec.name!r} projects on."
        )
    return steps


def require_sendable(spec: ModelSpec, assets: Mapping[str, bytes]) -> None:
    """Refuse weights or an asset that no plan can name and no chunks can carry.

    Args:
        spec: The model.
        assets: By role.

    Raises:
        PlanError: Naming what is too large.
    """
    sizes = {"weights": 4 * spec.parameter_count} | {role: len(data) for role, data in assets.items()}
    for what, size in sizes.items():
        if size > MAX_WHOLE_BYTES:
            raise PlanError(
                f"{what} of model {spec.name!r}: {size:,} bytes; expected at most {MAX_WHOLE_BYTES:,}, which "
                "is what devices accept. Choose a smaller model."
            )


def require_every_round_fits(settings: FleetSettings, job: Job, spec: ModelSpec) -> None:
    """Refuse a job some of whose rounds every device would decline.

    A round with less noise takes more bits on the wire, so a job whose first round can be
    announced could still die in a later one. And at an ε beyond all use a sampler that is
    all but exact may be told from an exact one.

    Raises:
        FragmentsTooLargeError: Naming the first round whose fragments do not fit a message.
        PlanError: Naming the first round that is declined for another reason.
    """
    for number, noise_multiplier in enumerate(job.noise_multipliers, start=1):
        released = _second_moments(settings, spec, number) or clipping_of(settings, spec)
        mechanism = _mechanism(settings, job, released, noise_multiplier)
        try:
            # Width and shift are in range by their making; what can be refused is the block.
            _wire(settings, mechanism)
        except ValidationError as error:
            raise FragmentsTooLargeError(
                f"No device would accept the plan of round {number}: "
                f"{error.errors(include_url=False)[0]['msg']}. Set fragments_per_update higher than "
                f"{settings.fragments_per_update}."
            ) from error
        try:
            require_noise_as_priced(
                mechanism, settings.rounds, job.epsilon_by_round[-1], settings.privacy.delta
            )
        except ParameterError as error:
            raise PlanError(f"No device would accept the plan of round {number}: its {error}") from error


def plan_round(
    settings: FleetSettings,
    job: Job,
    current: OpenRound,
    spec: ModelSpec,
    weights: bytes,
    sealing_key: bytes,
    *,
    clip_norm: float | None = None,
    assets: Sequence[AssetTerms] = (),
    state: Literal["open", "finished"] = "open",
) -> Plan:
    """What is announced for a round.

    Args:
        settings: The fleet's.
        job: Its schedule is announced whole.
        current: The round.
        spec: The model.
        weights: The model's bytes.
        sealing_key: What devices seal to.
        clip_norm: Of this round, where it follows a quantile.
        assets: What devices need besides the weights.
        state: Whether the job goes on.

    Raises:
        pydantic.ValidationError: The settings make a plan that no device would accept.
    """
    privacy = settings.privacy
    clipping = clipping_of(settings, spec, clip_norm)
    released = _second_moments(settings, spec, current.number) or clipping
    mechanism = _mechanism(settings, job, released, job.noise_multipliers[current.number - 1])
    augmentation = settings.model.augmentation
    return Plan(
        version=1,
        kind="plan",
        fleet=settings.fleet,
        job=job.id,
        round=current.number,
        state=state,
        model=ModelTerms(
            description=cbor2.dumps(spec.describe(), canonical=True),
            parameters=spec.parameter_count,
            architecture=spec.digest(),
            digest=content_digest(weights),
        ),
        assets=list(assets),
        mechanism=MechanismTerms(
            name="discrete-gaussian",
            clipping=ClippingTerms(
                norms=list(clipping.norms), shares=list(clipping.shares), count_weight=clipping.count_weight
            ),
            fine_steps=mechanism.fine_steps,
            accumulation_slack=ACCUMULATION_SLACK,
            noise_multipliers=list(job.noise_multipliers),
            sampling_rate=privacy.sampling_rate,
            local_steps=privacy.local_steps,
            local_learning_rate=privacy.local_learning_rate,
            expected_lot=_expected_lot(settings),
            delta=privacy.delta,
        ),
        projection=_projection(settings, spec),
        augmentation=None if augmentation is None else AugmentationTerms(**augmentation.model_dump()),
        cap=CapTerms(**settings.cap.model_dump()),
        wire=_wire(settings, mechanism),
        sealing_key=sealing_key,
        deadline=current.deadline,
        compute_slot_s=settings.round.compute_slot_s,
        jitter_window_s=settings.round.jitter_window_s,
    )


def _expected_lot(settings: FleetSettings) -> float:
    return settings.privacy.sampling_rate * settings.records_per_device


def _projection(settings: FleetSettings, spec: ModelSpec) -> ProjectionTerms | None:
    if spec.projection is None:
        return None
    values = math.prod(spec.shape_before_projection)
    return ProjectionTerms(values=values, record_norm=settings.privacy.record_norm)


def _second_moments(settings: FleetSettings, spec: ModelSpec, number: int) -> SecondMoments | None:
    """What the first round of a job with a projection releases."""
    terms = _projection(settings, spec)
    return None if terms is None or number > 1 else SecondMoments(terms.values, terms.record_norm)


def _mechanism(
    settings: FleetSettings, job: Job, released: Clipping | SecondMoments, noise_multiplier: float
) -> DiscretisedGaussian:
    return DiscretisedGaussian(
        clip_norm=released.radius,
        noise_multiplier=noise_multiplier,
        sampling_rate=settings.privacy.sampling_rate,
        dimension=released.dimension,
        steps=settings.privacy.local_steps,
        # One grid for the whole job, since the device pins what prices it.
        fine_steps=fine_steps_for(max(job.noise_multipliers)),
        accumulation_slack=ACCUMULATION_SLACK,
    )


def _wire(settings: FleetSettings, mechanism: DiscretisedGaussian) -> WireTerms:
    shift = wire_shift(mechanism.sigma_steps)
    return WireTerms(
        block=-(-mechanism.dimension // settings.fragments_per_update),
        width=wire_width(mechanism, _expected_lot(settings), shift),
        shift=shift,
    )
