"""Where the disk cannot read a block of an NPZ, the records in it are left out, and no other."""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from failing_disks import BLOCK, fails_at
from row_boards import Board

from agent.rows import Rows
from dpagent.errors import DataError
from dpagent.learning.data import npz_file, stamp

SIZE = 2 * BLOCK
"""Bytes of a record: in its middle is a block that is its own."""


@pytest.fixture(autouse=True)
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are as old as they are: nobody waits for four seconds."""
    monkeypatch.setattr(npz_file, "GRACE_S", 0.0)


def board_of(folder: Path) -> Board:
    declared = {"kind": "npz", "shape": [SIZE], "dtype": "uint8", "max_records": 40, "classes": 40}
    return Board(folder, path=folder / "data.npz", **declared)


def put(board: Board, number: int, save: Callable[..., None] = np.savez) -> Path:
    """Another file, of records whose labels are their numbers."""
    inputs = np.random.default_rng(1).integers(256, size=(number, SIZE), dtype=np.uint8)
    new = board.settings.path.with_name("new.npz")
    with new.open("wb") as stream:
        save(stream, inputs=inputs, labels=np.arange(number))
    os.utime(new, (1e9, 1e9))
    return new.replace(board.settings.path)


def place_of(file: Path, record: int) -> int:
    """The byte in the middle of a record."""
    with zipfile.ZipFile(file) as archive:
        info = archive.getinfo("inputs.npy")
        content = file.read_bytes()
    begins = content.index(b"\n", info.header_offset) + 1
    return begins + record * SIZE + SIZE // 2


def labels(rows: Rows) -> list[int]:
    return sorted(rows.labels.tolist())


@pytest.mark.parametrize("record", [0, 7])
def test_a_block_costs_the_records_that_lie_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: int
) -> None:
    """Before, nothing that was new in the file counted, for as long as the block could not be read."""
    board = board_of(tmp_path)
    put(board, 3)
    board.look(at_once=True)
    file = put(board, 8)
    with monkeypatch.context() as patch:
        fails_at(patch, file.name, place_of(file, record), "read")
        rows = board.look()
        assert labels(rows) == [each for each in range(8) if each != record]
        assert any(f"record {record}:" in sentence for sentence in rows.origin.left_out)
    # It can be read again: no other record has to come for that.
    assert labels(board.look()) == list(range(8))


def test_a_block_costs_no_record_that_the_system_reads_at_once_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, nine records where two lay in a bad block (XFS of Linux 6.1, dm-error): 64 KiB are a piece."""
    board = board_of(tmp_path)
    file = put(board, 30)
    fails_at(monkeypatch, file.name, place_of(file, 20), "read", read_at_once=64 << 10)
    assert labels(board.look(at_once=True)) == [each for each in range(30) if each != 20]


def test_a_board_starts_without_the_records_that_lie_in_a_bad_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = board_of(tmp_path)
    file = put(board, 8)
    fails_at(monkeypatch, file.name, place_of(file, 7), "read")
    assert labels(board.look(at_once=True)) == list(range(7))


def test_where_a_block_cannot_be_read_nothing_counts_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checksum tells then whether labels and values are of one file."""
    board = board_of(tmp_path)
    put(board, 3)
    board.look(at_once=True)
    file = put(board, 8)
    place = place_of(file, 7)
    fails_at(monkeypatch, file.name, place, "read")
    real = npz_file.StoredArray.readable

    def written_to_meanwhile(*arguments: object) -> object:
        with file.open("r+b") as stream:
            stream.seek(place - 4 * SIZE)
            stream.write(b"other")
        return real(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(npz_file.StoredArray, "readable", written_to_meanwhile)
        with pytest.raises(DataError, match="being written"):
            board.look()
    assert labels(board.newest()) == list(range(3))
    # One that was written to less than four seconds before it is looked at, by the board's clock, is watched.
    monkeypatch.setattr(npz_file, "GRACE_S", 3_600.0)
    watched: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(stamp, "REST_S", stamp.GRACE_S)
        patch.setattr(time, "sleep", watched.append)
        board.look()
    assert 3.0 < watched[0] <= stamp.GRACE_S
    assert labels(board.newest()) == list(range(7))


@pytest.mark.parametrize("what", ["packed", "list"])
def test_what_cannot_be_read_by_record_leaves_the_rows_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What follows a part that is missing of a packed array cannot be unpacked; and without the archive's
    list nobody knows what is where."""
    board = board_of(tmp_path)
    put(board, 3)
    board.look(at_once=True)
    if what == "packed":
        file, said = put(board, 8, np.savez_compressed), "compressed"
        place = 5 * SIZE
    else:
        file, said = put(board, 8), "damaged"
        place = file.read_bytes().rindex(b"labels.npy")  # In the list.
    with monkeypatch.context() as patch:
        fails_at(patch, file.name, place, "read")
        with pytest.raises(DataError, match=said):
            board.look()
    assert labels(board.newest()) == list(range(3))
    assert labels(board.look()) == list(range(8))
