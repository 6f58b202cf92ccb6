"""The file of a sweep: what all runs have in common, and the values that each setting takes.

::

    records: public
    base: {devices: 20, rounds: 30, epsilon: 4}
    vary:
      learning_rate: [0.5, 1, 2]
      clip_norm: [0.25, 0.5]
    seeds: [0, 1]

Each combination of the values is a *setting*, and is run once for each seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from dpagent.configuration import load_settings, resolve
from dpagent.errors import ConfigurationError
from dpagent.schema.base import rule
from dpagent.schema.limits import Before, Limits
from dpagent.schema.problems import SchemaError
from dpagent.settings import Settings
from dpagent.wording import counted
from simulation.request import (
    ClipNorm,
    ClippingKind,
    Devices,
    Epsilon,
    LearningRate,
    Rounds,
    SamplingRate,
    ScheduleKind,
    ScheduleStep,
    Seed,
)
from simulation.virtual.settings import VirtualRequest

MOST_RUNS: Final = 1_000


class Vary(Settings):
    """The values that settings take. One that is left out is as in ``base``."""

    learning_rate: Annotated[list[LearningRate], Limits(min_length=1)] | None = None
    """Of the coordinator's step."""
    clip_norm: Annotated[list[ClipNorm], Limits(min_length=1)] | None = None
    """Norm that gradients of records, or updates of devices, are clipped to."""
    clipping: Annotated[list[ClippingKind], Limits(min_length=1)] | None = None
    """Whether the gradient, or the update, is clipped as a whole, by layers or to a quantile."""
    sampling_rate: Annotated[list[SamplingRate], Limits(min_length=1)] | None = None
    """Probability with which each record is in a round's lot."""
    lot: Annotated[list[Annotated[float, Limits(gt=0)]], Limits(min_length=1)] | None = None
    """Records that a lot is expected to have, in place of ``sampling_rate``."""
    schedule: Annotated[list[ScheduleKind], Limits(min_length=1)] | None = None
    """How the budget is spread over the rounds."""
    step: Annotated[list[ScheduleStep], Limits(min_length=1)] | None = None
    """Of an incrementing schedule, as a fraction of its maximum."""
    method: Annotated[list[str], Limits(min_length=1)] | None = None
    """How the fleet trains."""
    noise: Annotated[list[str], Limits(min_length=1)] | None = None
    """Kind of the noise."""
    devices: Annotated[list[Devices], Limits(min_length=1)] | None = None
    rounds: Annotated[list[Rounds], Limits(min_length=1)] | None = None
    epsilon: Annotated[list[Epsilon], Limits(min_length=1)] | None = None
    """Of the job."""

    @rule
    def _is_consistent(self) -> None:
        if self.lot is not None and self.sampling_rate is not None:
            raise ValueError("lot and sampling_rate are two names of one setting; expected one of them")
        for key in self.given:
            values = getattr(self, key)
            if values is not None and len(set(values)) < len(values):
                raise ValueError(f"{key} has a value twice; expected different ones")
        if not any(getattr(self, key) for key in self.given):
            raise ValueError(f"nothing is varied; expected one of {', '.join(type(self).names)}")


def _without_seed(base: Any) -> Any:
    if isinstance(base, dict) and "seed" in base:
        raise ValueError("base has a seed; expected the list seeds beside base")
    return base


