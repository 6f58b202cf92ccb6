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
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.classes import classes_of_numbers, warnings_about, within
from dpagent.learning.data.dataset import ArrayDataset, Dataset, Origin
from dpagent.learning.data.declared import Half, NoSettings
from dpagent.learning.data.format import Format, Inferred, Source
from dpagent.learning.data.location import Location
from dpagent.learning.data.stored import (
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
_ON_A_BOARD: Final = (
    "A board takes no IDX files, whose labels and images could be of two data sets while they are replaced."
    " Write one NPZ file of them, by the lines of docs/data.md, and declare that."
)


class IdxFormat(Format[NoSettings]):
    """The files of MNIST."""

    kind, title, section = "idx", "a folder of IDX files", NoSettings
    decoder_seconds = 0.2

    def recognises(self, location: Location) -> bool:
        """As of :class:`Format`."""
        return any(map(_NAME.fullmatch, location.names))

    def hint(self, location: Location) -> str:
        """As of :class:`Format`."""
        named = not location.is_folder and _NAME.fullmatch(location.path.name)
        return "Give the path of the folder that holds the IDX files." if named else ""

    def undeclared(self, source: Source, section: NoSettings) -> list[str]:
        """As of :class:`Format`: the form of a record, which stands in the file."""
        return ["shape"] * (source.shape is None) + ["dtype"] * (source.dtype is None)

    def infer(self, source: Source, section: NoSettings) -> Inferred[NoSettings]:
        """As of :class:`Format`: what the headers say, and the largest label."""
        inputs, numbers = _files(source)
        classes, warnings = source.classes, tuple[str, ...]()
        if classes is None:
            classes = classes_of_numbers(numbers.read_all())
            warnings = warnings_about(classes)
        warnings = (*warnings, _ON_A_BOARD)
        declared = replace(
            source,
            classes=classes,
            shape=source.shape or _record_shape(inputs),
            dtype=source.dtype or ("uint8" if inputs.dtype == np.uint8 else "float32"),
        )
        return Inferred(declared, section, warnings)

    def open(self, source: Source, section: NoSettings) -> Dataset:
        """As of :class:`Format`. No board takes them: :meth:`listed`.

        The files are called ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and so on, ``t10k-`` or
        ``test-`` for the test half, with or without ``.gz``.
        """
        return _dataset(*_files(source), source)

    def listed(self, source: Source, section: NoSettings, *, growing: bool) -> Dataset:
        """As of :class:`Format`: none. Labels and images are two files, and between the moments at which
        somebody replaces them, every image has another's label.

        Raises:
            DataError: always; says what to do.
        """
        raise DataError(f"{source.path} holds IDX files. {_ON_A_BOARD}")

    def has_test_half(self, path: Path, section: NoSettings) -> bool:
        """As of :class:`Format`."""
        return any(
            match[1] in _HALVES["test"]
            for name in Location(path).names
            if (match := _NAME.fullmatch(name)) is not None
        )


def _files(source: Source) -> tuple[StoredArray, StoredArray]:
    """Records and labels, as many of each, and no more than there may be.

    Raises:
        DataError: they are damaged, or too many.
    """
    assert source.max_records is not None
    most, files = source.max_records, _find(source.path, source.half)
    labels = _open(files[0], _LABEL_TYPES, (1,), most * 4)
    values = None if source.shape is None else most * math.prod(source.shape) * 8
    inputs = _open(files[1], _TYPES, (2, 3, 4), values)
    if inputs.shape[0] != labels.shape[0]:
        raise DataError(
            f"{inputs.file.path} holds {counted(inputs.shape[0], 'record')} and {labels.file.path} "
            f"{counted(labels.shape[0], 'label')}; expected one label a record."
        )
    source.require_room(labels.shape[0])
    return inputs, labels


def _record_shape(inputs: StoredArray) -> tuple[int, ...]:
    return (*inputs.shape[1:], 1) if len(inputs.shape) == 3 else inputs.shape[1:]


def _dataset(inputs: StoredArray, numbers: StoredArray, source: Source) -> Dataset:
    table, shape, dtype = source.class_table, _record_shape(inputs), input_dtype(inputs.dtype)
    labels = numbers.read_all().astype(np.int64)
    places, left_out = within(labels, table.count)
    used = labels[places]
    origin = Origin("idx", f"{inputs.file.path} and {numbers.file.path.name}, IDX files", left_out)

    def convert(stored: NDArray[np.generic]) -> NDArray[np.generic]:
        return to_inputs(stored).reshape(-1, *shape)

    try:
        packed = inputs.file.path.suffix == ".gz"
        if packed and source.keeps_in_memory(inputs.shape[0], math.prod(shape) * dtype.itemsize):
            values = convert(inputs.read(places))
            return ArrayDataset(values, used, table.count, table.names, origin=origin)
        return StoredDataset(
            [inputs], convert, used, table.count, places=places,
            shape=shape, dtype=dtype, class_names=table.names, origin=origin,
        )  # fmt: skip
    except DataError as error:
        raise DataError(f"{source.path}, {source.half} half: {error}") from error


def _find(directory: Path, half: Half) -> tuple[Path, Path]:
    """The files of labels and of records.

    Raises:
        DataError: One of them is missing, or there are several.
    """
    with reading(directory):
        if not directory.is_dir():
            raise DataError(f"{directory} is not a directory; expected that of the IDX files.")
        names = sorted(entry.name for entry in directory.iterdir())
    labels, images = (_of_kind(names, directory, half, what) for what in ("labels", "images"))
    if labels is None or images is None:
        what, digit = ("labels", "1") if labels is None else ("images", "3")
        name = f"{_HALVES[half][0]}-{what}-idx{digit}-ubyte"
        raise DataError(
            f"{directory} has neither {name} nor {name}.gz; expected the IDX files of that half there."
        )
    return labels, images


def _of_kind(names: Sequence[str], directory: Path, half: Half, what: str) -> Path | None:
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
    return directory / found[0] if found else None  # the plain one before the packed one, as names sort


def _open(
    path: Path, types: dict[int, np.dtype[Any]], dimensions: tuple[int, ...], most: int | None
) -> StoredArray:
    """The values of a file, of which no more than ``most`` bytes and the header are unpacked."""
    # One more shows that there are too many.
    raw = open_raw(path, most=None if most is None else most + 4 + 4 * max(dimensions) + 1)
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
