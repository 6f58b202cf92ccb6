"""Whether a model and a dataset go together, by public facts of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dpagent.errors import DataError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.learning.models.spec import ModelSpec
from dpagent.wording import counted, named


def check_fits(
    dataset: Dataset, spec: ModelSpec, *, advise: Callable[[str, tuple[int, ...]], str] = lambda *_: ""
) -> None:
    """Raise :class:`DataError` unless ``spec`` can be trained or tested on ``dataset``.

    Looks at the public form only, never at a record.

    Args:
        dataset: the records.
        spec: the model.
        advise: how to have records of a format with a shape, for the sentence
            (:func:`~dpagent.learning.data.opening.advice_on_shape`); by default nobody knows.

    >>> import numpy as np
    >>> from dpagent.learning.data.dataset import ArrayDataset
    >>> digits = BUILT_IN["digits"]
    >>> check_fits(ArrayDataset(np.zeros((2, 8, 8, 1), np.uint8), np.array([0, 9]), 10), digits)
    >>> others = ArrayDataset(np.zeros((2, 8, 8, 1), np.uint8), np.array([0, 10]), 11)
    >>> check_fits(others, digits)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    dpagent.errors.DataError: The data have 11 classes, 0 to 10; ...
    """
    if dataset.shape != spec.input_shape:
        raise DataError(
            f"The records have shape {dataset.shape}; model {spec.name!r} expects {spec.input_shape}."
            f" {_reshaping(dataset, spec, advise)}"
        )
    if dataset.class_names and dataset.classes != spec.classes:
        raise DataError(
            f"The data have {counted(dataset.classes, 'class')} ({_some(dataset.class_names)}); model "
            f"{spec.name!r} has {spec.classes}. List all classes of the fleet in {named('classes')}, or "
            f"choose another model: {_adapt(spec, dataset.classes)}"
        )
    if dataset.classes > spec.classes:
        raise DataError(
            f"The data have {counted(dataset.classes, 'class')}, 0 to {dataset.classes - 1}; model"
            f" {spec.name!r} has {spec.classes}, 0 to {spec.classes - 1}. Correct {named('classes')}, or"
            f" choose another model: {_adapt(spec, dataset.classes)}"
        )


def _reshaping(dataset: Dataset, spec: ModelSpec, advise: Callable[[str, tuple[int, ...]], str]) -> str:
    """How to read the same data as records of the shape that the model takes."""
    if math.prod(dataset.shape) == math.prod(spec.input_shape):
        return f"They have as many values: set {named('shape', list(spec.input_shape))}."
    if advice := advise(dataset.origin.kind, spec.input_shape):
        return f"{advice}, or choose another model."
    return "Resize the records or choose another model."


def _adapt(spec: ModelSpec, classes: int) -> str:
    """How to make a model like this one for so many classes."""
    start = "in its file"
    if BUILT_IN.get(spec.name) == spec:
        start = f"`dpagent model show {spec.name} --yaml > mine.yaml`, and in that file"
    return f"{start} set classes and the units of the last dense layer to {classes}."


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
