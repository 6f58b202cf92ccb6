"""The commands that somebody wants to type when a run is over, with all options that its data need."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpagent.learning.data.registry import FORMATS
from simulation.settings import DataChoice


def predict_commands(
    data: DataChoice, kind: str, columns: Sequence[str], *, model: Path, test: Path
) -> tuple[str, ...]:
    """How ``dpagent predict`` is asked: on the records held out, and on new ones.

    Args:
        data: of the run.
        kind: what its data were taken for.
        columns: the inputs of a table.
        model: the file with the finished model.
        test: the file with the test records, which are scaled and shaped already.
    """
    held_out = ["dpagent", "predict", str(model), str(test), "--summary"]
    commands = [shlex.join(held_out)]
    known = FORMATS.get(kind)
    if data.train is not None and known is not None and known.example is not None:
        options = _options_of(data.train, kind, columns)
        commands.append(shlex.join(["dpagent", "predict", str(model), known.example, *options]))
    return tuple(commands)


def _options_of(settings: Mapping[str, Any], kind: str, columns: Sequence[str]) -> list[str]:
    """The options that read new data as those of training were. Classes and labels the model knows."""
    options: list[str] = []
    if (shape := settings.get("shape")) is not None:
        options += ["--shape", ",".join(map(str, shape))]
        if kind == "images":
            pictures = settings.get("images") or {}
            if pictures.get("size"):
                options += ["--size", "x".join(map(str, pictures["size"]))]
            if pictures.get("mode"):
                options += ["--mode", pictures["mode"]]
    return options + (_table_options(settings.get("csv") or {}, columns) if kind == "csv" else [])


def _table_options(form: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    options: list[str] = []
    if features := form.get("features") or columns:
        options += ["--features", ",".join(features)]
    for key in ("offset", "scale", "window", "stride", "group", "delimiter"):
        value = form.get(key)
        if isinstance(value, Mapping):
            value = ",".join(f"{name}={number:.15g}" for name, number in value.items())
        elif isinstance(value, float):
            value = f"{value:.15g}"
        elif value == "\t":
            value = "tab"
        if value is not None:
            # A number below 0 would be taken for an option.
            options += [f"--{key}={value}"] if str(value).startswith("-") else [f"--{key}", str(value)]
    return [*options, "--no-header"] if form.get("header") is False else options
