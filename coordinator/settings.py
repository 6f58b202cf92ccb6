"""``fleet.yaml``: what the operator decides for the fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dpagent.configuration import FilePath, Settings, load_settings, resolve
from dpagent.errors import ConfigurationError, DpagentError
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.model_files import find_model, is_model_file, load_assets
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.augmentation import Augmentation
from dpagent.learning.training.optimiser import Adam, LearningRate, Optimiser, Sgd
from dpagent.privacy.clipping import MAX_NORM, MIN_NORM
from dpagent.privacy.mechanisms.registry import DEFAULT_MECHANISM, mechanism_named
from dpagent.privacy.schedules import Schedule
from dpagent.protocol.topics import FleetName
from dpagent.transport.settings import MqttSettings


class AugmentationSettings(Settings):
    """Views of each record, whose gradients are averaged before clipping: they cost time, and no privacy."""

    views: Annotated[int, Field(ge=1, le=64)]
    """Copies of a record in a step. Not with a model that has a front end."""
    shift: Annotated[int, Field(ge=0, le=1024)] = 0
    """Most pixels (or readings) that a view is moved along each axis."""
    flip: bool = False
    """Whether a view of an image is mirrored left to right, every other time."""


class ModelSettings(Settings):
    """What is trained."""

    name: Annotated[str, Field(min_length=1)] = "mnist-cnn"
    """A built-in model, or the path of a model file (.yaml), relative to this file."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the initial weights (never of noise)."""
    classes: list[Annotated[str, Field(min_length=1, max_length=128)]] | None = None
    """Names of the classes, for whoever runs the model; without them, those of the test data."""
    augmentation: AugmentationSettings | None = None
    """Views of each record; without it, each is taken as it is. Not with a model that has a front end."""

    @model_validator(mode="after")
    def _is_known(self) -> ModelSettings:
        if not is_model_file(self.name):
            try:
                self.spec()
            except DpagentError as error:
                raise ValueError(str(error)) from error
        return self

    def spec(self) -> ModelSpec:
        """The model, its path resolved.

        Raises:
            ConfigurationError: The file is missing, describes no model, or one whose records have no views.
        """
        spec = find_model(self.name)
        if self.augmentation is not None:
            if spec.front_end:
                raise ConfigurationError(
                    f"model.augmentation is given, and model {spec.name!r} has a front end, whose features"
                    " are computed once a record; expected one of the two."
                )
            Augmentation(**self.augmentation.model_dump()).check_fits(spec.input_shape)
        return spec

    def assets(self) -> dict[str, bytes]:
        """The files that a model file names, by role.

        Raises:
            ConfigurationError: One is missing.
        """
        return load_assets(Path(self.name)) if is_model_file(self.name) else {}


class ScheduleSettings(Settings):
    """How the budget is spread over the rounds."""

    kind: Literal["incrementing", "uniform", "linear", "custom"] = "incrementing"
    """``incrementing`` gives each round a fixed step more than the last (in zCDP), ``custom`` the share that
    its weight is of all ``weights``."""
    step: Annotated[float, Field(ge=0, le=0.99)] = 0.3
    """``incrementing``: the step as a fraction of its allowed maximum."""
    ratio: Annotated[float, Field(ge=1, le=100)] = 3.0
    """``linear``: the last round's budget over the first round's."""
    weights: list[float] | None = None
    """``custom``: a positive number for each round, the greatest at most a million times the least."""

    @model_validator(mode="after")
    def _is_possible(self) -> ScheduleSettings:
        try:
            self.schedule()
        except DpagentError as error:
            raise ValueError(str(error)) from error
        return self

    def schedule(self) -> Schedule:
        """The schedule these settings describe."""
        return Schedule(kind=self.kind, step=self.step, ratio=self.ratio, weights=tuple(self.weights or ()))


class ClippingSettings(Settings):
    """What each record's gradient is clipped to."""

    kind: Literal["whole", "layers", "quantile"] = "whole"
    """``whole``: the gradient to ``clip_norm``. ``layers``: each layer to a norm of its own. ``quantile``:
    the gradient to a norm that follows a quantile of the records' norms, estimated privately."""
    norms: list[Annotated[float, Field(ge=MIN_NORM, le=MAX_NORM)]] | None = None
    """``layers``: one for each layer with parameters; without it, ``clip_norm`` over the root of their
    number."""
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """``quantile``: share of the records whose gradient should be left whole."""
    rate: Annotated[float, Field(gt=0, le=1)] = 0.2
    """``quantile``: how fast the norm follows."""

    @model_validator(mode="after")
    def _norms_are_of_layers(self) -> ClippingSettings:
        if self.norms is not None and self.kind != "layers":
            raise ValueError(f"norms are given for kind {self.kind}; expected kind layers")
        return self


