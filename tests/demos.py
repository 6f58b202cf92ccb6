"""Demo runs for tests, settled but not started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpagent.learning.models.spec import ModelSpec
from simulation.choices import Asked, choose
from simulation.presets import OWN_DATA
from simulation.settings import DataChoice, DataForm, DemoOptions


def asked_for(data: DataChoice, **changes: Any) -> Asked:
    """What a command line without more options asks for."""
    values: dict[str, Any] = {
        "data": data, "model": None, "devices": None, "rounds": None, "epsilon": None, "delta": 1e-5,
        "schedule": "incrementing", "step": 0.3, "sampling_rate": None, "clip_norm": None,
        "learning_rate": None, "clipping": "whole", "cap": None, "cap_at": "coordinator", "engine": "auto",
        "jitter_window_s": None, "seed": 0, "baseline": True,
    }  # fmt: skip
    return Asked(**values | changes)


def own(path: Path, **more: Any) -> DataChoice:
    """Data of one's own."""
    return DataChoice(name="mine", train={"kind": "auto", "path": str(path)}, **more)


def chosen(form: DataForm, spec: ModelSpec, **changes: Any) -> DemoOptions:
    """The options of a run on data of that form."""
    return choose(asked_for(DataChoice("mine"), **changes), OWN_DATA, form, "", spec).options
