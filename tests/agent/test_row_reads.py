"""Rows that are read from a file."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np

from agent.row_reads import read_rows, rows_in


def test_of_a_file_that_became_shorter_the_rows_are_named_that_are_gone(tmp_path: Path) -> None:
    path, rows = tmp_path / "rows", [b"row zero", b"a row ..", b"row two.", b"damaged."]
    path.write_bytes(b"".join(rows))
    checksums = np.array([zlib.crc32(row) for row in rows], np.uint32)
    file = rows_in(path, os.open(path, os.O_RDONLY))
    numbers = np.array([2, 0, 1])
    raw, problems = read_rows(file, numbers, checksums[numbers], 8)
    assert [bytes(row) for row in raw] == [rows[2], rows[0], rows[1]]
    assert problems == {}
    os.truncate(path, 13)
    raw, problems = read_rows(file, numbers, checksums[[3, 0, 1]], 8)
    assert bytes(raw[1]) == rows[0]
    assert sorted(problems) == [0, 2]
    assert "ends at byte 13;" in problems[2]
    with path.open("r+b") as changed:
        changed.write(b"ROW")
    assert "row 0 is damaged" in read_rows(file, numbers[1:2], checksums[:1], 8)[1][0]
    raw, problems = read_rows(file, np.zeros(0, np.int64), np.zeros(0, np.uint32), 8)
    assert (raw.shape, problems) == ((0, 8), {})
