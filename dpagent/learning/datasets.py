"""Labelled images in memory, and the two file formats they come in.

A device's records stay in the type they were stored in: uint8 pixels are kept as such (6,000
MNIST images are 4.7 MB) and become float32 in [0, 1] only for the batch at hand. What the
network does to them beyond that belongs to the :class:`~dpagent.learning.models.ModelSpec`.

Formats: NPZ with the arrays ``inputs`` and ``labels`` (never pickled objects), and the IDX
files of MNIST, gzipped or not (LeCun, Cortes and Burges, "The MNIST database of handwritten
digits").
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError, StorageError, require_count
from dpagent.learning.models import ModelSpec

_IDX_NAMES = {"train": "train", "test": "t10k"}
_IDX_UNSIGNED_BYTE = 0x08
_READ_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Records with labels.

    Args:
        inputs: ``(n, height, width, channels)``, uint8 or float32.
        labels: ``(n,)`` int64 in ``0..classes-1``.
        classes: number of classes the labels are drawn from.

    Raises:
        DataError: the three do not fit together.
    """

    inputs: NDArray[Any]
    labels: NDArray[np.int64]
    classes: int

    def __post_init__(self) -> None:
        if self.inputs.ndim != 4 or self.inputs.dtype not in (np.uint8, np.float32):
            raise DataError(
                f"The inputs are {self.inputs.dtype} of shape {self.inputs.shape}; expected uint8 or float32"
                " of shape (records, height, width, channels)."
            )
        if self.labels.ndim != 1 or self.labels.dtype != np.int64:
            raise DataError(
                f"The labels are {self.labels.dtype} of shape {self.labels.shape}; expected int64"
                " of shape (records,)."
            )
        if len(self.inputs) != len(self.labels):
            raise DataError(
                f"There are {len(self.inputs)} inputs and {len(self.labels)} labels; expected one"
                " label an input."
            )
        if len(self.labels) == 0:
            raise DataError("The dataset holds no records; expected at least one.")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.classes:
            wrong = low if low < 0 else high
            raise DataError(f"A label is {wrong}; expected whole numbers from 0 to {self.classes - 1}.")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: NDArray[np.integer[Any]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The records at ``indices``: float32 inputs (uint8 divided by 255) and their labels."""
        chosen = self.inputs[indices]
        if chosen.dtype == np.uint8:
            return np.divide(chosen, np.float32(255), dtype=np.float32), self.labels[indices]
        return chosen, self.labels[indices]

    @property
    def non_finite_records(self) -> int:
        """How many records hold a NaN or an infinity. The mechanism leaves them out of its sums."""
        if self.inputs.dtype == np.uint8:
            return 0
        return sum(not np.isfinite(record).all() for record in self.inputs)


def load_npz(path: str | Path) -> Dataset:
    """Read a dataset from an NPZ file with the arrays ``inputs`` and ``labels``.

    Inputs are ``(n, height, width, channels)``, or ``(n, height, width)`` for one channel;
    uint8 in 0..255, or floats that are already scaled to [0, 1]. Labels are whole numbers from
    0. An array ``classes`` with one whole number is optional; without it the number of classes
    is one more than the largest label, but at least two.

    Raises:
        DataError: the file is missing, is not such an NPZ, or its arrays do not fit together.
    """
    path = Path(path)
    arrays = _read_npz(path)
    inputs, labels = arrays["inputs"], arrays["labels"]
    if inputs.ndim == 3:
        inputs = inputs[..., np.newaxis]
    if inputs.dtype.kind == "f":
        with np.errstate(over="ignore"):
            inputs = inputs.astype(np.float32, copy=False)
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}: the labels are {labels.dtype}; expected whole numbers.")
    if labels.size and int(labels.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{path}: a label is {labels.max()}; expected whole numbers from 0.")
    labels = labels.astype(np.int64, copy=False)
    if "classes" in arrays:
        classes = _scalar_count(path, arrays["classes"])
    else:
        classes = max(2, int(labels.max(initial=0)) + 1)
    try:
        return Dataset(inputs, labels, classes)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def save_npz(path: str | Path, dataset: Dataset) -> None:
    """Write ``dataset`` as a compressed NPZ that :func:`load_npz` reads back.

    Raises:
        StorageError: the file cannot be written.
    """
    path = Path(path)
    try:
        with path.open("wb") as file:
            np.savez_compressed(
                file, inputs=dataset.inputs, labels=dataset.labels, classes=np.int64(dataset.classes)
            )
    except OSError as error:
        raise StorageError(
            f"Cannot write {path}: {error.strerror or error}. Check the folder and its space."
        ) from error


def load_idx(directory: str | Path, split: Literal["train", "test"]) -> Dataset:
    """Read one half of MNIST, or of a dataset in its format, from a folder of IDX files.

    The files are called ``train-images-idx3-ubyte`` and so on (``t10k-`` for the test half),
    with or without ``.gz``.

    Raises:
        DataError: a file is missing, is not IDX, or is shorter or longer than it says.
    """
    if split not in _IDX_NAMES:
        raise DataError(f"The split is {split!r}; expected 'train' or 'test'.")
    directory = Path(directory)
    images = _read_idx(_find_idx(directory, f"{_IDX_NAMES[split]}-images-idx3-ubyte"), dimensions=3)
    labels = _read_idx(_find_idx(directory, f"{_IDX_NAMES[split]}-labels-idx1-ubyte"), dimensions=1)
    classes = max(2, int(labels.max(initial=0)) + 1)
    try:
        return Dataset(images[..., np.newaxis], labels.astype(np.int64), classes)
    except DataError as error:
        raise DataError(f"{directory}, {split} half: {error}") from error


def check_fits(dataset: Dataset, spec: ModelSpec) -> None:
    """Raise :class:`DataError` unless ``spec`` can be trained or tested on ``dataset``."""
    came = dataset.inputs.shape[1:]
    if came != spec.input_shape:
        raise DataError(
            f"The records have shape {came}; model {spec.name!r} expects {spec.input_shape} (height, width,"
            " channels). Resize the records or choose another model."
        )
    largest = int(dataset.labels.max())
    if largest >= spec.classes:
        raise DataError(
            f"A label is {largest}; model {spec.name!r} has {spec.classes} classes, 0 to {spec.classes - 1}."
            " Correct the labels or choose another model."
        )


def split_iid(dataset: Dataset, parts: int, seed: int) -> list[Dataset]:
    """Deal the records at random into ``parts`` datasets whose sizes differ by one at most.

    For demonstrations and benchmarks: a fleet's data are never in one place. The same seed gives
    the same parts.
    """
    require_count("parts", parts)
    require_count("seed", seed, minimum=0)
    if parts > len(dataset):
        raise DataError(
            f"{len(dataset)} records cannot be split into {parts} parts; expected at most one part a record."
        )
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(dataset))
    return [
        Dataset(dataset.inputs[indices], dataset.labels[indices], dataset.classes)
        for indices in np.array_split(order, parts)
    ]


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                raise DataError(
                    f"{path} is not an NPZ file; write it with dpagent.learning.save_npz or numpy.savez."
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                for name in ("inputs", "labels"):
                    if name not in archive:
                        raise DataError(
                            f"{path} lacks the array {name!r}; expected 'inputs' and 'labels', found:"
                            f" {', '.join(archive.files) or 'none'}."
                        )
                arrays = {name: archive[name] for name in ("inputs", "labels", "classes") if name in archive}
    except FileNotFoundError as error:
        raise DataError(
            f"There is no file {path}; expected an NPZ with the arrays 'inputs' and 'labels'."
        ) from error
    except (OSError, ValueError, EOFError, MemoryError, KeyError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"Cannot read {path}: {error}. Expected an NPZ with plain arrays.") from error
    except (zipfile.BadZipFile, zlib.error, SyntaxError) as error:
        raise DataError(
            f"{path} is damaged: {error}. Expected an NPZ with plain arrays; copy it again."
        ) from error
    for name, array in arrays.items():
        # Members without numpy's own header come as bytes.
        if not isinstance(array, np.ndarray):
            raise DataError(f"{path}: {name!r} is not an array; write the file with numpy.savez.")
    return arrays


def _scalar_count(path: Path, value: NDArray[Any]) -> int:
    if value.size != 1 or value.dtype.kind not in "iu" or int(value.reshape(-1)[0]) < 2:
        raise DataError(f"{path}: 'classes' is {value!r}; expected one whole number of at least 2.")
    return int(value.reshape(-1)[0])


def _find_idx(directory: Path, name: str) -> Path:
    for candidate in (directory / name, directory / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise DataError(
        f"{directory} has neither {name} nor {name}.gz; expected the four IDX files of MNIST there."
    )


def _read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """The array in one IDX file: two zero bytes, type, number of dimensions, sizes, values."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * dimensions)
            magic = bytes((0, 0, _IDX_UNSIGNED_BYTE, dimensions))
            if header[:4] != magic:
                raise DataError(
                    f"{path} begins with {header[:4].hex()}; expected {magic.hex()}: IDX, unsigned bytes in"
                    f" {dimensions} dimension(s)."
                )
            if len(header) < 4 + 4 * dimensions:
                raise DataError(f"{path} ends within its header; copy it again.")
            shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", header[4:])
            expected = math.prod(shape)
            # Piece by piece, and one byte too many: a header may promise more than there is, or less.
            values = bytearray()
            while len(values) <= expected and (
                piece := file.read(min(_READ_CHUNK, expected + 1 - len(values)))
            ):
                values += piece
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"Cannot read {path}: {error}. Copy it again.") from error
    if len(values) != expected:
        amount = f"only {len(values)}" if len(values) < expected else f"more than {expected}"
        raise DataError(f"{path} holds {amount} bytes of values; its header says {expected}. Copy it again.")
    return np.frombuffer(bytes(values), np.uint8).reshape(shape)
