"""NPZ files: the arrays ``inputs`` and ``labels``, optionally ``classes`` and ``class_names``.

Pickled objects are never read. Small inputs are kept in memory; larger ones are read by number from the
file itself when they are stored (``numpy.savez``), and unpacked first when they are compressed.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpagent.errors import DataError, StorageError
from dpagent.learning.data.classes import named_classes
from dpagent.learning.data.dataset import ArrayDataset, Dataset, Origin
from dpagent.learning.data.format import Format, NoSettings, Source
from dpagent.learning.data.location import Location
from dpagent.learning.data.stored import (
    IN_MEMORY_BYTES,
    RawFile,
    StoredArray,
    StoredDataset,
    input_dtype,
    open_raw,
    require_readable,
    to_inputs,
    unpack,
)
from dpagent.wording import counted

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")  # of a zip: signature, lengths of name and extra field
_MOST_LABELS: Final = 1 << 28
_MOST_NAMES_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class _Member:
    """One array of the archive, before its values are read."""

    info: zipfile.ZipInfo
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    header_bytes: int

    @property
    def value_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class NpzFormat(Format[NoSettings]):
    """Arrays in an archive, as ``numpy.savez`` writes them."""

    kind, title, example, section = "npz", "an NPZ file", "NEW.npz", NoSettings

    def recognises(self, location: Location) -> bool:
        """As of :class:`Format`."""
        if location.is_folder:
            return False
        return location.name.endswith(".npz") or not {"inputs.npy", "labels.npy"}.isdisjoint(location.members)

    def hint(self, location: Location) -> str:
        """As of :class:`Format`."""
        files = [name for name in location.names if name.endswith(".npz")]
        return f"Give the path of the file: {location.path / files[0]}?" if files else ""

    def open(self, source: Source, section: NoSettings) -> Dataset:
        """As of :class:`Format`."""
        return open_npz(source.path, source.classes)


def open_npz(path: str | Path, classes: Sequence[str] | None = None) -> Dataset:
    """A dataset from an NPZ file with the arrays ``inputs`` and ``labels``.

    Inputs are ``(n, features)``, ``(n, length, channels)`` or ``(n, height, width, channels)``: uint8 in
    0..255, or floats, which become float32. Labels are whole numbers from 0. An array ``classes`` with one
    whole number is optional, as is ``class_names``; without either, the number of classes is one more than
    the largest label, but at least two.

    Args:
        path: the file.
        classes: names of the classes 0, 1, …, in place of those in the file.

    Raises:
        DataError: the file is missing, is not such an NPZ, or its arrays do not fit together.
    """
    path = Path(path)
    require_readable(path)
    with _damage(path), path.open("rb") as file:
        if file.read(2) != b"PK":
            raise DataError(f"{path} is not an NPZ file; write it with numpy.savez.")
        with zipfile.ZipFile(file) as archive:
            return _open(path, archive, classes)


def save_npz(path: str | Path, dataset: Dataset) -> None:
    """Write ``dataset`` as a compressed NPZ that :func:`open_npz` reads back, a piece at a time.

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
        with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
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


def _open(path: Path, archive: zipfile.ZipFile, listed: Sequence[str] | None) -> Dataset:
    members = {
        info.filename.removesuffix(".npy"): info
        for info in archive.infolist()
        if info.filename.endswith(".npy")
    }
    for name in ("inputs", "labels"):
        if name not in members:
            raise DataError(
                f"{path} lacks the array {name!r}; expected 'inputs' and 'labels', found:"
                f" {', '.join(members) or 'none'}."
            )
    labels = _labels(path, _values(archive, _header(path, archive, members["labels"]), _MOST_LABELS * 8))
    count, names = _classes(path, archive, members, labels, listed)
    inputs = _header(path, archive, members["inputs"])
    if not inputs.shape or inputs.shape[0] != len(labels):
        held = counted(inputs.shape[0], "input") if inputs.shape else "no inputs"
        raise DataError(
            f"{path}: There are {held} and {counted(len(labels), 'label')}; expected one label an input."
        )
    others: dict[str, Any] = {"class_names": names, "origin": Origin("npz", f"{path}, NPZ")}
    try:
        if math.prod(inputs.shape) * input_dtype(inputs.dtype).itemsize <= IN_MEMORY_BYTES:
            values = to_inputs(_values(archive, inputs, IN_MEMORY_BYTES * 2))
            return ArrayDataset(values, labels, count, **others)
        stored = StoredArray(_raw(path, archive, inputs), inputs.dtype, inputs.shape)
        return StoredDataset(
            [stored],
            to_inputs,
            labels,
            count,
            shape=inputs.shape[1:],
            dtype=input_dtype(inputs.dtype),
            **others,
        )
    except DataError as error:
        raise DataError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


