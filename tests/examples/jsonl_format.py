"""A worked example of a format: JSON lines, an object a line.

    {"inputs": [0.1, 0.7], "label": "walk"}

In the package it would be the file ``dpagent/learning/data/formats/jsonl.py``, and ``JsonlFormat()`` one
more name in ``dpagent/learning/data/registry.py``. From that follow ``kind: jsonl``, the section ``jsonl`` of
the settings, the check of the data, the refresh between rounds, and predictions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from dpagent.configuration import Settings
from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.classes import ClassTable, unlisted
from dpagent.learning.data.dataset import ArrayDataset, Dataset, Origin
from dpagent.learning.data.format import Format, Source
from dpagent.learning.data.inputs import Input, Say, Target
from dpagent.learning.data.location import Location
from dpagent.learning.data.stored import reading


class JsonlSettings(Settings):
    """How lines become records. All of it is public."""

    width: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Numbers in a record. Not taken from the first line, which may be the wrong one."""
    label: Annotated[str, Field(min_length=1)] = "label"
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

    def open(self, source: Source, section: JsonlSettings) -> Dataset:
        """All records whose lines fit."""
        listed = None if source.classes is None else ClassTable((), source.classes)
        return JsonlDataset(source.path, section, listed)

    def unlabelled(
        self, source: Source, section: JsonlSettings, target: Target, say: Say
    ) -> Iterator[Input] | None:
        """Lines of a file in which no line has a label; every other file is opened as for training."""
        labelled = any(f'"{section.label}"' in line for line in _lines(source.path))
        return None if labelled else _inputs(source.path, section)


class JsonlDataset(ArrayDataset):
    """The lines of a file, kept in memory. What a line holds costs no other line its place."""

    def __init__(self, path: Path, section: JsonlSettings, classes: ClassTable | None) -> None:
        self._path, self._section = path, section
        self._stamp = _stamp(path)
        inputs, labels, left_out = [], [], []
        for number, line in enumerate(_lines(path), start=1):
            try:
                values, label = _parsed(line, section)
                if label is None or (classes is not None and classes.number(label) is None):
                    expected = "a label" if classes is None else classes.expected()
                    raise DataError(f"the label is {label!r}; expected {expected}.")
            except DataError as error:
                left_out.append(f"{path}:{number}: {error}")
            else:
                inputs.append(values)
                labels.append(label)
        if not inputs:
            raise DataError(f"{path} holds no record. {' '.join(left_out[:1])}")
        self._classes = classes or ClassTable(labels, None)
        warnings = [] if self._classes.is_listed or not self._classes.names else [unlisted()]
        super().__init__(
            np.stack(inputs), np.array([self._classes.number(label) for label in labels], np.int64),
            self._classes.count, self._classes.names,
            origin=Origin("jsonl", f"{path}, JSON lines", tuple(left_out), tuple(warnings)),
        )  # fmt: skip

    def refresh(self) -> Dataset:
        """As of :class:`Dataset`: never fails, and costs one look at the file if nothing changed."""
        try:
            if _stamp(self._path) == self._stamp:
                return self
            return JsonlDataset(self._path, self._section, self._classes)
        except DataError as error:
            self.origin = replace(self.origin, left_out=(str(error),))
            return self


def _inputs(path: Path, section: JsonlSettings) -> Iterator[Input]:
    for number, line in enumerate(_lines(path)):
        try:
            yield Input(str(path), number, _parsed(line, section)[0])
        except DataError as error:
            yield Input(str(path), number, problem=str(error))


def _lines(path: Path) -> list[str]:
    with reading(path):
        return path.read_text("utf-8", errors="replace").splitlines()


def _stamp(path: Path) -> tuple[int, int]:
    with reading(path):
        known = path.stat()
    return known.st_size, known.st_mtime_ns


def _parsed(line: str, section: JsonlSettings) -> tuple[Any, str | None]:
    """The values ``(width,)`` float32 and the label of a line.

    Raises:
        DataError: it does not fit. The text names neither file nor line.
        ConfigurationError: ``width`` is not set.
    """
    if section.width is None:
        raise ConfigurationError("`jsonl.width` is not set; expected how many numbers a record has.")
    try:
        record = json.loads(line)
        with np.errstate(over="ignore"):
            values = np.array(record["inputs"], np.float32)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise DataError(f'no record ({error}); expected {{"inputs": [numbers]}}.') from error
    if values.shape != (section.width,):
        raise DataError(f"the inputs have shape {values.shape}; expected {section.width} numbers.")
    label = record.get(section.label)
    return values, None if label is None else str(label)
