"""What one demo run was asked for, kept in its state directory so that it can go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dpagent.errors import ConfigurationError
from dpagent.storage import disk_errors, write_atomically


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """A run. Everything here is part of the job and may not change when it goes on."""

    dataset: str
    data_dir: str | None
    model: str
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
    compute_slot_s: float
    jitter_window_s: float
    fragments_per_update: int = 16

    def save(self, state_dir: Path) -> None:
        """Keep the options of a run that can begin.

        Raises:
            StorageError: The directory cannot be written.
        """
        with disk_errors(state_dir):
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(state_dir / "demo.json", json.dumps(asdict(self), indent=2).encode() + b"\n")

    def require_match(self, state_dir: Path) -> None:
        """Make sure that a directory is free for a new run, or goes on with the run it holds.

        Raises:
            ConfigurationError: The directory holds a run with other options, or something else.
        """
        file = state_dir / "demo.json"
        with disk_errors(state_dir):
            if not file.exists():
                if state_dir.exists() and any(entry.name != "lock" for entry in state_dir.iterdir()):
                    raise ConfigurationError(
                        f"{state_dir} is not empty and holds no demo. "
                        "Give --state-dir a new or empty directory."
                    )
                return
            try:
                before = json.loads(file.read_text())
            except ValueError as error:
                raise ConfigurationError(
                    f"{file} is damaged ({error}). Give --state-dir another directory."
                ) from error
        now = asdict(self)
        for name, value in now.items():
            if before.get(name) != value:
                raise ConfigurationError(
                    f"The demo in {state_dir} was started with {name} = {before.get(name)!r}, not {value!r}. "
                    "Use the same options to go on with it, or another --state-dir."
                )