def _header(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    """Type and shape of a member, checked against the bytes it has."""
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as stream:
        if stream.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
            raise DataError(f"{path}: {name!r} is not an array; write the file with numpy.savez.")
        version = tuple(stream.read(2))
        if version not in ((1, 0), (2, 0)):
            raise DataError(f"{path}: {name!r} is of an unknown version; write the file with numpy.savez.")
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        begins = stream.tell()
    if dtype.hasobject:
        raise DataError(
            f"{path}: {name!r} holds objects. Object arrays cannot be loaded: they could run code."
        )
    if any(size < 0 for size in shape) or dtype.itemsize == 0:
        raise DataError(f"{path}: {name!r} has the shape {shape} of {dtype}; expected a plain array.")
    member = _Member(info, dtype, shape, begins)
    if fortran and sum(size > 1 for size in shape) > 1:
        raise DataError(
            f"{path}: {name!r} is stored column by column (Fortran order); write it with"
            " numpy.ascontiguousarray."
        )
    if info.file_size - begins != member.value_bytes:
        raise DataError(
            f"{path}: {name!r} holds {counted(info.file_size - begins, 'byte')} of values; its header says "
            f"{member.value_bytes}. The file is damaged; copy it again."
        )
    return member


def _values(archive: zipfile.ZipFile, member: _Member, most: int) -> NDArray[Any]:
    if member.value_bytes > most:
        raise DataError(
            f"{member.info.filename} takes {counted(member.value_bytes, 'byte')}; expected at most {most:,}."
        )
    with archive.open(member.info) as stream:
        stream.read(member.header_bytes)
        # One more than there should be, so that the end is reached and the checksum looked at.
        values = bytearray(stream.read(member.value_bytes))
        excess = stream.read(1)
    if len(values) != member.value_bytes or excess:
        raise DataError(f"{member.info.filename} is shorter or longer than it says. Copy the file again.")
    return np.frombuffer(values, member.dtype).reshape(member.shape)


def _raw(path: Path, archive: zipfile.ZipFile, member: _Member) -> RawFile:
    """The bytes of a member's values, to be read by number."""
    if member.info.compress_type != zipfile.ZIP_STORED or member.info.flag_bits & 1:
        with archive.open(member.info) as stream:
            # One byte too many shows that there are more than the header says.
            raw = unpack(stream, path, most=member.info.file_size + 1).part(member.header_bytes)
    else:
        whole, header = open_raw(path), np.empty(_LOCAL_HEADER.size, np.uint8)
        whole.read_into(header, member.info.header_offset)
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header.tobytes())
        if signature != b"PK\x03\x04":
            raise DataError(f"{path} is damaged: a member is not where it should be. Copy it again.")
        start = member.info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        raw = whole.part(start + member.header_bytes)
    if raw.size < member.value_bytes:
        raise DataError(f"{path} is shorter than it says. Copy it again.")
    return raw


def _labels(path: Path, labels: NDArray[Any]) -> NDArray[np.int64]:
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}: the labels are {labels.dtype}; expected whole numbers.")
    if labels.size and int(labels.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{path}: a label is {labels.max()}; expected whole numbers from 0.")
    if labels.ndim != 1:
        raise DataError(
            f"{path}: the labels are {labels.dtype} of shape {labels.shape}; expected int64 of shape"
            " (records,)."
        )
    return labels.astype(np.int64, copy=False)


def _classes(
    path: Path,
    archive: zipfile.ZipFile,
    members: dict[str, zipfile.ZipInfo],
    labels: NDArray[np.int64],
    listed: Sequence[str] | None,
) -> tuple[int, tuple[str, ...]]:
    if listed is not None:
        return named_classes(labels, listed)
    names: tuple[str, ...] = ()
    if "class_names" in members:
        array = _values(archive, _header(path, archive, members["class_names"]), _MOST_NAMES_BYTES)
        if array.dtype.kind != "U" or array.ndim != 1:
            raise DataError(
                f"{path}: 'class_names' is {array.dtype} of shape {array.shape}; expected a row of texts."
            )
        names = tuple(map(str, array))
    if "classes" in members:
        value = _values(archive, _header(path, archive, members["classes"]), _MOST_NAMES_BYTES)
        if value.size != 1 or value.dtype.kind not in "iu" or int(value.reshape(-1)[0]) < 2:
            raise DataError(f"{path}: 'classes' is {value!r}; expected one whole number of at least 2.")
        return int(value.reshape(-1)[0]), names
    return named_classes(labels, names or None)


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, SyntaxError, struct.error) as error:
        raise DataError(
            f"{path} is damaged: {error}. Expected an NPZ with plain arrays; copy it again."
        ) from error
    except (OSError, ValueError, EOFError, MemoryError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"Cannot read {path}: {error}. Expected an NPZ with plain arrays.") from error
