"""The files in a zip archive, read one at a time without keeping the archive's list of them.

``zipfile`` keeps half a kilobyte a member; a photo archive has tens of thousands. Here the list is read
once, and only the places of the wanted members are kept. Nothing is ever written to disk, so that names such
as ``../../etc`` do no harm; no member is unpacked to more than it says, or to more than
:data:`MAX_MEMBER_BYTES`.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.stored import RawFile, open_raw, reading
from dpagent.wording import counted

MAX_MEMBER_BYTES: Final = 64 << 20
MAX_MEMBERS: Final = 4_000_000

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


def open_zip(path: Path) -> tuple[RawFile, list[zipfile.ZipInfo]]:
    """The archive and its entries: files and directories.

    Raises:
        DataError: it is not a zip archive, or a damaged one.
    """
    try:
        with reading(path), zipfile.ZipFile(path) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, MemoryError) as error:
        raise DataError(f"{path} is not a zip archive, or a damaged one: {error}. Copy it again.") from error
    if len(listed) > MAX_MEMBERS:
        raise DataError(f"{path} lists {counted(len(listed), 'file')}; expected at most {MAX_MEMBERS:,}.")
    return open_raw(path), listed


def obstacle(info: zipfile.ZipInfo) -> str | None:
    """Why a member cannot be read, if it cannot."""
    if info.flag_bits & _ENCRYPTED:
        return "it is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"it is compressed by method {info.compress_type}; expected stored or deflated"
    if not 0 < info.file_size <= MAX_MEMBER_BYTES:
        return f"it has {counted(info.file_size, 'byte')}; expected 1 to {MAX_MEMBER_BYTES:,}"
    return None
