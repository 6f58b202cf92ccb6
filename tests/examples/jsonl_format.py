"""A worked example of a format: JSON lines, an object a line.

    {"inputs": [0.1, 0.7], "label": "walk"}

In the package it would be the file ``dpagent/learning/data/formats/jsonl.py``, and ``JsonlFormat()`` one
more name in ``dpagent/learning/data/registry.py``; its settings would be a file of their own, which needs no
numpy, and one more name in ``dpagent/learning/data/sections.py``. From that follow ``kind: jsonl``, the
section ``jsonl`` of the settings, the check of the data, decoding ahead of rounds, and predictions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from dpagent.errors import DataError
from dpagent.learning.data.classes import ClassTable, classes_of_texts, warnings_about
from dpagent.learning.data.dataset import ArrayDataset, Dataset, Origin
from dpagent.learning.data.format import Format, Inferred, Source
from dpagent.learning.data.inputs import Input, Say, Target
from dpagent.learning.data.location import Location
from dpagent.learning.data.stored import reading
from dpagent.schema.limits import Limits
from dpagent.settings import Settings


class JsonlSettings(Settings):
    """How lines become records. All of it is public."""

    width: Annotated[int, Limits(ge=1, le=65_536)] | None = None
    """Numbers in a record."""
    label: Annotated[str, Limits(min_length=1)] = "label"
    """The key of the label."""


class JsonlFormat(Format[JsonlSettings]):
    """A file of JSON lines."""

    kind, title, example, section = "jsonl", "a file of JSON lines", "NEW.jsonl", JsonlSettings

    def recognises(self, location: Location) -> bool:
        """By the name of the file."""
        return not location.is_folder and location.name.endswith(".jsonl")

    def hint(self, location: Location) -> str:
        """A folder is none, but may hold the file that is meant."""
        files = [name for name in location.names if name.endswith(".jsonl")]
        return f"Give the path of the file: {location.path / files[0]}?" if files else ""

    def undeclared(self, source: Source, section: JsonlSettings) -> list[str]:
        """What a board must be told, besides the classes."""
        return ["jsonl.width"] * (section.width is None)

    def infer(self, source: Source, section: JsonlSettings) -> Inferred[JsonlSettings]:
        """The width of the first record, and the labels that occur; never on a board."""
        found = [record for line in _lines(source.path) if (record := _parsed(line, section)) is not None]
        if not found:
            raise DataError(f"{source.path} holds no record.")
        complete = section.with_values({"width": section.width or len(found[0][0])})
        if source.classes is not None:
            return Inferred(source, complete)
        classes = classes_of_texts(label for _, label in found if label is not None)
        return Inferred(replace(source, classes=classes), complete, warnings_about(classes))

    def open(self, source: Source, section: JsonlSettings) -> Dataset:
        """All records whose lines fit."""
        return JsonlDataset(source.path, section, source.class_table)

    def unlabelled(
        self, source: Source, section: JsonlSettings, target: Target, say: Say
    ) -> Iterator[Input] | None:
        """Lines of a file in which no line has a label; every other file is opened as for training."""
        labelled = any(f'"{section.label}"' in line for line in _lines(source.path))
        return None if labelled else _inputs(source.path, section)


class JsonlDataset(ArrayDataset):
    """The lines of a file, kept in memory. What a line holds costs no other line its place."""

    def __init__(self, path: Path, section: JsonlSettings, classes: ClassTable) -> None:
        inputs, labels, left_out = [], [], []
        for number, line in enumerate(_lines(path), start=1):
            record = _parsed(line, section)
            label = None if record is None or record[1] is None else classes.number(record[1])
            if record is None or label is None:
                expected = f'{{"inputs": [{section.width} numbers], "{section.label}": …}}'
                left_out.append(f"{path}:{number}: expected {expected}, of the class {classes.expected()}.")
            else:
                inputs.append(record[0])
                labels.append(label)
        super().__init__(
            np.array(inputs, np.float32).reshape(-1, section.width or 1), np.array(labels, np.int64),
            classes.count, classes.names, origin=Origin("jsonl", f"{path}, JSON lines", tuple(left_out)),
        )  # fmt: skip


def _inputs(path: Path, section: JsonlSettings) -> Iterator[Input]:
    for number, line in enumerate(_lines(path)):
        record = _parsed(line, section)
        if record is None:
            yield Input(str(path), number, problem="no record of that width")
        else:
            yield Input(str(path), number, record[0])


def _lines(path: Path) -> list[str]:
    with reading(path):
        return path.read_text("utf-8", errors="replace").splitlines()


def _parsed(line: str, section: JsonlSettings) -> tuple[Any, str | None] | None:
    """The values ``(width,)`` float32 and the label of a line; None if it does not fit."""
    try:
        record = json.loads(line)
        with np.errstate(over="ignore"):
            values = np.array(record["inputs"], np.float32)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    if values.ndim != 1 or section.width not in (None, len(values)):
        return None
    label = record.get(section.label)
    return values, None if label is None else str(label)
