"""Simulated fleets for tests, settled but not started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.models.spec import ModelSpec
from simulation.choices import settle
from simulation.request import DataSelection, Request
from simulation.settings import DataForm, RunSettings


def own(path: Path, *, reading: dict[str, Any] | None = None, **more: Any) -> DataSelection:
    """Data of one's own, and how they are read."""
    train = DatasetSettings.checked({"path": path} | (reading or {}))
    return DataSelection(train=train, **more)


def settled(form: DataForm, spec: ModelSpec, **changes: Any) -> RunSettings:
    """The settings of a run on data of that form."""
    settings, _ = settle(Request(data=own(Path("mine")), **changes), form, "", spec)
    return settings
