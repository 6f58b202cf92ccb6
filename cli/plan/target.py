"""The input of a plan: the privacy target, the schedules to compare, and the fleet."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cli.configurations import fleet_settings
from dpagent.errors import ConfigurationError, ParameterError, require_count
from dpagent.learning.training.engine import ACCUMULATION_SLACK
from dpagent.privacy.calibration import EPSILON_RANGE
from dpagent.privacy.mechanisms.central import CentralMechanism
from dpagent.privacy.mechanisms.device_noise import DEVICE_NOISE, DeviceNoise
from dpagent.privacy.mechanisms.mechanism import CalibratedMechanism, Query
from dpagent.privacy.mechanisms.registry import mechanism_of
from dpagent.privacy.methods import DEFAULT_METHOD, METHODS, method_named
from dpagent.privacy.ranges import ScheduleKind
from dpagent.privacy.schedules import Schedule, kind_given_by
from dpagent.schema.limits import Limits
from dpagent.settings import Settings
from dpagent.wording import named

MAX_ROUNDS: Final = 5000
_MAX_WEIGHTS_BYTES: Final = 1_000_000

_OF_LOTS: Final = frozenset({"sampling_rate", "local_steps"})
_ARITHMETIC: Final[tuple[ScheduleKind, ...]] = ("uniform", "incrementing", "linear")


class PlanOptions(Settings):
    """The options of a plan; None leaves a value to the fleet's file, or to the default."""

    epsilon: Annotated[float, Limits(ge=EPSILON_RANGE[0], le=EPSILON_RANGE[1])] | None = None
    delta: Annotated[float, Limits(gt=0, lt=1)] | None = None
    rounds: Annotated[int, Limits(ge=1, le=MAX_ROUNDS)] | None = None
    sampling_rate: Annotated[float, Limits(gt=0, le=1)] | None = None
    schedule: Literal["incrementing", "uniform", "linear"] | None = None
    step: Annotated[float, Limits(ge=0, le=0.99)] | None = None
    ratio: Annotated[float, Limits(ge=1, le=100)] | None = None
    custom: str | None = None
    """Weights of a custom schedule, or a file of them."""
    local_steps: Annotated[int, Limits(ge=1, le=64)] | None = None
    devices: Annotated[int, Limits(ge=1, le=1_000_000)] | None = None
    records_per_device: Annotated[float, Limits(gt=0, le=1e12)] | None = None
    parameters: Annotated[int, Limits(ge=1, le=2**28)] | None = None
    method: str | None = None
    noise: str | None = None
    device_noise: Annotated[float, Limits(ge=EPSILON_RANGE[0], le=EPSILON_RANGE[1])] | None = None


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """The input of a comparison of schedules, with the command's defaults. Public.

    Attributes:
        epsilon: of the whole job, for each record; :func:`~dpagent.privacy.calibration.calibrate` checks it.
        delta: of the whole job, for each record; checked there too.
        rounds: in [1, 5000].
        sampling_rate: probability that a record is in a lot.
        local_steps: noisy steps of a device in a round, in [1, 64].
        schedule: kind of the requested schedule.
        step: of ``incrementing``.
        ratio: of ``linear``.
        weights: of ``custom``; empty without such a schedule.
        devices: in a round, in [1, 1e6].
        records_per_device: public estimate, in (0, 1e12].
        parameters: d, of the model, in [1, 2²⁸]; by default those of the built-in model for MNIST.
        cap: the noise cap in the fleet's file, or None.
        method: by name.
        noise: the kind of its noise; None for the method's own.
        device_noise: of ``central``, ε of the whole job for each device with nobody trusted, which noise of
            its own gives it besides; None without such noise.
    """

    epsilon: float = 2.0
    delta: float = 1e-5
    rounds: int = 100
    sampling_rate: float = 0.1
    local_steps: int = 1
    schedule: ScheduleKind = method_named(DEFAULT_METHOD).schedule
    step: float = 0.3
    ratio: float = 3.0
    weights: tuple[float, ...] = ()
    devices: int = 100
    records_per_device: float = 1000.0
    parameters: int = 26_010
    cap: str | None = None
    method: str = DEFAULT_METHOD
    noise: str | None = None
    device_noise: float | None = None

    @property
    def mechanism(self) -> type[CalibratedMechanism]:
        """What adds the noise.

        Raises:
            ParameterError: there is no such method, or no such noise, or it is not for sums.
        """
        mechanism = mechanism_of(method_named(self.method), self.noise)
        if not issubclass(mechanism, CalibratedMechanism):
            expected = [
                name for name, each in METHODS.items() if issubclass(mechanism_of(each), CalibratedMechanism)
            ]
            raise ParameterError(
                f"method is {self.method}; expected {' or '.join(expected)}, which add noise to sums. "
                f"`dpagent demo --method {self.method}` prices and runs it."
            )
        return mechanism

    @property
    def sums_updates(self) -> bool:
        """Whether the coordinator adds the noise, to a sum of whole updates; else each device does, to sums
        over random lots of its records."""
        return issubclass(self.mechanism, CentralMechanism)

    @property
    def device_mechanism(self) -> type[DeviceNoise] | None:
        """What each device adds to its own update besides, if anything."""
        if self.device_noise is None or not self.sums_updates:
            return None
        return DEVICE_NOISE[self.mechanism.norm]

    @property
    def expected_lot(self) -> float:
        """Expected number of records in one device's lot."""
        return self.sampling_rate * self.records_per_device

    @property
    def averaged_over(self) -> float:
        """How many times smaller a coordinate's noise is in the fleet's mean than as it is drawn."""
        if self.sums_updates:
            return self.devices
        return self.expected_lot * math.sqrt(self.devices * self.local_steps)

    @property
    def query(self) -> Query:
        """The query of a round, in units of the clip norm."""
        return Query(
            clip_norm=1.0,
            accumulation_slack=None if self.sums_updates else ACCUMULATION_SLACK,
            dimension=self.parameters,
            sampling_rate=self.sampling_rate,
            steps=self.local_steps,
        )

    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules to compare, uniform first.

        Raises:
            ParameterError: step, ratio or weights are out of range.
        """
        rules = (Schedule(kind=kind, step=self.step, ratio=self.ratio) for kind in _ARITHMETIC)
        return (*rules, Schedule(kind="custom", weights=self.weights)) if self.weights else tuple(rules)


def target_from(options: PlanOptions, *, config: Path | None) -> PlanTarget:
    """The target of a command line: its options, then the fleet's file, then the defaults.

    A custom schedule is the requested one unless the options name another, and sets the number of rounds
    unless they do. Else it is the one that a step or a ratio is given for, or the method's own.

    Args:
        options: those that were given.
        config: a coordinator's ``fleet.yaml``.

    Raises:
        ConfigurationError: a file is missing or malformed.
        ParameterError: a number is out of range.
    """
    values = {} if config is None else _from_fleet(config)
    if options.custom is not None:
        weights = _weights(options.custom)
        require_count(f"the number of weights of {named('custom')}", len(weights), maximum=MAX_ROUNDS)
        values |= {"weights": weights, "schedule": "custom", "rounds": len(weights)}
    given = options.as_dict(only_set=True, exclude={"custom"})
    if options.custom is None and (kind := kind_given_by(given)) is not None:
        values["schedule"] = kind
    values |= given
    if method_named(values.get("method", DEFAULT_METHOD)).trains_locally:
        for name in _OF_LOTS & given.keys():
            raise ParameterError(
                f"{named(name)} is {given[name]:g}, and method {values['method']} draws no lots at random; "
                f"expected no {named(name)}."
            )
        values |= dict.fromkeys(_OF_LOTS, 1)
    if "device_noise" in given and (method := values.get("method", DEFAULT_METHOD)) != "central":
        raise ParameterError(
            f"{named('device_noise')} is {given['device_noise']:g}, and method {method} has no other noise "
            "than that of devices; expected method central."
        )
    if "schedule" not in values:
        values["schedule"] = method_named(values.get("method", DEFAULT_METHOD)).schedule
    return PlanTarget(**values)


def _from_fleet(file: Path) -> dict[str, Any]:
    settings = fleet_settings(file)
    privacy, schedule = settings.privacy, settings.privacy.spending
    return {
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "rounds": settings.rounds,
        "sampling_rate": privacy.sampling_rate,
        "local_steps": privacy.local_steps,
        "schedule": schedule.kind,
        "step": schedule.step,
        "ratio": schedule.ratio,
        "weights": schedule.weights,
        "devices": settings.devices,
        "records_per_device": settings.records_per_device,
        "parameters": settings.model.spec().parameter_count,
        "cap": settings.cap.kind,
        "method": privacy.method,
        "noise": privacy.noise,
        "device_noise": privacy.device_noise and privacy.device_noise.epsilon,
    }


def _weights(text: str) -> tuple[float, ...]:
    """Numbers as in ``1,2,3``, or those in the file of that name."""
    if numbers := _numbers(text):
        return numbers
    file = Path(text)
    try:
        with file.open(encoding="utf-8") as stream:
            content = stream.read(_MAX_WEIGHTS_BYTES)
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(
            f"--custom {text}: give numbers such as 1,2,3 or a file of them ({reason})."
        ) from error
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip(" \t,") and _numbers(line) is None:
            raise ConfigurationError(f"{file}:{number}: expected numbers, got {line.strip()[:40]!r}.")
    if not (numbers := _numbers(content)):
        raise ConfigurationError(f"{file}: expected a number for each round; the file has none.")
    return numbers


def _numbers(text: str) -> tuple[float, ...] | None:
    """The numbers in ``text``, separated by commas or white space; None if it contains anything else."""
    try:
        return tuple(float(word) for word in re.split(r"[\s,]+", text) if word)
    except ValueError:
        return None
