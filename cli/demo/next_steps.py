"""The commands that come after a run, with all options that its data need."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from cli.options.rows import DATA
from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.settings import DatasetSettings
from simulation.layout import Layout
from simulation.notes import RunNotes

_OF_LABELS: Final = ("csv.label", "csv.mixed")
"""What reads the labels of rows, which new rows need not have."""


def predict_commands(train: DatasetSettings | None, notes: RunNotes, layout: Layout) -> list[str]:
    """How to run the model: on the records held out, and on new ones.

    Args:
        train: How the training data were read; None for the digits.
        notes: Of the run: what the data were taken for.
        layout: Of the run.
    """
    model = str(layout.trained_model)
    # The records held out are scaled and shaped already.
    commands = [["dpagent", "predict", model, str(layout.test_file), "--summary"]]
    known = FORMATS.get(notes.kind)
    if train is not None and known is not None and known.example is not None:
        values = train.model_dump(mode="json", exclude_unset=True)
        options = _options(values, known.kind, notes.columns)
        commands.append(["dpagent", "predict", model, known.example, *options])
    return [shlex.join(command) for command in commands]


def _options(values: Mapping[str, Any], kind: str, columns: tuple[str, ...]) -> list[str]:
    """The options that read new data as those of training were."""
    if kind == "csv":
        csv = {"features": list(columns)} | values.get("csv", {})
        rows = [row.setting for row in DATA.rows if row.setting.startswith("csv.")]
        table = [setting for setting in rows if setting not in _OF_LABELS]
        return DATA.command_line({**values, "csv": csv}, "shape", *table)
    # Without another shape, images are made to fit the model as in training.
    images = ("images.size", "images.mode") if kind == "images" and values.get("shape") else ()
    return DATA.command_line(values, "shape", *images)
