"""NPZ files: the arrays ``inputs`` and ``labels``, optionally ``classes`` and ``class_names``.

Pickled objects are never read. Small inputs are kept in memory; larger ones are read by number from the
file itself when they are stored (``numpy.savez``), and unpacked first when they are compressed. No header
makes more be read than it may: each array has a largest size, checked before its first value.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpagent.errors import DataError, StorageError
from dpagent.learning.data.archive import listed_zip, obstacle
from dpagent.learning.data.classes import Classes, classes_of_numbers, warnings_about, within
from dpagent.learning.data.dataset import ArrayDataset, Dataset, Origin
from dpagent.learning.data.derived import require_as_many_values
from dpagent.learning.data.format import Format, Inferred, NoSettings, Source
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
_LONGEST_HEADER: Final = 16_384
_MOST_LIST_BYTES: Final = 1 << 16
_MOST_NAMES_BYTES: Final = 16 << 20


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
    costs_alike = True

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
        with _opened(source.path) as file:
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
        with _opened(source.path) as file:
            return _dataset(file, source)


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
    with _opened(path) as file:
        return math.prod(file.header("inputs").shape[:1])


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


class _NpzFile:
    """The archive, with a bound on whatever is read of it.

    Args:
        path: of the file.
        archive: opened.

    Raises:
        DataError: it lacks an array.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path, self.archive = path, archive
        self.members = {
            info.filename.removesuffix(".npy"): info
            for info in archive.infolist()
            if info.filename.endswith(".npy")
        }
        for name in ("inputs", "labels"):
            if name not in self.members:
                raise DataError(
                    f"{path} lacks the array {name!r}; expected 'inputs' and 'labels', found:"
                    f" {', '.join(self.members) or 'none'}."
                )

    def header(self, name: str) -> _Member:
        """Type and shape of a member, checked against the bytes it has."""
        path, info = self.path, self.members[name]
        if (reason := obstacle(info, most=1 << 62)) is not None:
            raise DataError(f"{path}: {name!r}: {reason}. Write the file with numpy.savez.")
        with self.archive.open(info) as packed:
            stream = io.BytesIO(packed.read(_LONGEST_HEADER))
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
                f"{path}: {name!r} holds {counted(info.file_size - begins, 'byte')} of values; its header"
                f" says {member.value_bytes}. The file is damaged; copy it again."
            )
        return member

    def values(self, member: _Member, most: int) -> NDArray[Any]:
        """All values of a member, of at most so many bytes."""
        if member.value_bytes > most:
            raise DataError(
                f"{member.info.filename} takes {counted(member.value_bytes, 'byte')}; expected at most"
                f" {most:,}."
            )
        with self.archive.open(member.info) as stream:
            stream.read(member.header_bytes)
            # One more than there should be, so that the end is reached and the checksum looked at.
            values = bytearray(stream.read(member.value_bytes))
            excess = stream.read(1)
        if len(values) != member.value_bytes or excess:
            raise DataError(f"{member.info.filename} is shorter or longer than it says. Copy the file again.")
        return np.frombuffer(values, member.dtype).reshape(member.shape)

    def labels(self, source: Source) -> NDArray[Any]:
        """The labels as they are stored, ``(n,)``: numbers, of which not all need be classes."""
        member = self.header("labels")
        if member.dtype.kind not in "iuf" or member.dtype.itemsize > 8 or len(member.shape) != 1:
            raise DataError(
                f"{self.path}: the labels are {member.dtype} of shape {member.shape}; expected whole numbers"
                " of shape (records,)."
            )
        source.require_room(member.shape[0])
        return self.values(member, source.max_records * 8)

    def classes(self) -> Classes | None:
        """What the file says of its classes, if it does."""
        names: tuple[str, ...] = ()
        if "class_names" in self.members:
            member = self.header("class_names")
            if member.dtype.kind != "U" or len(member.shape) != 1:
                raise DataError(
                    f"{self.path}: 'class_names' is {member.dtype} of shape {member.shape}; expected a row of"
                    " texts."
                )
            names = tuple(map(str, self.values(member, _MOST_NAMES_BYTES)))
        if "classes" in self.members:
            member = self.header("classes")
            value = self.values(member, _MOST_NAMES_BYTES) if math.prod(member.shape) == 1 else None
            if value is None or value.dtype.kind not in "iu" or not int(value.reshape(-1)[0]) >= 2:
                raise DataError(
                    f"{self.path}: 'classes' is {member.dtype} of shape {member.shape}; expected one whole"
                    " number of at least 2."
                )
            count = int(value.reshape(-1)[0])
            if names and len(names) != count:
                raise DataError(
                    f"{self.path}: there are {len(names)} names for {counted(count, 'class')}; expected one"
                    " each."
                )
            return names or count
        return names or None


def _dataset(file: _NpzFile, source: Source) -> Dataset:
    path, table = file.path, source.class_table
    inputs, labels = file.header("inputs"), file.labels(source)
    if not inputs.shape or inputs.shape[0] != len(labels):
        held = counted(inputs.shape[0], "input") if inputs.shape else "no inputs"
        raise DataError(
            f"{path}: There are {held} and {counted(len(labels), 'label')}; expected one label an input."
        )
    if inputs.dtype != np.uint8 and inputs.dtype.kind != "f":
        raise DataError(f"{path}: {_odd_inputs(inputs)}")
    if source.shape is not None:
        require_as_many_values(inputs.shape[1:], source.shape)  # before they are unpacked
    places, left_out = within(labels, table.count)
    used = (labels if places is None else labels[places]).astype(np.int64)
    origin = Origin("npz", f"{path}, NPZ", left_out)
    if math.prod(inputs.shape) * input_dtype(inputs.dtype).itemsize <= IN_MEMORY_BYTES:
        values = to_inputs(file.values(inputs, IN_MEMORY_BYTES * 4))
        values = values if places is None else values[places]
        return ArrayDataset(values, used, table.count, table.names, origin=origin)
    stored = StoredArray(_raw(path, file.archive, inputs), inputs.dtype, inputs.shape)
    return StoredDataset(
        [stored], to_inputs, used, table.count, places=places, shape=inputs.shape[1:],
        dtype=input_dtype(inputs.dtype), class_names=table.names, origin=origin,
    )  # fmt: skip


def _odd_inputs(inputs: _Member) -> str:
    shown = ", ".join(["records", *map(str, inputs.shape[1:])])
    return (
        f"The inputs are {inputs.dtype} of shape ({shown}); expected uint8 or float32 of shape (records,"
        " features), (records, length, channels) or (records, height, width, channels)."
    )


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


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_NpzFile]:
    """The file, whose damage is a :class:`DataError`."""
    require_readable(path)
    with _damage(path):
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                raise DataError(f"{path} is not an NPZ file; write it with numpy.savez.")
        with listed_zip(path, _MOST_LIST_BYTES) as archive:
            yield _NpzFile(path, archive)


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        if str(path) in str(error):
            raise
        raise DataError(f"{path}: {error}") from error
    except (zipfile.BadZipFile, zlib.error, SyntaxError, struct.error) as error:
        raise DataError(
            f"{path} is damaged: {error}. Expected an NPZ with plain arrays; copy it again."
        ) from error
    except (
        OSError, ValueError, EOFError, MemoryError, NotImplementedError, RuntimeError, TypeError, LookupError,
        ArithmeticError, tokenize.TokenError,
    ) as error:  # fmt: skip
        raise DataError(f"Cannot read {path}: {error}. Expected an NPZ with plain arrays.") from error