class PrivacySettings(Settings):
    """The guarantee the job asks of every device: record-level, add-or-remove-one, trusting nobody."""

    epsilon: Annotated[float, Field(gt=0, le=1000)]
    """ε of the whole job for each record."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """δ of the whole job."""
    mechanism: str = DEFAULT_MECHANISM
    """The noise that devices add, by name."""
    sampling_rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Probability with which a record is in a lot (Poisson sampling)."""
    clip_norm: Annotated[float, Field(ge=MIN_NORM, le=MAX_NORM)] = 1.0
    """L2 norm that one record's gradient is clipped to; with a quantile, in the first round."""
    clipping: ClippingSettings = ClippingSettings()
    record_norm: Annotated[float, Field(ge=1e-4, le=1e4)] = 1.0
    """L2 norm that one record is scaled down to in the first round of a model with a projection."""
    local_steps: Annotated[int, Field(ge=1, le=64)] = 1
    """Noisy steps a device takes in a round."""
    local_learning_rate: Annotated[float, Field(ge=0, le=1000)] = 0.1
    """Learning rate of the steps on the device, when there are several."""
    schedule: ScheduleSettings = ScheduleSettings()

    @field_validator("mechanism")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            return mechanism_named(name).name
        except DpagentError as error:
            raise ValueError(str(error)) from error


class CapSettings(Settings):
    """The noise cap: free post-processing of what is already private."""

    kind: Literal["none", "clamp"] = "clamp"
    """``clamp`` bounds each coordinate of the noisy mean by the regulariser's own pull."""
    where: Literal["coordinator", "device"] = "coordinator"
    """Who applies it: the coordinator on the mean, or each device on its own."""
    regularisation: Annotated[float, Field(gt=0, le=1e6)] = 0.5
    """γ: a coordinate is bounded by γ times the size of its weight."""
    floor: Annotated[float, Field(gt=0, le=1e6)] = 0.05
    """Least bound of a coordinate, so that a weight of zero can move."""


