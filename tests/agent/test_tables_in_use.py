"""Tables that somebody writes in their place while a board looks: a row is inputs and label of one read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_boards import Board, rows_of, table, tables, values_in
from writers import Hidden, hide

from agent import decoding
from dpagent.learning.data.formats.tables import rows as tables_rows

ROWS = [*range(100, 160)]
NEW = {
    "the other way round": [*reversed(ROWS)],
    "a row at the front": [212, *ROWS],
    "a row that is longer": [*ROWS[:20], 1_120, *ROWS[21:]],
    "another row": [*ROWS[:20], 212, *ROWS[21:]],
    "half of it": ROWS[:30],
}


class Wide:
    """A table of rows that are longer than what is read at once."""

    def __init__(self, folder: Path, **section: Any) -> None:
        self.board = tables(folder, max_records=200, csv={"features": ["x"]} | section)
        self.file = self.board.root / "1.csv"

    def put(self, values: Sequence[int], *, begins: str = "") -> None:
        """Write these rows in the place of what is there, without cutting it short first."""
        rows = (f"{value},{'.' * 3_000},{value % 3}\n" for value in values)
        data = "".join(["x,note,label\n", begins, *rows]).encode()
        with self.file.open("r+b" if self.file.exists() else "wb") as stream:
            stream.write(data)
            stream.truncate()


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """Has things done one after the other: when so many lines are read, or when all are listed."""

    def at(moment: str, *work: Callable[[], None]) -> None:
        left = [*reversed(work)]
        next_line, listing = tables_rows.Lines._next, decoding.list_declared

        def reading(self: tables_rows.Lines) -> bytes:
            if left and moment == f"line {self.number}":
                left.pop()()
            return next_line(self)

        def listed(*arguments: Any, **others: Any) -> Any:
            dataset = listing(*arguments, **others)
            if left and moment == "when it is listed":
                left.pop()()
            return dataset

        monkeypatch.setattr(tables_rows.Lines, "_next", reading)
        monkeypatch.setattr(decoding, "list_declared", listed)

    return at


@pytest.mark.parametrize("moment", ["line 25", "when it is listed"])
@pytest.mark.parametrize("hidden", [Hidden.NOT, Hidden.NAME])
@pytest.mark.parametrize("values", NEW.values(), ids=NEW)
def test_a_table_written_in_its_place_gives_no_row_anothers_label(
    tmp_path: Path,
    meanwhile: Callable[[str, Callable[[], None]], None],
    moment: str,
    hidden: Hidden,
    values: list[int],
) -> None:
    """Labels were of one read of the file and values of another, and whether somebody had written to it
    between them was seen by its times and its name, which can be set back: 60 rows had others' labels."""
    wide = Wide(tmp_path)
    wide.put([1])
    wide.board.look(at_once=True)
    wide.put(ROWS)
    with hide(wide.file, hidden) as write:
        meanwhile(moment, lambda: write(lambda: wide.put(values)))
        wide.board.look()
    found = rows_of(wide.board)
    assert {label == value % 3 for value, label in found} <= {True}
    assert {value for value, _ in found} <= {1, *ROWS, *values}
    wide.board.look()
    assert rows_of(wide.board) == sorted((value, value % 3) for value in values)


@pytest.mark.parametrize("moment", ["line 25", "when it is listed"])
@pytest.mark.parametrize("values", NEW.values(), ids=NEW)
@pytest.mark.parametrize("stride", [1, 2])
def test_a_window_is_of_rows_that_stood_there_together(
    tmp_path: Path,
    meanwhile: Callable[[str, Callable[[], None]], None],
    moment: str,
    values: list[int],
    stride: int,
) -> None:
    wide = Wide(tmp_path, window=2, stride=stride)
    wide.put([1, 2])
    wide.board.look(at_once=True)
    wide.put(ROWS)
    with hide(wide.file, Hidden.NAME) as write:
        meanwhile(moment, lambda: write(lambda: wide.put(values)))
        wide.board.look()
    assert windows_of(wide.board) <= {((one, other), one % 3) for one, other in together(ROWS, values)}
    wide.board.look()
    assert windows_of(wide.board) == {((one, other), one % 3) for one, other in [*pairwise(values)][::stride]}


def together(*files: Sequence[int]) -> set[tuple[int, int]]:
    """The rows that follow one on another in some of these."""
    return {pair for values in files for pair in pairwise(values)}


def windows_of(board: Board) -> set[tuple[tuple[int, ...], int]]:
    rows = board.newest()
    inputs, labels = rows.batch(np.arange(len(rows)))
    return {
        (tuple(window.ravel().astype(int).tolist()), label)
        for window, label in zip(inputs, labels.tolist(), strict=True)
    }


