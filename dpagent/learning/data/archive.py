"""The files in a zip archive, read one at a time without keeping the archive's list of them.

``zipfile`` keeps half a kilobyte a member; a photo archive has tens of thousands. Here the list is read
once, if it is no longer than allowed, and only the places of the wanted members are kept. Nothing is ever
written to disk, so that names such as ``../../etc`` do no harm; no member is unpacked to more than it says,
or to more than its reader allows. Only stored and deflated members are read: the decompressors of the other
methods have no bound on the output of a piece of input.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.stored import RawFile, open_raw, reading
from dpagent.wording import counted

MAX_LIST_BYTES: Final = 16 << 20
"""The list of an archive of pictures, at most: some 200,000 names."""

_DEFLATE_EXCESS: Final = 1_024
_LOCAL: Final = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field
_ENCRYPTED: Final = 0x1


class ZipMembers:
    """Chosen members of an archive.

    Args:
        file: the archive.
        chosen: ``zipfile``'s entries of the members.
    """

    def __init__(self, file: RawFile, chosen: Sequence[zipfile.ZipInfo]) -> None:
        self._file = file
        rows = [
            (info.header_offset, info.compress_size, info.file_size, info.CRC, info.compress_type)
            for info in chosen
        ]
        self._table: NDArray[np.int64] = np.array(rows, np.int64).reshape(-1, 5)

    def read(self, number: int) -> bytes:
        """The bytes of a member, checked against their checksum.

        Raises:
            DataError: they are damaged. The text does not name the member: the caller knows it.
        """
        offset, packed_size, size, checksum, method = map(int, self._table[number])
        local = _LOCAL.unpack(self._bytes(offset, _LOCAL.size))
        if local[0] != b"PK\x03\x04":
            raise DataError("the archive is damaged here. Copy it again.")
        packed = self._bytes(offset + _LOCAL.size + local[1] + local[2], packed_size)
        try:
            data = packed
            if method == zipfile.ZIP_DEFLATED:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size + 1)
        except zlib.error as error:
            raise DataError(f"the archive is damaged here ({error}). Copy it again.") from error
        if len(data) != size or zlib.crc32(data) != checksum:
            raise DataError("its bytes do not match their checksum. Copy the archive again.")
        return data

    def keep(self, numbers: Sequence[int]) -> ZipMembers:
        """Only these members, in this order."""
        kept = ZipMembers(self._file, ())
        kept._table = self._table[list(numbers)]
        return kept

    def _bytes(self, place: int, size: int) -> bytes:
        if not 0 <= place <= place + size <= self._file.size:
            raise DataError("the archive ends before it. Copy it again.")
        target = np.empty(size, np.uint8)
        self._file.read_into(target, place)
        return target.tobytes()


@contextlib.contextmanager
def listed_zip(path: Path, most: int, raw: RawFile | None = None) -> Iterator[zipfile.ZipFile]:
    """An archive, if its list of members is short.

    Args:
        path: of the archive.
        most: bytes of the list. ``zipfile`` reads it at once, and makes ten times as much of it in memory.
        raw: the archive, if it is open.

    Raises:
        DataError: the list is longer.
        zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OSError: as of ``zipfile.ZipFile``.
    """
    with _ShortReads(path, most, raw) as stream, zipfile.ZipFile(stream) as archive:
        stream.most = None
        yield archive


class _ShortReads(io.FileIO):
    """A file of which only so much is read at once, while ``most`` is set."""

    def __init__(self, path: Path, most: int, raw: RawFile | None) -> None:
        super().__init__(path if raw is None else os.dup(raw.descriptor))
        self._path = path
        self.most: int | None = most

    def read(self, size: int | None = -1) -> bytes:
        if self.most is not None:
            wanted = os.fstat(self.fileno()).st_size - self.tell() if size is None or size < 0 else size
            if wanted > self.most:
                raise DataError(
                    f"{self._path} is an archive whose list of files takes {counted(wanted, 'byte')};"
                    f" expected at most {self.most:,}. Put fewer files into it, or unpack it into a folder."
                )
        return super().read(-1 if size is None else size) or b""


def open_zip(path: Path) -> tuple[RawFile, list[zipfile.ZipInfo]]:
    """The archive and its entries: files and directories.

    Raises:
        DataError: it is not a zip archive, or a damaged one, or lists too much.
    """
    try:
        with reading(path), listed_zip(path, MAX_LIST_BYTES) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, MemoryError) as error:
        raise DataError(f"{path} is not a zip archive, or a damaged one: {error}. Copy it again.") from error
    return open_raw(path), listed


def obstacle(info: zipfile.ZipInfo, most: int) -> str | None:
    """Why a member cannot be read, if it cannot.

    Args:
        info: of the member.
        most: bytes that it may have.
    """
    if info.flag_bits & _ENCRYPTED:
        return "it is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"it is compressed by method {info.compress_type}; expected stored or deflated"
    if not 0 < info.file_size <= most:
        return f"it has {counted(info.file_size, 'byte')}; expected 1 to {most:,}"
    if info.compress_size > info.file_size + info.file_size // 64 + _DEFLATE_EXCESS:
        packed = counted(info.compress_size, "byte")
        return f"it takes {packed} for {info.file_size:,}; expected fewer when packed"
    return None
