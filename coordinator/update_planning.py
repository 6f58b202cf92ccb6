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
from dpagent.privacy.mechanisms.mechanism import PlannedMechanism
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


def update_terms(settings: FleetSettings, noise: JobNoise, mechanism: PlannedMechanism) -> UpdateTerms:
    """What a plan says of its updates; ``mechanism`` is that of the round."""
    privacy = settings.privacy
    return UpdateTerms(
        kind="update",
        mechanism=MechanismTerms(
            name=mechanism.name,
            noise_multipliers=list(noise.multipliers),
            parameters=mechanism.announced,
        ),
        clip_norm=privacy.clip_norm,
        largest=mechanism.sensitivity_units,
        expected_devices=settings.devices,
        training=TrainingTerms(**privacy.local_training.model_dump()),
    )


def update_mechanism(
    settings: FleetSettings, spec: ModelSpec, noise: JobNoise, number: int
) -> PlannedMechanism:
    """The mechanism of a round.

    Raises:
        ParameterError: The noise is out of range.
    """
    return noise.at(number, query_of_update(settings.privacy.clip_norm, spec.parameter_count))


def update_wire(settings: FleetSettings, mechanism: PlannedMechanism) -> WireTerms:
    """How an update is cut: into as many fragments as the settings ask for."""
    block = -(-mechanism.dimension // settings.fragments_per_update)
    return WireTerms(block=block, bytes=packed_bytes(block, update_width(mechanism.sensitivity_units)))


def fragments_for_update(mechanism: PlannedMechanism) -> int:
    """The smallest number of fragments that holds an update."""
    width = update_width(mechanism.sensitivity_units)
    return -(-mechanism.dimension // ((MAX_PAYLOAD_BYTES - 1) * 8 // width))