class SweepFile(Settings):
    """A sweep that is asked for."""

    records: Literal["public", "private"]
    """Whether the training records may be published. With private ones, the page says what it costs them, and
    no run may show what no ε covers."""
    base: Annotated[VirtualRequest, Before(_without_seed)] = VirtualRequest()
    """What all runs have in common: the keys are those of a run."""
    vary: Vary
    seeds: Annotated[tuple[Seed, ...], Limits(min_length=1)] = (0,)
    """Of splits and initial weights: each setting is run once for each. Of private records, all runs hold out
    the same ones to test on, those of the first seed."""

    @rule
    def _names_each_setting_once(self) -> None:
        for key in self.vary.given:
            if key in self.base.given:
                raise ValueError(f"{key} is in base and in vary; expected it in one of them")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds has a value twice; expected different ones")
        if self.records == "private":
            self._pays_for_what_it_shows()
        if (runs := len(self.settings()) * len(self.seeds)) > MOST_RUNS:
            raise ValueError(f"the sweep has {counted(runs, 'run')}; expected at most {MOST_RUNS:,}")

    def _pays_for_what_it_shows(self) -> None:
        """The price of a sweep is that of noise which nobody knows. Without such noise there is none."""
        if self.base.baseline:
            raise ValueError(
                "base.baseline trains without noise, which no epsilon covers, and records are private; "
                "expected a sweep without it, or `dpagent simulate` for a look that stays with you"
            )
        if self.base.insecure_noise_seed is not None:
            raise ValueError(
                "base.insecure_noise_seed makes noise that can be taken off, which no epsilon covers, and "
                "records are private; expected a sweep without it"
            )

    def settings(self) -> list[dict[str, Any]]:
        """Each combination of the values, in the order of the file."""
        varied = {key: getattr(self.vary, key) for key in Vary.names if getattr(self.vary, key)}
        return [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        number: from 1.
        setting: number of its setting, from 1.
        varied: what the setting is.
        request: all of it.
    """

    number: int
    setting: int
    varied: Mapping[str, Any]
    request: VirtualRequest

    @property
    def in_words(self) -> str:
        """``learning_rate 0.5, clip_norm 1``."""
        return setting_in_words(self.varied)


def setting_in_words(varied: Mapping[str, Any]) -> str:
    """What a setting is, for people."""
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in varied.items()
    )


def load_sweep(file: Path) -> SweepFile:
    """Read a sweep; paths in it are relative to it.

    Raises:
        ConfigurationError: It is missing or invalid; the text names file, line, key and what was expected.
    """
    sweep = load_settings(file, SweepFile)
    data = sweep.base.data
    paths = {
        name: settings.with_values({"path": resolve(_as_written(settings.path), file).absolute()})
        for name in ("train", "test")
        if (settings := getattr(data, name)) is not None
    }
    base = sweep.base.with_values({"data": data.with_values(paths)}) if paths else sweep.base
    if base.model is not None and base.model.endswith((".yaml", ".yml")):
        base = base.with_values({"model": str(resolve(Path(base.model), file).absolute())})
    return sweep.with_values({"base": base})


def runs_of(sweep: SweepFile, file: Path) -> list[SweepRun]:
    """All runs of a sweep.

    Args:
        sweep: As it was read.
        file: Of it, for errors.

    Raises:
        ConfigurationError: A setting is impossible.
    """
    runs: list[SweepRun] = []
    given = {key: getattr(sweep.base, key) for key in sweep.base.given}
    for place, varied in enumerate(sweep.settings(), start=1):
        changes = {key: value for key, value in varied.items() if key != "lot"}
        for seed in sweep.seeds:
            try:
                request = VirtualRequest.checked(given | changes | {"seed": seed})
            except SchemaError as error:
                raise ConfigurationError(
                    f"{file}: setting {place} ({setting_in_words(varied)}): {error.first.complaint()}."
                ) from error
            runs.append(SweepRun(len(runs) + 1, place, varied, request))
    return runs


def with_lot(request: VirtualRequest, lot: float, records_per_device: int, where: str) -> VirtualRequest:
    """A request whose lots are expected to have so many records.

    Args:
        request: Without it.
        lot: Expected records of a lot.
        records_per_device: Of each device, as the data are split.
        where: What names the setting, for an error.

    Raises:
        ConfigurationError: A device has fewer records.
    """
    if lot > records_per_device:
        raise ConfigurationError(
            f"{where}: a lot of {counted(lot, 'record')}; expected at most {records_per_device}, as each "
            "device has."
        )
    return request.with_values({"sampling_rate": lot / records_per_device})


def _as_written(path: Path) -> Path:
    """A path that was made absolute from the working directory, relative to that again."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
