"""The commands that come after a run, with the options that its files need; the model has the rest."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from cli.options.rows import DATA
from dpagent.learning.data.format import Format
from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.settings import DatasetSettings
from dpagent.schema.json_values import json_values
from simulation.layout import Layout
from simulation.notes import RunNotes

_OF_LABELS: Final = {"csv.label", "csv.mixed", "images.folder"}
"""What reads the labels of records, which new ones need not have."""


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
        values = json_values(train.as_dict(only_given=True))
        options = _options(values, known)
        commands.append(["dpagent", "predict", model, known.example, *options])
    return [shlex.join(command) for command in commands]


def _options(values: Mapping[str, Any], known: Format[Any]) -> list[str]:
    """The options that read new files as those of training were; the model itself says what a record is."""
    if known.form is None:
        return DATA.command_line(values, "shape")
    in_model = {f"{known.kind}.{key}" for key in known.form.names}
    rows = [row.setting for row in DATA.rows if row.setting.startswith(f"{known.kind}.")]
    return DATA.command_line(values, *(each for each in rows if each not in in_model | _OF_LABELS))
