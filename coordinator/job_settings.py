"""What a job is: the sections of ``fleet.yaml`` that may not change after its start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from dpagent.errors import ConfigurationError, DpagentError
from dpagent.learning.data.input_form import InputForm
from dpagent.learning.model_files import find_model, is_model_file, load_assets
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.augmentation import Augmentation
from dpagent.learning.training.optimiser import Adam, LearningRate, Optimiser, Sgd
from dpagent.norm import Norm
from dpagent.privacy.mechanisms.mechanism import Mechanism
from dpagent.privacy.mechanisms.registry import mechanism_of
from dpagent.privacy.methods import DEFAULT_METHOD, MethodName, method_named
from dpagent.privacy.ranges import MAX_DIMENSION, MAX_NORM, MAX_RADIUS, MIN_NORM, MIN_RADIUS, ScheduleKind
from dpagent.privacy.schedules import Schedule, kind_given_by
from dpagent.protocol.sizes import Precision
from dpagent.schema.base import rule
from dpagent.schema.limits import Limits
from dpagent.settings import Settings


class AugmentationSettings(Settings):
    """Views of each record; their gradients are averaged before clipping. They cost time but no privacy."""

    views: Annotated[int, Limits(ge=2, le=64)]
    """Copies of a record in a step. Not for a model with a front end."""
    shift: Annotated[int, Limits(ge=0, le=1024)] = 0
    """Maximum shift of a view along each axis, in pixels (or readings)."""
    flip: bool = False
    """Whether a view of an image is mirrored left to right with probability 1/2."""


class ModelSettings(Settings):
    """The trained model."""

    name: Annotated[str, Limits(min_length=1)] = "mnist-cnn"
    """A built-in model, or the path of a model file (.yaml), relative to this file."""
    seed: Annotated[int, Limits(ge=0)] = 0
    """Seed of the initial weights (never of noise)."""
    precision: Precision = "int8"
    """How each round's weights travel to the devices: ``int8``, 8 bits a weight and a scale for every 64, or
    ``float32``. The coordinator keeps them exact."""
    classes: list[Annotated[str, Limits(min_length=1, max_length=128)]] | None = None
    """Names of the classes, for users of the model; by default those of the test data."""
    inputs: InputForm | None = None
    """What inputs are, in the words of ``data`` in agent.yaml, for users of the model: its file carries it,
    and ``dpagent predict`` applies it. By default as the test data are."""
    augmentation: AugmentationSettings | None = None
    """Views of each record; by default the record itself. Not for a model with a front end."""

    @rule
    def _is_known(self) -> None:
        if not is_model_file(self.name):
            try:
                self.spec()
            except DpagentError as error:
                raise ValueError(str(error)) from error

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
            Augmentation(**self.augmentation.as_dict()).check_fits(spec.input_shape)
        return spec

    def assets(self) -> dict[str, bytes]:
        """The files that a model file names, by role.

        Raises:
            ConfigurationError: One is missing.
        """
        return load_assets(Path(self.name)) if is_model_file(self.name) else {}


class ScheduleSettings(Settings):
    """Distribution of the budget over the rounds."""

    kind: Literal["incrementing", "uniform", "linear", "custom"] | None = None
    """``uniform`` shares the budget equally; ``incrementing`` increases it by a fixed step per round (in
    zCDP); ``custom`` divides it in proportion to ``weights``. By default the one that ``step`` or ``ratio``
    is given for, and else the method's own: ``uniform``, but for the method ``incrementing``."""
    step: Annotated[float, Limits(ge=0, le=0.99)] = 0.3
    """``incrementing``: the step as a fraction of its allowed maximum."""
    ratio: Annotated[float, Limits(ge=1, le=100)] = 3.0
    """``linear``: the last round's budget divided by the first round's."""
    weights: list[float] | None = None
    """``custom``: a positive number for each round; the largest is at most a million times the smallest."""

    @rule
    def _is_possible(self) -> None:
        if self.kind is None and {"step", "ratio"} <= self.given:
            raise ValueError(
                f"step {self.step:g} (incrementing) and ratio {self.ratio:g} (linear) are both set; "
                "expected one of them, or kind to choose"
            )
        try:
            self.schedule("uniform")
        except DpagentError as error:
            raise ValueError(str(error)) from error

    def schedule(self, default: ScheduleKind) -> Schedule:
        """The schedule these settings describe, where they name none ``default``."""
        kind = self.kind or kind_given_by(self.given) or default
        return Schedule(kind=kind, step=self.step, ratio=self.ratio, weights=tuple(self.weights or ()))


