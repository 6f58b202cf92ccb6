"""What one demo run was asked for, kept in its state directory so that it can go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dpagent.errors import ConfigurationError
from dpagent.learning.data.settings import DatasetSettings
from dpagent.storage import disk_errors, write_atomically

OPTIONS_FILE = "demo.json"
COMMAND_FILE = "command.txt"


@dataclass(frozen=True, slots=True)
class DataForm:
    """What is public of a run's data: how much there is, and of what form."""

    train_records: int
    test_records: int
    shape: list[int]
    """Of one record."""
    classes: int
    class_names: list[str] = field(default_factory=list)
    """Empty where classes are numbers only."""


@dataclass(frozen=True, slots=True)
class DataChoice:
    """Which data, what they are tested on, and how they are dealt to the devices."""

    name: str
    """``digits``, ``mnist``, or what data of one's own are called: in reports and ledgers."""
    train: dict[str, Any] | None = None
    """Settings of the data as of ``agent.yaml``, the path absolute; None for the digits."""
    test: dict[str, Any] | None = None
    """The same of test data of their own."""
    test_share: float | None = None
    """Share of the records held out; None takes the test half that data bring, else a fifth."""
    split: Literal["iid", "dirichlet", "class", "file"] = "iid"
    alpha: float = 0.5
    classes_per_device: int = 2

    @property
    def train_settings(self) -> DatasetSettings | None:
        """``train`` as settings."""
        return _settings(self.train)

    @property
    def test_settings(self) -> DatasetSettings | None:
        """``test`` as settings."""
        return _settings(self.test)

    @property
    def split_in_words(self) -> str:
        """For people: how the records came to the devices."""
        match self.split:
            case "dirichlet":
                return f"of each class shares drawn from Dirichlet({self.alpha:g})"
            case "class":
                return f"{self.classes_per_device} shards a device of the records sorted by class"
            case "file":
                return "whole files or groups"
        return "at random (iid)"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """A run. Everything here is part of the job and may not change when it goes on."""

    data: DataChoice
    form: DataForm
    model: str
    """A built-in model, the path of a model file, or empty for one that was made for the data."""
    devices: int
    rounds: int
    epsilon: float
    delta: float
    schedule: Literal["incrementing", "uniform", "linear"]
    step: float
    sampling_rate: float
    clip_norm: float
    learning_rate: float
    momentum: float
    cap: str
    cap_at: str
    seed: int
    jitter_window_s: float
    clipping: Literal["whole", "layers", "quantile"] = "whole"
    engine: Literal["auto", "numpy", "onnx"] = "auto"
    compute_slot_s: float = 0.0
    """0: as long as training takes on this machine, by trial."""
    fragments_per_update: int = 16
    baseline: bool = True
    """Whether the same training is also run without noise."""

    @property
    def records_per_device(self) -> int:
        """The public estimate that sums are divided by: training records over devices."""
        return self.form.train_records // self.devices

    def save(self, state_dir: Path) -> None:
        """Keep the options of a run that can begin.

        Raises:
            StorageError: The directory cannot be written.
        """
        with disk_errors(state_dir):
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        write_atomically(state_dir / OPTIONS_FILE, f"{text}\n".encode())

    def require_match(self, state_dir: Path) -> None:
        """Make sure that a directory is free for a new run, or goes on with the run it holds.

        Raises:
            ConfigurationError: The directory holds a run with other options, or something else.
        """
        before = _read(state_dir)
        if before is None:
            return
        difference = _difference(before, json.loads(json.dumps(asdict(self))))
        if difference is not None:
            name, old, new = difference
            began = read_command(state_dir)
            raise ConfigurationError(
                f"The demo in {state_dir} was started with {name} = {old!r}, not {new!r}. "
                "To begin another run, give another --state-dir; to go on with this one, "
                + (f"the command of before: {began}" if began else "the same options.")
            )


def read_command(state_dir: Path) -> str:
    """The command line that began the run in a directory; nothing where it was not noted."""
    try:
        return (state_dir / COMMAND_FILE).read_text(errors="replace").strip()
    except OSError:
        return ""


def load_options(state_dir: Path) -> DemoOptions:
    """The options of the run in a directory.

    Raises:
        ConfigurationError: There is none, or its file is damaged.
    """
    values = _read(state_dir)
    if values is None:
        raise ConfigurationError(f"{state_dir} holds no demo; expected a state directory of one.")
    try:
        data, form = DataChoice(**values.pop("data")), DataForm(**values.pop("form"))
        return DemoOptions(data=data, form=form, **values)
    except (KeyError, TypeError) as error:
        raise _damaged(state_dir, error) from error


def form_of_run(state_dir: Path) -> DataForm | None:
    """The form of the data of the run that a directory holds, or None where it holds none yet.

    Raises:
        ConfigurationError: The directory holds something else.
    """
    values = _read(state_dir)
    if values is None:
        return None
    try:
        return DataForm(**values["form"])
    except (KeyError, TypeError) as error:
        raise _damaged(state_dir, error) from error


def _settings(values: dict[str, Any] | None) -> DatasetSettings | None:
    return None if values is None else DatasetSettings.model_validate(values | {"path": Path(values["path"])})


def _read(state_dir: Path) -> dict[str, Any] | None:
    file = state_dir / OPTIONS_FILE
    with disk_errors(state_dir):
        if state_dir.exists() and not state_dir.is_dir():
            raise ConfigurationError(
                f"--state-dir {state_dir} is a file; expected a directory, new, empty or of a run."
            )
        if not file.exists():
            if state_dir.exists() and any(entry.name != "lock" for entry in state_dir.iterdir()):
                raise ConfigurationError(
                    f"{state_dir} is not empty and holds no demo. Give --state-dir a new or empty directory."
                )
            return None
        try:
            values = json.loads(file.read_text())
        except ValueError as error:
            raise _damaged(state_dir, error) from error
    if not isinstance(values, dict):
        raise _damaged(state_dir, "not an object")
    return values


def _damaged(state_dir: Path, why: object) -> ConfigurationError:
    return ConfigurationError(
        f"{state_dir / OPTIONS_FILE} is damaged, or of another version ({why}). "
        "Give --state-dir another directory."
    )


def _difference(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first option that differs: its name and both values."""
    for name in {**now, **before}:
        old, value = before.get(name), now.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if (inner := _difference(old, value)) is not None:
                return f"{name}.{inner[0]}", *inner[1:]
        elif old != value:
            return name, old, value
    return None
