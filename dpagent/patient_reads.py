"""Reads of a file on a disk that is damaged in places.

The system reads a file in pieces of 64 KiB and more (large folios), and of a piece in which a block cannot be
read it may hand out nothing: on XFS, one bad sector cost 64 KiB of records that lay around it.
"""

from __future__ import annotations

import os
from typing import Final

_LARGEST_PIECE: Final = 2 << 20
"""Bytes of the largest, at multiples of which it begins."""


class PatientReads:
    """Reads one open file. Where that fails, the piece is read again page by page, once."""

    def __init__(self) -> None:
        self._read_again = set[int]()

    def read(self, descriptor: int, view: memoryview, place: int) -> int:
        """As :func:`os.preadv`, from byte ``place`` on.

        Raises:
            OSError: the disk cannot read the first page.
        """
        try:
            return os.preadv(descriptor, [view], place)
        except OSError:
            piece = place // _LARGEST_PIECE
            if piece in self._read_again:
                raise
            self._read_again.add(piece)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            os.posix_fadvise(descriptor, piece * _LARGEST_PIECE, 2 * _LARGEST_PIECE, os.POSIX_FADV_DONTNEED)
            return os.preadv(descriptor, [view], place)