class ClippingSettings(Settings):
    """Clipping of each record's gradient, or with ``central`` of a device's whole update."""

    kind: Literal["whole", "layers", "quantile"] = "whole"
    """``whole``: clip to ``clip_norm``. ``layers``: clip each layer of a gradient to its own norm.
    ``quantile``: clip to a norm that follows a privately estimated quantile of the records' norms, or with
    ``central`` of the devices'."""
    norms: list[Annotated[float, Limits(ge=MIN_NORM, le=MAX_NORM)]] | None = None
    """``layers``: one for each layer with parameters; by default, ``clip_norm`` divided by the root of their
    number."""
    quantile: Annotated[float, Limits(gt=0, lt=1)] = 0.5
    """``quantile``: target share of records with an unclipped gradient, or of devices with an unclipped
    update."""
    rate: Annotated[float, Limits(gt=0, le=1)] = 0.2
    """``quantile``: adaptation rate of the norm."""
    span: Annotated[float, Limits(gt=1, le=1e9)] = 100.0
    """``quantile``: the norm stays between ``clip_norm`` divided by this number and ``clip_norm`` times this
    number, whatever devices send."""

    @rule
    def _norms_are_of_layers(self) -> None:
        if self.norms is not None and self.kind != "layers":
            raise ValueError(f"norms are set for kind {self.kind}; expected kind layers")


class TwoPointSettings(Settings):
    """``ldp-fl``: the random bits that a device sends."""

    coordinates: Annotated[int, Limits(ge=1, le=MAX_DIMENSION)] | Literal["all"] | None = None
    """Bits of a device in a round, each of a weight of its own; ``all``: one for each weight, as published.
    By default, as many as make the mean over the devices most exact."""
    radius: Annotated[float, Limits(ge=MIN_RADIUS, le=MAX_RADIUS)] = 0.1
    """Greatest change of a weight that a device reports in the first round, in weight units. The noise is
    proportional to it."""
    adapts: bool = True
    """Whether it then follows, layer by layer, the change that the reports show."""


class DeviceNoiseSettings(Settings):
    """``central``: noise that each device adds to its own update, besides the coordinator's on the sum. So
    the device has a guarantee that trusts nobody too, and takes part even if its owner does not trust the
    coordinator."""

    epsilon: Annotated[float, Limits(gt=0, le=1000)]
    """ε of the whole job for the device, nobody trusted, at ``privacy.delta``."""


class LocalTrainingSettings(Settings):
    """``ldp-fl`` and ``central``: training on a device, before bits are drawn or its update is clipped."""

    steps: Annotated[int, Limits(ge=1, le=10_000)] = 20
    """Steps in a round. With ``central``, one step is FedSGD, more are FedAvg."""
    batch: Annotated[int, Limits(ge=1, le=65_536)] = 32
    """Records of a step, drawn with replacement, however many there are."""
    learning_rate: Annotated[float, Limits(gt=0, le=1000)] = 0.1
    """Learning rate of these steps."""


