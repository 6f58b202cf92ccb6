"""Records decoded ahead of rounds, as rows of one size in a file, and the index of that file.

``records.rows`` has room for as many records as there may be, taken when they are first decoded. A row holds
the bytes of one record. ``records.index`` tells which rows hold a record, of which it is (a stamp that
changes when the record does), its label, and the checksum of the row. So reading a record costs one read of a
fixed number of bytes, whatever the record is.

**Two processes at once.** One process writes rows (:mod:`agent.decoding`, alone by a lock), others read them.
The index is replaced atomically, after the rows that it tells of are on disk. While the agent runs, rows are
written only where the index has none, so that a reader of this index, or of any that follows from the same
look, reads what it tells of. What such a look found becomes the index only when it counts
(:meth:`RowStore.take_found`). Until then it lies in ``records.found``, and goes if the look is cut short: how
far that had come shows in nothing. A reader takes the newest index before each look begins
(:mod:`agent.records`); one that did not, or a row that a power cut left half written, is found by the
checksum: that record does not count. Before a row that held another record is written, the index without that
record is on disk. The row of a record that is gone is erased by the look after the one that found it gone.

**A look takes no room on the disk.** An index has one size, and there are two files of it: ``records.index``,
and another that is ``records.found`` or, if nothing was found, ``records.spare``. A new index is written over
the spare one, which then changes places with the old one. On a disk that is nearly full, a look that found
something would else take what the ledger needs, and one that did not would leave it.

**A row's place means nothing.** A new record takes any free row, and all others stay where they are. A record
keeps its row as long as it is there, across restarts too; with more records than rows, it stays used, and a
free row goes to the first of those that wait. No deterministic rule does better that uses up to *m* records
whole: what it makes of *m* + 1 records would have to lie within one record of each set that lacks one of
them, and for *m* ≥ 2 only all *m* + 1 do. Hence ``max_records`` is to be chosen such that it is never reached
(docs/data.md).
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.data_settings import DataSettings
from agent.row_files import RowFiles
from agent.row_index import DECODED, Index
from agent.row_reads import read_rows, rows_in
from dpagent.errors import DataError
from dpagent.learning.data.dataset import DIGEST_BYTES, Dataset, Indices, Origin
from dpagent.learning.data.stored import RawFile
from dpagent.storage import disk_errors, replace_durably, require_room, take_room
from dpagent.wording import counted

_SIGNS: Final = np.dtype([("stamp", "<u8"), ("checksum", "<u4"), ("is_one", "<u4")])


class RowStore(RowFiles):
    """The two files, and what the last look found, read and written.

    Args:
        state_dir: where they are.
        settings: of the data, declared.
    """

    def __init__(self, state_dir: Path, settings: DataSettings) -> None:
        super().__init__(state_dir)
        self._settings = settings

    def load(self) -> Index | None:
        """The newest index; None where there is none for these settings, or a damaged one."""
        try:
            data = self._index_file.read_bytes()
        except OSError:
            return None
        return Index.parsed(data, self._settings)

    def is_complete(self, limits: str) -> bool:
        """Whether there are rows that an agent can start with, decoded under these limits."""
        index = self.load()
        if index is None or not self.rows_file.exists():
            return False
        return index.header.is_complete and index.header.limits == limits

    def publish(self, index: Index) -> None:
        """Replace the index.

        Raises:
            StorageError: it cannot be written.
        """
        self._write_spare(index.as_bytes())
        self._replace_index(self._spare_file)

    def publish_found(self, index: Index) -> None:
        """Keep an index until it counts.

        Raises:
            StorageError: it cannot be written.
        """
        self._write_spare(index.as_bytes())
        with disk_errors(self._found_file):
            replace_durably(self._found_file, self._spare_file)

    def take_room(self, record_bytes: int) -> bool:
        """Have room for the most records that there may be.

        Returns:
            Whether the rows of before are there.

        Raises:
            StorageError: the disk has none.
        """
        return take_room(*self._room(record_bytes))

    def require_room(self, record_bytes: int) -> None:
        """As :meth:`take_room`, and take nothing.

        Raises:
            StorageError: the disk has none.
        """
        require_room(*self._room(record_bytes))

    def _room(self, record_bytes: int) -> tuple[Path, int, str, str]:
        """The file of rows and its size, what it holds, and what to do if there is no room for it."""
        assert self._settings.max_records is not None
        return (
            self.rows_file, self._settings.max_records * record_bytes,
            f"the rows of {counted(self._settings.max_records, 'record')}",
            "Free space, put state_dir on a larger disk, or lower data.max_records.",
        )  # fmt: skip

    def remove(self) -> None:
        """Remove all.

        Raises:
            StorageError: they cannot be removed.
        """
        files = (self._found_file, self._spare_file, self._old_file, self._link_file)
        for file in (*files, self._index_file, self.rows_file):
            with disk_errors(file):
                file.unlink(missing_ok=True)

    def erase(self, index: Index, rows: NDArray[np.intp]) -> None:
        """Overwrite rows with zeros, durably: what its owner has taken away stays nowhere.

        Raises:
            StorageError: they cannot be written.
        """
        if not len(rows):
            return
        size = math.prod(index.header.shape) * np.dtype(index.header.dtype).itemsize
        with disk_errors(self.rows_file), self.rows_file.open("r+b", buffering=0) as file:
            for row in rows.tolist():
                file.seek(row * size)
                file.write(bytes(size))
            os.fsync(file.fileno())

    def open(self, index: Index) -> Rows:
        """The records that an index tells of.

        Raises:
            StorageError: the file is not there.
        """
        with disk_errors(self.rows_file):
            descriptor = os.open(self.rows_file, os.O_RDONLY | os.O_CLOEXEC)
        return Rows(index, rows_in(self.rows_file, descriptor))


class Rows(Dataset):
    """The decoded records of an index."""

    def __init__(self, index: Index, file: RawFile) -> None:
        header, table = index.header, index.table
        here = np.flatnonzero(table["state"] == DECODED)
        most = len(table)
        self._file, self._rows = file, _within(most, here)
        self._checksums: NDArray[np.uint32] = _within(most, table["checksum"][here])
        signs = _within(most, np.zeros(len(here), _SIGNS))
        signs["stamp"], signs["checksum"] = table["stamp"][here], self._checksums
        signs["is_one"] = 1
        self._digests = signs.view(np.uint8).reshape(-1, DIGEST_BYTES)
        super().__init__(
            _within(most, table["label"][here].astype(np.int64)), header.classes, shape=header.shape,
            dtype=np.dtype(header.dtype), class_names=header.class_names,
            origin=Origin(header.kind, header.source, index.sentences(), header.warnings),
        )  # fmt: skip

    @property
    def places(self) -> NDArray[np.int64]:
        """As of :attr:`Dataset.places`: the rows."""
        return self._rows

    def digests(self) -> NDArray[np.uint8]:
        """As of :meth:`Dataset.digests`, without a look at the rows: how many there are takes no time."""
        return self._digests

    def _read(self, indices: Indices) -> NDArray[Any]:
        inputs, problems = self.try_read(indices)
        if problems:
            raise DataError(next(iter(problems.values())))
        return inputs

    def try_read(self, indices: Indices) -> tuple[NDArray[Any], dict[int, str]]:
        """As of :meth:`Dataset.try_read`: each record is one read of as many bytes, whatever it holds."""
        indices = self._require_in_range(indices)
        raw, problems = read_rows(
            self._file, self._rows[indices], self._checksums[indices], self.record_bytes
        )
        return raw.view(self.dtype).reshape(len(indices), *self.shape), problems


def _within(most: int, values: NDArray[Any]) -> NDArray[Any]:
    """A copy in memory for as many as there may be: how many there are shows in none that is taken."""
    room = np.zeros(most, values.dtype)
    room[: len(values)] = values
    return room[: len(values)]
