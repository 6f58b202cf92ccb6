"""From a request and the form of the data to a run with every value settled."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from coordinator.job import Job
from coordinator.settings import FleetSettings
from coordinator.sum_planning import clipping_of
from coordinator.update_planning import update_clipping
from dpagent.errors import ConfigurationError, DataError, PlanError
from dpagent.learning.model_files import find_model, is_model_file, load_assets, load_model
from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork
from dpagent.norm import Norm
from dpagent.privacy.mechanisms.registry import mechanism_of
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds
from dpagent.privacy.methods import DEFAULT_METHOD, method_named
from dpagent.wording import counted, named
from simulation.fitting_model import fitting_model, linear_model
from simulation.layout import Layout
from simulation.outlook import Outlook, reports_to_noise, signal_to_noise, updates_to_noise
from simulation.planning import trial_job, trial_planner
from simulation.presets import (
    learning_rate_for,
    preset_of,
    sampling_rate_for,
    typical_stretch,
)
from simulation.programs.configurations import fleet_settings
from simulation.request import Request
from simulation.settings import DataForm, RunSettings

_FEWEST_FRAGMENTS: Final = 16
_STEP: Final = 0.3
"""Of an incrementing schedule."""


def wanted_model(request: Request) -> str | None:
    """The model that was asked for, or that the preset names: a file by its whole path, so that a run that
    goes on elsewhere finds it. None leaves the choice to the data."""
    if request.model is None:
        return preset_of(request).model or None
    return str(Path(request.model).absolute()) if is_model_file(request.model) else request.model


def choose_model(
    wanted: str | None, form: DataForm, layout: Layout, method: str = DEFAULT_METHOD
) -> tuple[str, ModelSpec]:
    """The model and how the settings name it.

    Args:
        wanted: See :func:`wanted_model`.
        form: Of the data.
        layout: A run that goes on has its model file.
        method: How the fleet trains.

    Raises:
        ConfigurationError: There is no such model, or it is not the one that the run began with.
    """
    kept = load_model(layout.model_file) if layout.model_file.exists() else None
    if wanted is None:
        make = linear_model if method_named(method).trains_locally else fitting_model
        spec = make(form.shape, form.classes) if kept is None else kept
        return (spec.name if BUILT_IN.get(spec.name) == spec else ""), spec
    spec = find_model(wanted)
    if kept is not None and kept.digest() != spec.digest():
        raise ConfigurationError(
            f"The run in {layout.root} was started with another model than {wanted} is now. "
            f"Give another {named('state_dir')}."
        )
    if any(isinstance(stage, FrozenNetwork) for stage in spec.front_end) and not load_assets(Path(wanted)):
        raise ConfigurationError(
            f"{wanted} names its network by a digest, and the coordinator has to send the file. Write "
            "`onnx: {file: PATH}`."
        )
    return wanted, spec


def settle(request: Request, form: DataForm, model: str, spec: ModelSpec) -> tuple[RunSettings, Outlook]:
    """Settle everything, and estimate the outcome.

    Args:
        request: As it was given.
        form: Of the data.
        model: How the settings name the model.
        spec: The model.

    Raises:
        DataError: There are too few records for so many devices.
        ParameterError: A value is out of its range.
        PlanError: No noise meets the target, or no device would accept the job.
    """
    preset = preset_of(request)
    devices = request.devices or preset.devices
    if form.train_records < devices:
        raise DataError(
            f"{counted(form.train_records, 'training record')} cannot be split over "
            f"{counted(devices, 'device')}; use fewer devices."
        )
    if request.mixer and devices == 1:
        raise PlanError(
            f"{named('mixer')}: there is 1 device, and nothing to mix its fragments with; expected 2 devices "
            f"or more. Raise {named('devices')}."
        )
    rounds = request.rounds or preset.rounds
    if spec.projection is not None and rounds < 2:
        raise PlanError(
            f"{named('rounds')} is {rounds}; expected at least 2: the first one finds the directions that "
            f"model {spec.name!r} projects on."
        )
    norm = mechanism_of(method_named(request.method), request.noise).norm or Norm.L2
    stretch = typical_stretch(norm, spec.parameter_count)
    clip_norm = request.clip_norm or preset.clip_norm * (1 if norm is Norm.L2 else float(f"{stretch:.2g}"))
    jitter_s = request.jitter_window_s
    schedule = request.schedule or (
        "incrementing" if request.step is not None else method_named(request.method).schedule
    )
    settings = RunSettings(
        data=request.data,
        form=form,
        model=model,
        devices=devices,
        rounds=rounds,
        epsilon=request.epsilon or preset.epsilon,
        delta=request.delta,
        method=request.method,
        noise=request.noise or method_named(request.method).default_noise,
        schedule=schedule,
        step=_STEP if request.step is None else request.step,
        sampling_rate=(
            request.sampling_rate or preset.sampling_rate or sampling_rate_for(form.train_records // devices)
        ),
        clip_norm=clip_norm,
        clipping=request.clipping,
        device_noise=request.device_noise,
        # This and the number of fragments follow from the noise, which depends on all others.
        learning_rate=1.0,
        momentum=preset.momentum,
        cap=request.cap or (preset.cap if preset.cap in method_named(request.method).caps else "none"),
        cap_at=request.cap_at,
        engine=request.engine,
        seed=request.seed,
        jitter_window_s=preset.jitter_window_s if jitter_s is None else jitter_s,
        compute_slot_s=preset.compute_slot_s,
        fragments_per_update=1,
        mixer=request.mixer,
        baseline=request.baseline,
    )
    fleet = fleet_settings(settings)
    job = trial_job(fleet, spec)
    outlook = _outlook(settings, fleet, job, spec)
    if request.learning_rate is not None:
        learning_rate = request.learning_rate
    elif method_named(request.method).trains_locally:
        # As long for any clip norm: there is none, or the mean update is taken as it is.
        learning_rate = preset.learning_rate
    elif preset.learning_rate:
        # As long a step as the preset's, for any clip norm.
        learning_rate = float(f"{preset.learning_rate * preset.clip_norm * stretch / clip_norm:.3g}")
    else:
        learning_rate = learning_rate_for(
            outlook.signal_to_noise, rounds, clip_norm / stretch, preset.momentum
        )
    settings = settings.with_values({"learning_rate": learning_rate})
    return _cut_into_fragments(settings, job, spec), outlook


def _cut_into_fragments(settings: RunSettings, job: Job, spec: ModelSpec) -> RunSettings:
    """``settings`` with as few fragments as hold an update of every round, but not fewer than usual.

    Raises:
        ParameterError: The noise of a round is out of range.
        PlanError: Devices would decline a round.
    """
    needed = trial_planner(fleet_settings(settings), spec, job).fragments_needed()
    settings = settings.with_values({"fragments_per_update": max(_FEWEST_FRAGMENTS, needed)})
    trial_planner(fleet_settings(settings), spec, job).require_acceptable()
    return settings


def _outlook(settings: RunSettings, fleet: FleetSettings, job: Job, spec: ModelSpec) -> Outlook:
    parameters, devices = spec.parameter_count, settings.devices
    if isinstance(job.noise, TwoPointRounds):
        ratio = reports_to_noise(job.noise, parameters=parameters, devices=devices)
    else:
        # A clip norm in L1 is as long as its stretch in L2, which is what the ratio compares.
        mechanism = job.noise.mechanism
        stretch = typical_stretch(mechanism.norm, parameters)
        noise = [mechanism.deviation_per_multiplier * stretch * each for each in job.noise.multipliers]
        if method_named(settings.method).trains_locally:
            clipping = update_clipping(fleet, spec)
            if job.device is not None:
                # Over twice the norm of an update, and from every device.
                share = 2 * math.sqrt(devices) * mechanism.deviation_per_multiplier * stretch
                pairs = zip(noise, job.device.noise.multipliers, strict=True)
                noise = [math.hypot(each, share * own) for each, own in pairs]
            noise = [each * clipping.radius / clipping.clip_norm for each in noise]
            ratio = updates_to_noise(noise, parameters=parameters, devices=devices)
        else:
            ratio = signal_to_noise(
                clipping_of(fleet, spec),
                noise,
                sampling_rate=settings.sampling_rate,
                records_per_device=settings.records_per_device,
                devices=devices,
            )
    return Outlook(
        ratio, settings.records_per_device, settings.devices, spec.parameter_count, settings.epsilon
    )


def model_in_words(settings: RunSettings, spec: ModelSpec) -> str:
    """The model and where it is from, for people."""
    if settings.model and is_model_file(settings.model):
        return f"{spec.name} ({settings.model})"
    return spec.name if settings.model else f"{spec.name}, made for data of this form"
