"""``fleet.yaml``: the operator's settings for the fleet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dpagent.configuration import FilePath, Settings, changed_settings, load_settings, resolve
from dpagent.errors import ConfigurationError, DpagentError
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.model_files import find_model, is_model_file, load_assets
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.augmentation import Augmentation
from dpagent.learning.training.optimiser import Adam, LearningRate, Optimiser, Sgd
from dpagent.privacy.clipping import MAX_NORM, MIN_NORM
from dpagent.privacy.mechanisms.registry import DEFAULT_MECHANISM, mechanism_named
from dpagent.privacy.schedules import Schedule
from dpagent.protocol.messages import MIN_SLOT_S
from dpagent.protocol.topics import FleetName
from dpagent.transport.settings import MqttSettings
from dpagent.wording import counted


class AugmentationSettings(Settings):
    """Views of each record; their gradients are averaged before clipping. They cost time but no privacy."""

    views: Annotated[int, Field(ge=2, le=64)]
    """Copies of a record in a step. Not for a model with a front end."""
    shift: Annotated[int, Field(ge=0, le=1024)] = 0
    """Maximum shift of a view along each axis, in pixels (or readings)."""
    flip: bool = False
    """Whether a view of an image is mirrored left to right with probability 1/2."""


class ModelSettings(Settings):
    """The trained model."""

    name: Annotated[str, Field(min_length=1)] = "mnist-cnn"
    """A built-in model, or the path of a model file (.yaml), relative to this file."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the initial weights (never of noise)."""
    classes: list[Annotated[str, Field(min_length=1, max_length=128)]] | None = None
    """Names of the classes, for users of the model; by default those of the test data."""
    augmentation: AugmentationSettings | None = None
    """Views of each record; by default the record itself. Not for a model with a front end."""

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
            ConfigurationError: The file is missing or invalid, or the model excludes augmentation.
        """
        spec = find_model(self.name)
        if self.augmentation is not None:
            if spec.front_end:
                raise ConfigurationError(
                    f"model.augmentation is set, but model {spec.name!r} has a front end, whose features"
                    " are computed once per record; expected only one of the two."
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
    """Distribution of the budget over the rounds."""

    kind: Literal["incrementing", "uniform", "linear", "custom"] = "incrementing"
    """``incrementing`` increases the budget by a fixed step per round (in zCDP); ``custom`` divides it in
    proportion to ``weights``."""
    step: Annotated[float, Field(ge=0, le=0.99)] = 0.3
    """``incrementing``: the step as a fraction of its allowed maximum."""
    ratio: Annotated[float, Field(ge=1, le=100)] = 3.0
    """``linear``: the last round's budget divided by the first round's."""
    weights: list[float] | None = None
    """``custom``: a positive number for each round; the largest is at most a million times the smallest."""

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
    """Clipping of each record's gradient."""

    kind: Literal["whole", "layers", "quantile"] = "whole"
    """``whole``: clip the gradient to ``clip_norm``. ``layers``: clip each layer to its own norm.
    ``quantile``: clip to a norm that follows a privately estimated quantile of the records' norms."""
    norms: list[Annotated[float, Field(ge=MIN_NORM, le=MAX_NORM)]] | None = None
    """``layers``: one for each layer with parameters; by default, ``clip_norm`` divided by the root of their
    number."""
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """``quantile``: target share of records with an unclipped gradient."""
    rate: Annotated[float, Field(gt=0, le=1)] = 0.2
    """``quantile``: adaptation rate of the norm."""

    @model_validator(mode="after")
    def _norms_are_of_layers(self) -> ClippingSettings:
        if self.norms is not None and self.kind != "layers":
            raise ValueError(f"norms are set for kind {self.kind}; expected kind layers")
        return self


