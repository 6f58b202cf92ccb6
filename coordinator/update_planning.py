"""The job's plan where devices send whole updates, and the coordinator adds the noise (``central``)."""

from __future__ import annotations

import math
from typing import Final

from coordinator.settings import FleetSettings
from dpagent.learning.models.spec import ModelSpec
from dpagent.norm import Norm
from dpagent.privacy.accounting.gaussian_loss import MIN_SIGMA_UNITS
from dpagent.privacy.calibration import calibrate
from dpagent.privacy.mechanisms.central import CentralMechanism
from dpagent.privacy.mechanisms.grid import MAX_RESOLUTION
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.update_clipping import COUNT_WEIGHT, UpdateClipping
from dpagent.protocol.bit_packing import packed_bytes
from dpagent.protocol.messages import MAX_PAYLOAD_BYTES, WireTerms
from dpagent.protocol.terms import MechanismTerms, TrainingTerms, UpdateTerms
from dpagent.protocol.update_packing import update_width
from dpagent.protocol.updates import query_of_update

_SLACK: Final = 1 / 128
"""Most that rounding adds to the sensitivity, relative to the clip norm, where the finest grid allows it.
Each halving costs a bit a value."""
_LEAST: Final = 256


def update_noise(
    settings: FleetSettings, spec: ModelSpec, mechanism: type[CentralMechanism]
) -> tuple[JobNoise, tuple[float, ...]]:
    """The noise that spends the target over the rounds, and the ε that each round brings it to.

    Raises:
        PlanError: No noise meets the target.
    """
    privacy = settings.privacy
    budget = calibrate(
        privacy.spending,
        mechanism.family(1.0),
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        rounds=settings.rounds,
    )
    grid = {
        "resolution": update_resolution(mechanism.norm, spec.parameter_count, min(budget.noise_multipliers))
    }
    return JobNoise(mechanism, budget.noise_multipliers, grid), budget.epsilon_by_round


def update_resolution(norm: Norm, dimension: int, least_noise: float) -> int:
    """Grid units to a clip norm: the smallest power of two that is fine enough.

    Updates travel without noise to hide how coarse they are, and at a fixed width: a finer grid costs bits.

    Args:
        norm: of the mechanism.
        dimension: d, weights of the model.
        least_noise: the least noise multiplier of the job. Gaussian noise is priced from 2,122 units on.

    >>> update_resolution(Norm.L2, 26_010, 0.9), update_resolution(Norm.L1, 26_010, 0.9)
    (16384, 2097152)
    """
    rounding = math.sqrt(dimension) / 2 if norm is Norm.L2 else dimension / 2
    wanted = max(_LEAST, rounding / _SLACK, MIN_SIGMA_UNITS / least_noise if norm is Norm.L2 else 0)
    return min(1 << math.ceil(math.log2(wanted)), MAX_RESOLUTION[norm])


def update_clipping(
    settings: FleetSettings, spec: ModelSpec, clip_norm: float | None = None
) -> UpdateClipping:
    """The clipping of updates.

    Args:
        settings: The fleet's.
        spec: The model.
        clip_norm: Of the round, if it follows a quantile; by default the first round's.
    """
    privacy = settings.privacy
    assert privacy.mechanism.norm is not None
    weight = COUNT_WEIGHT if privacy.clipping.kind == "quantile" else 0.0
    return UpdateClipping(
        privacy.mechanism.norm, clip_norm or privacy.clip_norm, spec.parameter_count, weight
    )


def update_terms(
    settings: FleetSettings, spec: ModelSpec, noise: JobNoise, number: int, clip_norm: float | None
) -> tuple[UpdateTerms, WireTerms]:
    """What a plan says of its updates, and how they are cut: into as many fragments as the settings ask for.

    Args:
        settings: The fleet's.
        spec: The model.
        noise: Of the job.
        number: Of the round.
        clip_norm: Of the round, if it follows a quantile.

    Raises:
        ParameterError: The noise is out of range.
    """
    clipping = update_clipping(settings, spec, clip_norm)
    mechanism = noise.at(number, query_of_update(clipping))
    largest = mechanism.sensitivity_units
    terms = UpdateTerms(
        kind="update",
        mechanism=MechanismTerms(
            name=mechanism.name,
            noise_multipliers=list(noise.multipliers),
            parameters=mechanism.announced,
        ),
        clip_norm=clipping.clip_norm,
        count_weight=clipping.count_weight,
        largest=largest,
        expected_devices=settings.devices,
        training=TrainingTerms(**settings.privacy.local_training.model_dump()),
    )
    block = -(-mechanism.dimension // settings.fragments_per_update)
    return terms, WireTerms(block=block, bytes=packed_bytes(block, update_width(largest)))


def fragments_for_update(settings: FleetSettings, spec: ModelSpec, noise: JobNoise) -> int:
    """The smallest number of fragments that holds an update.

    Raises:
        ParameterError: The noise is out of range.
    """
    # Its size depends neither on the noise of a round nor on its clip norm.
    mechanism = noise.at(1, query_of_update(update_clipping(settings, spec)))
    width = update_width(mechanism.sensitivity_units)
    return -(-mechanism.dimension // ((MAX_PAYLOAD_BYTES - 1) * 8 // width))
