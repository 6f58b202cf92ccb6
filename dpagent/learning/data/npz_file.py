"""The archive of an NPZ file, of which nothing is read beyond a bound.

Pickled objects are never read. No header makes more be read than it may: each array has a largest size,
checked before its first value.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.archive import listed_zip, obstacle
from dpagent.learning.data.classes import Classes
from dpagent.learning.data.format import Source
from dpagent.learning.data.stored import ChangedError, RawFile, open_plain, unpack
from dpagent.wording import counted

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")  # of a zip: signature, lengths of name and extra field
_PIECE: Final = 1 << 20
_LONGEST_HEADER: Final = 16_384
_MOST_LIST_BYTES: Final = 1 << 16
_MOST_NAMES_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """One array of the archive, before its values are read.

    Attributes:
        info: the archive's entry.
        dtype: as stored.
        shape: ``(n, …)``.
        header_bytes: before the values.
    """

    info: zipfile.ZipInfo
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    header_bytes: int

    @property
    def value_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_stored(self) -> bool:
        """Whether its values stand in the file as they are, so that they can be read by number."""
        return self.info.compress_type == zipfile.ZIP_STORED and not self.info.flag_bits & 1


class NpzFile:
    """The archive, with a bound on whatever is read of it.

    Args:
        path: of the file.
        archive: opened.

    Raises:
        DataError: it lacks an array.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path, self.archive = path, archive
        assert archive.fp is not None
        # Values are read by number from the very file whose labels are read first.
        self._whole = RawFile(path, os.dup(archive.fp.fileno()))
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

    def header(self, name: str) -> Member:
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
        member = Member(info, dtype, shape, begins)
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

    def values(self, member: Member, most: int) -> NDArray[Any]:
        """All values of a member, of at most so many bytes."""
        if member.value_bytes > most:
            raise DataError(
                f"{member.info.filename} takes {counted(member.value_bytes, 'byte')}; expected at most"
                f" {most:,}."
            )
        with self.archive.open(member.info) as stream:
            stream.read(member.header_bytes)
            values, begins = bytearray(member.value_bytes), 0
            # In pieces, so that they are not in memory twice.
            while piece := stream.read(min(_PIECE, len(values) - begins)):
                values[begins : begins + len(piece)] = piece
                begins += len(piece)
            # One more than there should be, so that the end is reached and the checksum looked at.
            excess = stream.read(1)
        if begins != member.value_bytes or excess:
            raise DataError(f"{member.info.filename} is shorter or longer than it says. Copy the file again.")
        return np.frombuffer(values, member.dtype).reshape(member.shape)

    def first(self, member: Member, most: int) -> Iterator[NDArray[Any]]:
        """The first ``most`` records of a member as they are stored, in pieces ``(m, …)``, a piece at least.

        Then all the rest of it is read, so that its checksum has been looked at: what came before is of the
        file that the archive's list is of, if nobody makes two files with one CRC-32.

        Raises:
            ChangedError: it is of no one file; somebody writes to it, or it is damaged.
        """
        left, size = min(most, member.shape[0]), math.prod(member.shape[1:]) * member.dtype.itemsize
        step = max(1, _PIECE // max(1, size))
        try:
            with self.archive.open(member.info) as stream:
                stream.read(member.header_bytes)
                while True:
                    piece = stream.read(min(step, left) * size)
                    if len(piece) < min(step, left) * size:
                        raise EOFError("it is shorter than it says")
                    yield np.frombuffer(piece, member.dtype).reshape(-1, *member.shape[1:])
                    left -= min(step, left)
                    if not left:
                        break
                while stream.read(_PIECE):
                    pass
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
            raise ChangedError(
                f"{self.path}: {member.info.filename} is not what its checksum says ({error}). It is being"
                " written, or damaged; then copy it again."
            ) from error

    def label_header(self) -> Member:
        """Type and shape of the labels: numbers, of which not all need be classes."""
        member = self.header("labels")
        if member.dtype.kind not in "iuf" or member.dtype.itemsize > 8 or len(member.shape) != 1:
            raise DataError(
                f"{self.path}: the labels are {member.dtype} of shape {member.shape}; expected whole numbers"
                " of shape (records,)."
            )
        return member

    def labels(self, source: Source) -> NDArray[Any]:
        """The labels as they are stored, ``(n,)``."""
        member = self.label_header()
        source.require_room(member.shape[0])
        return self.values(member, member.shape[0] * 8)

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

    def raw(self, member: Member) -> RawFile:
        """The bytes of a member's values, to be read by number."""
        path = self.path
        if not member.is_stored:
            with self.archive.open(member.info) as stream:
                # One byte too many shows that there are more than the header says.
                raw = unpack(stream, path, most=member.info.file_size + 1).part(member.header_bytes)
        else:
            header = np.empty(_LOCAL_HEADER.size, np.uint8)
            self._whole.read_into(header, member.info.header_offset)
            signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header.tobytes())
            if signature != b"PK\x03\x04":
                raise DataError(f"{path} is damaged: a member is not where it should be. Copy it again.")
            start = member.info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            raw = self._whole.part(start + member.header_bytes)
        if raw.size < member.value_bytes:
            raise DataError(f"{path} is shorter than it says. Copy it again.")
        return raw


@contextlib.contextmanager
def opened_npz(path: Path, raw: RawFile | None = None) -> Iterator[NpzFile]:
    """The file, whose damage is a :class:`DataError`.

    Args:
        path: of the file.
        raw: the file, if it is open.
    """
    raw = raw or open_plain(path)
    with _damage(path):
        if os.pread(raw.descriptor, 2, 0) != b"PK":
            raise DataError(f"{path} is not an NPZ file; write it with numpy.savez.")
        with listed_zip(path, _MOST_LIST_BYTES, raw) as archive:
            yield NpzFile(path, archive)


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
