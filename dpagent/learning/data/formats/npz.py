"""NPZ files: the arrays ``inputs`` and ``labels``, optionally ``classes`` and ``class_names``.

Small inputs are kept in memory; larger ones are read by number from the file itself when they are stored
(``numpy.savez``), and unpacked first when they are compressed. What is read of an archive is bounded
(:mod:`dpagent.learning.data.npz_file`).
"""

from __future__ import annotations

import io
import math
import zipfile
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpagent.errors import DataError, StorageError
from dpagent.learning.data.classes import classes_of_numbers, warnings_about, within
from dpagent.learning.data.dataset import DIGEST_BYTES, ArrayDataset, Dataset, Origin
from dpagent.learning.data.declared import NoSettings
from dpagent.learning.data.derived import require_as_many_values
from dpagent.learning.data.format import Format, Inferred, Source
from dpagent.learning.data.glance import Glance
from dpagent.learning.data.location import Location
from dpagent.learning.data.npz_file import Member, NpzFile, opened_npz
from dpagent.learning.data.problems import Problems
from dpagent.learning.data.stored import (
    IN_MEMORY_BYTES,
    StoredArray,
    StoredDataset,
    digest_of,
    input_dtype,
    to_inputs,
)
from dpagent.wording import counted


class NpzFormat(Format[NoSettings]):
    """Arrays in an archive, as ``numpy.savez`` writes them."""

    kind, title, example, section = "npz", "an NPZ file", "NEW.npz", NoSettings
    decoder_seconds = 0.2

    def recognises(self, location: Location) -> bool:
        """As of :class:`Format`."""
        if location.is_folder:
            return False
        return location.name.endswith(".npz") or not {"inputs.npy", "labels.npy"}.isdisjoint(location.members)

    def hint(self, location: Location) -> str:
        """As of :class:`Format`."""
        files = [name for name in location.names if name.endswith(".npz")]
        return f"Give the path of the file: {location.path / files[0]}?" if files else ""

    def undeclared(self, source: Source, section: NoSettings) -> list[str]:
        """As of :class:`Format`: the form of a record, which stands in the file."""
        return ["shape"] * (source.shape is None) + ["dtype"] * (source.dtype is None)

    def infer(self, source: Source, section: NoSettings) -> Inferred[NoSettings]:
        """As of :class:`Format`: what the file says, and else the largest label."""
        with opened_npz(source.path) as file:
            inputs, classes = file.header("inputs"), source.classes
            warnings: tuple[str, ...] = ()
            dtype = input_dtype(inputs.dtype)
            if classes is None and (classes := file.classes()) is None:
                classes = classes_of_numbers(file.labels(source))
                warnings = warnings_about(classes)
            if dtype != np.uint8 and dtype != np.float32:
                raise DataError(f"{source.path}: {_odd_inputs(inputs)}")
        declared = replace(
            source,
            classes=classes,
            shape=source.shape or inputs.shape[1:],
            dtype=source.dtype or ("uint8" if dtype == np.uint8 else "float32"),
        )
        return Inferred(declared, section, warnings)

    def open(self, source: Source, section: NoSettings) -> Dataset:
        """As of :class:`Format`."""
        with opened_npz(source.path) as file:
            return _dataset(file, source)

    def listed(self, source: Source, section: NoSettings, *, growing: bool) -> Dataset:
        """As of :class:`Format`. All of the file is read for its checksums: labels and values are of one
        file, or it is left for later. A record that the disk cannot read is left out alone, where the values
        are stored as they are."""
        with opened_npz(source.path, source.opened(source.path)) as file:
            return _listed(file, source)

    def glance(self, source: Source, section: NoSettings) -> Glance:
        """As of :class:`Format`."""
        return Glance.at(lambda: [source.path])


def open_npz(path: str | Path) -> Dataset:
    """A dataset from an NPZ file of one's own, such as :func:`save_npz` writes; the file says what it holds.

    Inputs are ``(n, features)``, ``(n, length, channels)`` or ``(n, height, width, channels)``: uint8 in
    0..255, or floats, which become float32. Labels are whole numbers from 0. An array ``classes`` with one
    whole number is optional, as is ``class_names``; without either, the number of classes is one more than
    the largest label, but at least two.

    Args:
        path: the file.

    Raises:
        DataError: the file is missing, is not such an NPZ, or its arrays do not fit together.
    """
    known = NpzFormat()
    found = known.infer(Source(Path(path)), NoSettings())
    return known.open(found.source, found.section)


def records_in(path: Path) -> int:
    """The number of inputs in an NPZ file, by its header alone.

    Raises:
        DataError: the file is missing, or has no inputs.
    """
    with opened_npz(path) as file:
        return math.prod(file.header("inputs").shape[:1])


def save_npz(path: str | Path, dataset: Dataset) -> None:
    """Write ``dataset`` as an NPZ that :func:`open_npz` reads back, a piece at a time. It is not compressed,
    so that it can be read by number.

    Raises:
        StorageError: the file cannot be written.
        DataError: a record cannot be read.

    >>> from tempfile import TemporaryDirectory
    >>> data = ArrayDataset(np.zeros((3, 8, 8, 1), np.uint8), np.array([0, 1, 1]), 2, ["cat", "fox"])
    >>> with TemporaryDirectory() as folder:
    ...     save_npz(Path(folder) / "x.npz", data)
    ...     again = open_npz(Path(folder) / "x.npz")
    >>> len(again), again.shape, again.class_names
    (3, (8, 8, 1), ('cat', 'fox'))
    """
    path = Path(path)
    small = {"labels": dataset.labels, "classes": np.asarray(dataset.classes, np.int64)}
    if dataset.class_names:
        small["class_names"] = np.array(dataset.class_names)
    try:
        with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
            with archive.open("inputs.npy", "w", force_zip64=True) as member:
                shape = (len(dataset), *dataset.shape)
                header = {"descr": npy.dtype_to_descr(dataset.dtype), "fortran_order": False, "shape": shape}
                npy.write_array_header_1_0(member, header)
                for inputs, _ in dataset.batches():
                    member.write(np.ascontiguousarray(inputs).data)
            for name, array in small.items():
                buffer = io.BytesIO()
                npy.write_array(buffer, array, allow_pickle=False)
                archive.writestr(f"{name}.npy", buffer.getvalue())
    except OSError as error:
        raise StorageError(
            f"Cannot write {path}: {error.strerror or error}. Check the folder and its space."
        ) from error


