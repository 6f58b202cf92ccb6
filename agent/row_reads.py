"""Rows read from a file and checked: those of records, and of made-up ones, which take the same steps.

Of a small model, reading is most of the work. Where a made-up record took less of it than a real one, the
time of a round would tell how many of its rows were records.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.stored import AWAY, RawFile


def rows_in(path: Path, descriptor: int) -> RawFile:
    """A file of rows, for :func:`read_rows`.

    Args:
        path: for what is said of it.
        descriptor: of the open file; the result owns it.
    """
    return RawFile(path, descriptor, -AWAY)


def read_rows(
    file: RawFile, rows: NDArray[np.int64], checksums: NDArray[np.uint32], record_bytes: int
) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """The rows of these numbers, each one read of as many bytes, whatever it holds.

    Args:
        file: as of :func:`rows_in`.
        rows: ``(m,)``.
        checksums: ``(m,)``, of what each row is to hold.
        record_bytes: of a row.

    Returns:
        ``(m, record_bytes)``, and a sentence for each place in them whose bytes mean nothing.
    """
    raw, problems = np.zeros((len(rows), record_bytes), np.uint8), {}
    starts = (rows * record_bytes + AWAY).tolist()
    for place, (start, checksum) in enumerate(zip(starts, checksums.tolist(), strict=True)):
        try:
            file.read_into(raw[place], start)
        except DataError as error:
            problems[place] = str(error)
            continue
        if zlib.crc32(raw[place].data) != checksum:
            problems[place] = f"{file.path}: row {rows[place]} is damaged. Check the disk."
    return raw, problems
