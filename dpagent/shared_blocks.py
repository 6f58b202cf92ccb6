"""Blocks of their own for files whose blocks a copy shares.

On XFS, ``cp`` makes a copy that takes no room: both have the same blocks, until one of them is written to and
has to have others. A file whose blocks were taken beforehand needs room again by then. So it gets that as
soon as a copy is seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
import struct
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct("=QQIIII")
_EXTENT: Final = struct.Struct("=QQQ16xI12x")
_AT_ONCE: Final = 64
_FIEMAP: Final = 0xC020_660B
"""FS_IOC_FIEMAP of linux/fs.h, for structures of linux/fiemap.h."""
_LAST: Final = 0x1
_SHARED: Final = 0x2000
_UNSHARE: Final = 0x40 | 0x1
"""FALLOC_FL_UNSHARE_RANGE and FALLOC_FL_KEEP_SIZE of linux/falloc.h."""


def take_own_blocks(directory: Path) -> None:
    """Let each file of a directory have blocks of its own, as far as there is room and the file system can.

    Not for a process that has a database there open: SQLite's locks end with any descriptor of the file.
    """
    with contextlib.suppress(OSError):
        # The small ones first: the books that an agent does not start without, and then the records.
        for entry in sorted(os.scandir(directory), key=_size):
            with contextlib.suppress(OSError):
                descriptor = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    known = os.fstat(descriptor)
                    if stat.S_ISREG(known.st_mode) and _is_shared(descriptor):
                        _unshare(descriptor, known.st_size)
                finally:
                    os.close(descriptor)


def _size(entry: os.DirEntry[str]) -> int:
    """Of a file; 0 if it cannot be told."""
    with contextlib.suppress(OSError):
        return entry.stat(follow_symlinks=False).st_size
    return 0


def _is_shared(descriptor: int) -> bool:
    """Whether other files have some of the blocks of a file.

    Raises:
        OSError: the file system does not say.
    """
    start = 0
    while True:
        question = bytearray(_HEADER.size + _AT_ONCE * _EXTENT.size)
        _HEADER.pack_into(question, 0, start, (1 << 64) - 1 - start, 0, 0, _AT_ONCE, 0)
        fcntl.ioctl(descriptor, _FIEMAP, question)
        count = _HEADER.unpack_from(question)[3]
        for number in range(count):
            begins, _, size, flags = _EXTENT.unpack_from(question, _HEADER.size + number * _EXTENT.size)
            if flags & _SHARED:
                return True
            if flags & _LAST:
                return False
            start = begins + size
        if not count:
            return False


def _unshare(descriptor: int, size: int) -> None:
    fallocate = getattr(ctypes.CDLL(None), "fallocate64", None)
    if fallocate is not None:
        fallocate(descriptor, _UNSHARE, ctypes.c_int64(0), ctypes.c_int64(size))
