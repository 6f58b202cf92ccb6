"""The job's plan where devices send whole updates, to whose sum the coordinator adds noise (``central``)."""

from __future__ import annotations

import math
from typing import Final

from coordinator.job import NoiseOfDevices
from coordinator.settings import FleetSettings
from dpagent.errors import PlanError
from dpagent.learning.models.spec import ModelSpec
from dpagent.norm import Norm
from dpagent.privacy.accounting.gaussian_loss import MIN_SIGMA_UNITS
from dpagent.privacy.calibration import BudgetPlan
from dpagent.privacy.mechanisms.central import CentralMechanism
from dpagent.privacy.mechanisms.device_noise import DEVICE_NOISE, DeviceNoise
from dpagent.privacy.mechanisms.grid import MAX_RESOLUTION
from dpagent.privacy.mechanisms.job_noise import JobNoise, calibrated_noise
from dpagent.privacy.mechanisms.mechanism import CalibratedMechanism, Query
from dpagent.privacy.update_clipping import COUNT_WEIGHT, UpdateClipping
from dpagent.protocol.messages import MAX_PAYLOAD_BYTES, WireTerms
from dpagent.protocol.sizes import packed_bytes, update_width
from dpagent.protocol.terms import MechanismTerms, TrainingTerms, UpdateTerms
from dpagent.protocol.updates import query_of_update
from dpagent.wording import counted

_SLACK: Final = 1 / 128
"""Most that rounding adds to the sensitivity, relative to the clip norm, where the finest grid allows it.
Each halving costs a bit a value."""
_LEAST: Final = 256
_EXACT: Final = 2**53
"""The coordinator adds noise to sums of up to so many units."""


def update_noise(
    settings: FleetSettings, spec: ModelSpec, mechanism: type[CentralMechanism]
) -> tuple[JobNoise, tuple[float, ...], NoiseOfDevices | None]:
    """The noise that spends the target over the rounds, the ε that each round brings it to, and the same of
    noise of devices, if there is any. Both are on one grid.

    Raises:
        PlanError: No noise meets a target.
    """

    def budget_for(each: type[CalibratedMechanism], epsilon: float) -> BudgetPlan:
        privacy = settings.privacy
        return calibrated_noise(
            each, privacy.spending, epsilon=epsilon, delta=privacy.delta, rounds=settings.rounds
        )

    wanted = settings.privacy.device_noise
    budget = budget_for(mechanism, settings.privacy.epsilon)
    own = DEVICE_NOISE[mechanism.norm]
    of_devices = None if wanted is None else budget_for(own, wanted.epsilon)
    grid = update_grid(mechanism.norm, spec.parameter_count, budget, of_devices)
    device = None
    if of_devices is not None:
        added = JobNoise(own, of_devices.noise_multipliers, grid)
        device = NoiseOfDevices(added, of_devices.epsilon_by_round)
    return JobNoise(mechanism, budget.noise_multipliers, grid), budget.epsilon_by_round, device


def update_grid(
    norm: Norm, dimension: int, budget: BudgetPlan, of_devices: BudgetPlan | None
) -> dict[str, float]:
    """The parameters of both kinds of noise: one grid, fine enough for the least of them.

    Args:
        norm: of the mechanisms.
        dimension: d, weights of the model.
        budget: that the coordinator's noise spends.
        of_devices: that the noise of devices spends, if they add any.
    """
    least = min(budget.noise_multipliers)
    if of_devices is not None:
        # Relative to twice the norm of an update, and so of twice as many units.
        least = min(least, 2 * min(of_devices.noise_multipliers))
    return {"resolution": update_resolution(norm, dimension, least)}


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
    settings: FleetSettings,
    spec: ModelSpec,
    noise: JobNoise,
    own: JobNoise | None,
    number: int,
    clip_norm: float | None,
) -> tuple[UpdateTerms, WireTerms]:
    """What a plan says of its updates, and how they are cut: into as many fragments as the settings ask for.

    Args:
        settings: The fleet's.
        spec: The model.
        noise: Of the job, at the coordinator.
        own: Of the job, on devices, if they add any.
        number: Of the round.
        clip_norm: Of the round, if it follows a quantile.

    Raises:
        ParameterError: The noise is out of range.
        PlanError: Sums of such updates could not be exact.
    """
    clipping = update_clipping(settings, spec, clip_norm)
    query = query_of_update(clipping)
    mechanism, largest = noise.at(number, query), _largest(noise, own, number, query)
    if settings.devices * largest > _EXACT:
        raise PlanError(
            f"Values of an update have up to {largest:,} units, and their sum over "
            f"{counted(settings.devices, 'device')} could have more than {_EXACT:,}; expected fewer "
            "devices, or less noise of each."
        )
    terms = UpdateTerms(
        kind="update",
        mechanism=_announced(noise),
        device_noise=None if own is None else _announced(own),
        clip_norm=clipping.clip_norm,
        count_weight=clipping.count_weight,
        largest=largest,
        expected_devices=settings.devices,
        training=TrainingTerms(**settings.privacy.local_training.as_dict()),
    )
    block = -(-mechanism.dimension // settings.fragments_per_update)
    return terms, WireTerms(block=block, bytes=packed_bytes(block, update_width(largest)))


def fragments_for_update(
    settings: FleetSettings, spec: ModelSpec, noise: JobNoise, own: JobNoise | None
) -> int:
    """The smallest number of fragments that holds the update of any round.

    Raises:
        ParameterError: The noise is out of range.
    """
    # Its size does not depend on the clip norm, and it rises with the noise of devices.
    query = query_of_update(update_clipping(settings, spec))
    number = 1 if own is None else 1 + own.multipliers.index(max(own.multipliers))
    width = update_width(_largest(noise, own, number, query))
    return -(-query.dimension // ((MAX_PAYLOAD_BYTES - 1) * 8 // width))


def _announced(noise: JobNoise) -> MechanismTerms:
    return MechanismTerms(
        name=noise.mechanism.name,
        noise_multipliers=list(noise.multipliers),
        parameters=dict(noise.parameters),
    )


def _largest(noise: JobNoise, own: JobNoise | None, number: int, query: Query) -> int:
    """The largest value of an update in a round, in grid units."""
    if own is None:
        return noise.at(number, query).sensitivity_units
    mechanism = own.at(number, query)
    assert isinstance(mechanism, DeviceNoise)
    return mechanism.largest_units
