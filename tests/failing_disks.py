"""A disk that fails at some bytes of a file: it does not write them, says so when they are to be durable, or
does not read them."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from dpagent.learning.data import archive

BLOCK = 4_096
"""Bytes of a file that the system reads at least at once."""

Fault = Literal["write", "flush", "read"]


def fails_at(
    patch: pytest.MonkeyPatch, name: str, place: int, fault: Fault, *, read_at_once: int = 1
) -> None:
    """Let the disk fail at one byte of the files of a name, for this process and its forks.

    Args:
        patch: for as long as it fails.
        name: of the files.
        place: the byte.
        fault: what it cannot do.
        read_at_once: bytes of a piece that the system reads at once, as with large folios: of the one that
            holds the byte, nothing is had until it is asked for page by page.
    """
    pwrite, preadv, pread, fsync = os.pwrite, os.preadv, os.pread, os.fsync
    fadvise, by_page = os.posix_fadvise, set[int]()
    dirty = set[int]()
    known = dict[Path, bytes]()

    def path_of(file: int) -> Path:
        return Path(f"/proc/self/fd/{file}").readlink()

    def there(path: Path) -> bytes:
        """What is there, also by the hand of a fork."""
        with path.open("rb") as opened:
            return pread(opened.fileno(), 16, place)

    def hits(file: int, start: int, length: int) -> bool:
        return path_of(file).name == name and start <= place < start + length

    def write(file: int, data: Any, offset: int) -> int:
        if hits(file, offset, len(data)):
            if fault == "write":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            dirty.add(file)
        return pwrite(file, data, offset)

    def lost(file: int, start: int, length: int) -> bool:
        piece = 1 if by_page == {os.POSIX_FADV_RANDOM, os.POSIX_FADV_DONTNEED} else read_at_once
        first = place // piece * piece
        return path_of(file).name == name and start < first + piece and first < start + length

    def advise(file: int, start: int, length: int, advice: int) -> None:
        fadvise(file, start, length, advice)
        if path_of(file).name == name and start <= place and (not length or place < start + length):
            by_page.add(advice)

    def flush(file: int) -> None:
        fsync(file)
        if fault != "flush" or (path := path_of(file)).name != name:
            return
        is_new = file in dirty or known.get(path, bytes(16)) != there(path)
        dirty.discard(file)  # The kernel says it once.
        known[path] = there(path)
        if is_new:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read(file: int, length: int, offset: int) -> bytes:
        if fault == "read" and lost(file, offset, length):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(file, length, offset)

    def read_into(file: int, targets: Sequence[Any], offset: int, *flags: int) -> int:
        if fault == "read" and lost(file, offset, sum(memoryview(each).nbytes for each in targets)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(file, targets, offset, *flags)

    from_archive = archive._ShortReads.read

    def read_archive(file: Any, size: int | None = -1) -> bytes:
        start, data = file.tell(), from_archive(file, size)
        if fault != "read" or not hits(file.fileno(), start, len(data)):
            return data
        if start >= place // BLOCK * BLOCK:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        file.seek(place // BLOCK * BLOCK)  # The system hands out what it could read.
        return data[: place // BLOCK * BLOCK - start]

    patch.setattr(archive._ShortReads, "read", read_archive)
    patch.setattr(os, "posix_fadvise", advise)
    for function, replaced in (("pwrite", write), ("fsync", flush), ("pread", read), ("preadv", read_into)):
        patch.setattr(os, function, replaced)
