"""The records of a demo: opened as ``dpagent data check`` opens them, and parted into training and test.

The demo owns all data and may do what nobody in a real fleet can: look at all records, hold some of them
out, and deal the others to devices.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cli.demo.options import DataChoice, DataForm
from dpagent.errors import ConfigurationError, DataError
from dpagent.learning import ArrayDataset, Dataset, ModelSpec, open_dataset, to_float32
from dpagent.learning.data import Subset, recognise
from dpagent.learning.data.classes import UNLISTED
from dpagent.learning.data.images import ImageDataset
from dpagent.learning.data.picture_files import HALVES, choose_half
from dpagent.learning.data.settings import DatasetSettings

DEFAULT_TEST_SHARE: Final = 0.2

_DIGITS_TRAIN: Final = 1437
_ATTEMPTS: Final = 20
_LOOKED_AT: Final = 2000
_LARGEST_INPUT: Final = 20.0
_FEW_TEST_RECORDS: Final = 100
_MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Source:
    """Records for a run."""

    train: Dataset
    test: Dataset

    @property
    def form(self) -> DataForm:
        """What is public of them."""
        return DataForm(
            train_records=len(self.train),
            test_records=len(self.test),
            shape=list(self.train.shape),
            classes=self.train.classes,
            class_names=list(self.train.class_names),
        )

    def remarks(self, spec: ModelSpec) -> Iterator[str]:
        """What whoever owns the data should know before training, a sentence each."""
        left_out = self.train.origin.left_out
        if left_out:
            shown = "; ".join(left_out[:_MOST_NAMED]) + ("; …" if len(left_out) > _MOST_NAMED else "")
            yield f"{len(left_out)} left out: {shown}. `dpagent data check` lists all of them."
        if self.train.origin.kind == "csv":
            # That boards could number the classes unlike is of no concern here: one table is for all.
            yield from (warning for warning in self.train.origin.warnings if warning != UNLISTED)
        counts = self.train.class_counts()
        missing = [self.train.class_label(int(number)) for number in np.flatnonzero(counts == 0)]
        if missing:
            shown = ", ".join(missing[:_MOST_NAMED]) + (", …" if len(missing) > _MOST_NAMED else "")
            yield f"No training record is of {shown}: the model cannot learn that."
        if (largest := _largest_input(self.train, spec)) > _LARGEST_INPUT:
            yield (
                f"Inputs reach {largest:,.4g}, and networks learn badly from numbers beyond about ±10. Give "
                "--offset and --scale: what a column means and its sensor's range, no figures computed from "
                "the data."
            )
        if len(self.test) < _FEW_TEST_RECORDS:
            yield (
                f"There are {len(self.test)} test records: the accuracy is uncertain by about "
                f"{100 * 0.5 / len(self.test) ** 0.5:.0f} points."
            )


def open_source(data: DataChoice, seed: int) -> Source:
    """The records that ``data`` describes.

    Args:
        data: Which.
        seed: Of what is held out.

    Raises:
        DataError: They are missing, malformed, or too few.
        ConfigurationError: An option does not go with the data, or the demo's packages are missing.
    """
    settings = data.train_settings
    if settings is None:
        return _digits(seed)
    train = _readable(open_dataset(settings))
    test_settings = data.test_settings
    if test_settings is None and data.test_share is None and _has_test_half(settings, train):
        test_settings = settings.model_copy(update={"half": "test"})
    if test_settings is None:
        return _held_out(train, data, seed)
    # The test data number the classes as the training data do.
    if test_settings.classes is None and train.class_names:
        test_settings = test_settings.model_copy(update={"classes": list(train.class_names)})
    test = _readable(open_dataset(test_settings))
    if test.shape != train.shape or test.classes > train.classes:
        raise DataError(
            f"The test records have shape {test.shape} and {test.classes} classes, the training records "
            f"{train.shape} and {train.classes}; expected the same form."
        )
    return Source(train, test)


def _digits(seed: int) -> Source:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError("The digits come with scikit-learn: pip install 'dpagent[demo]'.") from error
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
    if not isinstance(dataset, ImageDataset):
        return dataset
    for _ in range(_ATTEMPTS):
        try:
            for _batch in dataset.batches():
                pass
            return dataset
        except DataError:
            now = dataset.refresh()
            if now is dataset or not isinstance(now, ImageDataset):
                raise
            dataset = now
    return dataset


def _has_test_half(settings: DatasetSettings, train: Dataset) -> bool:
    """Whether the data come in two halves."""
    path = settings.path
    kind = recognise(path) if settings.kind == "auto" else settings.kind
    if kind in ("idx", "cifar"):
        prefixes = ("t10k-", "test-", "test_batch.bin", "test.bin")
        return path.is_dir() and any(entry.name.startswith(prefixes) for entry in path.iterdir())
    if kind != "images" or not isinstance(train, ImageDataset):
        return False
    if path.is_dir():
        return choose_half(path, "train") != path
    with zipfile.ZipFile(path) as archive:
        return _archive_has_halves([name.lower().split("/")[:-1] for name in archive.namelist()])


def _archive_has_halves(folders: list[list[str]]) -> bool:
    """Whether the outermost folders of an archive that are several are its halves."""
    level = 0
    while True:
        tops = {parts[level] for parts in folders if len(parts) > level and parts[0] != "__macosx"}
        if len(tops) != 1 or not tops.isdisjoint(HALVES["train"]):
            return not tops.isdisjoint(HALVES["train"]) and not tops.isdisjoint(HALVES["test"])
        level += 1


def _held_out(train: Dataset, data: DataChoice, seed: int) -> Source:
    share = DEFAULT_TEST_SHARE if data.test_share is None else data.test_share
    generator = np.random.default_rng(seed)
    if data.split == "file":
        test = _whole_groups(train, share, generator)
    else:
        test = _of_each_class(train, share, generator)
    rest = np.setdiff1d(np.arange(len(train)), test)
    if not len(rest) or not len(test):
        raise DataError(
            f"{len(train)} records cannot be parted into training and test records; expected some of both. "
            "Give --test-data, or more records."
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
            "These records do not tell which file they are from; use --split iid, or CSV files or --group."
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


def _largest_input(dataset: Dataset, spec: ModelSpec) -> float:
    """The largest finite magnitude that a network meets among some of the records."""
    inputs = to_float32(dataset.batch(np.arange(min(len(dataset), _LOOKED_AT)))[0])
    with np.errstate(all="ignore"):
        values = np.abs((inputs - np.asarray(spec.input_offset)) / np.asarray(spec.input_scale))
    return float(np.max(values, where=np.isfinite(values), initial=0.0))


def data_name(path: Path) -> str:
    """What data of one's own are called: by the last part of their path, as far as it can be shown."""
    name = "".join(letter for letter in path.absolute().name if letter.isprintable())
    return name[:64] or "data"
