"""The files of decoded records, and of what a look at the data found, apart from what stands in them.

:mod:`agent.rows` says what they are for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dpagent.errors import StorageError
from dpagent.resident_memory import kept
from dpagent.storage import disk_errors, open_private, overwrite, replace_durably, sync_directory, take_blocks

CACHED_BYTES: Final = 64 << 20
"""Files of decoded records, and of features, of up to so much are read when the agent starts, and then are in
memory; of larger ones, each record counts with a read of the disk."""
COUNTS_AFTER_S: Final = 900.0
"""What a look at the data found counts so long after its beginning; see :mod:`agent.decoding`."""


class RowFiles:
    """The two files, and what the last look found.

    Args:
        state_dir: where they are.
    """

    def __init__(self, state_dir: Path) -> None:
        self.rows_file, self._index_file = state_dir / "records.rows", state_dir / "records.index"
        self._found_file, self._spare_file = state_dir / "records.found", state_dir / "records.spare"
        self._old_file = state_dir / "records.old"
        """A second name of the index, while another takes its place; before the first, the file that becomes
        its spare."""
        self._link_file = state_dir / "records.link"
        self._lock_file = state_dir / "records.lock"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only one who writes; waits until another is done."""
        with disk_errors(self._lock_file):
            lock = open_private(self._lock_file, "a")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def take_found(self) -> None:
        """Let what the last look found count, if it is whole and not taken yet.

        If it found nothing, as much is made durable all the same: a round does this, and how long it takes
        shows in one that only just ends with its slots.

        Raises:
            StorageError: the disk fails.
        """
        if self._found_file.exists():
            self._replace_index(self._found_file)
        elif self._index_file.exists():
            with disk_errors(self._index_file):
                self._link_file.unlink(missing_ok=True)  # Of a crash.
                os.link(self._index_file, self._link_file)
                sync_directory(self._link_file)
                self._link_file.unlink()
                sync_directory(self._link_file)

    def drop_found(self) -> None:
        """Forget what the last look found.

        Raises:
            StorageError: the disk fails.
        """
        with disk_errors(self._found_file), contextlib.suppress(FileNotFoundError):
            self._found_file.replace(self._spare_file)

    def _write_spare(self, data: bytes) -> None:
        """Write an index over the spare one."""
        self._recover()
        self.drop_found()
        with disk_errors(self._spare_file), _of_size(self._spare_file, len(data)) as descriptor:
            overwrite(descriptor, data, 0)
            os.fsync(descriptor)

    def _replace_index(self, new: Path) -> None:
        """Let another file be the index; the old one becomes the spare one."""
        self._recover()
        with disk_errors(self._index_file):
            if self._index_file.exists():
                os.link(self._index_file, self._old_file)
            else:  # So that there are two from the first one on.
                self._require_links(new)
                with _of_size(self._old_file, new.stat().st_size):
                    pass
            replace_durably(self._index_file, new)
            replace_durably(self._spare_file, self._old_file)

    def _require_links(self, file: Path) -> None:
        """Refuse a file system without hard links, which the next index needs: where the first look had found
        no record, the first one that came would be the one to fail.

        Raises:
            StorageError: it has none.
            OSError: the disk fails.
        """
        self._link_file.unlink(missing_ok=True)  # Of a crash.
        try:
            os.link(file, self._link_file)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                raise
            raise StorageError(
                f"{file.parent}: the file system has no hard links ({error.strerror}), as FAT and exFAT have"
                " none. Put state_dir on another (ext4, XFS, f2fs, btrfs)."
            ) from error
        self._link_file.unlink()

    def _recover(self) -> None:
        """Put right what a crash left while an index took another's place."""
        with disk_errors(self._index_file):
            if not self._old_file.exists():
                return
            if self._spare_file.exists() or self._found_file.exists():
                self._old_file.unlink()
            else:
                self._old_file.replace(self._spare_file)


def kept_in_memory(state_dir: Path) -> list[mmap.mmap]:
    """Have rows and features stay in memory, for as long as this is held, where the system lets this program:
    else a look at a large picture throws them out, and training reads each from the disk.

    Args:
        state_dir: where they are.
    """
    files = (RowFiles(state_dir).rows_file, state_dir / "features.f32")
    small = (file for file in files if file.exists() and file.stat().st_size <= CACHED_BYTES)
    return [pages for file in small if (pages := kept(file)) is not None]


@contextmanager
def _of_size(file: Path, size: int) -> Iterator[int]:
    """A file of a size, on blocks of its own, open for writing."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        take_blocks(descriptor, size)
        os.truncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)