class OptimiserSettings(Settings):
    """The coordinator's step on the mean gradient."""

    kind: Literal["sgd", "adam"] = "sgd"
    """``sgd``, with momentum; ``adam`` scales each coordinate's step by running moments."""
    learning_rate: Annotated[float, Field(gt=0, le=1000)] = 0.5
    """Length of a step, at first."""
    final_learning_rate: Annotated[float, Field(gt=0, le=1000)] | None = None
    """What the learning rate falls to, linearly; without it, it stays."""
    decay_rounds: Annotated[int, Field(ge=1)] | None = None
    """Steps over which it falls; without it, all. Each round is one, but for that of a projection."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """``sgd``: share of the last step that goes on. ``adam``: β₁."""
    second_moment: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """``adam``: β₂."""

    def optimiser(self) -> Optimiser:
        """The optimiser these settings describe."""
        return Sgd(self.momentum) if self.kind == "sgd" else Adam(self.momentum, self.second_moment)

    def learning_rates(self, rounds: int) -> LearningRate:
        """The course of the learning rate in a job of so many rounds."""
        return LearningRate(self.learning_rate, self.final_learning_rate, self.decay_rounds or rounds)


class RoundSettings(Settings):
    """When a round is over."""

    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """A round is closed this long after it opened, if it is not complete before."""
    compute_slot_s: Annotated[float, Field(gt=0, le=86_400)] = 5.0
    """Devices publish a whole number of slots after the plan; choose it above their training time."""
    jitter_window_s: Annotated[float, Field(ge=0, le=86_400)] = 10.0
    """Each fragment waits a random time up to this."""
    minimum_devices: Annotated[int, Field(ge=1)] = 1
    """If any block of the update has fewer fragments at the deadline, the round stays open for another."""

    @model_validator(mode="after")
    def _leaves_time(self) -> RoundSettings:
        if self.deadline_s <= self.compute_slot_s + self.jitter_window_s:
            raise ValueError(
                f"deadline_s is {self.deadline_s:g}; expected more than compute_slot_s + jitter_window_s = "
                f"{self.compute_slot_s + self.jitter_window_s:g}, or nothing can arrive in time"
            )
        return self


class TestDataSettings(DatasetSettings):
    """Public data that the model is evaluated on each round; the keys are those of ``agent.yaml``."""

    half: Literal["train", "test"] = "test"
    """Which half, where data have two (idx, cifar, images in folders ``train`` and ``test``)."""


class FleetSettings(Settings):
    """Everything in ``fleet.yaml``."""

    fleet: FleetName
    """The fleet's name, part of its MQTT topics."""
    devices: Annotated[int, Field(ge=1, le=1_000_000)]
    """Devices expected in a round; with all of their fragments it closes at once."""
    records_per_device: Annotated[float, Field(gt=0)]
    """Public estimate. Sums are divided by sampling rate × this, never by a true count."""
    rounds: Annotated[int, Field(ge=1, le=5000)]
    """Rounds of the job."""
    privacy: PrivacySettings
    model: ModelSettings = ModelSettings()
    cap: CapSettings = CapSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    round: RoundSettings = RoundSettings()
    fragments_per_update: Annotated[int, Field(ge=1, le=4096)] = 16
    """Pieces that a device's update is cut into."""
    test_data: TestDataSettings | None = None
    keep_models: Literal["all", "last"] = "all"
    """Whether each round's model is kept, in ``models`` of the state directory, or the last one only."""
    state_dir: FilePath = Path("coordinator-state")
    """Where the job lives, relative to this file."""
    keys_dir: FilePath = Path("keys")
    """The coordinator's keys, relative to this file; made at the first start, mode 0600. A new job in
    another ``state_dir`` keeps the keys that boards know."""
    mqtt: MqttSettings = MqttSettings()

    @model_validator(mode="after")
    def _quorum_is_possible(self) -> FleetSettings:
        if self.round.minimum_devices > self.devices:
            raise ValueError(
                f"round.minimum_devices is {self.round.minimum_devices}; "
                f"expected at most devices = {self.devices}"
            )
        return self

    @model_validator(mode="after")
    def _cap_on_the_device_knows_one_norm(self) -> FleetSettings:
        if self.cap.kind == "clamp" and self.cap.where == "device" and self.privacy.clipping.kind != "whole":
            raise ValueError(
                f"cap.where is device and privacy.clipping.kind is {self.privacy.clipping.kind}; expected "
                "whole, or the cap at the coordinator"
            )
        return self

    @model_validator(mode="after")
    def _has_a_weight_for_each_round(self) -> FleetSettings:
        weights = self.privacy.schedule.weights or []
        if weights and len(weights) != self.rounds:
            raise ValueError(
                f"privacy.schedule.weights has {len(weights)} numbers; expected rounds = {self.rounds}"
            )
        return self

    def job_terms(self) -> dict[str, object]:
        """What defines the job: it may not change once the job has begun."""
        terms = self.model_dump(
            mode="json",
            include={
                "fleet",
                "records_per_device",
                "rounds",
                "privacy",
                "model",
                "cap",
                "optimiser",
                "fragments_per_update",
            },
        )
        # A model file may change, or move, without its name showing it.
        terms["model"]["name"] = self.model.spec().name
        return terms | {"architecture": self.model.spec().digest().hex()}


def load_fleet_settings(file: Path) -> FleetSettings:
    """Read ``fleet.yaml`` with its paths made relative to it.

    Raises:
        ConfigurationError: Something in the file is wrong.
    """
    settings = load_settings(file, FleetSettings)
    changes: dict[str, object] = {
        "state_dir": resolve(settings.state_dir, file),
        "keys_dir": resolve(settings.keys_dir, file),
        "mqtt": settings.mqtt.resolved(file),
    }
    if is_model_file(settings.model.name):
        changes["model"] = settings.model.model_copy(
            update={"name": str(resolve(Path(settings.model.name), file))}
        )
    if settings.test_data is not None:
        changes["test_data"] = settings.test_data.model_copy(
            update={"path": resolve(settings.test_data.path, file)}
        )
    return settings.model_copy(update=changes)


def changed_terms(before: dict[str, object], now: dict[str, object]) -> str:
    """Name the first difference between the terms of a job and those asked for now."""
    for key in now:
        old, new = before.get(key), now[key]
        if isinstance(old, dict) and isinstance(new, dict):
            if inner := changed_terms(old, new):
                return f"{key}.{inner}"
        elif old != new:
            return f"{key} was {old!r} and is {new!r}"
    return ""


def require_same_job(before: dict[str, object], now: dict[str, object], state_dir: Path) -> None:
    """Refuse to go on with a job under other terms.

    Raises:
        ConfigurationError: Naming what changed.
    """
    if difference := changed_terms(before, now):
        raise ConfigurationError(
            f"The job in {state_dir} has begun with other settings: {difference}. "
            "Restore them, or start a new job in another state_dir; keys_dir stays, so boards go on "
            "knowing you."
        )
