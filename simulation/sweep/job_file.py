"""The job of a setting, for a real fleet: a file that ``dpagent coordinator job add`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from coordinator.settings import JobSettings
from dpagent.errors import ConfigurationError
from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.schema.json_values import json_values
from dpagent.storage import write_atomically
from simulation.programs.configurations import fleet_settings
from simulation.virtual.settings import VirtualSettings

_OF_A_JOB: Final = (
    "records_per_device", "rounds", "model", "privacy", "cap", "optimiser", "fragments_per_update",
)  # fmt: skip


def job_values(settings: VirtualSettings) -> dict[str, Any]:
    """The keys of a job file: what was set, and nothing of the machine that simulated it.

    Raises:
        ConfigurationError: The model was made for the data, and lies in no file.
    """
    if settings.model not in BUILT_IN and not settings.model:
        raise ConfigurationError(
            "The model of this sweep was made for its data and lies in no file. Name a built-in model or a "
            "model file in the sweep's base, and sweep again."
        )
    job = fleet_settings(settings).job()
    values: dict[str, Any] = json_values(job.as_dict(include={*_OF_A_JOB}, only_given=True, only_set=True))
    if settings.model not in BUILT_IN:
        values["model"]["name"] = str(Path(settings.model).absolute())
    return values


def write_job_file(settings: VirtualSettings, file: Path, remarks: str) -> None:
    """Write the job file of a setting.

    Args:
        settings: Of a run.
        file: To be written.
        remarks: Lines of comment above it.

    Raises:
        ConfigurationError: As of :func:`job_values`.
        StorageError: It cannot be written.
    """
    values = job_values(settings)
    JobSettings.checked(values)
    comment = "".join(f"# {line}\n" for line in remarks.splitlines())
    write_atomically(file, (comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)).encode())