def _dataset(file: NpzFile, source: Source) -> Dataset:
    path, table = file.path, source.class_table
    inputs, labels = _inputs(file, source, file.label_header()), file.labels(source)
    places, left_out = within(labels, table.count)
    used = labels[places].astype(np.int64)
    origin = Origin("npz", f"{path}, NPZ", left_out)
    if source.keeps_in_memory(inputs.shape[0], _record_bytes(inputs)):
        values = to_inputs(file.values(inputs, IN_MEMORY_BYTES * 4))[places]
        return ArrayDataset(values, used, table.count, table.names, origin=origin)
    stored = StoredArray(file.raw(inputs), inputs.dtype, inputs.shape)
    return StoredDataset(
        [stored], to_inputs, used, table.count, places=places, shape=inputs.shape[1:],
        dtype=input_dtype(inputs.dtype), class_names=table.names, origin=origin,
    )  # fmt: skip


def _listed(file: NpzFile, source: Source) -> Dataset:
    """On a board: the first records, a digest of each, or where they are packed their values."""
    path, table, declared = file.path, source.class_table, source.declared_records
    assert declared is not None
    header = file.label_header()
    inputs = _inputs(file, source, header)
    record_bytes = _record_bytes(inputs)
    source.require_room(inputs.shape[0])
    if not inputs.is_stored and not source.keeps_in_memory(inputs.shape[0], record_bytes):
        raise DataError(
            f"{path} is compressed, and {counted(declared, 'record')} (data.max_records) take"
            f" {declared * record_bytes >> 20:,} MiB; a board unpacks at most"
            f" {IN_MEMORY_BYTES >> 20}. Write the file with numpy.savez, or lower data.max_records."
        )
    most = source.most_listed(max(1, record_bytes))
    labels = np.concatenate(list(file.first(header, most)))
    places, left_out = within(labels, table.count)
    source_name = f"{path}, NPZ"
    shape, dtype = inputs.shape[1:], input_dtype(inputs.dtype)
    if inputs.is_stored:
        is_class = np.zeros(len(labels), np.bool_)
        is_class[places] = True
        here, contents, problems = array("q"), bytearray(), Problems()
        for number, record in file.first_readable(inputs, most, problems):
            if is_class[number]:
                here.append(number)
                contents += digest_of(record)
        places = np.array(here, np.int64)
        stored = StoredArray(file.raw(inputs), inputs.dtype, inputs.shape)
        return StoredDataset(
            [stored], to_inputs, labels[places].astype(np.int64), table.count, places=places,
            contents=np.frombuffer(bytes(contents), np.uint8).reshape(-1, DIGEST_BYTES), shape=shape,
            dtype=dtype, class_names=table.names,
            origin=Origin("npz", source_name, (*problems.sentences(), *left_out)),
        )  # fmt: skip
    values = np.empty((len(places), *shape), dtype)
    for piece, records in _pieces(file, inputs, most, places):
        values[piece] = to_inputs(records)
    origin = Origin("npz", source_name, left_out)
    return ArrayDataset(values, labels[places].astype(np.int64), table.count, table.names, origin=origin)


def _pieces(
    file: NpzFile, inputs: Member, most: int, places: NDArray[np.int64]
) -> Iterator[tuple[slice, NDArray[Any]]]:
    """The records at ``places`` among the first ones, in pieces, with which of them these are."""
    begins = 0
    for piece in file.first(inputs, most):
        low, high = np.searchsorted(places, [begins, begins + len(piece)]).tolist()
        if high > low:
            yield slice(low, high), piece[places[low:high] - begins]
        begins += len(piece)


def _inputs(file: NpzFile, source: Source, labels: Member) -> Member:
    """Type and shape of the inputs, one for each label.

    Raises:
        DataError: they do not fit together, or are not as declared.
    """
    path, inputs, count = file.path, file.header("inputs"), labels.shape[0]
    if not inputs.shape or inputs.shape[0] != count:
        held = counted(inputs.shape[0], "input") if inputs.shape else "no inputs"
        raise DataError(
            f"{path}: There are {held} and {counted(count, 'label')}; expected one label an input."
        )
    if inputs.dtype != np.uint8 and inputs.dtype.kind != "f":
        raise DataError(f"{path}: {_odd_inputs(inputs)}")
    if source.shape is not None:
        require_as_many_values(inputs.shape[1:], source.shape)  # before they are unpacked
    return inputs


def _record_bytes(inputs: Member) -> int:
    return math.prod(inputs.shape[1:]) * input_dtype(inputs.dtype).itemsize


def _odd_inputs(inputs: Member) -> str:
    shown = ", ".join(["records", *map(str, inputs.shape[1:])])
    return (
        f"The inputs are {inputs.dtype} of shape ({shown}); expected uint8 or float32 of shape (records,"
        " features), (records, length, channels) or (records, height, width, channels)."
    )