@pytest.mark.parametrize(
    ("times", "hidden"), [(1, Hidden.NOT), (1, Hidden.NAME), (2, Hidden.NOT), (5, Hidden.NOT)]
)
@pytest.mark.parametrize("before", ["", "long"])
def test_a_line_that_moves_all_others_while_they_are_listed_repeats_none_and_skips_none(
    tmp_path: Path,
    meanwhile: Callable[[str, Callable[[], None]], None],
    times: int,
    hidden: Hidden,
    before: str,
) -> None:
    """What stood before the place that had been read stood behind it then, or the other way round."""
    wide, lines = Wide(tmp_path), {"": "", "long": "." * 61_000 + "\n"}
    wide.put(ROWS, begins=lines[before])
    wide.board.look(at_once=True)
    others = [lines["" if before else "long"], lines[before]] * times
    with hide(wide.file, hidden) as write:
        wide.put([*ROWS, 212], begins=lines[before])
        meanwhile(
            "line 25",
            *(
                lambda text=text: write(lambda: wide.put([*ROWS, 212], begins=text))
                for text in others[:times]
            ),
        )
        wide.board.look()
    found = values_in(wide.board.newest())
    assert len(found) == len(set(found))
    if times < 3:  # One that is moved beyond where the file ended when the look began waits for the next.
        assert set(ROWS) <= set(found) <= {*ROWS, 212}
        assert 212 in found or (times, before) == (1, "")
    wide.board.look()
    assert values_in(wide.board.newest()) == [*ROWS, 212]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_table_that_is_written_all_the_time_keeps_no_row_of_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """A look that listed one three times in vain failed: 60 new rows of another table waited."""
    board = tables(tmp_path, max_records=100)
    table(board, [1], "a.csv")
    table(board, [2], "b.csv")
    board.look(at_once=True)
    table(board, [1, *ROWS], "a.csv")
    real, written = decoding.list_declared, []

    def written_afterwards(*arguments: Any, **others: Any) -> Any:
        listed = real(*arguments, **others)
        written.append(1)
        table(board, [2, 20 + len(written)][:: 1 - 2 * (len(written) % 2)], "b.csv")
        return listed

    monkeypatch.setattr(decoding, "list_declared", written_afterwards)
    board.look(at_once=at_once)
    assert {1, 2, *ROWS} <= set(values_in(board.newest()))
    assert len(written) <= (decoding._TRIES if at_once else 1)


def test_a_row_that_is_written_anew_between_listing_and_decoding_waits_alone(
    tmp_path: Path, meanwhile: Callable[[str, Callable[[], None]], None]
) -> None:
    """Also its label alone, also if the file's times say nothing."""
    board = tables(tmp_path, max_records=100)
    table(board, [1])
    board.look(at_once=True)
    table(board, [1, *ROWS])
    file = board.root / "1.csv"
    known = file.stat()

    def relabelled() -> None:
        with file.open("r+b") as stream:
            stream.seek(file.read_bytes().index(b"130,1"))
            stream.write(b"130,2")
        os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))

    meanwhile("when it is listed", relabelled)
    board.look()
    assert rows_of(board) == [(value, value % 3) for value in [1, *ROWS] if value != 130]
    assert any("1.csv: the rows at byte" in text for text in board.newest().origin.left_out)
    board.look()
    assert rows_of(board) == [(value, 2 if value == 130 else value % 3) for value in [1, *ROWS]]
    assert board.newest().origin.left_out == ()


def test_columns_that_change_places_while_a_table_is_decoded_change_no_row(
    tmp_path: Path, meanwhile: Callable[[str, Callable[[], None]], None]
) -> None:
    """Rows are what they were under the header that they were listed with."""
    board = tables(tmp_path, max_records=100)
    table(board, [1])
    board.look(at_once=True)
    table(board, [1, *ROWS])
    file = board.root / "1.csv"

    def header_rewritten() -> None:
        with file.open("r+b") as stream:
            stream.write(b"label,x\n")

    meanwhile("when it is listed", header_rewritten)
    board.look()
    assert rows_of(board) == [(value, value % 3) for value in [1, *ROWS]]
    board.look()
    assert rows_of(board) == [(1, 1)], "the label of the others is none"


def test_a_line_that_is_ended_when_the_next_is_written_is_the_record_that_it_was(tmp_path: Path) -> None:
    board = tables(tmp_path, max_records=100)
    file = board.root / "1.csv"
    file.write_text("x,label\n1,1\n2,2")
    before = board.look(at_once=True)
    with file.open("a") as stream:
        stream.write("\n3,0")
    after = board.look(at_once=True)
    assert values_in(after) == [1, 2, 3]
    assert after.digests()[:2].tolist() == before.digests().tolist()
