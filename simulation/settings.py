"""A run with every value settled, kept in its state directory so that it can go on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from dpagent.configuration import changed_settings
from dpagent.errors import ConfigurationError
from dpagent.learning.data.declared import DType
from dpagent.learning.data.input_form import InputForm
from dpagent.norm import Norm
from dpagent.privacy.mechanisms.mechanism import Mechanism
from dpagent.privacy.mechanisms.published import PublishedLaplace
from dpagent.privacy.mechanisms.registry import mechanism_of
from dpagent.privacy.methods import method_named
from dpagent.schema.json_values import json_values
from dpagent.schema.problems import SchemaError
from dpagent.settings import Settings
from dpagent.storage import disk_errors, write_atomically
from dpagent.wording import named
from simulation.request import (
    CapKind,
    CapPlace,
    ClipNorm,
    ClippingKind,
    DataSelection,
    Delta,
    Devices,
    EngineKind,
    Epsilon,
    Jitter,
    LearningRate,
    Request,
    Rounds,
    SamplingRate,
    ScheduleKind,
    ScheduleStep,
    Seed,
)

SETTINGS_FILE: Final = "demo.json"
COMMAND_FILE: Final = "command.txt"


@dataclass(frozen=True, slots=True)
class DataForm:
    """The public facts of a run's data: their number and form."""

    train_records: int
    test_records: int
    shape: tuple[int, ...]
    """Of one record."""
    classes: int
    class_names: tuple[str, ...] = ()
    """Empty where classes are numbers only."""
    dtype: DType = "float32"
    """Of a record's values."""
    inputs: InputForm | None = None
    """What made the records what they are."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes' names, or their numbers."""
        return self.class_names or tuple(map(str, range(self.classes)))


NOISY_UPDATES: Final = "updates with noise of their devices"
"""What the coordinator gets where devices add noise besides."""


def cap_in_words(cap: str, cap_at: str) -> str:
    """A noise cap and where it acts."""
    if cap in ("bounded", "published"):
        return f"{cap} on each device"
    return "none" if cap == "none" else f"{cap} at the {cap_at}"


class RunSettings(Settings):
    """A run, every value settled. All of it is part of the job, and may not change when the run goes on."""

    data: DataSelection
    form: DataForm
    model: str
    """A built-in model, the path of a model file, or empty for one that was made for the data."""
    devices: Devices
    rounds: Rounds
    epsilon: Epsilon
    delta: Delta
    method: str
    noise: str
    schedule: ScheduleKind
    step: ScheduleStep
    sampling_rate: SamplingRate
    clip_norm: ClipNorm
    clipping: ClippingKind
    device_noise: Epsilon | None
    """ε of the job for each device, nobody trusted, by noise that it adds itself; None: it adds none."""
    learning_rate: LearningRate
    momentum: float
    cap: CapKind
    cap_at: CapPlace
    engine: EngineKind
    seed: Seed
    jitter_window_s: Jitter
    compute_slot_s: float
    """0: as long as training takes on this machine, by trial."""
    fragments_per_update: int
    mixer: bool
    """Whether fragments pass through a mixer."""
    baseline: bool
    """Whether the same training is also run without noise."""

    FILE: ClassVar[str] = SETTINGS_FILE
    """In which a state directory keeps them."""

    @property
    def insecure(self) -> str:
        """Why nothing is guaranteed, whatever the mechanism is; empty where that is not so."""
        return ""

    @property
    def mechanism(self) -> type[Mechanism]:
        """What adds the noise."""
        if self.cap == "published":
            return PublishedLaplace
        return mechanism_of(method_named(self.method), self.noise)

    @property
    def sends(self) -> str:
        """What the coordinator gets of a device."""
        return method_named(self.method).sends if self.device_noise is None else NOISY_UPDATES

    @property
    def norm(self) -> Norm | None:
        """In which records are clipped, or whole updates, if they are."""
        return self.mechanism.norm

    @property
    def gradient_norm(self) -> Norm:
        """In which devices clip gradients; where they train without noise, no gradient reaches the bound."""
        return Norm.L2 if self.norm is None or method_named(self.method).trains_locally else self.norm

    @property
    def records_per_device(self) -> int:
        """The public estimate that sums are divided by: training records over devices."""
        return self.form.train_records // self.devices

    @property
    def minimum_devices(self) -> int:
        """Half of the devices must take part for a round to close."""
        return max(1, self.devices // 2)

    @property
    def cap_in_words(self) -> str:
        """The noise cap and where it acts."""
        return cap_in_words(self.cap, self.cap_at)

    def save(self, state_dir: Path) -> None:
        """Keep the settings of a run that can begin.

        Raises:
            StorageError: The directory cannot be written.
        """
        with disk_errors(state_dir):
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps(json_values(self), indent=2, ensure_ascii=False)
        write_atomically(state_dir / self.FILE, f"{text}\n".encode())

    def require_match(self, state_dir: Path) -> None:
        """Make sure that a directory is free for a new run, or goes on with the run it holds.

        Raises:
            ConfigurationError: The directory holds a run with other settings, or something else.
        """
        before = load_settings_of_run(state_dir, type(self))
        if before is None:
            return
        changes = changed_settings(json_values(before), json_values(self))
        # What a request cannot name follows from what it can.
        asked = [each for each in changes if each.key.partition(".")[0] in _asked_for(type(self))]
        if changes:
            began = read_command(state_dir)
            raise ConfigurationError(
                f"The run in {state_dir} was started with other settings: "
                f"{'; '.join(map(str, asked or changes))}. "
                f"To begin another run, give another {named('state_dir')}; to go on with this one, "
                + (f"the command of before: {began}" if began else "the same options.")
            )


def read_command(state_dir: Path) -> str:
    """The command line that began the run in a directory; nothing where it was not noted."""
    try:
        return (state_dir / COMMAND_FILE).read_text(errors="replace").strip()
    except OSError:
        return ""


def _asked_for(kind: type[RunSettings]) -> set[str]:
    """The settings that a request can name."""
    return {*Request.names} | ({*kind.names} - {*RunSettings.names})


RunT = TypeVar("RunT", bound=RunSettings)


def load_settings_of_run(state_dir: Path, kind: type[RunT]) -> RunT | None:
    """The settings of the run that a directory holds; None where it holds none yet.

    Args:
        state_dir: The directory.
        kind: Of run.

    Raises:
        ConfigurationError: The file is damaged, or the directory holds something else.
    """
    file = state_dir / kind.FILE
    with disk_errors(state_dir):
        if state_dir.exists() and not state_dir.is_dir():
            raise ConfigurationError(
                f"{named('state_dir')}: {state_dir} is a file; expected a directory, new, empty or of a run."
            )
        if not file.exists():
            if state_dir.exists() and any(entry.name != "lock" for entry in state_dir.iterdir()):
                raise ConfigurationError(
                    f"{state_dir} is not empty and holds no run. Give {named('state_dir')} a new or empty"
                    " directory."
                )
            return None
        content = file.read_bytes()
    try:
        return kind.from_json(content)
    except SchemaError as error:
        raise ConfigurationError(
            f"{file} is damaged, or of another version ({error.first.sentence()}). "
            f"Give {named('state_dir')} another directory."
        ) from error