class PrivacySettings(Settings):
    """The guarantee of the job on every device: record-level, add-or-remove-one, no trusted party."""

    epsilon: Annotated[float, Field(gt=0, le=1000)]
    """ε of the whole job for each record."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """δ of the whole job."""
    mechanism: str = DEFAULT_MECHANISM
    """Name of the mechanism that adds noise on devices."""
    sampling_rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Probability that a record is in a lot (Poisson sampling)."""
    clip_norm: Annotated[float, Field(ge=MIN_NORM, le=MAX_NORM)] = 1.0
    """L2 clip norm of one record's gradient; with a quantile, of the first round."""
    clipping: ClippingSettings = ClippingSettings()
    record_norm: Annotated[float, Field(ge=1e-4, le=1e4)] = 1.0
    """L2 clip norm of one record in the first round of a model with a projection."""
    local_steps: Annotated[int, Field(ge=1, le=64)] = 1
    """Noisy steps of a device in a round."""
    local_learning_rate: Annotated[float, Field(ge=0, le=1000)] = 0.1
    """Learning rate of local steps, if there are several."""
    schedule: ScheduleSettings = ScheduleSettings()

    @field_validator("mechanism")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            return mechanism_named(name).name
        except DpagentError as error:
            raise ValueError(str(error)) from error


class CapSettings(Settings):
    """The noise cap: post-processing of noisy sums, without privacy cost."""

    kind: Literal["none", "clamp"] = "clamp"
    """``clamp`` bounds each coordinate of the noisy mean by the gradient of an L2 penalty."""
    where: Literal["coordinator", "device"] = "coordinator"
    """The coordinator caps the fleet's mean, or each device its own."""
    regularisation: Annotated[float, Field(gt=0, le=1e6)] = 0.5
    """γ: the bound of a coordinate is γ times the absolute value of its weight."""
    floor: Annotated[float, Field(gt=0, le=1e6)] = 0.05
    """Smallest bound of a coordinate, so that a zero weight can change."""


class OptimiserSettings(Settings):
    """The coordinator's step on the mean gradient."""

    kind: Literal["sgd", "adam"] = "sgd"
    """``sgd``, with momentum; ``adam`` scales each coordinate's step by running moments."""
    learning_rate: Annotated[float, Field(gt=0, le=1000)] = 0.5
    """Initial learning rate."""
    final_learning_rate: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Final learning rate of a linear decay; by default the rate is constant."""
    decay_rounds: Annotated[int, Field(ge=1)] | None = None
    """Rounds of the decay, not counting that of a projection; by default all."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """``sgd``: momentum. ``adam``: β₁."""
    second_moment: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """``adam``: β₂."""

    def optimiser(self) -> Optimiser:
        """The optimiser these settings describe."""
        return Sgd(self.momentum) if self.kind == "sgd" else Adam(self.momentum, self.second_moment)

    def learning_rates(self, rounds: int) -> LearningRate:
        """The learning rates of a job with this number of gradient steps."""
        return LearningRate(self.learning_rate, self.final_learning_rate, self.decay_rounds or rounds)


class RoundSettings(Settings):
    """Timing of a round."""

    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """An incomplete round closes this long after it opened."""
    compute_slot_s: Annotated[float, Field(ge=MIN_SLOT_S, le=86_400)] = 5.0
    """Devices publish a whole number of slots after the plan; choose it above their training time."""
    device_grid_s: Annotated[float, Field(ge=MIN_SLOT_S, le=86_400)] | None = None
    """The longest ``limits.minimum_compute_slot_s`` of the devices, at whose multiples their slots begin; by
    default ``compute_slot_s``."""
    jitter_window_s: Annotated[float, Field(ge=0, le=86_400)] = 10.0
    """Maximum random delay of each fragment."""
    minimum_devices: Annotated[int, Field(ge=1)] = 1
    """If a block of the update has fewer fragments at the deadline, the round stays open for another
    deadline."""

    @property
    def honest_s(self) -> float:
        """Seconds after which a device has sent that got the plan at once and trained within one slot.

        It waits for a point of its grid, for a slot in whole periods of the grid, and for its jitter.
        """
        grid_s = self.device_grid_s or self.compute_slot_s
        return grid_s + math.ceil(self.compute_slot_s / grid_s) * grid_s + self.jitter_window_s

    @model_validator(mode="after")
    def _leaves_time(self) -> RoundSettings:
        if self.deadline_s <= self.honest_s:
            raise ValueError(
                f"deadline_s is {self.deadline_s:g}; expected more than {self.honest_s:g}, when the devices"
                " have sent: the sum of device_grid_s (by default compute_slot_s), compute_slot_s and"
                " jitter_window_s"
            )
        return self


class AggregationSettings(Settings):
    """How devices' fragments become one mean, and how much one of them can weigh. Without privacy cost."""

    kind: Literal["mean", "median-of-means"] = "mean"
    """``median-of-means``: the median of the means of random groups of fragments, coordinate by coordinate. A
    few hostile devices then move it little; for five groups of honest ones its noise has 1.43 times the
    variance."""
    groups: Annotated[int, Field(ge=2, le=1_000)] = 5
    """``median-of-means``: number of groups. Hostile fragments in less than half of them cannot drag a
    coordinate beyond the honest groups."""
    largest_signal: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Largest signal of an honest device in a block, in clip norms a record of its expected lot. At 1, the
    range of honest norms holds every device with at most ``records_per_device`` records, whatever they are;
    at 2, with twice as many. Below 1, it relies on gradients that do not all point one way within one block.
    A hostile fragment can weigh as much."""
    false_rejection: Annotated[float, Field(ge=1e-30, lt=1)] = 1e-9
    """Probability that any fragment of the honest devices is rejected for its norm, in the whole job."""

    @property
    def dealt(self) -> int:
        """Groups that a block's fragments are dealt to: one for the mean."""
        return self.groups if self.kind == "median-of-means" else 1


