"""A user's request to a simulated fleet. Open values follow the data (``presets.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from dpagent.errors import ParameterError
from dpagent.learning.data.settings import DatasetSettings
from dpagent.privacy.mechanisms.registry import mechanism_of
from dpagent.privacy.methods import DEFAULT_METHOD, method_named
from dpagent.schema.base import rule
from dpagent.schema.limits import After, Limits
from dpagent.settings import Settings
from dpagent.transport.settings import broker_url
from dpagent.wording import counted

KnownData: TypeAlias = Literal["digits", "mnist"]
"""Data that have settings of their own."""
Devices: TypeAlias = Annotated[int, Limits(ge=1, le=1_000_000)]
Rounds: TypeAlias = Annotated[int, Limits(ge=1, le=5000)]
Epsilon: TypeAlias = Annotated[float, Limits(gt=0, le=1000)]
Delta: TypeAlias = Annotated[float, Limits(gt=0, lt=1)]
ScheduleKind: TypeAlias = Literal["incrementing", "uniform", "linear"]
ScheduleStep: TypeAlias = Annotated[float, Limits(ge=0, le=0.99)]
SamplingRate: TypeAlias = Annotated[float, Limits(gt=0, le=1)]
ClipNorm: TypeAlias = Annotated[float, Limits(ge=1e-6, le=1e6)]
ClippingKind: TypeAlias = Literal["whole", "layers", "quantile"]
LearningRate: TypeAlias = Annotated[float, Limits(gt=0, le=1000)]
CapKind: TypeAlias = Literal["clamp", "none", "bounded", "published"]
CapPlace: TypeAlias = Literal["coordinator", "device"]
EngineKind: TypeAlias = Literal["auto", "numpy", "onnx"]
Jitter: TypeAlias = Annotated[float, Limits(ge=0, le=3600)]
Seed: TypeAlias = Annotated[int, Limits(ge=0)]


def _absolute(settings: DatasetSettings) -> DatasetSettings:
    """With a path that is the same from wherever a run goes on."""
    return settings.with_values({"path": settings.path.absolute()})


Records: TypeAlias = Annotated[DatasetSettings, After(_absolute)]


class DataSelection(Settings):
    """The data, the test data, and the split over the devices."""

    dataset: KnownData | None = None
    """``digits`` come with scikit-learn; ``mnist`` are ``train`` with settings of their own."""
    train: Records | None = None
    """Data of one's own, as in ``agent.yaml``; None for the digits."""
    test: Records | None = None
    """Test data of their own."""
    test_share: Annotated[float, Limits(gt=0, le=0.9)] | None = None
    """Share of the records held out; None takes the test half that data bring, else a fifth."""
    split: Literal["iid", "dirichlet", "class", "file"] = "iid"
    """How records come to devices."""
    alpha: Annotated[float, Limits(ge=1e-3, le=1e6)] = 0.5
    """``dirichlet``: small for devices that differ much."""
    classes_per_device: Annotated[int, Limits(ge=1)] = 2
    """``class``: shards of the sorted records that a device gets."""

    @classmethod
    def prepared(cls, values: Any) -> Any:
        """With the digits, where no data of one's own are named."""
        if isinstance(values, dict) and values.get("train") is None:
            return {"dataset": "digits"} | {key: value for key, value in values.items() if value is not None}
        return values

    @rule
    def _is_possible(self) -> None:
        if (self.train is None) != (self.dataset == "digits"):
            raise ValueError(f"dataset {self.dataset} and train do not go together: only digits are bundled")
        if self.train is None and (self.test is not None or self.test_share is not None):
            raise ValueError("the digits have a test half of their own; test and test_share go with train")
        if self.test is not None and self.test_share is not None:
            raise ValueError("test and test_share exclude each other; expected one of them")

    def as_dict(self, **how: Any) -> dict[str, Any]:
        """As of the base. Of data of one's own, the values that were set alone: a command that reads them has
        no other options."""
        made = super().as_dict(**how)
        return made | {
            key: getattr(self, key).as_dict(only_given=True)
            for key in ("train", "test")
            if made.get(key) is not None
        }

    @property
    def name(self) -> str:
        """The name of the data in reports and ledgers; of one's own data, the last part of their path."""
        return self.dataset or data_name(self.train.path if self.train is not None else Path())

    @property
    def split_in_words(self) -> str:
        """How the records came to the devices, for people."""
        match self.split:
            case "dirichlet":
                return f"of each class shares drawn from Dirichlet({self.alpha:g})"
            case "class":
                return f"{counted(self.classes_per_device, 'shard')} a device of the records sorted by class"
            case "file":
                return "whole files or groups"
        return "at random (iid)"


