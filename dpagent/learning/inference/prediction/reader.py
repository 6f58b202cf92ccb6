"""Reads the inputs of a model one by one: from data as they are trained on, and from such without labels.

The format decides: it reads inputs without labels as they come, or leaves records with labels to be opened as
a dataset for training is. In every case only the requested inputs are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.formats.tables.format import CsvFormat
from dpagent.learning.data.inputs import Input, Say, Target
from dpagent.learning.data.opening import open_dataset, recognise_inputs, section_of, source_of
from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.settings import AUTO, DatasetSettings
from dpagent.learning.data.stored import require_readable
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.wording import counted, named


class InputReader:
    """Reads the data at a path for one model.

    Args:
        model: the model.
        settings: how records are read; its path is that of each input in turn, and its classes name
            those of a model that does not.
        say: is told what is skipped or assumed.

    Attributes:
        class_names: of the model, or of the settings.

    Raises:
        ConfigurationError: the classes, or what the settings make of a record, are not those of the model.
    """

    def __init__(self, model: ExportedModel, settings: DatasetSettings, say: Say) -> None:
        self._model, self._settings, self._say = model, settings, say
        if isinstance(settings.classes, int) and settings.classes != model.classes:
            raise ConfigurationError(
                f"There are {counted(settings.classes, 'class')}; model {model.name!r} has {model.classes}."
                " Leave them out."
            )
        listed = tuple(settings.classes) if isinstance(settings.classes, list) else ()
        if listed and len(listed) != model.classes:
            raise ConfigurationError(
                f"There are {counted(len(listed), 'class')} ({', '.join(listed[:8])}); model {model.name!r} "
                f"has {model.classes}. List all of them, in the fleet's order, or leave them out."
            )
        if listed and model.class_names and listed != model.class_names:
            raise ConfigurationError(
                f"The classes are {', '.join(listed[:8])}; model {model.name!r} itself names"
                f" {', '.join(model.class_names[:8])}. Leave them out."
            )
        if model.inputs is not None:
            model.inputs.require_same(settings, model.name)
        self._said: set[str] = set()
        self.class_names = listed or model.class_names
        self._count = settings.classes if isinstance(settings.classes, int) else None

    def read(self, path: Path) -> Iterator[Input]:
        """The records at ``path`` in their order.

        Raises:
            DataError: nothing can be read there, or it does not fit the model.
            ConfigurationError: a setting does not go with it, or a package that reads it is missing.
        """
        require_readable(path)
        kind = recognise_inputs(path) if self._settings.kind == AUTO else self._settings.kind
        settings = self._settings.with_values(
            {"path": path, "classes": list(self.class_names) or self._count, "kind": kind}
        )
        known, model = FORMATS[kind], self._model
        if model.inputs is not None:
            settings = model.inputs.completed(settings, kind, model.input_shape)
        self._tell_of_form(kind)
        target = Target(model.name, model.input_shape, model.classes, self.class_names)
        unlabelled = known.unlabelled(source_of(settings), section_of(settings, known), target, self._say)
        if unlabelled is not None:
            yield from self._shaped(path, unlabelled, settings.shape)
            return
        dataset = open_dataset(settings)
        for sentence in dataset.origin.left_out:
            self._say(f"{path}: left out: {sentence}")
        for warning in dataset.origin.warnings:
            # How records are best kept for training does not concern a user who asks for predictions.
            if dataset.class_names and not self.class_names and "sorted order" in warning:
                self._say(f"{path}: {warning}")
        self._require_fit(path, dataset)
        yield from _records(path, dataset)

    def _tell_of_form(self, kind: str) -> None:
        """Say once where nothing checks how the columns of tables become inputs."""
        form = None if self._model.inputs is None else self._model.inputs.of_kind(kind)
        if kind == CsvFormat.kind and form is None and kind not in self._said:
            self._said.add(kind)
            keys = ", ".join(map(named, ("features", "offset", "scale")))
            self._say(
                f"Model {self._model.name!r} does not say what columns it takes, nor how they are scaled:"
                f" with other {keys} or {named('window')} than in training its answers are wrong."
            )

    def _shaped(self, path: Path, inputs: Iterator[Input], shape: list[int] | None) -> Iterator[Input]:
        """The same, in the shape that the model takes."""
        is_first = True
        for one in inputs:
            if one.values is None:
                yield one
                continue
            if is_first:
                self._require_shape(path, tuple(shape or one.values.shape), one.values.size)
                is_first = False
            yield replace(one, values=one.values.reshape(self._model.input_shape))

    def _require_fit(self, path: Path, dataset: Dataset) -> None:
        self._require_shape(path, dataset.shape, int(np.prod(dataset.shape)))
        if dataset.classes > self._model.classes:
            raise DataError(
                f"{path} has {counted(dataset.classes, 'class')}; model {self._model.name!r} has "
                f"{self._model.classes}. Correct the labels or take another model."
            )

    def _require_shape(self, path: Path, shape: tuple[int, ...], size: int) -> None:
        wanted = self._model.input_shape
        if shape == wanted:
            return
        advice = "Give data, columns or a window of that shape."
        if size == np.prod(wanted):
            advice = f"They have as many values: set {named('shape', list(wanted))}."
        raise DataError(
            f"{path}: a record has {_dimensions(shape)}; model {self._model.name!r} takes "
            f"{_dimensions(wanted)}. {advice}"
        )


def _dimensions(shape: tuple[int, ...]) -> str:
    return counted(shape[0], "value") if len(shape) == 1 else " × ".join(map(str, shape)) + " values"


def _records(path: Path, dataset: Dataset) -> Iterator[Input]:
    """All records of a data set; one that cannot be read takes no other with it."""
    size = max(1, (1 << 20) // dataset.record_bytes)
    for start in range(0, len(dataset), size):
        indices = np.arange(start, min(start + size, len(dataset)))
        try:
            pieces = [(indices, *dataset.batch(indices))]
        except DataError:
            pieces = []
            for number in indices:
                try:
                    pieces.append((np.array([number]), *dataset.batch(np.array([number]))))
                except DataError as error:
                    yield Input(str(path), int(number), problem=str(error))
                    continue
                yield from _made(path, pieces.pop())
        for piece in pieces:
            yield from _made(path, piece)


def _made(path: Path, piece: tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]) -> Iterator[Input]:
    for number, values, label in zip(*piece, strict=True):
        yield Input(str(path), int(number), values, int(label))
