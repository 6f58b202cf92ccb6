"""IDX files, the format of MNIST: two zero bytes, a type, the number of dimensions, sizes, values.

Described by LeCun, Cortes and Burges, "The MNIST database of handwritten digits". A plain file is read by
number, one with ``.gz`` is unpacked. Inputs of three dimensions, ``(n, height, width)``, are images with one
channel; those of two and four are taken as they are.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.classes import named_classes
from dpagent.learning.data.dataset import ArrayDataset, Dataset, Origin
from dpagent.learning.data.format import Format, Half, NoSettings, Source
from dpagent.learning.data.location import Location
from dpagent.learning.data.stored import (
    IN_MEMORY_BYTES,
    StoredArray,
    StoredDataset,
    input_dtype,
    open_raw,
    reading,
    to_inputs,
)
from dpagent.wording import counted

_TYPES: Final[dict[int, np.dtype[Any]]] = {
    0x08: np.dtype(np.uint8),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
_LABEL_TYPES: Final[dict[int, np.dtype[Any]]] = {
    0x08: np.dtype(np.uint8),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
}
_NAME: Final = re.compile(r"(?:.+[-.])?(train|t10k|test)[-.](images|labels)[-.]idx\d[-.]\w+(?:\.gz)?")
_HALVES: Final[dict[Half, tuple[str, ...]]] = {"train": ("train",), "test": ("t10k", "test")}


class IdxFormat(Format[NoSettings]):
    """The files of MNIST."""

    kind, title, section = "idx", "a folder of IDX files", NoSettings

    def recognises(self, location: Location) -> bool:
        """As of :class:`Format`."""
        return any(map(_NAME.fullmatch, location.names))

    def hint(self, location: Location) -> str:
        """As of :class:`Format`."""
        named = not location.is_folder and _NAME.fullmatch(location.path.name)
        return "Give the path of the folder that holds the IDX files." if named else ""

    def open(self, source: Source, section: NoSettings) -> Dataset:
        """As of :class:`Format`."""
        return open_idx(source.path, source.half, source.classes)

    def has_test_half(self, path: Path) -> bool:
        """As of :class:`Format`."""
        return any(
            match[1] in _HALVES["test"]
            for name in Location(path).names
            if (match := _NAME.fullmatch(name)) is not None
        )


def open_idx(directory: str | Path, half: Half, classes: Sequence[str] | None = None) -> Dataset:
    """One half of MNIST, or of a dataset in its format, from a folder of IDX files.

    The files are called ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and so on, ``t10k-`` or
    ``test-`` for the test half, with or without ``.gz``.

    Args:
        directory: the folder.
        half: ``train`` or ``test``.
        classes: names of the classes 0, 1, …; without them there is one more than the largest label.

    Raises:
        DataError: a file is missing, is not IDX, or is shorter or longer than it says.
    """
    if half not in _HALVES:
        raise DataError(f"The half is {half!r}; expected 'train' or 'test'.")
    directory = Path(directory)
    inputs = _open(_find(directory, half, "images"), _TYPES, (2, 3, 4))
    numbers = _open(_find(directory, half, "labels"), _LABEL_TYPES, (1,))
    if inputs.shape[0] != numbers.shape[0]:
        raise DataError(
            f"{inputs.file.path} holds {counted(inputs.shape[0], 'record')} and {numbers.file.path} "
            f"{counted(numbers.shape[0], 'label')}; expected one label a record."
        )
    labels = numbers.read_all().astype(np.int64)
    shape = (*inputs.shape[1:], 1) if len(inputs.shape) == 3 else inputs.shape[1:]
    dtype = input_dtype(inputs.dtype)
    origin = Origin("idx", f"{inputs.file.path} and {numbers.file.path.name}, IDX files")
    count, names = named_classes(labels, classes)
    packed = inputs.file.path.suffix == ".gz"
    try:
        if packed and math.prod(inputs.shape) * dtype.itemsize <= IN_MEMORY_BYTES:
            values = to_inputs(inputs.read_all()).reshape(-1, *shape)
            return ArrayDataset(values, labels, count, names, origin=origin)

        def convert(stored: NDArray[np.generic]) -> NDArray[np.generic]:
            return to_inputs(stored).reshape(-1, *shape)

        return StoredDataset(
            [inputs], convert, labels, count, shape=shape, dtype=dtype, class_names=names, origin=origin
        )
    except DataError as error:
        raise DataError(f"{directory}, {half} half: {error}") from error


def _find(directory: Path, half: Half, what: str) -> Path:
    with reading(directory):
        if not directory.is_dir():
            raise DataError(f"{directory} is not a directory; expected that of the IDX files.")
        names = sorted(entry.name for entry in directory.iterdir())
    found = [
        name
        for name in names
        if (match := _NAME.fullmatch(name)) and match[1] in _HALVES[half] and match[2] == what
    ]
    plain = {name.removesuffix(".gz") for name in found}
    if len(plain) > 1:
        raise DataError(
            f"{directory} has several files of {what} of the {half} half: {', '.join(found)}. Keep one"
            " dataset in a directory."
        )
    if not found:
        digit = "3" if what == "images" else "1"
        name = f"{_HALVES[half][0]}-{what}-idx{digit}-ubyte"
        raise DataError(
            f"{directory} has neither {name} nor {name}.gz; expected the IDX files of that half there."
        )
    return directory / found[0]  # the plain one before the packed one, as names sort


def _open(path: Path, types: dict[int, np.dtype[Any]], dimensions: tuple[int, ...]) -> StoredArray:
    raw = open_raw(path)
    header = np.zeros(4 + 4 * max(dimensions), np.uint8)
    begin = header[: min(len(header), raw.size)]
    raw.read_into(begin, 0)
    if len(begin) < 4 or header[0] or header[1] or header[2] not in types or header[3] not in dimensions:
        kinds = "/".join(f"{kind:02x}" for kind in types)
        sizes = "/".join(f"{number:02x}" for number in dimensions)
        raise DataError(
            f"{path} begins with {begin[:4].tobytes().hex() or 'nothing'}; expected 0000, a type ({kinds})"
            f" and a number of dimensions ({sizes}): an IDX file."
        )
    start = 4 + 4 * int(header[3])
    if len(begin) < start:
        raise DataError(f"{path} ends within its header; copy it again.")
    shape: tuple[int, ...] = struct.unpack(f">{header[3]}I", header[4:start].tobytes())
    dtype = types[int(header[2])]
    expected, came = math.prod(shape) * dtype.itemsize, raw.size - start
    if came != expected:
        amount = "only" if came < expected else "as many as"
        raise DataError(
            f"{path} holds {amount} {counted(came, 'byte')} of values; its header says {expected}. Copy it "
            "again."
        )
    return StoredArray(raw.part(start), dtype, shape)
