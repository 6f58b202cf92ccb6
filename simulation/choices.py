"""From what was asked for, and what the data are, to a run whose every value is settled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from coordinator.planning import Planner, clipping_of, job_noise
from coordinator.store import Job
from dpagent.errors import ConfigurationError, DataError, PlanError
from dpagent.learning.model_files import find_model, is_model_file, load_assets, load_model
from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork
from simulation.fitting_model import fitting_model
from simulation.layout import Layout
from simulation.outlook import Outlook, outlook_of
from simulation.presets import Preset, learning_rate_for, sampling_rate_for
from simulation.programs.configurations import fleet_settings
from simulation.settings import DataChoice, DataForm, DemoOptions

_FEWEST_FRAGMENTS: Final = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says; None is left to preset and rules."""

    data: DataChoice
    model: str | None
    devices: int | None
    rounds: int | None
    epsilon: float | None
    delta: float
    schedule: Literal["incrementing", "uniform", "linear"]
    step: float
    sampling_rate: float | None
    clip_norm: float | None
    learning_rate: float | None
    clipping: Literal["whole", "layers", "quantile"]
    cap: str | None
    cap_at: str
    engine: Literal["auto", "numpy", "onnx"]
    jitter_window_s: float | None
    seed: int
    baseline: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """A run that can begin."""

    options: DemoOptions
    spec: ModelSpec
    outlook: Outlook


def choose_model(asked: str | None, form: DataForm, layout: Layout) -> tuple[str, ModelSpec]:
    """The model and how options name it.

    Args:
        asked: As ``--model``.
        form: Of the data.
        layout: A run that goes on has its model file.

    Raises:
        ConfigurationError: There is no such model, or it is not the one that the run began with.
    """
    kept = load_model(layout.model_file) if layout.model_file.exists() else None
    if asked is None:
        spec = fitting_model(form.shape, form.classes) if kept is None else kept
        return (spec.name if BUILT_IN.get(spec.name) == spec else ""), spec
    spec = find_model(asked)
    if kept is not None and kept.digest() != spec.digest():
        raise ConfigurationError(
            f"The demo in {layout.root} was started with another model than {asked} is now. "
            "Give another --state-dir."
        )
    if any(isinstance(stage, FrozenNetwork) for stage in spec.front_end) and not load_assets(Path(asked)):
        raise ConfigurationError(
            f"{asked} names its network by a digest, and the coordinator has to send the file. Write "
            "`onnx: {file: PATH}`."
        )
    return asked, spec


def choose(asked: Asked, preset: Preset, form: DataForm, model: str, spec: ModelSpec) -> Choice:
    """Settle everything.

    Args:
        asked: What was asked for.
        preset: What to start from.
        form: Of the data.
        model: How options name the model.
        spec: The model.

    Raises:
        DataError: There are too few records for so many devices.
        ParameterError: A value is out of its range.
        PlanError: No noise meets the target, or no fragment holds the update.
    """
    devices = preset.devices if asked.devices is None else asked.devices
    if form.train_records < devices:
        raise DataError(
            f"{form.train_records} training records cannot be split over {devices} devices; "
            "use fewer devices."
        )
    rounds = preset.rounds if asked.rounds is None else asked.rounds
    if spec.projection is not None and rounds < 2:
        raise PlanError(
            f"--rounds is {rounds}; expected at least 2: the first one finds the directions that model "
            f"{spec.name!r} projects on."
        )
    clip_norm = preset.clip_norm if asked.clip_norm is None else asked.clip_norm
    options = DemoOptions(
        data=asked.data,
        form=form,
        model=model,
        devices=devices,
        rounds=rounds,
        epsilon=preset.epsilon if asked.epsilon is None else asked.epsilon,
        delta=asked.delta,
        schedule=asked.schedule,
        step=asked.step,
        sampling_rate=(
            asked.sampling_rate or preset.sampling_rate or sampling_rate_for(form.train_records // devices)
        ),
        clip_norm=clip_norm,
        learning_rate=1.0,
        momentum=preset.momentum,
        cap=preset.cap if asked.cap is None else asked.cap,
        cap_at=asked.cap_at,
        seed=asked.seed,
        jitter_window_s=preset.jitter_window_s if asked.jitter_window_s is None else asked.jitter_window_s,
        clipping=asked.clipping,
        engine=asked.engine,
        compute_slot_s=preset.compute_slot_s,
        baseline=asked.baseline,
    )
    settings = fleet_settings(options)
    # The model's file is written later: no terms yet.
    job = Job(bytes(16), {}, *job_noise(settings))
    clipping = clipping_of(settings, spec)
    outlook = outlook_of(
        clipping,
        job.noise.multipliers,
        sampling_rate=options.sampling_rate,
        records_per_device=options.records_per_device,
        devices=devices,
    )
    learning_rate = asked.learning_rate
    if learning_rate is None and preset.learning_rate:
        # As long a step as the preset's, whatever gradients are clipped to.
        learning_rate = preset.learning_rate * preset.clip_norm / clip_norm
    if learning_rate is None:
        learning_rate = learning_rate_for(
            outlook.signal_to_noise, options.rounds, clip_norm, options.momentum
        )
    # As few fragments as hold an update, but not fewer than usual.
    fragments = max(_FEWEST_FRAGMENTS, Planner(settings, spec, job, bytes(32)).fragments_needed())
    options = replace(options, learning_rate=learning_rate, fragments_per_update=fragments)
    Planner(fleet_settings(options), spec, job, bytes(32)).require_acceptable()
    return Choice(options, spec, outlook)


def model_in_words(options: DemoOptions, spec: ModelSpec) -> str:
    """For people: the model, and where it is from."""
    if options.model and is_model_file(options.model):
        return f"{spec.name} ({options.model})"
    return spec.name if options.model else f"{spec.name}, made for data of this form"


def facts_of(options: DemoOptions, spec: ModelSpec, outlook: Outlook) -> Mapping[str, Any]:
    """The fields of the record of a run that are known before it."""
    form = options.form
    return {
        "dataset": options.data.name,
        "split": options.data.split_in_words,
        "shape": tuple(form.shape),
        "classes": tuple(form.class_names) or tuple(map(str, range(form.classes))),
        "test_records": form.test_records,
        "model": spec.name,
        "parameters": spec.parameter_count,
        "devices": options.devices,
        "rounds": options.rounds,
        "records_per_device": float(options.records_per_device),
        "schedule": options.schedule,
        "sampling_rate": options.sampling_rate,
        "clip_norm": options.clip_norm,
        "clipping": options.clipping,
        "learning_rate": options.learning_rate,
        "cap": "none" if options.cap == "none" else f"{options.cap} at the {options.cap_at}",
        "epsilon_target": options.epsilon,
        "delta": options.delta,
        "signal_to_noise": outlook.signal_to_noise,
        "outlook": outlook.verdict,
        "warning": outlook.warning(
            records_per_device=options.records_per_device,
            devices=options.devices,
            epsilon=options.epsilon,
            parameters=spec.parameter_count,
        ),
    }
