"""The records of a simulated fleet: opened as ``dpagent data check`` opens them, and split.

The simulation owns all data and may do more than anyone in a real fleet: look at all records, hold some of
them out, and deal the others to devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.extras import extra_needed
from dpagent.learning.data.classes import doubt_about_labels
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.data.derived import Subset
from dpagent.learning.data.input_form import InputForm
from dpagent.learning.data.opening import fitted, has_test_half, open_dataset, open_inferred
from dpagent.learning.models.spec import ModelSpec
from dpagent.wording import counted, named
from simulation.request import DataSelection
from simulation.settings import DataForm

DEFAULT_TEST_SHARE: Final = 0.2

_DIGITS_TRAIN: Final = 1437
_DECODED_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True)
class Source:
    """Records for a run."""

    train: Dataset
    test: Dataset
    columns: tuple[str, ...] = ()
    """The inputs of a table."""
    inputs: InputForm | None = None
    """What makes the records what they are."""
    not_counted: int = 0
    """Records that were in neither, because they hold NaN or infinity."""

    @property
    def form(self) -> DataForm:
        """Their public form."""
        return DataForm(
            train_records=len(self.train),
            test_records=len(self.test),
            shape=self.train.shape,
            classes=self.train.classes,
            dtype="uint8" if self.train.dtype == np.uint8 else "float32",
            class_names=self.train.class_names,
            inputs=self.inputs,
        )


def open_source(data: DataSelection, seed: int, spec: ModelSpec | None = None) -> Source:
    """The records that ``data`` describes.

    Args:
        data: Which.
        seed: Of the choice of the held-out records.
        spec: A model that was asked for; pictures are made as large as it takes them, unless that is given.

    Raises:
        DataError: They are missing, malformed, or too few, or their labels are no classes.
        ConfigurationError: A setting does not go with the data, or the demo's packages are missing.
    """
    settings = data.train
    if settings is None:
        return _digits(seed)
    test_settings = data.test
    if spec is not None:
        settings = fitted(settings, spec.input_shape)
        test_settings = None if test_settings is None else fitted(test_settings, spec.input_shape)
    opened, declared = open_inferred(settings)
    inputs = InputForm.of(declared)
    if opened.origin.kind == "csv" and (doubt := doubt_about_labels(opened)):
        raise DataError(f"{settings.path}: {doubt}")
    columns = opened.columns
    train, not_counted = _finite(_readable(opened))
    if test_settings is None and data.test_share is None and has_test_half(settings):
        test_settings = settings.with_values({"half": "test"})
    if test_settings is None:
        parted = _held_out(train, data, seed)
        return replace(parted, columns=columns, inputs=inputs, not_counted=not_counted)
    # The test data number the classes as the training data do.
    if test_settings.classes is None and train.class_names:
        test_settings = test_settings.with_values({"classes": list(train.class_names)})
    test, without_answer = _finite(_readable(open_dataset(test_settings)))
    if test.shape != train.shape or test.classes > train.classes:
        raise DataError(
            f"The test records have shape {test.shape} and {counted(test.classes, 'class')}, the training "
            f"records {train.shape} and {train.classes}; expected the same form."
        )
    return Source(train, test, columns, inputs, not_counted + without_answer)


def _finite(dataset: Dataset) -> tuple[Dataset, int]:
    """The records that count, and how many do not, because they hold NaN or infinity."""
    if dataset.dtype == np.uint8:
        return dataset, 0
    kept, start = np.ones(len(dataset), np.bool_), 0
    for inputs, labels in dataset.batches():
        kept[start : start + len(labels)] = np.isfinite(inputs).reshape(len(labels), -1).all(axis=1)
        start += len(labels)
    if kept.all():
        return dataset, 0
    if not kept.any():
        raise DataError(
            f"{dataset.origin.source}: every record holds NaN or infinity (or a missing value), and none "
            "counts."
        )
    return Subset(dataset, np.flatnonzero(kept)), int(np.count_nonzero(~kept))


def _digits(seed: int) -> Source:
    with extra_needed("demo", "The data set of digits"):
        from sklearn.datasets import load_digits
    digits = load_digits()
    inputs = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(labels))
    train, test = order[:_DIGITS_TRAIN], order[_DIGITS_TRAIN:]
    return Source(
        ArrayDataset(inputs[train], labels[train], 10), ArrayDataset(inputs[test], labels[test], 10)
    )


def _readable(dataset: Dataset) -> Dataset:
    """The records without those pictures that turn out damaged only when they are decoded."""
    if dataset.origin.kind != "images":
        return dataset
    damaged: list[int] = []
    problems: list[str] = []
    for start in range(0, len(dataset), _DECODED_AT_ONCE):
        indices = np.arange(start, min(start + _DECODED_AT_ONCE, len(dataset)))
        for place, problem in dataset.try_read(indices)[1].items():
            damaged.append(start + place)
            problems.append(problem)
    if not damaged:
        return dataset
    rest = np.delete(np.arange(len(dataset)), damaged)
    if not len(rest):
        raise DataError(f"No picture can be read. The first: {problems[0]}")
    readable = Subset(dataset, rest)
    readable.origin = replace(dataset.origin, left_out=(*dataset.origin.left_out, *problems))
    return readable


def _held_out(train: Dataset, data: DataSelection, seed: int) -> Source:
    share = DEFAULT_TEST_SHARE if data.test_share is None else data.test_share
    generator = np.random.default_rng(seed)
    if data.split == "file":
        test = _whole_groups(train, share, generator)
    else:
        test = _of_each_class(train, share, generator)
    rest = np.setdiff1d(np.arange(len(train)), test)
    if not len(rest) or not len(test):
        raise DataError(
            f"{counted(len(train), 'record')} cannot be parted into training and test records; expected "
            f"some of both. Give {named('test')}, or more records."
        )
    return Source(Subset(train, rest), Subset(train, test))


def _of_each_class(dataset: Dataset, share: float, generator: np.random.Generator) -> NDArray[np.int64]:
    """A share of each class, but of two records or more neither none nor all."""
    chosen = []
    for number in np.unique(dataset.labels):
        members = generator.permutation(np.flatnonzero(dataset.labels == number))
        count = round(share * len(members))
        if len(members) > 1:
            count = min(max(count, 1), len(members) - 1)
        chosen.append(members[:count])
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def _whole_groups(dataset: Dataset, share: float, generator: np.random.Generator) -> NDArray[np.int64]:
    """Whole files, persons or sessions, until they are a share of the records."""
    if dataset.groups is None:
        raise DataError(
            f"These records do not tell which file they are from; use {named('split', 'iid')}, or CSV files "
            f"or {named('group')}."
        )
    chosen: list[int] = []
    count = 0
    groups, sizes = np.unique(dataset.groups, return_counts=True)
    for place in generator.permutation(len(groups)):
        if chosen and count + sizes[place] / 2 > share * len(dataset):
            continue
        chosen.append(int(groups[place]))
        count += int(sizes[place])
    return np.flatnonzero(np.isin(dataset.groups, chosen)).astype(np.int64)