class TestDataSettings(DatasetSettings):
    """Public data for the evaluation of each round's model; the keys are those of ``agent.yaml``."""

    half: Literal["train", "test"] = "test"
    """Which half to use, for data with two (idx, cifar, images in folders ``train`` and ``test``)."""


class FleetSettings(Settings):
    """Everything in ``fleet.yaml``."""

    fleet: FleetName
    """The fleet's name, part of its MQTT topics."""
    devices: Annotated[int, Field(ge=1, le=1_000_000)]
    """Expected devices in a round. No block counts more fragments than this; the round closes once all are in
    and honest devices have had their slot and their jitter."""
    records_per_device: Annotated[float, Field(gt=0)]
    """Public estimate. Sums are divided by sampling rate × this number, never by a true count."""
    rounds: Annotated[int, Field(ge=1, le=5000)]
    """Rounds of the job."""
    privacy: PrivacySettings
    model: ModelSettings = ModelSettings()
    cap: CapSettings = CapSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    round: RoundSettings = RoundSettings()
    aggregation: AggregationSettings = AggregationSettings()
    fragments_per_update: Annotated[int, Field(ge=1, le=4096)] = 16
    """Fragments of a device's update."""
    test_data: TestDataSettings | None = None
    keep_models: Literal["all", "last"] = "all"
    """Keep each round's model, in ``models`` of the state directory, or only the last one."""
    state_dir: FilePath = Path("coordinator-state")
    """Directory of the job's state, relative to this file."""
    keys_dir: FilePath = Path("keys")
    """Directory of the coordinator's keys, relative to this file; created at the first start, mode 0600. A
    new job in another ``state_dir`` keeps these keys, so boards recognise the coordinator."""
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
    def _groups_are_not_empty(self) -> FleetSettings:
        wanted = self.aggregation
        if wanted.kind == "median-of-means" and wanted.groups > self.devices:
            raise ValueError(
                f"aggregation.groups is {wanted.groups}; expected at most devices = {self.devices}"
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
                f"privacy.schedule.weights has {counted(len(weights), 'number')}; expected rounds = "
                f"{self.rounds}"
            )
        return self

    def job_terms(self) -> dict[str, object]:
        """The settings that define the job and may not change after its start."""
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
        # A model file can change without a change of its path, and the reverse.
        terms["model"]["name"] = self.model.spec().name
        return terms | {"architecture": self.model.spec().digest().hex()}


def load_fleet_settings(file: Path) -> FleetSettings:
    """Read ``fleet.yaml`` with its paths made relative to it.

    Raises:
        ConfigurationError: The file is invalid.
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


def require_same_job(before: dict[str, object], now: dict[str, object], state_dir: Path) -> None:
    """Refuse to continue a job under other terms.

    Raises:
        ConfigurationError: Naming every change.
    """
    if changes := changed_settings(before, now):
        raise ConfigurationError(
            f"The job in {state_dir} began with other settings: {'; '.join(map(str, changes))}. "
            "Restore them, or start a new job in another state_dir. Keep keys_dir, so that boards "
            "recognise this coordinator."
        )
