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
from dpagent.learning.data.problems import Problems
from dpagent.learning.data.stamp import GRACE_S, Stamp, is_at_rest
from dpagent.learning.data.stored import ChangedError, RawFile, StoredArray, open_plain, unpack
from dpagent.wording import counted

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")  # of a zip: signature, lengths of name and extra field
_PIECE: Final = 1 << 20
_LONGEST_HEADER: Final = 16_384
_SIZES: Final = {(1, 0): 2, (2, 0): 4}
"""Bytes that tell how long a header is, by its version."""
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
        whole: the very file that the archive is in.

    Raises:
        DataError: it lacks an array.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile, whole: RawFile) -> None:
        self.path, self.archive, self._whole = path, archive, whole
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
            if packed.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
                raise DataError(f"{path}: {name!r} is not an array; write the file with numpy.savez.")
            version = tuple(packed.read(2))
            if version not in _SIZES:
                raise DataError(
                    f"{path}: {name!r} is of an unknown version; write the file with numpy.savez."
                )
            # No more than the header: in the next block may be a record that the disk cannot read.
            size = packed.read(_SIZES[version])
            text = packed.read(min(int.from_bytes(size, "little"), _LONGEST_HEADER))
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(io.BytesIO(size + text))
        begins = len(npy.MAGIC_PREFIX) + len(version) + len(size) + len(text)
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
            raise self._changed(member, str(error)) from error
        except OSError as error:
            packed = "" if member.is_stored else " It is compressed: write it with numpy.savez."
            raise DataError(
                f"Cannot read {self.path}: {error.strerror}. As long as {member.info.filename} cannot be read"
                f" as a whole, nothing that is new in it counts.{packed}"
            ) from error

    def first_readable(
        self, member: Member, most: int, problems: Problems
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """As :meth:`first`, of a stored member, each record with its number, without those that the disk
        cannot read.

        Where there are such, no checksum tells whether the others are of one file. So it has to be at rest:
        not written to since four seconds before it was opened.

        Args:
            member: the array.
            most: records to read.
            problems: is told of those that cannot be read.

        Raises:
            ChangedError: it is of no one file; somebody writes to it, or it is damaged.
        """
        stored, count = StoredArray(self.raw(member), member.dtype, member.shape), member.shape[0]
        step = max(1, _PIECE // max(1, member.value_bytes // max(1, count)))
        head = np.empty(member.header_bytes, np.uint8)
        self._content(member).read_into(head, 0)
        checksum, read, begins = zlib.crc32(head.data), 0, min(most, count)
        for start in range(0, begins, step):
            for number, record in stored.readable(start, min(start + step, begins), problems):
                checksum, read = zlib.crc32(record.tobytes(), checksum), read + 1
                yield number, record
        for start in range(begins, count, step):
            with contextlib.suppress(DataError):
                rest = stored.read(np.arange(start, min(start + step, count)))
                checksum, read = zlib.crc32(rest.tobytes(), checksum), read + len(rest)
        if read < count and not self._is_at_rest():
            raise self._changed(member, "a part of it cannot be read")
        if read == count and checksum != member.info.CRC:
            raise self._changed(member, "Bad CRC-32")

    def _is_at_rest(self) -> bool:
        """Whether nobody has written to the file since four seconds before it was opened; or, on a board, for
        four seconds, whatever its clock says."""
        was = Stamp.of(self._whole.known)
        is_young = abs(self._whole.opened_ns - was.touched) < GRACE_S * 1e9
        return is_at_rest(self._whole, is_young=is_young)

    def _changed(self, member: Member, why: str) -> ChangedError:
        return ChangedError(
            f"{self.path}: {member.info.filename} is not what its checksum says ({why}). It is being written,"
            " or damaged; then copy it again."
        )

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
            raw = self._content(member).part(member.header_bytes)
        if raw.size < member.value_bytes:
            raise DataError(f"{path} is shorter than it says. Copy it again.")
        return raw

    def _content(self, member: Member) -> RawFile:
        """A stored member, from the header of its array on."""
        header = np.empty(_LOCAL_HEADER.size, np.uint8)
        self._whole.read_into(header, member.info.header_offset)
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header.tobytes())
        if signature != b"PK\x03\x04":
            raise DataError(f"{self.path} is damaged: a member is not where it should be. Copy it again.")
        return self._whole.part(member.info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)


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
            yield NpzFile(path, archive, raw)


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