class Request(Settings):
    """A run that is asked for. None is settled by preset and rules.

    >>> Request(rounds=10).data.name
    'digits'
    """

    data: DataSelection = DataSelection()
    model: Annotated[str, Limits(min_length=1)] | None = None
    """A built-in model or the path of a model file; None takes one that fits the data."""
    devices: Devices | None = None
    rounds: Rounds | None = None
    epsilon: Epsilon | None = None
    """Of the job, for each record."""
    delta: Delta = 1e-5
    method: str = DEFAULT_METHOD
    """How the fleet trains; see ``dpagent.privacy.methods``."""
    noise: str | None = None
    """Kind of the noise; None takes the method's own."""
    schedule: ScheduleKind | None = None
    """How the budget is spread over the rounds; None: ``incrementing`` with a step, else the method's own."""
    step: ScheduleStep | None = None
    """``incrementing``: the step as a fraction of its maximum."""
    clip_norm: ClipNorm | None = None
    """Norm that gradients of records, or updates of devices, are clipped to, in that which the noise needs:
    L1 or L2."""
    device_noise: Epsilon | None = None
    """``central``: ε of the job for each device, nobody trusted, by noise that it adds itself; None: none."""
    learning_rate: LearningRate | None = None
    """Of the coordinator's step."""
    sampling_rate: SamplingRate | None = None
    """Probability with which each record is in a round's lot."""
    clipping: ClippingKind = "whole"
    """Whether the gradient, or the update, is clipped as a whole, layer by layer, or to a private quantile of
    the norms."""
    cap: CapKind | None = None
    allow_unproven: bool = False
    """Whether rounds may run that guarantee nothing."""
    cap_at: CapPlace = "coordinator"
    engine: EngineKind = "auto"
    """The engine that computes the agents' gradients."""
    mixer: bool = False
    """Whether fragments pass through a mixer, a program of its own."""
    baseline: bool = True
    """Whether the same training is also run without noise."""
    seed: Seed = 0
    """Of splits and initial weights; never of noise."""
    jitter_window_s: Jitter | None = None
    """Over which an agent spreads its fragments."""

    @rule
    def _method_is_known(self) -> None:
        try:
            mechanism_of(method_named(self.method), self.noise)
        except ParameterError as error:
            raise ValueError(str(error)) from error


STARTED_BROKERS: Final = ("auto", "embedded", "mosquitto")


def _broker(choice: str) -> str:
    if choice in STARTED_BROKERS:
        return choice
    if "://" not in choice:
        raise ValueError(f"expected {', '.join(STARTED_BROKERS)} or mqtt://host[:port]")
    return broker_url(choice)


class BrokerRequest(Settings):
    """Which broker a fleet uses."""

    broker: Annotated[str, After(_broker)] = "auto"
    """``auto``, ``embedded``, ``mosquitto``, or the URL of one that runs: ``mqtt://host:port``."""
    broker_port: Annotated[int, Limits(ge=0, le=65_535)] = 0
    """TCP port of a broker that is started; 0 takes a free one."""
    mqtt_username: str | None = None
    """For a URL."""
    mqtt_password_file: Path | None = None
    """For a URL."""


def data_name(path: Path) -> str:
    """The name of data: the last part of their path, as far as it can be shown."""
    name = "".join(letter for letter in path.absolute().name if letter.isprintable())
    return name[:64] or "data"
