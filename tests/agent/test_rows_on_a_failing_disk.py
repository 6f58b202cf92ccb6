"""Where the disk fails at one row, a look takes in all new records but the one that the row is for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from failing_disks import Fault, fails_at
from pictures import encoded, folder_of, noise, write
from row_boards import contents, expected, named, pictures

ROW_BYTES = 12 * 8 * 3


@pytest.mark.parametrize("fault", ["write", "flush", "read"])
def test_a_row_that_fails_costs_the_record_there_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """Before, none of the new ones counted, in no look: with one fewer, all of them had."""
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1))
    board.look(at_once=True)
    for seed in (2, 3, 4):
        write(board.root / named(seed)[0], encoded(noise(seed)))
    with monkeypatch.context() as patch:
        fails_at(patch, "records.rows", 3 * ROW_BYTES, fault)
        rows = board.look()
        inputs, problems = rows.try_read(np.arange(len(rows)))
    whole = [place for place in range(len(rows)) if place not in problems]
    found = {(inputs[place].tobytes(), int(rows.labels[place])) for place in whole}
    assert found <= set(expected(0, 1, 2, 3, 4))
    assert len(found) == (5 if fault == "flush" else 4)  # From memory it may be read.


def test_a_row_that_cannot_be_read_costs_none_that_the_system_reads_at_once_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2, 3))
    rows = board.look(at_once=True)
    fails_at(monkeypatch, "records.rows", 2 * ROW_BYTES, "read", read_at_once=64 << 10)
    _, problems = rows.try_read(np.arange(len(rows)))
    assert len(problems) == 1


def test_a_row_that_is_not_erased_keeps_no_new_record_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, once a picture had been taken away whose row has gone bad, no new one counted any more."""
    board = pictures(tmp_path)
    folder_of(board.root, *named(0, 1, 2))
    before = board.look(at_once=True)
    (row,) = before.places[before.labels == 1]
    (board.root / named(1)[0]).unlink()
    board.look()
    for seed in (3, 4):
        write(board.root / named(seed)[0], encoded(noise(seed)))
    with monkeypatch.context() as patch:
        fails_at(patch, "records.rows", int(row) * ROW_BYTES, "flush")
        rows = board.look()
    assert contents(rows) == expected(0, 2, 3, 4)
    assert contents(board.look()) == expected(0, 2, 3, 4)