class PrivacySettings(Settings):
    """The guarantee of the job on every device: for each record, add-or-remove-one, and nobody is trusted; or
    for the whole device, with ``ldp-fl``, and with ``central``, which trusts the coordinator."""

    epsilon: Annotated[float, Limits(gt=0, le=1000)]
    """ε of the whole job, for each record, or with ``ldp-fl`` and ``central`` for the device."""
    delta: Annotated[float, Limits(gt=0, lt=1)] = 1e-5
    """δ of the whole job."""
    method: MethodName = DEFAULT_METHOD
    """How the fleet trains: ``dpagent methods list`` names all."""
    noise: str | None = None
    """Kind of the noise; by default the method's own."""
    sampling_rate: Annotated[float, Limits(gt=0, le=1)] = 0.1
    """Probability that a record is in a lot (Poisson sampling)."""
    clip_norm: Annotated[float, Limits(ge=MIN_NORM, le=MAX_NORM)] = 1.0
    """Clip norm of one record's gradient, or with ``central`` of a device's whole update, in the norm that
    the noise needs: L2 for ``gaussian``, L1 for ``laplace``; with a quantile, of the first round."""
    clipping: ClippingSettings = ClippingSettings()
    record_norm: Annotated[float, Limits(ge=1e-4, le=1e4)] = 1.0
    """L2 clip norm of one record in the first round of a model with a projection."""
    local_steps: Annotated[int, Limits(ge=1, le=64)] = 1
    """Noisy steps of a device in a round."""
    local_learning_rate: Annotated[float, Limits(ge=0, le=1000)] = 0.1
    """Learning rate of local steps, if there are several."""
    two_point: TwoPointSettings = TwoPointSettings()
    device_noise: DeviceNoiseSettings | None = None
    local_training: LocalTrainingSettings = LocalTrainingSettings()
    schedule: ScheduleSettings = ScheduleSettings()

    @property
    def mechanism(self) -> type[Mechanism]:
        """What adds the noise."""
        return mechanism_of(method_named(self.method), self.noise)

    @property
    def spending(self) -> Schedule:
        """How the rounds share the budget."""
        return self.schedule.schedule(method_named(self.method).schedule)

    @property
    def clip_norms(self) -> tuple[float, float]:
        """Least and greatest clip norm of a round, where it follows a quantile."""
        span = self.clipping.span
        return max(self.clip_norm / span, MIN_NORM), min(self.clip_norm * span, MAX_NORM)

    @property
    def gradient_norm(self) -> Norm:
        """In which devices clip gradients; where they train without noise, no gradient reaches the bound."""
        norm = self.mechanism.norm
        return Norm.L2 if norm is None or method_named(self.method).trains_locally else norm

    @rule
    def _noise_of_devices_is_beside_another(self) -> None:
        if self.device_noise is not None and self.method != "central":
            raise ValueError(
                f"device_noise is set and method is {self.method}; expected method central: with the others, "
                "the only noise is the devices' own"
            )

    @rule
    def _has_such_noise(self) -> None:
        try:
            mechanism = self.mechanism
        except DpagentError as error:
            raise ValueError(str(error)) from error
        if method_named(self.method).trains_locally:
            if mechanism.norm is None and self.clipping.kind != "whole":
                raise ValueError(
                    f"clipping.kind is {self.clipping.kind}; expected whole: method {self.method} clips "
                    "weights to the ranges of their layers"
                )
            if self.clipping.kind == "layers":
                raise ValueError(
                    f"clipping.kind is layers; expected whole or quantile: method {self.method} clips whole "
                    "updates"
                )
        elif mechanism.norm is Norm.L1 and self.clipping.kind != "whole":
            raise ValueError(
                f"noise is {self.noise}, which needs records clipped in {mechanism.norm}, and clipping.kind"
                f" is {self.clipping.kind}, which clips in L2; expected whole, or noise gaussian"
            )


class CapSettings(Settings):
    """The noise cap."""

    kind: Literal["none", "clamp", "bounded", "published"] = "clamp"
    """``clamp`` bounds each coordinate of the noisy mean by the gradient of an L2 penalty: post-processing,
    without privacy cost. ``bounded``, for Laplace noise, draws noise that stays within a bound, and charges
    what that costs. ``published`` is Algorithm 1 of Luo, Xu and Guan to the letter, and guarantees nothing:
    only with ``allow_unproven``, here and on every device."""
    allow_unproven: bool = False
    """``published``: whether a job may run that guarantees nothing. For data that are not private alone."""
    where: Literal["coordinator", "device"] = "coordinator"
    """``clamp``: the coordinator caps the fleet's mean, or each device its own."""
    regularisation: Annotated[float, Limits(gt=0, le=1e6)] = 0.5
    """γ: the bound of a coordinate is γ times the absolute value of its weight; ``bounded`` takes the largest
    weight for all."""
    floor: Annotated[float, Limits(gt=0, le=1e6)] = 0.05
    """Smallest bound of a coordinate, so that a zero weight can change."""


class OptimiserSettings(Settings):
    """The coordinator's step on the mean gradient."""

    kind: Literal["sgd", "adam"] = "sgd"
    """``sgd``, with momentum; ``adam`` scales each coordinate's step by running moments."""
    learning_rate: Annotated[float, Limits(gt=0, le=1000)] = 0.5
    """Initial learning rate."""
    final_learning_rate: Annotated[float, Limits(gt=0, le=1000)] | None = None
    """Final learning rate of a linear decay; by default the rate is constant."""
    decay_rounds: Annotated[int, Limits(ge=1)] | None = None
    """Rounds of the decay, not counting that of a projection; by default all."""
    momentum: Annotated[float, Limits(ge=0, lt=1)] = 0.9
    """``sgd``: momentum. ``adam``: β₁."""
    second_moment: Annotated[float, Limits(ge=0, lt=1)] = 0.999
    """``adam``: β₂."""

    def optimiser(self) -> Optimiser:
        """The optimiser these settings describe."""
        return Sgd(self.momentum) if self.kind == "sgd" else Adam(self.momentum, self.second_moment)

    def learning_rates(self, rounds: int) -> LearningRate:
        """The learning rates of a job with this number of gradient steps."""
        return LearningRate(self.learning_rate, self.final_learning_rate, self.decay_rounds or rounds)
