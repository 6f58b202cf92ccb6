"""Reads the inputs of a model one by one: from data as they are trained on, and from such without labels.

Pictures, and rows of tables without a label column, are read here as they come. Whatever else has labels is
opened as a data set for training is. In every case only what is asked for is in memory.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.opening import open_dataset, recognise
from dpagent.learning.data.picture_files import entries_of, is_picture
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.data.stored import reading, require_readable
from dpagent.learning.data.tables import is_table
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.learning.inference.prediction.inputs import Input, Say
from dpagent.learning.inference.prediction.pictures import PictureReader, picture_form
from dpagent.learning.inference.prediction.unlabelled_tables import has_labels, unlabelled_rows
from dpagent.wording import named


class InputReader:
    """Reads what a path holds for one model.

    Args:
        model: the model.
        settings: how records are read; its path is that of each input in turn, and its classes name
            those of a model that does not.
        say: told what is passed over, or assumed.

    Attributes:
        class_names: of the model, or of the settings.

    Raises:
        ConfigurationError: the classes are not those of the model.
    """

    def __init__(self, model: ExportedModel, settings: DatasetSettings, say: Say) -> None:
        self._model, self._settings, self._say = model, settings, say
        listed = tuple(settings.classes or ())
        if listed and len(listed) != model.classes:
            raise ConfigurationError(
                f"There are {len(listed)} classes ({', '.join(listed[:8])}); model {model.name!r} has"
                f" {model.classes}. List all of them, in the fleet's order, or leave them out."
            )
        if listed and model.class_names and listed != model.class_names:
            raise ConfigurationError(
                f"The classes are {', '.join(listed[:8])}; model {model.name!r} itself names"
                f" {', '.join(model.class_names[:8])}. Leave them out."
            )
        self.class_names = listed or model.class_names

    def read(self, path: Path) -> Iterator[Input]:
        """The records at ``path`` in their order.

        Raises:
            DataError: nothing can be read there, or it does not fit the model.
            ConfigurationError: a setting does not go with it, or what reads it is not installed.
        """
        require_readable(path)
        kind = self._kind(path)
        if kind == "images":
            yield from self._pictures(path)
            return
        settings = self._settings.model_copy(
            update={"path": path, "classes": list(self.class_names) or None, "kind": kind}
        )
        if kind == "csv" and not has_labels(path, settings.csv):
            yield from self._rows(path, settings)
            return
        dataset = open_dataset(settings)
        for warning in dataset.origin.warnings:
            # Who only asks what a model says need not know how records are best kept for training.
            if dataset.class_names and not self.class_names and "sorted order" in warning:
                self._say(f"{path}: {warning}")
        self._require_fit(path, dataset)
        yield from _records(path, dataset)

    def _kind(self, path: Path) -> str:
        if self._settings.kind != "auto":
            return self._settings.kind
        if path.is_file() and is_picture(path.name):
            return "images"
        if path.is_dir():
            with reading(path):
                names = [entry.name for entry in entries_of(path)]
            # A folder of pictures without classes is none that could be trained on.
            if any(map(is_picture, names)) and not any(map(is_table, names)):
                return "images"
        return recognise(path)

    def _pictures(self, path: Path) -> Iterator[Input]:
        pictures = self._settings.images
        form, shape = picture_form(self._model, pictures.size, pictures.mode)
        reader = PictureReader(form, shape, self.class_names, self._model.classes, self._say)
        if path.is_file() and not zipfile.is_zipfile(path) and path.suffix.lower() != ".zip":
            yield reader.read_file(path)
        else:
            yield from reader.read_many(path, self._settings.half)

    def _rows(self, path: Path, settings: DatasetSettings) -> Iterator[Input]:
        shape = tuple(settings.shape or ()) or None
        for number, (source, values) in enumerate(unlabelled_rows(path, settings.csv)):
            if number == 0:
                self._require_shape(path, shape or values.shape, values.size)
            yield Input(source, number, values.reshape(self._model.input_shape))

    def _require_fit(self, path: Path, dataset: Dataset) -> None:
        self._require_shape(path, dataset.shape, int(np.prod(dataset.shape)))
        if dataset.classes > self._model.classes:
            raise DataError(
                f"{path} has {dataset.classes} classes; model {self._model.name!r} has {self._model.classes}."
                " Correct the labels or take another model."
            )

    def _require_shape(self, path: Path, shape: tuple[int, ...], size: int) -> None:
        wanted = self._model.input_shape
        if shape == wanted:
            return
        advice = "Give data, columns or a window of that shape."
        if size == np.prod(wanted):
            advice = f"They have as many values: set {named('shape', list(wanted))}."
        raise DataError(
            f"{path}: the records have shape {shape}; model {self._model.name!r} takes {wanted}. {advice}"
        )


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
