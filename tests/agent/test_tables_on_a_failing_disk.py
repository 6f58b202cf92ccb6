"""Where the disk cannot read a block of a table, the rows in it are left out, and no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from failing_disks import fails_at
from pictures import write
from row_boards import Board, table, tables, values_in

BLOCK = 4_096
LAST = 7_777


def filled(board: Board, blocks: int, last: str = "") -> None:
    """A table of two rows and empty lines that fill so many blocks, and a row after them."""
    begin = "x,label\n1,0\n2,1\n"
    text = begin + "\n" * (blocks * BLOCK - len(begin)) + last
    write(board.root / "1.csv", text.encode())


@pytest.mark.parametrize("blocks", [1, 2, 17])
def test_a_record_that_lies_alone_in_a_block_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """Before, all records of the table were gone, and erased, until it could be read. (Seen on btrfs, with a
    block that has not its checksum: 60 others of 61.)"""
    board = tables(tmp_path)
    filled(board, blocks, f"{LAST},1\n")
    assert values_in(board.look(at_once=True)) == [1, 2, LAST]
    table(board, [5], "2.csv")  # A look reads what has changed.
    for file in board.root.iterdir():
        os.utime(file, (1e9, 1e9))  # Else each look lists them.
    with monkeypatch.context() as patch:
        fails_at(patch, "1.csv", blocks * BLOCK + 2, "read")
        rows = board.look()
    assert values_in(rows) == [1, 2, 5]
    assert len(rows.origin.left_out) == 1
    # It can be read again: no other record has to come for that.
    assert values_in(board.look()) == [1, 2, 5, LAST]


def test_a_block_costs_no_row_that_the_system_reads_at_once_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tables(tmp_path)
    filled(board, 5, f"{LAST},1\n")
    fails_at(monkeypatch, "1.csv", 5 * BLOCK + 2, "read", read_at_once=16 * BLOCK)
    assert values_in(board.look(at_once=True)) == [1, 2]


def test_what_cannot_be_read_waits_for_no_other_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a look listed nothing until something else came, which then brought it in."""
    board = tables(tmp_path)
    filled(board, 1)
    board.look(at_once=True)
    filled(board, 1, f"{LAST},1\n")
    os.utime(board.root / "1.csv", (1e9, 1e9))  # Else each look lists it.
    with monkeypatch.context() as patch:
        fails_at(patch, "1.csv", BLOCK + 2, "read")
        assert values_in(board.look()) == [1, 2]
    assert values_in(board.look()) == [1, 2, LAST]


def test_a_block_in_the_middle_costs_the_rows_that_lie_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tables(tmp_path)
    filled(board, 1, "3,0\n" + "\n" * (BLOCK - 4) + "4,1\n")
    assert values_in(board.look(at_once=True)) == [1, 2, 3, 4]
    table(board, [5], "2.csv")
    with monkeypatch.context() as patch:
        fails_at(patch, "1.csv", BLOCK + 1, "read")
        # The rest of the block has no end of a line, either: the next row is a part of the same one.
        assert values_in(board.look()) == [1, 2, 5]
