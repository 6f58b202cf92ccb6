"""The outcomes that a sweep's directory keeps, read without its data."""

from __future__ import annotations

import json
from pathlib import Path

from dpagent.errors import ConfigurationError
from dpagent.storage import disk_errors
from simulation.sweep.file import SweepRun
from simulation.sweep.sweep import RunOutcome
from simulation.virtual.settings import VirtualRequest


def kept_outcomes(directory: Path) -> list[RunOutcome]:
    """The runs that are done, at least one.

    Raises:
        ConfigurationError: The directory holds no sweep, or one without a run.
        StorageError: It cannot be read.
    """
    with disk_errors(directory):
        files = sorted((directory / "runs").glob("*.json"))
    outcomes = []
    for file in files:
        try:
            values = json.loads(file.read_text())
            run = SweepRun(
                values["run"], values["setting"], values["varied"], VirtualRequest(seed=values["seed"])
            )
            outcomes.append(RunOutcome(run, values["results"], values["settings"], values["seconds"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{file} is damaged, or of another version. Sweep again.") from error
    if not outcomes:
        raise ConfigurationError(
            f"{directory} holds no run of a sweep. Expected the state directory of `dpagent sweep run`."
        )
    return outcomes
